"""The trainer: no process is started for what a run does not use."""

from ray.train.torch import TorchTrainer

from vitray.loop.trainer import Trainer


def callbacks(trainer):
    return [type(each).__name__ for each in trainer._create_default_callbacks()]


def test_helpers_without_work_are_left_out():
    usual, ours = callbacks(TorchTrainer(print)), Trainer(print)
    assert set(usual) - set(callbacks(ours)) == {"DatasetsCallback"}
    ours.is_alone = True
    assert set(usual) - set(callbacks(ours)) == {"DatasetsCallback", "PlacementGroupCleanerCallback"}
    assert callbacks(ours) == [each for each in usual if each in callbacks(ours)]
