"""A dataset as a stream of batches in a reproducible order, decoded by Ray Data or by processes of this machine."""

from vitray.data.stream.batches import HostBatch as HostBatch
from vitray.data.stream.batches import Share as Share
from vitray.data.stream.batches import StreamSpec as StreamSpec
from vitray.data.stream.stream import Stream as Stream
