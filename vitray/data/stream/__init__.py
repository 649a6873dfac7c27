"""A dataset as a stream of batches: Ray Data decodes on any CPU of the cluster, in a reproducible order."""

from typing import TYPE_CHECKING, Any

from vitray.data.stream.batches import HostBatch as HostBatch
from vitray.data.stream.batches import Share as Share
from vitray.data.stream.batches import StreamSpec as StreamSpec

if TYPE_CHECKING:
    from vitray.data.stream.stream import Stream as Stream


def __getattr__(name: str) -> Any:
    if name != "Stream":
        raise AttributeError(f"vitray.data.stream has no {name!r}")
    from vitray.data.stream.stream import Stream  # imports Ray, which the training loop does without

    return Stream
