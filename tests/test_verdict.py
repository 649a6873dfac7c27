"""The ingest verdict: its arithmetic on numbers with known answers, and one measurement at toy size."""

import json
import math

import pytest
import torch
from image_sets import write_dataset

from pipelines.__main__ import main
from vitray.bench import recipe_stages
from vitray.bench.train import training_step
from vitray.bench.verdict import Machines, Prices, StageSeconds, cost_per_million, ingest_verdict, predict

MACHINES = Machines(workers=2, decoding_cpus=4, cpus=6, gpus=2)
# 2 ms of CPU an image: 2,000 images/s on 4 CPUs.
SECONDS = StageSeconds(read=0.0002, decode=0.001, augment=0.0008, transfer=0.00001, step=0.0005)


@pytest.mark.parametrize(
    ("changes", "bottleneck", "rate", "wait"),
    [
        ({}, "decode", 2000, 0.5),  # devices take 4,000
        ({"augment": 0.0018}, "augment", 4 / 0.003, 2 / 3),
        ({"step": 0.002}, "step", 1000, 0.0),
        ({"transfer": 0.002}, "transfer", 1000, 0.75),
        ({"read": 0.0082}, "read", 400, 0.9),
    ],
)
def test_the_slowest_stage_sets_the_speed(changes, bottleneck, rate, wait):
    prediction = predict(SECONDS._replace(**changes), MACHINES)
    assert prediction.bottleneck == bottleneck
    assert prediction.images_per_second == pytest.approx(rate)
    assert prediction.wait_share == pytest.approx(wait)


def simulated(seconds, machines, images=8_000, ready=16):
    """Return images/s and the wait share of steps and decoding that run, or pause, in small slices of time."""
    step, cpu = machines.workers / seconds.step, machines.decoding_cpus / seconds.cpu
    tick = 0.25 / max(step, cpu)
    time = waited = done = stored = 0.0
    while done < images:
        steps, decodes = stored >= 1, stored <= ready
        both = steps and decodes
        done += (taken := steps * step * tick / (seconds.step_slowdown if both else 1))
        stored += decodes * cpu * tick / (seconds.cpu_slowdown if both else 1) - taken
        waited += 0 if steps else tick
        time += tick
    return done / time, waited / time


@pytest.mark.parametrize("step", [0.0003, 0.0008, 0.0012, 0.003])
@pytest.mark.parametrize(("step_slowdown", "cpu_slowdown"), [(1.0, 1.0), (2.0, 1.0), (1.0, 1.8), (2.1, 1.7)])
def test_stages_that_slow_each_other_down_alternate(step, step_slowdown, cpu_slowdown):
    seconds = SECONDS._replace(step=step, step_slowdown=step_slowdown, cpu_slowdown=cpu_slowdown)
    prediction, (rate, wait) = predict(seconds, MACHINES), simulated(seconds, MACHINES)
    assert prediction.images_per_second == pytest.approx(rate, rel=0.02)
    assert prediction.wait_share == pytest.approx(wait, abs=0.02)


def test_transfers_that_limit_steps_between_their_two_speeds_leave_no_wait():
    seconds = SECONDS._replace(step=0.0012, step_slowdown=2.0, cpu_slowdown=1.8)
    free = predict(seconds, MACHINES)
    slowed = MACHINES.workers / (seconds.step * seconds.step_slowdown)
    assert slowed < free.images_per_second
    limited = seconds._replace(transfer=MACHINES.workers / ((slowed + free.images_per_second) / 2))
    assert predict(limited, MACHINES)[::2] == ("transfer", 0.0)


def test_the_mean_of_the_nodes_is_of_the_images_that_each_decodes():
    from vitray.bench.cluster_stages import NodeSeconds, mean_stages

    nodes = [NodeSeconds("fast", 8, 0.0001, 0.0005, 0.0004), NodeSeconds("slow", 4, 0.0002, 0.0012, 0.0006)]
    seconds = mean_stages(SECONDS, nodes)
    assert 12 / seconds.cpu == pytest.approx(8 / 0.001 + 4 / 0.002)
    assert seconds.decode == pytest.approx(0.8 * 0.0005 + 0.2 * 0.0012)
    assert seconds.step == SECONDS.step


