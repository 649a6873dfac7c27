"""`vitray inspect` on networks of torchvision: their states, tensors and terms, and every figure or its reason."""

import itertools
import re

import numpy as np
import pytest
import torch
from image_sets import SHAPES, write_dataset, write_network
from networks import scrambled
from test_torchvision_use import outputs, plain, view_of
from torch import nn
from torchvision.models.feature_extraction import create_feature_extractor

from vitray import load_model, save_model
from vitray.config import Model
from vitray.errors import ConfigError
from vitray.inspection import feature_changes, first_filters, level_grams, spectra, tensor_changes, window_terms
from vitray.inspection.report.drawings import Rendered
from vitray.inspection.report.inspect_networks import Request, make_figures
from vitray.inspection.report.page import render
from vitray.inspection.report.subjects import choose_images
from vitray.inspection.tensors import KINDS, network_tensors
from vitray.inspection.tokens import run_states
from vitray.models.other_networks import OtherNetwork
from vitray.pages.plotting import LIGHT

SECTIONS = re.compile(r'<section id="(\w+)"')


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A dataset, a ResNet, a ShuffleNet with a delta of it, a Swin, a network without stages, and a ViT."""
    folder = tmp_path_factory.mktemp("inspect")
    write_dataset(folder / "data", {"val": 9})
    write_network(folder / "vit")
    networks = {"resnet": "resnet18", "shuffle": "shufflenet_v2_x0_5", "swin": "swin_t", "mobile": "mobilenet_v3_small"}
    for name, network in networks.items():
        write_network(folder / name, name=f"torchvision/{network}")
    run, network, classes = load_model(str(folder / "shuffle"))
    for name, tensor in network.named_parameters():
        if name.startswith(("body.stage4.", "body.fc.")) and tensor.ndim > 1:
            tensor.data.mul_(1.25)
    save_model(str(folder / "tuned"), run, network, classes, str(folder / "shuffle"))
    return folder


def network(name, **settings) -> OtherNetwork:
    model = Model.model_validate({"name": f"torchvision/{name}", "image_size": 32, "num_classes": 3, **settings})
    return scrambled(OtherNetwork(model))


def images(count=5) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


# ---- values ----------------------------------------------------------------------------------------------------------


def test_states_are_the_maps_before_and_after_the_stages():
    resnet, batch = network("resnet18"), images()
    names = ["maxpool", "layer1", "layer2", "layer3", "layer4"]
    with torch.no_grad():
        states = list(run_states(resnet, batch))
        theirs = create_feature_extractor(resnet.body, names)(batch)
    for name, state_BND in zip(names, states, strict=True):
        assert torch.equal(state_BND, theirs[name].flatten(2).mT)
    grams = level_grams(resnet, batch, batch=5)[0]
    flat_BK = theirs["layer2"].double().flatten(1)
    flat_BK = flat_BK - flat_BK.mean(dim=0)
    gram_BB = flat_BK @ flat_BK.T
    gram_BB.fill_diagonal_(0)
    sums = gram_BB.sum(dim=1) / 3
    wanted = gram_BB - sums[:, None] - sums + gram_BB.sum() / 12
    wanted.fill_diagonal_(0)
    torch.testing.assert_close(grams[2], wanted, rtol=1e-4, atol=1e-6 * float(wanted.abs().max()))
    with pytest.raises(ValueError, match="torchvision/mobilenet_v2 has no numbered stages"):
        list(run_states(network("mobilenet_v2"), batch))


def test_features_change_where_weights_did():
    base, other = network("resnet18"), network("resnet18")
    other.body.layer3[1].conv2.weight.data.mul_(1.5)
    change = feature_changes(base, other, images())
    assert (change.relative > 0).all(dim=1).tolist() == [False, False, False, True, True]
    assert not change.relative[:3].any()


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        "swin_t",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("convnext_tiny", "swin_v2_t", "densenet121")),
    ],
)
def test_every_tensor_has_a_kind_and_a_stage(name):
    built = network(name)
    tensors = list(network_tensors(built))
    floats = [tensor for tensor in built.state_dict().values() if tensor.is_floating_point()]
    assert sum(each.values.numel() for each in tensors) == sum(tensor.numel() for tensor in floats)
    assert len({each.name for each in tensors}) == len(tensors)
    assert {each.kind for each in tensors} <= set(KINDS)
    assert {each.level for each in tensors} == {None, 0, 1, 2, 3, 4}
    assert {each.kind for each in tensors if each.level is None} == {"head"}


def test_spectra_and_changes_are_those_of_each_kernel():
    base, other = network("shufflenet_v2_x0_5"), network("shufflenet_v2_x0_5")
    kernel = other.body.stage3[0].branch2[0].weight
    kernel.data[:, 0] += 0.1
    found = {each.name: each for each in spectra(base)}
    assert len(found) == sum(isinstance(layer, nn.Conv2d) for layer in base.modules())  # the head is left out
    matrix = base.body.stage4[1].branch2[0].weight.detach().double().flatten(1).numpy()
    got = found["body.stage4.1.branch2.0.weight"]
    assert (got.kind, got.level) == ("convolution", 4)
    np.testing.assert_allclose(
        got.values, np.sqrt(np.maximum(np.linalg.eigvalsh(matrix @ matrix.T)[::-1], 0)), atol=1e-6
    )
    [change] = [each for each in tensor_changes(base, other) if each.status != "equal"]
    assert (change.name, change.level) == ("body.stage3.0.branch2.0.weight", 3)
    assert change.change == pytest.approx(0.1 * (kernel[:, 0].numel()) ** 0.5, rel=1e-5)
    [of_change] = spectra(other, base)
    assert of_change.values[0] == pytest.approx(change.change, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("swin_t", [1, 1, 2, 2, *[3] * 6, 4, 4]),
        pytest.param("swin_v2_t", [1, 1, 2, 2, *[3] * 6, 4, 4], marks=pytest.mark.slow),
        pytest.param("maxvit_t", [*[1] * 4, *[2] * 4, *[3] * 10, *[4] * 4], marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_terms_of_windows_are_those_of_every_pair(name, stages):
    terms = window_terms(built := network(name, image_size=224))
    assert [each.level for each in terms] == stages
    for place in (0, 5):
        module = built.get_submodule(f"body.{terms[place].name}")
        bias_HNN = (
            module.get_relative_positional_bias() if name == "maxvit_t" else module.get_relative_position_bias()
        )[0]
        side = int(bias_HNN.shape[1] ** 0.5)
        assert terms[place].values.shape == (len(bias_HNN), 2 * side - 1, 2 * side - 1)
        for query, key in itertools.product(range(side**2), repeat=2):
            row, column = query // side - key // side, query % side - key % side
            assert torch.equal(terms[place].values[:, row + side - 1, column + side - 1], bias_HNN[:, query, key])
    assert window_terms(network("resnet18")) == []
    if name != "maxvit_t":
        assert torch.equal(first_filters(built), built.body.features[0][0].weight)


# ---- figures ---------------------------------------------------------------------------------------------------------


def inspected(place, tmp_path, capsys, *names, figures=()):
    """Inspect one network or two: the results by name, the page, and what the screen shows."""
    urls = [str(place / name) for name in names]
    request = Request(urls[0], [str(place / "data")], figures, *urls[1:], out=str(tmp_path / "-".join(names)))
    inspection, _ = make_figures(request)
    drawings = [drawing for result in inspection.results for drawing in result.drawings]
    for drawing in drawings:
        drawing.draw(LIGHT)
    page = render(inspection, {drawing.file: Rendered(b"light", b"dark", b"svg") for drawing in drawings})
    return {result.name: result for result in inspection.results}, page, capsys.readouterr().err


def check_reasons(results, page, screen) -> set[str]:
    """Return the figures without pictures; each has a section, and its reason on the page and on the screen."""
    assert [*results, "origin"] == SECTIONS.findall(page)
    for result in results.values():
        for reason in result.reasons:
            assert f"{result.name}: {reason}" in screen.splitlines()
            assert reason in page
    lacking = {name for name, result in results.items() if not result.drawings}
    assert all(results[name].reasons for name in lacking)
    return lacking


def test_a_convolutional_network_and_its_fine_tuning_have_the_figures_that_apply(place, tmp_path, capsys):
    results, page, screen = inspected(place, tmp_path, capsys, "shuffle", "tuned")
    lacking = check_reasons(results, page, screen)
    assert lacking == {"components", "distance", "branches", "positions", "norms", "layerscale"}
    assert "shuffle has no position embedding." in results["positions"].reasons
    assert "shuffle has no attention maps: torchvision/shufflenet_v2_x0_5 is not a ViT of vitray." in page
    assert "the 24 filters of 3 x 3 pixels of its first convolution" in results["filters"].drawings[0].caption
    assert len(results["similarity"].tables[0].rows) == 1 + 4  # its stages are 2, 3 and 4
    predicted = {row[0]: row for row in results["rollout"].tables[0].rows[1:]}
    assert set(predicted) == {"shuffle", "tuned"}
    rows = results["changes"].tables[0].rows
    changed = {row[0] for row in rows[1:] if row[4] == "changed"}
    kernels = {row[0] for row in rows[1:] if row[1] == "convolution" and row[2] == 4}
    assert changed == kernels | {"body.fc.weight"}
    assert [row[7] for row in rows[1:] if row[0] in changed] == pytest.approx([0.25] * len(changed))
    [features] = results["features"].tables
    medians = [row[2] for row in features.rows[1:]]
    assert medians[:3] == [0] * 3
    assert medians[3] > 0


def test_predicted_classes_are_those_of_the_network(place, tmp_path, capsys):
    results, _, _ = inspected(place, tmp_path, capsys, "resnet", figures=["rollout"])
    [table] = results["rollout"].tables
    assert table.file == "predictions"
    theirs = plain(place / "resnet")
    for image in choose_images([str(place / "data")], "val", 9).shown:
        logits = torch.from_numpy(outputs(theirs, view_of(place / "resnet", image.content))["logits"])
        best = [row for row in table.rows[1:] if row[1] == image.key and row[3] == 1]
        assert [row[4] for row in best] == [SHAPES[int(logits.argmax())]]
        assert best[0][5] == pytest.approx(float(logits.softmax(0).max()), rel=1e-3)


def test_a_swin_has_its_terms_of_offsets_and_a_network_without_stages_says_so(place, tmp_path, capsys):
    figures = ["filters", "positions", "similarity", "norms"]
    results, page, screen = inspected(place, tmp_path, capsys, "swin", "mobile", figures=figures)
    assert check_reasons(results, page, screen) == {"norms"}
    assert [drawing.file for drawing in results["positions"].drawings] == ["positions-swin"]
    assert [drawing.file for drawing in results["similarity"].drawings] == ["similarity-swin"]
    reason = "mobile is not in this figure: torchvision/mobilenet_v3_small has no numbered stages."
    assert results["similarity"].reasons == (reason,)


def test_a_vision_transformer_is_compared_with_a_convolutional_network(place, tmp_path, capsys):
    results, page, screen = inspected(place, tmp_path, capsys, "vit", "shuffle")
    assert check_reasons(results, page, screen) == {"branches", "layerscale", "changes", "features"}
    assert [drawing.file for drawing in results["distance"].drawings] == [
        "attention_distance-vit",
        "entropy_of_attention-vit",
    ]
    assert len(results["similarity"].drawings) == 3
    with pytest.raises(ConfigError, match="--levels needs a Vision Transformer: got torchvision/resnet18"):
        make_figures(Request(str(place / "resnet"), [str(place / "data")], levels=[0], out=str(tmp_path / "x")))
