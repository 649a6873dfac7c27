"""A dataset as a stream of batches: Ray Data decodes on any CPU of the cluster, in an order that is a function."""

from vitray.stream.cache import forget_decoded as forget_decoded
from vitray.stream.plan import Cursor as Cursor
from vitray.stream.stream import HostBatch as HostBatch
from vitray.stream.stream import Share as Share
from vitray.stream.stream import Stream as Stream
