"""Probes of a run's weights: the same values beside the workers and from a checkpoint, and the alarm of a collapse."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import mlflow
import numpy as np
import pytest
import torch
from image_sets import SHAPES, write_dataset

from pipelines.evaluate import main as evaluate_verb
from vitray.config import load_run
from vitray.config.training import Data, Guard
from vitray.data.augment.crops import crop_center
from vitray.data.augment.decode import decode_image
from vitray.data.augment.mixing import normalized
from vitray.data.shards import held_out
from vitray.data.stream.decoding import locate_rows, read_rows
from vitray.errors import ConfigError, RunError
from vitray.metrics.arrays import Labeled
from vitray.metrics.calibration import adaptive_ece, brier
from vitray.metrics.feature_rank import effective_rank, rankme
from vitray.metrics.few_shot import probe_few_shot
from vitray.metrics.knn import probe_knn
from vitray.metrics.probes import mean_distances
from vitray.models.vit import ViT
from vitray.runs import ray_host
from vitray.runs.model_output import probe_checkpoints
from vitray.runs.placement import place_workers
from vitray.runs.resolve import resolve
from vitray.runs.train import train
from vitray.sweeps.plan import Recipe
from vitray.sweeps.space import read_space
from vitray.sweeps.sweep import sweep
from vitray.training import checkpoints, loop, prober
from vitray.training.checkpoints import Checkpoint
from vitray.training.prober import Prober
from vitray.training.probes import choose_rows, network_weights, probe_weights, read_probe_images, read_probe_labels
from vitray.training.state import TrainState, report_collapse

ALL = "[knn,few_shot,calibration,rank,attention_distance]"
SETTINGS = [
    f"model={{name: vit_u2x2_8, image_size: 32, num_classes: {len(SHAPES)}}}",
    "evaluate.probe_images=80",
    "optim.batch=16",
    "optim.duration=6 steps",
    "optim.warmup=0 steps",
    "optim.ema={decay: 0.5}",
    "compute.workers=1",
    "checkpoint={every: 2 steps, keep: 9}",
    "evaluate.every=2 steps",
    "evaluate.examples=0",
    "tracking.every=1 step",
]
MASKED = [*SETTINGS[1:], "task=masked", "model={name: vit_u2x2_8, image_size: 32, num_classes: null, pool: mean}"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("probes") / "demo", {"train": 90, "val": 50}, corrupt=1)


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("clean") / "demo", {"train": 90, "val": 50})


def load(*overrides):
    """A run; a later override replaces an earlier one of the same setting."""
    return load_run(None, list({override.partition("=")[0]: override for override in overrides}.values()))


def recipe(dataset, *overrides, base=SETTINGS):
    return load(*base, f"data.url={dataset.url}", f"evaluate.probes={ALL}", *overrides)


# ---- the images and the values ---------------------------------------------------------------------------------------


def test_the_choice_of_rows_depends_on_the_split_and_on_nothing_else():
    used = np.arange(500)
    chosen = choose_rows("val", used, 60)
    assert len(set(chosen)) == 60
    assert list(chosen) == sorted(chosen)
    assert np.array_equal(chosen, choose_rows("val", used, 60))
    assert set(choose_rows("val", used, 20)) < set(chosen), "fewer images are among those of more"
    assert set(choose_rows("val", used, 60)) != set(choose_rows("train", used, 60))
    assert np.array_equal(choose_rows("val", np.arange(7), 60), np.arange(7)), "a small split gives all"
    # Of a part of the rows, the chosen ones of all that are in it come first.
    part = used[used % 3 > 0]
    assert set(chosen) & set(part) <= set(choose_rows("val", part, 60)) <= set(part)
    # Spread over the split: 60 even draws of 500 have a mean of 250 with a deviation of 18.
    assert abs(chosen.mean() - 250) < 90


def test_the_images_of_a_hold_out_are_not_among_those_that_probes_learn_from(dataset):
    run, mask = recipe(dataset, "data.holdout=0.4"), held_out(dataset, Data(holdout=0.4))
    images = read_probe_images(run, dataset, mask)
    views = {view.tobytes() for view in images.val.views}
    assert images.train is not None
    assert not views & {view.tobytes() for view in images.train.views}
    rows = read_rows(np.flatnonzero(mask), locate_rows(dataset, "train"))
    expected = {
        crop_center(decode_image(content), run.data.eval_crop, (32, 32)).tobytes()
        for content, _, _ in rows.values()
        if content != b"none"
    }
    assert views <= expected


def test_corrupt_images_are_left_out_and_counted(dataset):
    images = read_probe_images(recipe(dataset, "evaluate.probe_images=64"), dataset, None)
    assert len(images.val.views) == len(images.val.labels) == 49  # of 50
    vit = ViT(recipe(dataset).model)
    values = probe_weights(recipe(dataset), vit.state_dict(), images, torch.device("cpu"))
    assert values["images"] == 49
    assert values["train_images"] == len(images.train.views)


def test_the_values_are_those_of_the_network_image_by_image(dataset):
    run = recipe(dataset)
    images = read_probe_images(run, dataset, None)
    torch.manual_seed(0)
    vit = ViT(run.model).eval()
    values = probe_weights(run, vit.state_dict(), images, torch.device("cpu"))
    exact = vit.double()  # a batch of one, and another precision

    def outputs(views):
        features, logits, distances = [], [], []
        for view in views:
            image = normalized(torch.from_numpy(view[None]), run.data.normalize).double()
            with torch.no_grad():
                features.append(exact.pooled(exact.tokens(image)).numpy()[0])
                logits.append(exact(image).numpy()[0])
                trace = {}
                exact(image, trace)
            distances.append([slow_distance(weights[0].numpy()) for weights in trace.values()])
        return np.array(features), np.array(logits), np.array(distances)

    (train, _, _), (val, logits, distances) = outputs(images.train.views), outputs(images.val.views)
    learned, scored = Labeled(train, images.train.labels), Labeled(val, images.val.labels)
    shares = torch.from_numpy(logits).softmax(1).numpy()
    hits = logits.argmax(1) == images.val.labels
    assert values["knn10"] == probe_knn(learned, scored, len(SHAPES))[10].top1
    few = [each.top1 for each in probe_few_shot(learned, scored, len(SHAPES), [5])[5]]
    assert values["few_shot5"] == pytest.approx(np.mean(few), abs=1e-12)
    assert values["rankme"] == pytest.approx(rankme(val), rel=1e-4)
    assert values["effective_rank"] == pytest.approx(effective_rank(val), rel=1e-4)
    assert values["nll"] == pytest.approx(-np.log(shares[np.arange(len(hits)), images.val.labels]).mean(), abs=1e-5)
    # Random weights are sure of nothing: all confidences are in one of the 15 bins, or in two.
    cells = np.ceil(shares.max(1) * 15)
    gap = sum(abs((hits - shares.max(1))[cells == cell].sum()) for cell in set(cells)) / len(hits)
    assert values["ece"] == pytest.approx(gap, abs=1e-5)
    assert values["attention_distance"] == pytest.approx(distances.mean(), abs=1e-4)


SIGMOID_SCORES = {"brier": brier, "adaptive_ece": adaptive_ece}


def test_calibration_after_a_binary_loss_is_that_of_sigmoids(dataset):
    run = recipe(dataset, "evaluate.probes=[calibration]", "task.loss=bce")
    images, vit = read_probe_images(run, dataset, None), ViT(run.model).eval()
    values = probe_weights(run, vit.state_dict(), images, torch.device("cpu"))
    with torch.no_grad():
        logits = vit(normalized(torch.from_numpy(images.val.views), run.data.normalize)).numpy()
    wanted = {name: of(logits, images.val.labels, probability="sigmoid") for name, of in SIGMOID_SCORES.items()}
    assert {name: values[name] for name in wanted} == pytest.approx(wanted, abs=1e-5)
    assert values["brier"] != pytest.approx(brier(logits, images.val.labels), abs=1e-3)


def slow_distance(weights_HNN):
    """The mean distance of one branch by a loop over pairs of 4 x 4 patches of 8 pixels."""
    total, patches = 0.0, [(row, column) for row in range(4) for column in range(4)]
    for query, (r, c) in enumerate(patches):
        for key, (s, d) in enumerate(patches):
            total += 8 * ((r - s) ** 2 + (c - d) ** 2) ** 0.5 * weights_HNN[:, 1 + query, 1 + key].mean()
    return total / len(patches)


def test_distances_are_averaged_over_branches_heads_and_images():
    distance_LPHB = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    assert mean_distances(distance_LPHB) == {
        "attention_distance": 59.5,
        "attention_distance_level00": 29.5,
        "attention_distance_level01": 89.5,
    }


def test_the_average_counts_where_there_is_one():
    model = {"vit.a": torch.zeros(2), "vit.b": torch.zeros(2), "decoder": torch.zeros(1)}
    weights = network_weights({"model": model, "average": {"vit.b": torch.ones(2)}, "optimizer": {}})
    assert {name: tensor.tolist() for name, tensor in weights.items()} == {"a": [0, 0], "b": [1, 1]}


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["evaluate.probes=[knnn]"], r"evaluate.probes.*got 'knnn', expected .*'knn'"),
        (["evaluate.probes=[knn,knn]"], "evaluate: probes: got knn more than once"),
        (["evaluate.probes=[knn]", "data.val=null"], "evaluate.probes needs data.val or data.holdout"),
        (["evaluate.probes=[knn]", "evaluate.probe_images=15"], "evaluate.probe_images: got 15, expected .*16"),
        (["guard.on_collapse=stop", "evaluate.probes=[knn]"], "guard.on_collapse: got stop with task sup"),
        (["guard.knn_drop=1.0"], "guard.knn_drop: got 1.0, expected .*less than 1"),
        (["guard.min_rank=1.0"], "guard.min_rank: got 1.0, expected .*greater than 1"),
    ],
)
def test_settings_that_do_not_fit_get_one_message(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_run(None, overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["evaluate.probes=[calibration]"],
            "evaluate.probes calibration needs a head",
        ),
        (["task=tokenizer", "evaluate.probes=[rank]"], "evaluate.probes does not apply to task tokenizer"),
        (["guard.on_collapse=stop"], "guard.on_collapse stop needs evaluate.probes with knn or rank"),
        (["guard={on_collapse: stop, knn_drop: null}", "evaluate.probes=[knn]"], "evaluate.probes with knn or rank"),
    ],
)
def test_settings_of_training_without_labels_that_do_not_fit_get_one_message(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(*MASKED, *overrides)
    assert load(*MASKED, "guard.on_collapse=stop", "evaluate.probes=[rank]").guard.on_collapse == "stop"
    distilled = ["model.num_classes=null", "task=self_distillation", "guard.on_collapse=stop"]
    assert load(*distilled).guard.min_prototypes == 4


def test_probes_that_learn_need_labels(dataset):
    unlabeled = dataset.model_copy(update={"classes": ("image",)})
    with pytest.raises(ConfigError, match=r"evaluate.probes few_shot needs labels to learn from; .* has none"):
        resolve(recipe(dataset, "evaluate.probes=[few_shot,rank]", base=MASKED), unlabeled)
    resolve(recipe(dataset, "evaluate.probes=[rank]", base=MASKED), unlabeled)


def test_few_shot_learns_from_the_number_of_images_in_its_name_or_is_refused_by_the_plan(dataset):
    labels = [label for label, content in training_images(dataset, 80) if content != b"none"]
    run = recipe(dataset)
    least = min(map(labels.count, range(len(SHAPES))))
    assert 5 <= least < 10
    images, vit = read_probe_images(run, dataset, None), ViT(run.model)
    values = probe_weights(run, vit.state_dict(), images, torch.device("cpu"))
    assert {name for name in values if name.startswith("few_shot")} == {
        *("few_shot_least", "few_shot1", "few_shot1_std", "few_shot5", "few_shot5_std")
    }
    assert values["few_shot_least"] == least
    few = [label for label, _ in training_images(dataset, 16)]
    missing = [shape for label, shape in enumerate(SHAPES) if label not in few]
    message = (
        f"evaluate.probe_images: got 16: {len(missing)} of 10 classes have none of .* '{missing[0]}', and few_shot"
    )
    with pytest.raises(ConfigError, match=message):
        resolve(recipe(dataset, "evaluate.probe_images=16"), dataset)
    assert resolve(recipe(dataset, "evaluate.probe_images=16", "evaluate.probes=[knn]"), dataset)


def training_images(dataset, number):
    """Label and encoded image of the images that probes learn from."""
    chosen = choose_rows("train", np.arange(90), number)
    rows = read_rows(chosen, locate_rows(dataset, "train"))
    return [(rows[row][1], rows[row][0]) for row in chosen.tolist()]


def test_the_plan_has_the_number_of_images_of_the_smallest_class(dataset):
    labels = [label for label, _ in training_images(dataset, 80)]
    assert resolve(recipe(dataset), dataset).few_shot_least == min(map(labels.count, range(len(SHAPES))))
    assert resolve(recipe(dataset, "evaluate.probes=[knn]"), dataset).few_shot_least is None
    assert read_probe_labels(recipe(dataset), dataset, None).tolist() == labels
    mask = held_out(dataset, Data(holdout=0.4))
    trained = [label for row, (_, label, _) in every_row(dataset).items() if not mask[row]]
    assert sorted(read_probe_labels(recipe(dataset), dataset, mask)) == sorted(trained)


def every_row(dataset):
    """All rows of train."""
    return read_rows(np.arange(90), locate_rows(dataset, "train"))


@pytest.mark.parametrize(
    ("node", "overrides", "expected"),
    [
        ({"CPU": 3.0}, [], (1.0, 0)),
        ({"CPU": 2.0}, [], None),
        ({"CPU": 3.0}, ["evaluate.where=cpu"], None),
        ({"CPU": 4.0}, ["evaluate.where=cpu"], (1.0, 0)),
        ({"CPU": 8.0, "GPU": 2.0}, [], (1.0, 1)),
        ({"CPU": 8.0, "GPU": 1.0}, [], (1.0, 0)),
        ({"CPU": 8.0, "GPU": 2.0}, ["evaluate.where=gpu"], (1.0, 0)),
    ],
)
def test_probes_have_a_cpu_of_their_own_or_a_spare_gpu(node, overrides, expected, dataset, monkeypatch):
    import ray

    monkeypatch.setattr(ray, "cluster_resources", lambda: node)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": node}])
    run = recipe(dataset, *overrides)
    if expected is None:
        with pytest.raises(
            ConfigError, match=r"one for evaluate.probes do not fit into .*without evaluate.probes, `vitray eval"
        ):
            place_workers(run)
    else:
        placement = place_workers(run)
        assert (placement.cpus, placement.probe_gpus) == expected
    assert place_workers(run.replace({"evaluate.probes": [], "evaluate.where": "workers"})).probe_gpus == 0


# ---- the alarm -------------------------------------------------------------------------------------------------------


def test_a_collapse_is_a_fall_of_knn_below_its_best_or_a_low_rank():
    state, guard = TrainState(), Guard(knn_drop=0.2, min_rank=2.0)

    def check(step, **values):
        return state.check_collapse(step, values, guard)

    assert check(10, knn10=0.5, knn20=0.1, rankme=2.0) is None
    assert check(20, knn10=0.4, rankme=9.0) is None, "a fifth below the best, and not more"
    assert check(30, knn10=0.6) is None
    fallen = "at step 40 kNN accuracy fell to 47.00% from 60.00% at step 30, by more than guard.knn_drop, 0.2 of it"
    assert check(40, knn10=0.47) == fallen
    assert (state.best_knn, state.best_knn_step) == (0.6, 30)
    assert check(45, knn10=0.47, knn10_high=0.49) is None, "a few hits of few images"
    assert check(50, rankme=1.99) == "at step 50 RankMe is 1.99, below guard.min_rank, 2"
    assert "and RankMe is 1.5" in check(60, knn10=0.1, rankme=1.5)
    assert check(70, knn10=0.55, rankme=3.0) is None
    assert check(75, prototypes_used=4.0, knn10=0.55) is None
    assert check(75, prototypes_used=1.0) == "at step 75 all images share 1 prototypes, below guard.min_prototypes, 4"
    off = Guard(knn_drop=None, min_rank=None, min_prototypes=None)
    assert state.check_collapse(80, {"knn10": 0.0, "rankme": 1.0, "prototypes_used": 1.0}, off) is None


def test_a_collapse_is_noted_once_with_its_likely_cause():
    run = load("model.num_classes=null", "task={kind: self_distillation, prototypes: 100}")
    run, state, sent = run.replace({"task.teacher_temperature": [0.04, 0.2]}), TrainState(), []
    host = SimpleNamespace(send=sent.append)
    for step in (10, 20):
        report_collapse(step, {"prototypes_used": 2.0, "entropy": 4.6}, run, state, host)  # log(100) is 4.605
        report_collapse(step, {"knn10": 0.5}, run, state, host)
    [note] = sent
    wanted = "likely cause: task.teacher_temperature 0.2: it is not below task.student_temperature; or the teacher's"
    assert wanted in note.text
    report_collapse(30, {"prototypes_used": 60.0}, run, state, host)
    assert state.collapse is None
    report_collapse(40, {"rankme": 1.1}, load("model.num_classes=null", "task=lejepa", "optim.lr=0.5"), state, host)
    assert sent[-1].text.endswith("likely cause: optim.lr, 0.5, is too high, or optim.warmup too short")


def test_the_best_accuracy_is_in_checkpoints_and_the_alarm_is_not():
    state = TrainState(best_knn=0.5, best_knn_step=4, pending_probes=[4], collapse="at step 4", best_step=2)
    state.watched["knn10"] = 0.5
    stored = TrainState(**json.loads(json.dumps(state.as_json())))
    assert stored == replace(state, collapse=None, watched={})
    assert state.protected_steps == {2, 4}


class Notes:
    """The part of a host that a prober uses; with a ResolvedRun, it starts an actor of Ray."""

    def __init__(self, resolved=None, rank=0):
        self.notes, self.rank, self.actor = [], rank, None
        if resolved is not None:
            self.actor = ray_host.start_probe_actor(ray_host.RayStart(resolved, "", "", 1))

    def send(self, message):
        self.notes.append(message.text)

    def start_probes(self, step, weights):
        return ray_host.RayJob(self.actor.probe.remote(step, weights))

    def unfinished(self, jobs, seconds):
        return ray_host.unfinished(jobs, seconds)


class Waiting:
    """Evaluations or probes that are ready after some looks."""

    def __init__(self, looks):
        self.looks = looks

    def is_ready(self, *_):
        self.looks -= 1
        return self.looks < 0


def test_the_workers_meet_while_one_waits_for_results_at_the_end():
    met = []
    worker = SimpleNamespace(
        evaluator=Waiting(2), prober=Waiting(1), largest=lambda number: met.append(number) or number
    )
    loop.await_results(worker)
    assert met == [1, 1, 0, 1, 0]


def test_probes_that_are_too_late_at_the_end_are_left_out(tmp_path, dataset):
    notes = []
    hosts = [
        SimpleNamespace(
            rank=rank,
            send=lambda message: notes.append(message.text),
            start_probes=lambda step, _: f"probes of {step}",
            unfinished=lambda jobs, _: jobs[1:],  # the first has finished
        )
        for rank in range(2)
    ]
    probers = [Prober(recipe(dataset), str(tmp_path), host) for host in hosts]
    learner = SimpleNamespace(average=None, task=torch.nn.Linear(1, 1))
    for step in (2, 4):
        for each in probers:
            each.start(step, learner, is_last=True)
    assert probers[1].is_ready(0, 0)
    assert not probers[0].is_ready(0, 2 * prober.LONGEST_WAIT)
    assert probers[0].pending == [2, 4]
    assert probers[0].is_ready(0, 2 * prober.LONGEST_WAIT + 1)
    assert probers[0].pending == [2]
    (note,) = notes
    assert note == "the probes of step 4 are left out: they have not finished in 3601 s"


# ---- on a real Ray ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory, ray_cluster, migrated):
    folder = tmp_path_factory.mktemp("probed")
    (folder / "mlruns.db").write_bytes(migrated.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlruns.db'}")
        patch.setenv("VITRAY_HOME", str(folder / "home"))
        yield folder


def logged(outcome_or_name):
    """The probes of an MLflow run: {step: {name: value}}."""
    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    run = client.get_run(outcome_or_name)
    steps = {}
    for name in run.data.metrics:
        if name.startswith("probe/"):
            for point in client.get_metric_history(outcome_or_name, name):
                steps.setdefault(point.step, {})[name.removeprefix("probe/")] = point.value
    return steps


def check_equal(got, rows):
    assert sorted(got) == [row["step"] for row in rows]
    for row in rows:
        wanted = {name: value for name, value in row.items() if name not in ("checkpoint", "step")}
        assert got[row["step"]] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_probes_of_training_equal_those_of_the_checkpoints(place, clean, capsys):
    figures = ["evaluate.figures=[distance,norms]", "evaluate.examples=4", "tracking.register_as=probed"]
    outcome = train(recipe(clean, *figures), "probed", str(place / "runs"))
    rows = evaluate_verb([outcome.home, "--training-probes"])["checkpoints"]
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert {"knn10", "few_shot5", "few_shot_least", "ece", "rankme", "attention_distance_level01"} <= rows[0].keys()
    assert rows[0]["nll"] != rows[2]["nll"], "the weights differ"
    check_equal(logged(outcome.mlflow_run), rows)
    assert "knn10" in capsys.readouterr().out
    # The figures of each evaluation in the image grid, and those of the registered version.
    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    pictures = [item.path for item in client.list_artifacts(outcome.mlflow_run, "images")]
    for name in ("attention_distance", "entropy_of_attention", "norms"):
        found = (re.search(rf"figures~{name}\+step\+(\d+)\+", path) for path in pictures)
        steps = {int(each[1]) for each in found if each}
        assert steps == {2, 4, 6}, pictures
    files = {item.path for item in client.list_artifacts(outcome.mlflow_run, "inspection")}
    assert files >= {"inspection/index.html", "inspection/distance.csv", "inspection/norms-probed.svg"}
    (version,) = client.search_model_versions("name = 'probed'")
    assert version.run_id == outcome.mlflow_run
    # A single checkpoint, and other probes than the run's.
    alone = probe_checkpoints([f"{outcome.home}/checkpoints/step-00000004"], ["rank"])
    assert [(row["step"], row["rankme"]) for row in alone] == [(4, pytest.approx(rows[1]["rankme"], abs=1e-6))]
    assert "knn10" not in alone[0]


SHORT = ["evaluate.probes=[knn,few_shot,rank]", "optim.duration=2 steps", "evaluate.examples=0"]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_of_two_workers_probes(place, clean, capsys):
    outcome = train(recipe(clean, *SHORT, "compute.workers=2"), "pair", str(place / "runs"))
    rows = probe_checkpoints([outcome.home])
    assert [row["step"] for row in rows] == [2]
    check_equal(logged(outcome.mlflow_run), rows)
    shown = f"on one CPU beside the workers; few_shot of 1, 5, as the smallest class has {rows[0]['few_shot_least']}"
    printed = capsys.readouterr()
    assert shown in printed.out + printed.err


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_trial_of_a_sweep_probes_its_own_weights(place, clean):
    (place / "lr.yaml").write_text("space:\n  optim.lr: {grid: [1.0e-3, 3.0e-2]}\n")
    space, out = read_space(place / "lr.yaml"), str(place / "sweeps")
    outcome = sweep(Recipe(recipe(clean, *SHORT), ["tiny"]), space, "probed", out, "vitray sweep tiny lr.yaml")
    assert (outcome.trials, outcome.finished) == (2, 2)
    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    experiments = [each.experiment_id for each in client.search_experiments()]
    trials = client.search_runs(experiments, f"tags.`mlflow.parentRunId` = '{outcome.mlflow_run}'")
    homes = {trial.info.run_id: str(Path(outcome.home, trial.info.run_name or "")) for trial in trials}
    assert len(homes) == 2
    rows = [probe_checkpoints([home]) for home in homes.values()]
    for run_id, own in zip(homes, rows, strict=True):
        check_equal(logged(run_id), own)
    assert rows[0][0]["rankme"] != rows[1][0]["rankme"]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_collapse_ends_the_run_or_is_a_warning_and_the_run_can_be_resumed(place, clean):
    guard = "guard={min_rank: 1000.0, on_collapse: stop}"
    settings = ["evaluate.probes=[knn,rank]", "optim.duration=40 steps", "evaluate.every=10 steps"]
    settings += ["checkpoint={every: 10 steps, keep: 9}"]
    settings += ["task={kind: masked, objective: {kind: mae, decoder_width: 16, decoder_depth: 1, decoder_heads: 2}}"]
    stopping = recipe(clean, *settings, guard, base=MASKED)
    with pytest.raises(RunError, match=r"guard.on_collapse: at step \d+ RankMe is .*, below guard.min_rank, 1000"):
        train(stopping, "collapsed", str(place / "runs"))
    home = str(place / "runs" / "collapsed")
    saved = checkpoints.complete_steps(home)
    assert 10 <= saved[-1] <= 40
    assert not Path(home, "model").exists()
    outcome = train(stopping.replace({"guard.on_collapse": "warn"}), "collapsed", str(place / "runs"))
    assert outcome.state == "finished"
    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    note = client.get_run(outcome.mlflow_run).data.tags["vitray.note"]
    assert "collapse: at step" in note
    rows = probe_checkpoints([home])
    got = logged(outcome.mlflow_run)
    assert 40 in got
    check_equal(got, [row for row in rows if row["step"] in got])  # others are left out while the actor is busy


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)  # the other worker would wait for half an hour
def test_a_collapse_in_the_last_probes_ends_both_workers(place, clean):
    settings = ["evaluate.probes=[rank]", "optim.duration=2 steps", "compute.workers=2"]
    run = recipe(clean, *settings, "guard={min_rank: 1000.0, on_collapse: stop}", base=MASKED)
    with pytest.raises(RunError, match=r"guard.on_collapse: at step 2 RankMe is"):
        train(run, "collapsed at last", str(place / "runs"))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_interrupted_probes_restart_from_their_checkpoints(place, clean):
    run, run_dir = recipe(clean), str(place / "interrupted")
    torch.manual_seed(1)
    vit = ViT(run.model)
    parts = {"model": {f"vit.{name}": tensor for name, tensor in vit.state_dict().items()}}
    checkpoints.write_checkpoint(run_dir, Checkpoint(4, parts, {}))
    host = Notes(resolve(run, clean))
    prober = Prober(run, run_dir, host)
    prober.restart_pending(TrainState(step=6, pending_probes=[2, 4]))
    assert prober.pending == [4]
    assert host.notes == ["the probes of step 2 were lost when the run was interrupted"]
    ((step, probed),) = prober.finished(wait=True)
    images = read_probe_images(run, clean, None)
    assert step == 4
    assert probed.pictures == {}
    assert probed.values == pytest.approx(probe_weights(run, vit.state_dict(), images, torch.device("cpu")), abs=1e-6)
    assert prober.pending == []
    # Weights of another network are reported, and training goes on.
    other = ViT(run.replace({"model.name": "vit_u3x2_8"}).model)
    parts = {"model": {f"vit.{name}": tensor for name, tensor in other.state_dict().items()}}
    checkpoints.write_checkpoint(run_dir, Checkpoint(6, parts, {}))
    prober.restart_pending(TrainState(step=6, pending_probes=[6]))
    assert list(prober.finished(wait=True)) == []
    assert len(host.notes) == 2
    assert host.notes[1].startswith("the probes of step 6 failed, and training goes on: ")
    # Another rank starts nothing.
    other = Prober(run, run_dir, Notes(rank=1))
    other.restart_pending(TrainState(step=6, pending_probes=[4]))
    assert other.pending == []


# ---- the command -----------------------------------------------------------------------------------------------------


def test_a_folder_without_checkpoints_gets_one_message(tmp_path, dataset):
    with pytest.raises(ConfigError, match=r"nowhere: no run folder; expected one, as runs/NAME"):
        probe_checkpoints([str(tmp_path / "nowhere")])
    home = tmp_path / "run"
    home.mkdir()
    run = recipe(dataset, "evaluate.probes=[]")
    (home / "run.yaml").write_text(run.to_yaml())
    meta = {"uid": "0", "name": "run", "dataset_identity": dataset.identity}
    (home / "run.json").write_text(json.dumps(meta))
    with pytest.raises(ConfigError, match="the run has no complete checkpoint yet"):
        probe_checkpoints([str(home)])
    parts = {"model": {f"vit.{name}": tensor for name, tensor in ViT(run.model).state_dict().items()}}
    checkpoints.write_checkpoint(str(home), Checkpoint(3, parts, {}))
    with pytest.raises(ConfigError, match=r"no complete checkpoint; expected one of the steps 3"):
        probe_checkpoints([f"{home}/checkpoints/step-00000002"])
    with pytest.raises(ConfigError, match=r"its evaluate.probes are empty; expected --probes"):
        probe_checkpoints([str(home)])
    with pytest.raises(ConfigError, match=r"got 'linear', expected .*'knn'"):
        probe_checkpoints([str(home)], ["linear"])
    assert probe_checkpoints([str(home)], ["rank"])[0]["rankme"] > 1
    (home / "run.json").write_text(json.dumps(meta | {"dataset_identity": "other"}))
    with pytest.raises(ConfigError, match="the images have changed since"):
        probe_checkpoints([str(home)], ["rank"])
    assert not Path("evaluations").exists()
