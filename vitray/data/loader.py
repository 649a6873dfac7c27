"""A dataset of `vitray shard` as the batches of any training loop: `vitray.Loader`."""

import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor

from vitray.cluster import session
from vitray.config.augmentation import Augment, CenterCrop, Mix, Normalize
from vitray.config.loader import LoaderSettings
from vitray.config.validation import explain_error
from vitray.data.augment.mixing import BatchRows, BatchSettings, DeviceBatch, known_or_nan, normalized, prepare_batch
from vitray.data.decode_processes import DecodeProcesses
from vitray.data.shards.manifest import open_dataset
from vitray.data.stream.batches import HostBatch, Share, StreamSpec
from vitray.data.stream.decoder import DecodeThread
from vitray.data.stream.local_reader import LocalReader
from vitray.data.stream.prefetch import Prefetcher, all_reduce_max, new_share
from vitray.data.stream.stream import Reader, Stream
from vitray.errors import ConfigError
from vitray.system import storage

# A change of these changes no image that comes.
FREE = {"max_corrupt"}


class Loader:
    """A split as batches, in the order, the views and the mixing of a run; it resumes at any batch, on any workers.

    `for images, labels in loader` is an epoch, and the next loop is the next one; a loop that is left early has ended
    its epoch. `images` are normalized floats (BCHW) on `device`; `labels` are numbers of `classes`, or shares of all
    classes (BK) where images are mixed. Of several labels an image, they are 1, 0 or NaN (unknown) for each class (BK).
    """

    def __init__(
        self,
        dataset: str | os.PathLike[str],
        *,
        split: str = "train",
        batch: int = 256,
        size: int | tuple[int, int] = 224,
        augment: Augment | Mapping[str, Any] | str | None = Augment(),
        mix: Mix | Mapping[str, Any] = Mix(),
        normalize: Normalize | Mapping[str, Any] = Normalize(),
        eval_crop: CenterCrop | Mapping[str, Any] = CenterCrop(),
        repeats: int = 1,
        seed: int = 0,
        max_corrupt: float = 0.001,
        rank: int | None = None,
        workers: int | None = None,
        device: str | torch.device = "cpu",
        reader: Literal["auto", "processes", "ray"] = "auto",
        decoders: int | None = None,
    ) -> None:
        """`dataset` is a folder or s3:// address that `vitray shard` has written; `batch` counts all workers' images.

        augment: settings as `data.augment` of a recipe has them, or the name of a policy, such as `three_augment`; None
            gives each image once, in the stored order and with `eval_crop`, for an evaluation
        rank, workers: this process among those that share the batches; by default those of torch.distributed
        reader: Ray Data decodes where this process is connected to Ray, and processes of this machine do elsewhere
        decoders: these processes, by default one for each CPU beside this process; 0: a thread of this process
        """
        given = {
            "split": split, "batch": batch, "size": size, "augment": augment, "mix": mix, "normalize": normalize,
            "eval_crop": eval_crop, "repeats": repeats, "seed": seed, "max_corrupt": max_corrupt,
        }  # fmt: skip
        try:
            self._settings = LoaderSettings.model_validate(given)
        except ValidationError as invalid:
            raise explain_error(invalid, LoaderSettings, {}, "Loader") from None
        joined = dist.is_available() and dist.is_initialized()
        rank = rank if rank is not None else dist.get_rank() if joined else 0
        workers = workers if workers is not None else dist.get_world_size() if joined else 1
        if not 0 <= rank < workers:
            raise ConfigError(f"Loader: got rank {rank} of {workers} workers, expected a rank from 0 to {workers - 1}")
        self._device = torch.device(device)
        ray: Any = sys.modules.get("ray")
        self._on_ray = reader == "ray" or (reader == "auto" and bool(ray and ray.is_initialized()))
        if self._on_ray and workers > 1 and not joined:
            raise ConfigError(
                f"Loader: {workers} workers share one execution of Ray Data, which needs a process group of"
                " torch.distributed; call init_process_group, or pass reader='processes'"
            )
        self._decoding: DecodeProcesses | DecodeThread | None = None
        neighbors = int(os.environ.get("LOCAL_WORLD_SIZE", workers))
        self._decoders = max(1, session.local_cpus() // neighbors - 1) if decoders is None else decoders
        # One worker agrees with nobody: others of its process group need not have a loader.
        self._agrees = self._on_ray and workers > 1
        self._share = new_share(rank, workers) if self._agrees else Share(rank, workers)
        self._stream = Stream(open_dataset(storage.absolute(os.fspath(dataset))), self._spec(), self._reader)
        if self._settings.augment and not self._stream.steps:
            raise ConfigError(f"Loader: batch: got {batch}, expected at most the {self._stream.images} images")
        if workers > batch:
            raise ConfigError(f"Loader: batch: got {batch}, expected at least one image for each of {workers} workers")
        self._epoch, self._step, self._continues, self._is_closed = 0, 0, False, False
        self._rows = np.empty(0, np.int64)
        self._loop: weakref.ref[Any] | None = None

    def _spec(self) -> StreamSpec:
        settings, has_gpu = self._settings, self._device.type == "cuda"
        crop = settings.augment.resolved(has_gpu) if settings.augment else settings.eval_crop
        return StreamSpec(
            settings.split, settings.batch, settings.shape, crop, settings.seed, settings.repeats,
            settings.max_corrupt, in_bulk=bool(settings.augment) and not has_gpu,
        )  # fmt: skip

    def _reader(self, stream: Stream) -> Reader:
        if self._on_ray:
            from vitray.data.stream.ray_reader import RayReader

            return RayReader(stream)
        self._decoding = DecodeProcesses(self._decoders) if self._decoders else DecodeThread()
        weakref.finalize(self, self._decoding.close)
        return LocalReader(stream, self._decoding)

    # ---- what it has -------------------------------------------------------------------------------------------------

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, by label."""
        return tuple(self._stream.dataset.classes)

    @property
    def images(self) -> int:
        """The number of images of the split."""
        return self._stream.images

    @property
    def rows(self) -> np.ndarray:
        """The rows, in the stored order of the split, of the images of the batch that came last."""
        return self._rows

    @property
    def corrupt(self) -> list[str]:
        """The images that could not be decoded so far, as shard:row; the image before each took its place."""
        return list(self._stream.corrupt)

    def __len__(self) -> int:
        """The batches of an epoch."""
        if self._settings.augment:
            return self._stream.steps
        return -(-self._stream.images // self._settings.batch)

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the batches of the next epoch, or the rest of the epoch of `load_state_dict`."""
        if self._is_closed:
            raise ConfigError("Loader: this loader is closed; make another one")
        open_loop = self._loop and self._loop()
        if open_loop is not None and open_loop.gi_frame is not None:
            raise ConfigError("Loader: another loop over this loader is open; end it first, or make a second Loader")
        if self._step and not self._continues:
            self._epoch, self._step = self._epoch + 1, 0
        self._continues = False
        loop = self._training() if self._settings.augment else self._evaluation()
        self._loop = weakref.ref(loop)  # a loop that is left early closes it
        return loop

    def _training(self) -> Iterator[tuple[Tensor, Tensor]]:
        settings, total = self._settings, self._stream.steps
        assert settings.augment
        how = BatchSettings(settings.augment, settings.mix, settings.normalize, len(self.classes))
        first = self._epoch * total
        prefetcher = self._prefetched(self._stream.train(first + self._step, first + total, self._share))
        try:
            for batch in prefetcher:
                step, rows = first + self._step, BatchRows(batch.positions % settings.batch, settings.batch)
                self._taken(batch)
                images, targets = prepare_batch(batch.images, batch.labels, how, settings.seed, step, rows)
                yield images, targets if settings.mix.is_mixing or batch.labels.ndim > 1 else batch.labels
        finally:
            prefetcher.close()

    def _evaluation(self) -> Iterator[tuple[Tensor, Tensor]]:
        self._step = 0
        prefetcher = self._prefetched(self._stream.evaluate(self._share))
        try:
            for batch in prefetcher:
                self._taken(batch)
                real = slice(len(batch.rows))  # what follows pads the last batch, and stands for corrupt images
                labels = batch.labels[real]
                labels = known_or_nan(labels) if labels.ndim > 1 else labels
                yield normalized(batch.images[real], self._settings.normalize), labels
        finally:
            prefetcher.close()

    def _prefetched(self, batches: Iterator[HostBatch]) -> Prefetcher:
        if not self._agrees:
            return Prefetcher(batches, self._device)
        return Prefetcher(batches, self._device, lambda number: all_reduce_max(number, self._device))

    def _taken(self, batch: DeviceBatch) -> None:
        self._rows, self._step = batch.rows, self._step + 1
        if self._step == len(self):
            self._loop = None  # some trainers do not ask whether a batch follows
            self._epoch, self._step = self._epoch + 1, 0

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._epoch

    @property
    def step(self) -> int:
        """The number of batches of that epoch that have come."""
        return self._step

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop begin an epoch, unless it is to continue that one; a loop of one's own need not call it."""
        if epoch != self._epoch:
            self._epoch, self._step, self._continues = epoch, 0, False

    def seek(self, steps: int) -> None:
        """Let the next loop continue after a number of batches since the first epoch, for who counts them anyway."""
        self._epoch, self._step = divmod(steps, len(self))
        self._continues = True

    # ---- its state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop is, after the batches that it has taken; the same on each worker."""
        settings = self._settings.model_dump(mode="json")
        return {"epoch": self._epoch, "step": self._step, "dataset": self._stream.dataset.identity} | settings

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next loop continue where another loader was, on whatever number of workers."""
        own = self.state_dict()
        if unknown := own.keys() ^ state.keys():
            raise ConfigError(f"Loader.load_state_dict: not the state of a Loader: {', '.join(sorted(unknown))}")
        for name in own.keys() - FREE - {"epoch", "step"}:
            if own[name] != state[name]:
                raise ConfigError(
                    f"Loader.load_state_dict: {name}: the state has {state[name]!r}, and this loader {own[name]!r}"
                )
        self._epoch, self._step, self._continues = state["epoch"], state["step"], True

    def close(self) -> None:
        """End the processes that decode."""
        self._is_closed = True
        if self._decoding is not None:
            self._decoding.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
