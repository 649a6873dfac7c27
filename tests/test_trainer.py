"""The trainer: Ray Train's unused helper processes are not started."""

import pytest
import ray
from ray.train.torch import TorchTrainer

from vitray.runs.trainer import Trainer
from vitray.runs.worker_mailbox import Mailbox


def callbacks(trainer):
    return [type(each).__name__ for each in trainer._create_default_callbacks()]


@pytest.mark.ray
def test_unused_callbacks_are_left_out(ray_cluster, monkeypatch):
    monkeypatch.setenv("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")
    usual, ours = callbacks(TorchTrainer(print)), callbacks(Trainer(print))
    assert set(usual) - set(ours) == {"DatasetsCallback", "PlacementGroupCleanerCallback", "StateManagerCallback"}
    assert ours == [each for each in usual if each in ours]


@pytest.mark.ray
def test_a_trial_keeps_the_cleanup_of_its_placement_group(ray_cluster):
    """A trial is an actor that may die before its job, and its run has a thread of its own."""

    def callbacks_in_a_thread(_):
        from concurrent.futures import ThreadPoolExecutor

        from vitray.runs.trainer import Trainer

        with ThreadPoolExecutor() as threads:
            return [type(each).__name__ for each in threads.submit(Trainer(print)._create_default_callbacks).result()]

    names = ray.get(Mailbox.remote().__ray_call__.remote(callbacks_in_a_thread))
    assert "PlacementGroupCleanerCallback" in names
    assert "DatasetsCallback" not in names
