"""Other networks end to end: two workers, evaluation, fine-tuning, a registered model."""

import mlflow
import pytest

from vitray.config import Run, load_run
from vitray.data.shards import read_request, write_dataset
from vitray.evaluation.evaluate import Request, compute_evaluation
from vitray.runs.train import train
from vitray.weights import load_model, read_delta

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SETTINGS = [
    "optim.batch=16",
    "optim.duration=6 steps",
    "optim.warmup=0 steps",
    "compute.workers=2",
    "checkpoint={every: 4 steps, keep: 9}",
    "evaluate.every=6 steps",
    "tracking.every=1 step",
]
NETWORKS = ["torchvision/resnet18", "vit_u2x1_16_r26", "vit_u2x1_16_local", "axial_resnet50_s"]


@pytest.fixture(scope="module")
def place(tmp_path_factory, ray_cluster):
    """A folder with a dataset, a tracking store and a spool of its own."""
    folder = tmp_path_factory.mktemp("others")
    write_dataset(read_request("demo", str(folder / "demo"), overrides=["images=100", "image_size=32"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlruns.db'}")
        patch.setenv("VITRAY_HOME", str(folder / "home"))
        yield folder


def recipe(place, name: str, *overrides: str) -> Run:
    model = f"model={{name: {name}, image_size: 32, num_classes: 10}}"
    return load_run(None, [model, f"data.url={place / 'demo'}", *SETTINGS, *overrides])


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_trains_on_two_workers_and_is_evaluated_with_its_own_score(place, tmp_path, name):
    short = name.rpartition("/")[2]
    outcome = train(recipe(place, name, f"tracking.register_as={short}"), short, str(place / "runs"))
    assert outcome.steps == 6
    assert load_model(outcome.model).vit.model.name == name
    assert mlflow.pyfunc.load_model(f"models:/{short}/1").unwrap_python_model() is not None
    request = Request([outcome.model], str(place / "demo"), probes=["knn"], out=str(tmp_path), workers=1)
    scores = compute_evaluation(request)[0].flat()
    assert scores["top1"] == outcome.val_top1
    assert scores["loss"] == pytest.approx(outcome.val_loss, abs=1e-4)
    if name.startswith("torchvision"):
        tuned = train(
            recipe(
                place,
                name,
                f"task={{kind: finetune, weights: {outcome.model}, mode: head, also_train: [stage4]}}",
                "evaluate.probes=[knn]",
            ),
            f"{short}-tuned",
            str(place / "runs"),
        )
        taken = read_delta(tuned.model).taken
        assert "body.conv1.weight" in taken
        assert "body.bn1.running_mean" in taken  # a frozen batch norm keeps its statistics
        assert not {"body.fc.weight", "body.layer4.0.conv1.weight"} & set(taken)
