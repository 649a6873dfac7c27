"""One row per thing: every row is complete, a planted row appears wherever its table is read, docs list the rows."""

import re

import numpy as np
import pytest
import torch
from image_sets import write_dataset, write_network
from test_layers import ROOT

from pipelines.__main__ import main
from pipelines.evaluate import read_options
from vitray.config import Model, load_run
from vitray.config.classification import LOSS_TRAITS, LossTraits
from vitray.config.evaluation import PROBE_TRAITS, ProbeTraits, feature_probes, training_probes
from vitray.config.model_names import parse_name
from vitray.config.stems import RESNETS, STEMS, Convolution, StemTraits
from vitray.errors import ConfigError
from vitray.evaluation.evaluate import Request, compute_evaluation
from vitray.evaluation.page import render
from vitray.exports.export import export_network
from vitray.exports.options import TARGETS, ExportRequest, TargetTraits, check_request
from vitray.exports.writers import COMPLETED, GRAPHS, write_torch_export
from vitray.metrics.arrays import ProbeValues
from vitray.metrics.probes import PROBES, Probe
from vitray.models.counts import count, diagram
from vitray.models.probabilities import probability_of
from vitray.models.sizes import sizes_of
from vitray.models.stems import LAYERS
from vitray.models.vit import ViT
from vitray.tasks.supervised import LOSSES, Classification, Loss
from vitray.training.probes import probe_weights, read_probe_images
from vitray.weights.export import LIBRARIES, WEIGHTS

DOCS = ROOT / "docs"


# ---- probes ----------------------------------------------------------------------------------------------------------


def mean_norm(inputs):
    """A probe."""
    return ProbeValues({"mean_norm": float(np.linalg.norm(inputs.scored.features, axis=1).mean())})


def test_each_probe_has_its_traits_and_its_computation():
    assert list(PROBES) == list(PROBE_TRAITS)
    assert all(probe.titles for name, probe in PROBES.items() if name in feature_probes())


def test_a_planted_probe_is_accepted_offered_scored_and_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(PROBE_TRAITS, "norm", ProbeTraits())
    monkeypatch.setitem(PROBES, "norm", Probe(mean_norm, ["mean_norm"], {"mean_norm": "mean norm"}))
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


# ---- stems -----------------------------------------------------------------------------------------------------------


def test_each_stem_with_a_cost_of_its_own_has_layers_of_its_own():
    assert {stem for stem, traits in (STEMS | RESNETS).items() if traits.cost} == set(LAYERS)


@pytest.mark.parametrize("stem", [*STEMS, *RESNETS])
def test_each_stem_has_a_name_a_cost_layers_and_a_diagram(stem):
    model = Model(name=f"vit_u1x1_{32 if stem == 'r' else 16}_{stem}", image_size=32)
    assert model.shape.stem == stem
    with torch.device("meta"):
        vit = ViT(model)
    assert sum(each.numel() for each in vit.stem.parameters()) == sizes_of(model).parts["stem"]
    assert f"stem {stem}: " in diagram(model, count(model))
    for spelling in model.shape.traits.spellings:
        assert parse_name(f"vit_u1x1_16_{spelling}".rstrip("_")).stem == stem


def test_a_planted_stem_is_named_built_counted_and_offered(monkeypatch):
    traits = StemTraits(lambda width, patch: [Convolution(1, 1, 0, 5), Convolution(patch, patch, 0, width)], norm="ln")
    monkeypatch.setitem(STEMS, "colors", traits._replace(spellings=("dots",)))
    with pytest.raises(ValueError, match=r"stem 'colrs' is not one of linear, .*, colors, .* did you mean colors"):
        parse_name("vit_u1x1_8_colrs")
    assert str(parse_name("vit_u1x1_8_dots")) == "vit_u1x1_8_colors"
    model = Model(name="vit_u1x1_8_colors", image_size=16, num_classes=3)
    vit = ViT(model)
    assert vit(torch.zeros(1, 3, 16, 16)).shape == (1, 3)
    assert sum(each.numel() for each in vit.stem.parameters()) == sizes_of(model).parts["stem"]
    assert "stem colors: 1x1/1 conv 5 > ln > gelu > 8x8/8 conv 64 > ln" in diagram(model, count(model))
    with pytest.raises(ValueError, match="expected a linear, hmlp, local or colors stem"):
        load_run(None, ["model={name: vit_u1x1_16_conv, image_size: 32, num_classes: null}", "task=masked"])


