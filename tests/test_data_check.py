"""`vitray doctor data`: the speed between two marks, the verdict on known numbers, and measurements at toy size."""

import json
import math

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from image_sets import write_dataset

from pipelines.__main__ import main
from vitray.bench.data_check import Mark, is_long, is_over, rates, verdict, verdict_text
from vitray.config import load_run


def followed(times, seconds):
    """Return marks, as a worker makes them, of calls that would end at these times if none waited; [(end, wait)]."""
    marks, waits = [Mark(0.0, 0, 0.0)], []
    for end, wait in times:
        marks.append(Mark(end, len(marks), marks[-1].waited + wait))
        if is_long(marks[-2], marks[-1], seconds):
            waits.append((marks[-2], marks[-1]))
        if is_over(end, seconds, waits):
            return marks
    raise AssertionError("the measurement does not end")


@given(st.floats(0.01, 0.5), st.floats(0, 0.04), st.floats(6, 20))
def test_a_steady_speed_is_that_of_any_part_of_it(each, waiting, seconds):
    times = ((place * each, waiting * each) for place in range(1, 10_000))
    speed, wait = rates(followed(times, seconds), seconds)
    assert speed == pytest.approx(1 / each)
    assert wait == pytest.approx(waiting, abs=1e-9)


def bursts(decoded, taken, first, growth):
    """Yield (end, wait) of steps on images that come in bursts; `decoded` and `taken` are speeds in steps a second."""
    now, there, size, steps = 0.0, 0.0, first, 0
    while steps < 10**5:
        wait = max(0.0, there - now)
        for place in range(round(size)):
            now += 1 / taken + (0.0 if place else wait)
            steps += 1
            yield now, 0.0 if place else wait
        size = min(size * growth, 1024)
        there += round(size) / decoded


@example(2.0, 1.21875, 11, 1.0, 6.0)  # the second burst ends long after the time
@given(st.floats(2, 200), st.floats(1.2, 50), st.integers(4, 64), st.sampled_from([1.0, 2.0]), st.floats(5, 30))
def test_images_in_bursts_are_counted_with_the_time_before_each(decoded, ratio, first, growth, seconds):
    """Where images limit, the speed is that of their decoding, if the first burst ends in time."""
    assume(first / (ratio * decoded) < 0.9 * seconds)
    speed, wait = rates(followed(bursts(decoded, ratio * decoded, first, growth), seconds), seconds)
    # A burst twice as large takes a longer time to train on, too, but its images were decoded before.
    # The end of a burst that is just not long, a twentieth of the seconds, may be anywhere in the other nine tenths.
    rel = 0.07 if growth == 1 else 0.6 / ratio
    assert speed == pytest.approx(decoded, rel=rel)
    assert wait == pytest.approx(1 - 1 / ratio, abs=rel)


@given(st.floats(2, 200), st.floats(1.2, 50), st.integers(4, 64), st.sampled_from([1.0, 2.0]), st.floats(5, 30))
def test_bursts_that_come_in_time_leave_the_speed_of_the_step(taken, ratio, first, growth, seconds):
    assume(ratio > growth)  # or each burst, larger than the last one, comes late
    speed, wait = rates(followed(bursts(ratio * taken, taken, first, growth), seconds), seconds)
    assert speed == pytest.approx(taken, rel=0.2)
    assert wait < 0.2


def test_one_long_wait_ends_after_a_time():
    waits = [(0.1 * place, 3.0 if place == 50 else 0.0) for place in range(1, 10_000)]
    marks = followed(waits, 10.0)
    assert marks[-1].seconds == pytest.approx(17.0)
    assert rates(marks, 10.0)[0] == pytest.approx(10.0)


def measured(stream: float, step: float, both: float, wait: float, gpus: float = 0) -> dict:
    values = {"stream_images_per_second": stream, "step_images_per_second": step, "both_images_per_second": both}
    values |= {f"{name}_spread": 0.0 for name in (*values, "wait_share")}
    more = {"circumstances": "A card", "rounds": 3, "workers": 2, "cpus": 6, "gpus": gpus, "decoding_cpus": 4}
    return values | more | {"wait_share": wait, "stream_over_step": stream / step}


