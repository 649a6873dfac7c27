"""One row per thing: every row is complete, a planted row appears wherever its table is read, docs list the rows."""

import re

import numpy as np
import pytest
import torch
from image_sets import write_dataset, write_network
from test_layers import ROOT

from vitray.config import load_run
from vitray.config.probes import PROBE_TRAITS, ProbeTraits, feature_probes, training_probes
from vitray.evaluation.probes import PROBES, Probe
from vitray.evaluation.report.driver import Request, compute_evaluation
from vitray.evaluation.report.options import read_options
from vitray.evaluation.report.page import render
from vitray.models.vit import ViT
from vitray.training.probes import probe_weights, read_probe_images

DOCS = ROOT / "docs"


# ---- probes ----------------------------------------------------------------------------------------------------------


def mean_norm(inputs):
    """A probe."""
    return {"mean_norm": float(np.linalg.norm(inputs.scored.features, axis=1).mean())}


def test_each_probe_has_its_traits_and_its_computation():
    assert list(PROBES) == list(PROBE_TRAITS)
    assert all(probe.titles for name, probe in PROBES.items() if name in feature_probes())


def test_a_planted_probe_is_accepted_offered_scored_and_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(PROBE_TRAITS, "norm", ProbeTraits())
    monkeypatch.setitem(PROBES, "norm", Probe(mean_norm, "mean_norm", {"mean_norm": "mean norm"}))
    with pytest.raises(SystemExit):
        read_options(["-h"])
    assert f"feature probes: {', '.join(feature_probes())}" in " ".join(capsys.readouterr().out.split())
    dataset = write_dataset(tmp_path / "data", {"train": 20, "val": 20})
    models = [str(write_network(tmp_path / "network"))]
    request = Request(models, str(tmp_path / "data"), probes=["norm"], out=str(tmp_path / "out"), workers=1)
    evaluation = compute_evaluation(request)[0]
    score = evaluation.flat()["mean_norm"]
    assert score > 0
    assert f'<td>mean norm</td><td class="number">{score:.4f}' in render(evaluation)
    # Beside training, without the page.
    network = "model={name: vit_u2x1_8, image_size: 32, num_classes: 10}"
    run = load_run(None, [network, f"data.url={dataset.url}", "evaluate={probes: [norm], probe_images: 16}"])
    images = read_probe_images(run, dataset, None)
    assert images.train is None
    values = probe_weights(run, ViT(run.model).state_dict(), images, torch.device("cpu"))
    assert values.keys() == {"images", "mean_norm"}


def test_the_docs_list_the_probes():
    text = (DOCS / "evaluation.md").read_text().partition("## Probes")[2]
    rows = re.findall(r"^\| `(\w+)`(, while training)? \|", text, re.MULTILINE)
    assert {name: not tail for name, tail in rows} == {name: name in feature_probes() for name in PROBE_TRAITS}
    assert f"`evaluate.probes=[{','.join(training_probes())}]`" in text