def test_the_docs_list_the_stems():
    assert f"stems `{' '.join(STEMS)}`" in " ".join((DOCS / "networks.md").read_text().split())


# ---- targets of an export --------------------------------------------------------------------------------------------


def test_each_target_of_an_export_has_its_writer():
    assert {name for name, traits in TARGETS.items() if traits.file} == set(GRAPHS)
    assert {name for name, traits in TARGETS.items() if not traits.file} == set(LIBRARIES)
    assert COMPLETED.keys() <= LIBRARIES.keys()
    assert {library for traits in STEMS.values() for library in traits.libraries} == set(LIBRARIES)


def test_a_planted_target_is_offered_written_and_proven(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(TARGETS, "second", TargetTraits("second.pt2", about="planted", int8=("weights",)))
    monkeypatch.setitem(GRAPHS, "second", write_torch_export)
    with pytest.raises(SystemExit):
        main(["export", "-h"])
    text = " ".join(capsys.readouterr().out.split())
    assert "hf (Hugging Face) or second (planted)" in text
    assert "onnx, torch_export, second: images of any multiple of a patch" in text
    model = str(write_network(tmp_path / "network"))
    request = ExportRequest(model, "second", out=str(tmp_path / "out"), images=4, rounds=1, seconds=0.001)
    assert export_network(request).parity.changed_top1 == 0
    assert (tmp_path / "out/second.pt2").exists()
    with pytest.raises(ConfigError, match=r"--to secnd: expected one of onnx, .*, second; did you mean second"):
        check_request(request._replace(target="secnd"), str(tmp_path / "other"))


def test_the_docs_list_the_targets():
    rows = re.findall(r"^\| `(\w+)` \| `([\w.]+)`", (DOCS / "export.md").read_text(), re.MULTILINE)
    assert dict(rows) == {name: traits.file or WEIGHTS for name, traits in TARGETS.items()}
    *first, last = (f"`{name}`" for name in TARGETS)
    assert f"| `target` | {', '.join(first)} or {last} |" in (DOCS / "formats.md").read_text()


# ---- losses of labels ------------------------------------------------------------------------------------------------


def test_each_loss_has_its_traits_and_its_functions():
    assert list(LOSSES) == list(LOSS_TRAITS)


def test_a_planted_loss_is_accepted_computed_and_decides_the_probabilities(monkeypatch):
    def of_labels(logits_BK, targets_BK, task, weights_K):
        return (logits_BK - targets_BK).square().mean() + task.smoothing

    monkeypatch.setitem(LOSS_TRAITS, "squares", LossTraits("squared errors", "sigmoid"))
    monkeypatch.setitem(LOSSES, "squares", Loss(of_labels, lambda logits_BK, peer_BK: (logits_BK - peer_BK).mean()))
    network = "model={name: vit_u1x1_8, image_size: 16, num_classes: 3}"
    run = load_run(None, [network, "task.loss=squares", "task.smoothing=0.5"])
    assert probability_of(run) == "sigmoid"
    module, images_BCHW, targets_BK = Classification(run), torch.rand(2, 3, 16, 16), torch.eye(3)[:2]
    expected = of_labels(module.vit(images_BCHW), targets_BK, run.task, None)
    assert torch.equal(module(images_BCHW, targets_BK), expected)
    with pytest.raises(
        ConfigError, match=r"task.loss: got 'square', expected 'softmax', 'bce', 'asymmetric' or 'squares'.*squares"
    ):
        load_run(None, ["task.loss=square"])
