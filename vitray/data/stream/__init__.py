"""A dataset as a stream of batches: Ray Data decodes on any CPU of the cluster, in a reproducible order."""

from vitray.data.stream.cache import forget_decoded as forget_decoded
from vitray.data.stream.stream import HostBatch as HostBatch
from vitray.data.stream.stream import Share as Share
from vitray.data.stream.stream import Stream as Stream
from vitray.data.stream.stream import StreamSpec as StreamSpec
