"""The trainer: no process is started for what a run does not use."""

import pytest
import ray
from ray.train.torch import TorchTrainer

from vitray.runs.mailbox import Desk
from vitray.runs.trainer import Trainer


def callbacks(trainer):
    return [type(each).__name__ for each in trainer._create_default_callbacks()]


@pytest.mark.ray
def test_helpers_without_work_are_left_out(ray_cluster, monkeypatch):
    monkeypatch.setenv("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")
    usual, ours = callbacks(TorchTrainer(print)), callbacks(Trainer(print))
    assert set(usual) - set(ours) == {"DatasetsCallback", "PlacementGroupCleanerCallback", "StateManagerCallback"}
    assert ours == [each for each in usual if each in ours]


@pytest.mark.ray
def test_what_a_trial_reserves_is_given_back_when_it_dies(ray_cluster):
    """A trial is an actor, whose job goes on without it; its run has a thread of its own."""

    def begun_in_a_thread(_):
        from concurrent.futures import ThreadPoolExecutor

        from vitray.runs.trainer import Trainer

        with ThreadPoolExecutor() as threads:
            return [type(each).__name__ for each in threads.submit(Trainer(print)._create_default_callbacks).result()]

    found = ray.get(Desk.remote().__ray_call__.remote(begun_in_a_thread))
    assert "PlacementGroupCleanerCallback" in found
    assert "DatasetsCallback" not in found
