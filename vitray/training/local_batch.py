"""compute.local_batch=auto: the fewest passes of a step that fit the memory of every worker, found by trying."""

import gc
import resource
from collections.abc import Callable

import numpy as np
import psutil
import torch

from vitray.config import Run
from vitray.data.augment.mixing import DeviceBatch
from vitray.data.shares import share_sizes
from vitray.data.stream.batches import HostBatch, Share
from vitray.data.stream.prefetch import all_reduce_max
from vitray.errors import ConfigError
from vitray.training.data import with_masks
from vitray.training.host import Host
from vitray.training.learner import Learner, build_learner
from vitray.training.profiling import forget_peak_memory
from vitray.training.resolved import ResolvedRun
from vitray.training.schedule import pair_size
from vitray.training.step import take_step

# Share of the free memory that a trial leaves for what comes after it: fragments, communication, evaluations.
SPARE = 0.1


def with_local_batch(resolved: ResolvedRun, host: Host) -> ResolvedRun:
    """Return the run with the largest local batch that fits all workers for `auto`; they call this together."""
    run, pair = resolved.run, pair_size(resolved.run)
    if run.compute.local_batch != "auto":
        return resolved
    sizes = share_sizes(run.optim.batch, host.workers)
    units, most = -(-max(sizes) // pair), -(-min(sizes) // pair)  # every pass has images of each worker
    passes, trial = 1, None
    if has_limit(host.device):
        trial = Trial(resolved, host)
        passes = fewest(lambda passes: trial.fits(pair * -(-units // passes)), most)
        forget_peak_memory(host.device)
    passes = all_reduce_max(passes or most + 1, host.device)
    if passes > most:
        raise ConfigError(
            f"compute.local_batch: a pass of {pair * -(-units // most)} images does not fit a worker's memory; expected"
            " a smaller network or image, compute.activation_checkpointing=blocks, or larger GPUs"
        ) from (trial and trial.error)
    return resolved._replace(run=run.replace({"compute.local_batch": pair * -(-units // passes)}))


def has_limit(device: torch.device) -> bool:
    """Whether too large a batch is an error that a process survives: on a GPU, or with a limit as of `ulimit -v`."""
    return device.type == "cuda" or resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def free_bytes(device: torch.device) -> int:
    """Return the memory that a process with a limit can still take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return max(0, resource.getrlimit(resource.RLIMIT_AS)[0] - psutil.Process().memory_info().vms)


def fewest(fits: Callable[[int], bool], most: int) -> int | None:
    """Return the smallest number from 1 to `most` that fits, where all larger ones do, too; None if none does."""
    below, number = 0, 1
    while not fits(number):
        if number == most:
            return None
        below, number = number, min(2 * number, most)
    while number - below > 1:
        middle = (below + number) // 2
        below, number = (below, middle) if fits(middle) else (middle, number)
    return number


class Trial:
    """Steps on black images, with weights and an optimizer of their own."""

    def __init__(self, resolved: ResolvedRun, host: Host) -> None:
        run = resolved.run
        smallest = [min(run.model.patches)] if run.model.patches else []
        self._run = run.replace({"compute.local_batch": None, "model.patches": smallest})
        self._length, self._device = resolved.length, host.device
        self._learner: Learner = build_learner(self._run, host)
        self.error: BaseException | None = None

    def fits(self, images: int) -> bool:
        """Return whether a step of one pass fits this worker's memory."""
        run, device = self._run.replace({"optim.batch": images}), self._device
        spare = None
        try:
            spare = torch.empty(int(SPARE * free_bytes(device)), dtype=torch.uint8, device=device)
            # The last step, as the first ones may have smaller images.
            take_step(run, self._length.total - 1, _batch(run, device), Share(0, 1), self._learner, self._length)
            return True
        except (RuntimeError, MemoryError) as error:  # also of a kernel that cannot start with so many images
            self.error = error.with_traceback(None)  # whose frames hold the tensors
            return False
        finally:
            del spare
            self._learner.optimizer.zero_grad()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _batch(run: Run, device: torch.device) -> DeviceBatch:
    """Return a batch with all that the run's task needs."""
    images, places = run.optim.batch, np.arange(run.optim.batch)
    labels = np.zeros((images, run.model.num_classes or 0) if run.has_several_labels else images, np.int64)
    pixels = np.zeros((images, *run.model.image_shape, 3), np.uint8)
    batch = with_masks(HostBatch(pixels, labels, places, places, 0), run, 0)
    masks = None if batch.masks is None else torch.from_numpy(batch.masks).to(device)
    on_device = DeviceBatch(torch.from_numpy(pixels).to(device), torch.from_numpy(labels).to(device), places, places)
    return on_device._replace(masks=masks, hidden=batch.hidden)
