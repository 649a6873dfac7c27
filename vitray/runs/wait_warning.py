"""The warning of a run whose training waits for images, with the one setting that helps most."""

from vitray.config.training import Data

# Share of the time above which the warning appears.
WARNING_SHARE = 0.05


class WaitWarning:
    """Whether to warn: once in a run, at its first large data-wait share."""

    def __init__(self, data: Data, has_gpu: bool) -> None:
        self._data, self._has_gpu = data, has_gpu
        self._is_warm, self._is_done = False, False

    def restart(self) -> None:
        """Ignore the next report: it includes the start of the tasks that decode."""
        self._is_warm = False

    def report(self, share: float) -> str | None:
        """Return the warning at the first share above 5 % that does not include a start, else None."""
        is_warm, self._is_warm = self._is_warm, True
        if not is_warm or self._is_done or share <= WARNING_SHARE:
            return None
        self._is_done = True
        remedy = best_remedy(self._data, self._has_gpu)
        return f"training waits for images {share:.0%} of the time: {remedy}; docs/faq.md#data-wait"


def best_remedy(data: Data, has_gpu: bool) -> str:
    """Return the setting that lowers the CPU time of an image most, of those that change no pixel."""
    augment = data.augment
    is_costly = augment.policy.kind != "none" or augment.jitter > 0
    if has_gpu and is_costly and augment.resolved(has_gpu).on == "tasks":
        return "set data.augment.on=device"
    if data.cache == "none":
        return "set data.cache=decoded, if the pixels fit into Ray's object store"
    return "add CPUs to the cluster"
