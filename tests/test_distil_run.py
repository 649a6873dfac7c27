"""Distillation end to end on a real Ray with a real MLflow: two workers, the teacher's cost, and a changed teacher."""

import mlflow
import pytest
import torch
from networks import scrambled

from vitray.config import Model, Run, load_run
from vitray.data.shards import open_dataset, read_request, write_dataset
from vitray.errors import ConfigError
from vitray.models.vit import TwoHeads, ViT
from vitray.runs.resolve import resolve
from vitray.runs.run_dir import difference
from vitray.runs.train import train
from vitray.weights import load_model, save_model

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SETTINGS = [
    "model={name: vit_u2x1_8, image_size: 32, num_classes: 10, distillation_token: true}",
    "optim.batch=16",
    "optim.duration=6 steps",
    "optim.warmup=0 steps",
    "compute.workers=2",
    "evaluate.every=6 steps",
    "tracking.every=1 step",
    "task.distill.target=soft",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory, ray_cluster):
    """A folder with a dataset, a teacher of its classes, a tracking store and a spool of its own."""
    folder = tmp_path_factory.mktemp("distil")
    write_dataset(read_request("demo", str(folder / "demo"), overrides=["images=100", "image_size=32"]))
    torch.manual_seed(0)
    run = Run().replace({"model": {"name": "vit_u4x2_8", "image_size": 32, "num_classes": 10}})
    save_model(str(folder / "teacher"), run, scrambled(ViT(run.model)), open_dataset(str(folder / "demo")).classes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlruns.db'}")
        patch.setenv("VITRAY_HOME", str(folder / "home"))
        yield folder


def recipe(place, teacher="teacher"):
    return load_run(None, [*SETTINGS, f"data.url={place / 'demo'}", f"task.distill.teacher={place / teacher}"])


@pytest.fixture(scope="module")
def pupil(place):
    return train(recipe(place), "pupil", str(place / "runs"))


def test_two_workers_learn_from_a_teacher_whose_cost_is_counted(place, pupil):
    outcome = pupil
    assert (outcome.state, outcome.steps) == ("finished", 6)
    loaded = load_model(outcome.model)
    assert isinstance(loaded.vit.head, TwoHeads)
    assert {name.partition(".")[0] for name in loaded.vit.state_dict()} >= {"distillation_token", "class_token"}
    resolved = resolve(recipe(place))
    assert resolved.teacher.url == str(place / "teacher")
    assert 3 * resolved.sizes.gflops < resolved.teacher.gflops < resolved.costs.step_gflops
    logged = mlflow.get_run(outcome.mlflow_run).data
    assert logged.tags["vitray.teacher"] == str(place / "teacher")
    assert float(logged.params["plan.teacher_gflops"]) == resolved.teacher.gflops
    teacher = 2e9 * resolved.teacher.gflops * 96
    assert float(logged.params["cost/teacher_flops"]) == pytest.approx(teacher)
    assert float(logged.params["cost/flops"]) == pytest.approx(2e9 * resolved.costs.step_gflops * 96)


@pytest.mark.usefixtures("pupil")
def test_a_run_is_not_resumed_with_another_teacher(place):
    run = Run().replace({"model": {"name": "vit_u4x2_8", "image_size": 32, "num_classes": 10}})
    save_model(str(place / "other"), run, scrambled(ViT(run.model), 1), open_dataset(str(place / "demo")).classes)
    other = recipe(place, "other")
    assert difference(recipe(place), other) == []  # a teacher may move
    with pytest.raises(ConfigError, match="other: the teacher has changed since the run started"):
        train(other, "pupil", str(place / "runs"))


def test_a_teacher_that_does_not_fit_is_refused_in_the_plan(place):
    with pytest.raises(ConfigError, match=r"^task\.distill\.teacher: .*nowhere.*: no such file"):
        resolve(recipe(place, "nowhere"))
    run = Run().replace({"model": Model(name="vit_u2x1_8", image_size=32, num_classes=9).model_dump(mode="json")})
    save_model(str(place / "nine"), run, ViT(run.model))
    with pytest.raises(ConfigError, match="which knows 9 classes, expected the 10 of the data"):
        resolve(recipe(place, "nine"))
