"""The training benchmark measures a step, alone and beside probes, and writes its tables."""

import json
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.__main__ import main
from vitray.bench import probes, train
from vitray.bench.probes import POLL_SECONDS, ProbeHost, ProbeLoad, take_steps
from vitray.bench.train import host_batches
from vitray.config import load_run
from vitray.data.augment.draws import OPERATIONS
from vitray.data.stream.prefetch import Prefetcher
from vitray.errors import RunError
from vitray.training.messages import Note

CPU = torch.device("cpu")


def test_a_training_step_is_measured(tmp_path, capsys):
    args = ["--models", "vit_u2x1_8", "--image-size", "32", "--batch", "2", "--rounds", "2", "--seconds", "0.05"]
    assert main(["bench", "train", *args, "--out", str(tmp_path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert all(row[column] > 0 for column in ("vitray", "bare", "ratio"))
    assert (tmp_path / "train_step_cpu_fp32.csv").read_text().startswith("model,vitray,vitray_spread,bare,")


def test_a_model_that_cannot_take_a_step_is_noted_and_the_others_are_measured(tmp_path, capsys, monkeypatch):
    variants = train.step_variants

    def step_variants(run, device):
        if run.model.name == "vit_u1x1_8":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return variants(run, device)

    monkeypatch.setattr(train, "step_variants", step_variants)
    args = ["--image-size", "16", "--batch", "2", "--rounds", "2", "--seconds", "0.01", "--out", str(tmp_path)]
    assert main(["bench", "train", "--models", "vit_u1x1_8,vit_u2x1_8", *args, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert first == {"model": "vit_u1x1_8", "error": "batches of 2: OutOfMemoryError: CUDA out of memory"}
    assert second["vitray"] > 0
    assert (tmp_path / "train_step_cpu_fp32.csv").read_text().splitlines()[1].startswith("vit_u1x1_8,batches of 2")
    assert main(["bench", "train", "--models", "vit_u1x1_8", *args]) == 1
    assert "vit_u1x1_8: batches of 2: OutOfMemoryError: CUDA out of memory" in capsys.readouterr().err


def test_the_search_of_the_largest_batch_ends_at_a_kernel_that_cannot_start(monkeypatch):
    def peak_bytes(run, _device):
        if run.optim.batch > 100:
            raise RuntimeError("CUDA error: invalid configuration argument")

    monkeypatch.setattr(train, "peak_bytes", peak_bytes)
    assert 89 < (train.largest_fitting(lambda batch: train.fits(load_run(), batch, CPU)) or 0) <= 100


def test_the_augmentation_of_a_batch_is_measured_beside_its_step(tmp_path, capsys):
    args = ["--models", "vit_u1x1_8", "--image-size", "16", "--batch", "4", "--rounds", "2", "--seconds", "0.02"]
    assert main(["bench", "train", "--augment", "three_augment", *args, "--out", str(tmp_path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert all(row[column] > 0 for column in ("augmented", "crops", "ratio"))
    assert (tmp_path / "train_three_augment_cpu_fp32.csv").read_text().startswith("model,augmented,augmented_spread,")
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "train", "--augment", "three_augment", "--probes"])


def test_each_prefetcher_gives_its_batch_with_or_without_the_draws():
    run = load_run().replace(
        {"model.name": "vit_u1x1_8", "model.image_size": 16, "optim.batch": 8, "data.augment.policy": "three_augment"}
    )
    augmented, crops = host_batches(run)
    assert crops.draws == ()
    [draws] = augmented.draws
    assert {OPERATIONS[code] for code in draws.codes.flat} <= {"gray", "solarize", "blur"}
    assert np.array_equal(augmented.images, crops.images)
    with closing(Prefetcher(iter([augmented, crops]), CPU)) as feed:
        changed, same = feed
    assert not torch.equal(changed.images, same.images)
    assert np.array_equal(same.images.numpy(), crops.images)


def test_a_load_beside_the_steps_is_looked_at_now_and_then(monkeypatch):
    now, looks = [100.0], []
    monkeypatch.setattr(probes, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def step():
        now[0] += 0.4 * POLL_SECONDS

    load: Any = SimpleNamespace(look=lambda: looks.append(round((now[0] - 100.0) / POLL_SECONDS, 6)))
    assert take_steps(step, 8, CPU, load) == pytest.approx(3.2 * POLL_SECONDS)
    assert looks == [0.0, 1.2, 2.4]
    assert take_steps(step, 8, CPU) == pytest.approx(3.2 * POLL_SECONDS)
    assert len(looks) == 3


class OneAtATime:
    """A prober of which a probe ends at every second look."""

    def __init__(self):
        self.pending, self.started, self.looks = [], [], 0

    def start(self, step, _learner, *, is_last):
        assert not self.pending, "two probes run at a time"
        assert not is_last
        self.pending = [step]
        self.started.append(step)

    def finished(self, *, wait=False):
        self.looks += 1
        if self.pending and (wait or not self.looks % 2):
            yield self.pending.pop(), {}


def test_a_load_is_one_probe_after_the_other_and_each_is_counted():
    prober: Any = OneAtATime()
    learner: Any = None
    load = ProbeLoad(prober, learner)
    for _ in range(5):
        load.look()
        assert prober.pending
    load.wait()
    load.wait()
    assert load.done == len(prober.started) == 3
    with pytest.raises(RunError, match="the probes of step 0 failed"):
        ProbeHost.send(None, Note("the probes of step 0 failed, and training goes on"))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_step_beside_probes_is_measured(ray_cluster, tmp_path, capsys):
    args = ["--models", "vit_u2x1_8", "--image-size", "32", "--batch", "2", "--rounds", "2", "--seconds", "0.05"]
    assert main(["bench", "train", "--probes", *args, "--out", str(tmp_path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert all(row[column] > 0 for column in ("probed", "alone", "ratio", "probe_seconds"))
    assert (tmp_path / "train_probes_cpu_fp32.csv").read_text().startswith("model,probed,probed_spread,alone,")
