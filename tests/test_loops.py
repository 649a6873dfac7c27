"""The loops of experiments/loops around `vitray.Loader`: resumed on other workers, with each image at its step."""

import sys
from pathlib import Path

import pytest
from test_layers import ROOT

sys.path.insert(0, str(ROOT / "experiments" / "faults"))
from fault_subjects import LOOPS, Place, Settings, make_images
from measure_faults import run_cell

# timm's train.py is in no package, and cannot distribute to CPUs.
HERE = [name for name in LOOPS if not LOOPS[name].is_alone]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loops") / "data"
    make_images(folder, Settings())
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", HERE)
def test_a_loop_goes_on_with_the_images_of_its_step(data, tmp_path, name):
    """SIGTERM, one worker, SIGTERM, two workers again: no image is repeated, skipped or moved to another step."""
    whole, changed = (Place(data, tmp_path / each, Path(sys.executable)) for each in ("whole", "changed"))
    run_cell(name, "none", whole, None, Settings())
    cost = run_cell(name, "elastic", changed, whole, Settings())
    assert cost["steps"] == Settings().steps
    assert (cost["repeated"], cost["skipped"], cost["other_steps"]) == (0, 0, 0)
    assert cost["weights_difference"] < 0.01