@pytest.mark.parametrize(
    ("numbers", "gpus", "settings", "bottleneck", "advice", "absent"),
    [
        ((1000, 2000, 1000, 0.5), 2, [], "images", "about 8 CPUs to decode, in place of 4", "share CPUs"),
        ((1000, 2000, 1000, 0.5), 2, [], "images", "data.cache=decoded", "bf16"),
        ((1000, 2000, 1000, 0.5), 0, ["data.cache=decoded"], "images", "resize=SIZE", "data.augment.decode"),
        ((1000, 2000, 1000, 0.5), 2, ["data.augment.on=tasks"], "images", "data.augment.on=device", "bf16"),
        ((2000, 1000, 1000, 0.0), 2, [], "step", "compute.compile=default", "data.cache"),
        (
            (2000, 1000, 1000, 0.0),
            2,
            ["compute.compile=default", "compute.precision=fp32"],
            "step",
            "bf16",
            "compute.compile",
        ),
        ((2000, 1000, 700, 0.02), 0, [], "step", "together reach 70% of the slower one alone", "bf16"),
        # Alone the stream is faster, but not beside the steps, which take its CPUs.
        ((1200, 1000, 700, 0.2), 0, [], "images", "stream and step share CPUs", "in place of"),
    ],
)
def test_the_verdict_names_the_bottleneck_and_what_to_change(numbers, gpus, settings, bottleneck, advice, absent):
    result = verdict(load_run(None, settings), measured(*numbers, gpus), None, None)
    assert (result["bottleneck"], result["images_per_second"]) == (bottleneck, numbers[2])
    text = verdict_text(result)
    assert advice in text
    assert absent not in text
    assert f"bottleneck: {bottleneck}" in text
    assert "cost" not in text


def test_the_cost_is_of_all_machines():
    numbers = measured(2000, 4000, 2000, 0.5, gpus=2)
    costs = [
        verdict(load_run(), numbers, *prices)["cost_per_million_images"]
        for prices in ((3.6, 0.0), (None, 0.1), (None, None))
    ]
    assert costs[:2] == pytest.approx([1.0, 0.6 * 500 / 3600])  # 500 s of two GPUs, and of six CPUs
    assert costs[2] is None


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ["compute.workers=1", "data.augment.policy=three_augment"],
        ["compute.workers=2", "task=masked", "model.num_classes=null", "data.cache=decoded"],
    ],
    ids=["one worker", "two workers of a masked task"],
)
def test_a_recipe_is_measured(settings, ray_cluster, tmp_path, capsys):
    write_dataset(tmp_path / "set", {"train": 64, "val": 16})
    settings = [*settings, f"data.url={tmp_path / 'set'}", "model.name=vit_u2x1_8", "model.image_size=32"]
    options = ["--seconds", "0.6", "--rounds", "2", "--cpu-hour", "0.1", "--json"]
    assert main(["doctor", "data", "demo", "optim.batch=8", "compute.device=cpu", *settings, *options]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    speeds = [result[f"{part}_images_per_second"] for part in ("stream", "step", "both")]
    assert all(math.isfinite(speed) and speed > 0 for speed in speeds)
    assert result["images_per_second"] == speeds[2]
    assert 0 <= result["wait_share"] <= 1
    assert result["bottleneck"] == ("images" if result["wait_share"] >= 0.05 or speeds[0] < speeds[1] else "step")
    assert result["decoding_cpus"] < result["cpus"] == 3
    assert result["cost_per_million_images"] > 0
    assert f"{speeds[1]:,.0f} ± " in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "got no recipe, expected one recipe"),
        (["demo", "compute.device=cpu", "data.url=null"], "data.url: got null"),
        (["demo", "compute.device=cpu", "compute.workers=2..4"], "compute.workers: got 2..4, expected one number"),
    ],
)
def test_bad_input_is_one_message(words, message, capsys):
    assert main(["doctor", "data", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_cluster_has_its_own_cpus(capsys, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert main(["doctor", "data", "demo", "--cpus", "4"]) == 2
    assert "a cluster has its own CPUs" in capsys.readouterr().err
