"""Ray Train's trainer, without the helpers that would have nothing to do: each is a process more."""

from typing import Any

from ray.train.torch import TorchTrainer


class Trainer(TorchTrainer):
    """A trainer that starts faster, and whose run leaves the CPUs to itself."""

    is_alone = False
    """Whether Ray ends with this run, and nobody else uses it."""

    def _create_default_callbacks(self) -> list[Any]:
        # Ray promises nothing about this method: with a release that has none of the kind, the helpers are there again.
        unused = {"DatasetsCallback"}  # hands out datasets of the trainer; each worker reads a stream of its own
        if self.is_alone:
            # Gives back what a dead run has reserved, to the others of the cluster. It wants the dashboard.
            unused.add("PlacementGroupCleanerCallback")
        return [each for each in super()._create_default_callbacks() if type(each).__name__ not in unused]