@pytest.mark.parametrize("step", [0.0001, 0.0005, 0.003])
def test_as_many_cpus_as_the_verdict_says_end_the_wait(step):
    seconds = SECONDS._replace(step=step)
    needed = ingest_verdict(seconds, MACHINES, Prices(None, None))["cpus_per_gpu"] * MACHINES.workers
    enough, fewer = (MACHINES._replace(decoding_cpus=share * needed) for share in (1.001, 0.9))
    assert predict(seconds, enough).wait_share == 0
    assert predict(seconds, fewer).wait_share == pytest.approx(0.1)


def test_the_cpus_are_those_of_a_gpu_also_where_a_worker_has_a_part_of_one():
    whole, half, none = (
        ingest_verdict(SECONDS, MACHINES._replace(gpus=gpus), Prices(None, None))["cpus_per_gpu"]
        for gpus in (MACHINES.workers, MACHINES.workers / 2, 0)
    )
    assert half == pytest.approx(2 * whole)
    assert none == whole  # of a worker


def test_a_cache_leaves_the_augmentation():
    cached = ingest_verdict(SECONDS, MACHINES, Prices(None, None))["with_cache"]
    assert (cached["bottleneck"], cached["wait_share"]) == ("step", 0)
    assert cached["cpus_per_gpu"] == pytest.approx(1.6)


def test_the_cost_is_of_all_machines():
    assert cost_per_million(2000, MACHINES, Prices(3.6, 0.0)) == pytest.approx(1.0)  # 500 s of two GPUs
    assert cost_per_million(2000, MACHINES, Prices(None, 0.1)) == pytest.approx(0.6 * 500 / 3600)
    assert cost_per_million(2000, MACHINES, Prices(None, None)) is None


@pytest.mark.parametrize("place", ["tasks", pytest.param("device", marks=pytest.mark.slow)])
def test_a_recipe_is_measured(place, tmp_path, capsys, monkeypatch):
    threads = set()

    def watched(run, batch):
        learner, step = training_step(run, batch)
        return learner, lambda: (threads.add(torch.get_num_threads()), step())

    monkeypatch.setattr(recipe_stages, "training_step", watched)
    write_dataset(tmp_path / "set", {"train": 64, "val": 16}, corrupt=1)
    settings = [f"data.url={tmp_path / 'set'}", "model.name=vit_u2x1_8", "model.image_size=32", "optim.batch=8"]
    settings += ["compute.device=cpu", "data.augment.policy=three_augment", f"data.augment.on={place}"]
    settings += ["compute.workers=1"]  # one process beside the measurement
    options = ["--seconds", "0.2", "--cpus", "2", "--cpu-hour", "0.1", "--json"]
    assert main(["doctor", "data", "demo", *settings, *options]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["bottleneck"] in ("read", "decode", "augment", "transfer", "step")
    assert 0 <= result["wait_share"] < 1
    assert all(math.isfinite(result[name]) and result[name] > 0 for name in ("images_per_second", "cpus_per_gpu"))
    assert all(seconds > 0 for seconds in result["seconds_per_image"].values())
    assert result["cost_per_million_images"] > 0
    assert result["nodes"] == []
    assert threads == {result["machines"]["threads"]} == {2}


@pytest.mark.slow
@pytest.mark.ray
def test_a_recipe_is_measured_on_each_node_of_a_cluster(ray_cluster, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "the caller's own")  # the session is connected already
    write_dataset(tmp_path / "set", {"train": 64, "val": 16})
    settings = [f"data.url={tmp_path / 'set'}", "model.name=vit_u2x1_8", "model.image_size=32", "optim.batch=8"]
    assert main(["doctor", "data", "demo", *settings, "compute.device=cpu", "--seconds", "0.5", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(result["nodes"]) == 1
    assert result["machines"]["cpus"] == result["nodes"][0]["cpus"]
    assert result["images_per_second"] > 0
    assert main(["doctor", "data", "demo", *settings, "--cpus", "4"]) == 2
    assert "a cluster has its own CPUs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "got no recipe, expected one recipe"),
        (["demo", "compute.device=cpu", "data.url=null"], "data.url: got none"),
        (
            ["demo", "compute.device=cpu", "task=masked", "model.num_classes=null"],
            "task.kind: got masked, expected supervised",
        ),
        (["demo", "compute.device=cpu", "compute.workers=2..4"], "compute.workers: got 2..4, expected one number"),
        (["demo", "compute.device=cpu", "--cpus", "1"], "compute.workers: 2 workers and the decoding"),
    ],
)
def test_bad_input_is_one_message(words, message, capsys):
    assert main(["doctor", "data", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
