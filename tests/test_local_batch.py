"""compute.local_batch=auto: the fewest passes that fit, under a real limit of memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitray.config import load_run
from vitray.errors import ConfigError
from vitray.training import local_batch
from vitray.training.local_batch import Trial, fewest, with_local_batch
from vitray.training.resolved import ResolvedRun
from vitray.training.schedule import Length

FOLDER = Path(__file__).parent
SETTINGS = ["model.name=vit_u2x1_4", "compute.local_batch=auto", "compute.workers=1"]
SETTINGS += ["optim.duration=10 steps", "optim.warmup=0 steps"]


def resolved_of(*settings) -> ResolvedRun:
    run: Any = load_run(None, [*SETTINGS, *settings])
    nothing: Any = None
    return ResolvedRun(run, *[nothing] * 5, Length(10, 0, 10), *[nothing] * 4)


def host_of(workers=1) -> Any:
    return SimpleNamespace(device=torch.device("cpu"), load=lambda _: None, workers=workers)


@given(least=st.integers(1, 300), most=st.integers(1, 300))
def test_the_fewest_are_found_in_few_tries(least, most):
    tried = []
    found = fewest(lambda number: tried.append(number) or number >= least, most)
    assert found == (least if least <= most else None)
    assert all(1 <= number <= most for number in tried)
    assert len(tried) <= 2 * most.bit_length() + 1


@pytest.mark.parametrize(
    ("settings", "workers", "fitting", "expected"),
    [
        (["optim.batch=64"], 1, 64, 64),  # the whole share
        (["optim.batch=64"], 1, 63, 32),
        (["optim.batch=64"], 1, 10, 10),  # seven passes, of at most ten images
        (["optim.batch=64"], 2, 10, 8),  # of each worker's 32 images, four passes
        (["optim.batch=64", "data.mix.mixup=0.8"], 1, 5, 4),  # neighbors stay together
        (["optim.batch=9"], 2, 2, 2),  # of five and of four images, three passes
    ],
)
def test_a_pass_is_as_large_as_memory(monkeypatch, settings, workers, fitting, expected):
    monkeypatch.setattr(local_batch, "has_limit", lambda device: True)
    monkeypatch.setattr(Trial, "__init__", lambda *_: None)
    monkeypatch.setattr(Trial, "fits", lambda self, images: images <= fitting)
    found = with_local_batch(resolved_of(*settings), host_of(workers))
    assert found.run.compute.local_batch == expected


def test_all_workers_take_the_most_passes_of_any(monkeypatch):
    monkeypatch.setattr(local_batch, "all_reduce_max", lambda passes, device: max(passes, 8))
    assert with_local_batch(resolved_of("optim.batch=64"), host_of()).run.compute.local_batch == 8


def test_a_network_that_does_not_fit_is_one_message(monkeypatch):
    monkeypatch.setattr(local_batch, "all_reduce_max", lambda passes, device: 65)
    with pytest.raises(ConfigError, match=r"compute.local_batch: a pass of 1 images does not fit a worker's memory"):
        with_local_batch(resolved_of("optim.batch=64"), host_of())


def test_a_loss_of_the_whole_batch_is_refused():
    with pytest.raises(ConfigError, match=r"compute.local_batch: got auto with task lejepa, expected null"):
        load_run(None, ["task=lejepa", "model.num_classes=null", "compute.local_batch=auto"])


@pytest.mark.parametrize("settings", [[], ["task=masked", "model.num_classes=null"], ["model.patches=[4,8]"]])
def test_a_trial_is_a_step_of_each_task(settings):
    assert Trial(resolved_of("model.image_size=32", *settings), host_of()).fits(4)


# A limit of 300 MB beside what the process has, for steps of which one of all images takes more than a gigabyte.
LIMITED = """
import json, resource
from pathlib import Path
import torch
from test_local_batch import host_of, resolved_of
from vitray.training.local_batch import Trial, with_local_batch

torch.set_num_threads(1)
resolved = resolved_of("model.image_size=64", "optim.batch=256")
Trial(resolved, host_of()).fits(2)  # loads what a first step loads
taken = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (taken + 300_000_000, resource.RLIM_INFINITY))
found = with_local_batch(resolved, host_of()).run.compute.local_batch
trial = Trial(resolved, host_of())
print(json.dumps({"found": found, "fits": trial.fits(found), "more": trial.fits(3 * found)}))
"""


def test_a_process_with_less_memory_takes_smaller_passes():
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # freed memory goes back to the system, as on a GPU
    done = subprocess.run([sys.executable, "-c", LIMITED], cwd=FOLDER, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert 2 <= result["found"] <= 128, result
    assert result["fits"]
    assert not result["more"]
