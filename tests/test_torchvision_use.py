"""Networks of torchvision in use: predicted and served with the values of plain torch."""

import io
import json
from functools import cache
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torchvision
from image_sets import SHAPES, write_dataset, write_network
from networks import scrambled
from PIL import Image
from test_predict import contents, plan_of, write_all
from torch import Tensor, nn

from vitray.config import Model, Run
from vitray.config.serving import Serving
from vitray.data.augment.crops import crop_center
from vitray.data.augment.decode import decode_image
from vitray.data.augment.mixing import normalized
from vitray.errors import ConfigError
from vitray.inference.answers import answer
from vitray.inference.models import describe_network
from vitray.inference.plan import Options, check_options, column_widths
from vitray.models.other_networks import OtherNetwork, stage_widths
from vitray.serving.hosted import Hosted, check_tasks
from vitray.serving.pyfunc import ImageClassifier
from vitray.weights import load_model, save_model

STAGES = ("stage1", "stage2", "stage3", "stage4")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A dataset with a broken image, a ResNet of torchvision, a delta of it with its own head, and a ViT."""
    folder = tmp_path_factory.mktemp("torchvision")
    write_dataset(folder / "data", {"val": 12}, corrupt=1)
    write_network(folder / "vit")
    write_network(folder / "base", name="torchvision/resnet18")
    run, network, classes = load_model(str(folder / "base"))
    scrambled(network)
    (folder / "base" / "run.yaml").unlink()
    save_model(str(folder / "base"), run, network, classes)
    network.head.weight.data.mul_(-1)
    save_model(str(folder / "delta"), run, network, classes, str(folder / "base"))
    return folder


@cache
def plain(folder) -> nn.Module:
    """The network as torchvision builds it, with the tensors of a model folder, in float64."""
    theirs = torchvision.models.resnet18(num_classes=len(SHAPES))
    state = load_model(str(folder)).vit.state_dict()
    theirs.load_state_dict({name.removeprefix("body."): tensor for name, tensor in state.items()})
    return theirs.double().eval()


@cache
def run_of(folder) -> Run:
    return load_model(str(folder)).run


def view_of(folder, content: bytes) -> Tensor:
    run = run_of(folder)
    view_HWC = crop_center(decode_image(content), run.data.eval_crop, (32, 32))
    return normalized(torch.from_numpy(view_HWC)[None], run.data.normalize).double()


@torch.no_grad()
def outputs(theirs: nn.Module, x_BCHW: Tensor) -> dict[str, np.ndarray]:
    """The values of each level of a ResNet, layer by layer."""
    x_BCHW = theirs.maxpool(theirs.relu(theirs.bn1(theirs.conv1(x_BCHW))))
    values = {}
    for name, layer in zip(STAGES, (theirs.layer1, theirs.layer2, theirs.layer3, theirs.layer4), strict=True):
        x_BCHW = layer(x_BCHW)
        values[name] = x_BCHW.mean(dim=(2, 3))[0].numpy()
    values["embedding"] = theirs.avgpool(x_BCHW).flatten()
    values["logits"] = theirs.fc(values["embedding"])
    values["embedding"] = values["embedding"].numpy()
    return {name: np.asarray(value) for name, value in values.items()}


# ---- stages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["swin_t", "densenet121", pytest.param("convnext_tiny", marks=pytest.mark.slow)])
@torch.no_grad()
def test_states_lie_between_the_stages(name):
    model = Model.model_validate({"name": f"torchvision/{name}", "image_size": 32, "num_classes": 3})
    network = scrambled(OtherNetwork(model))
    x = images_BCHW = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with network.watching_stages() as states:
        network(images_BCHW)
    after = {}
    for place, (layer, module) in enumerate(network.body.features.named_children()):
        after[layer] = x = module(x)
        after[place] = x.movedim(-1, 1) if name == "swin_t" else x
    wanted = ["pool0", *(f"denseblock{number}" for number in (1, 2, 3, 4))] if "dense" in name else [0, 1, 3, 5, 7]
    assert len(states) == 5
    assert all(torch.equal(state, after[key]) for state, key in zip(states, wanted, strict=True))
    assert stage_widths(model) == dict(zip(STAGES, (state.shape[1] for state in states[1:]), strict=True))


# ---- predict ---------------------------------------------------------------------------------------------------------


def test_predictions_are_those_of_plain_torch_beside_a_vision_transformer(place, tmp_path):
    options = Options(top_k=2, logits=True, embedding=True, batch=8, part=16)
    plan = plan_of(place / "data", tmp_path / "out", place / "base", place / "delta", place / "vit", options=options)
    write_all(plan)
    mixed = pq.read_table(tmp_path / "out" / "parts")
    options = options._replace(levels=STAGES)
    alone = plan_of(place / "data", tmp_path / "alone", place / "base", options=options)
    write_all(alone)
    table = pq.read_table(tmp_path / "alone" / "parts")
    assert [len(table.to_pylist()[1][name]) for name in column_widths(alone)] == list(column_widths(alone).values())
    theirs = {name: plain(place / name) for name in ("base", "delta")}
    rows = zip(mixed.to_pylist(), table.to_pylist(), contents(plan.images).values(), strict=True)
    for both, row, content in rows:
        if content == b"none":
            assert row["error"] == both["error"] == "not an image"
            continue
        wanted = outputs(theirs["base"], view_of(place / "base", content))
        for name, values in wanted.items():
            np.testing.assert_allclose(row[name], values, rtol=1e-4, atol=1e-4 * np.abs(values).max())
        shares = np.exp(wanted["logits"] - wanted["logits"].max())
        best = np.argsort(-shares)[:2]
        assert row["classes"] == [SHAPES[label] for label in best]
        np.testing.assert_allclose(row["probabilities"], (shares / shares.sum())[best], rtol=1e-3)
        for name in ("base", "delta"):
            wanted = outputs(theirs[name], view_of(place / name, content))["logits"]
            np.testing.assert_allclose(both[f"{name}/logits"], wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
        assert len(both["vit/embedding"]) == 64


def test_levels_that_a_network_lacks_are_refused(place, tmp_path):
    spec = describe_network(str(place / "base"))[0]
    with pytest.raises(
        ConfigError, match=r"--features stage5: .*resnet18; expected one of stage1 to stage4; did you mean"
    ):
        check_options([spec], Options(levels=("stage5",)))
    with pytest.raises(ConfigError, match=r"--compile: torchvision/resnet18 is compiled whole, with its logits alone"):
        check_options([spec], Options(compile=True, embedding=True))
    flat = describe_network(str(write_network(tmp_path / "m", name="torchvision/mobilenet_v3_small")))[0]
    with pytest.raises(ConfigError, match=r"torchvision/mobilenet_v3_small has no stages; expected --embedding alone"):
        check_options([flat], Options(levels=("stage1",)))


# ---- serve -----------------------------------------------------------------------------------------------------------


def png(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
    Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def test_served_answers_are_those_of_plain_torch(place):
    tasks = {"negated": str(place / "delta")}
    assert check_tasks(str(place / "base"), tasks) == ["base", "negated"]
    hosted = Hosted(Serving(base=str(place / "base")), torch.device("cpu"))
    hosted.set_tasks(tasks)
    names, pictures = ["negated", "base", "base", "negated", "base"], [png(seed) for seed in range(5)]
    members = [hosted.choose(name, None)[1].member for name in names]
    items = [hosted.item(*pair, 0) for pair in zip(members, pictures, strict=True)]
    rows = hosted.probabilities(items)
    logged = ImageClassifier()
    logged.load_context(SimpleNamespace(artifacts={"model": str(place / "base")}))
    for name, picture, member, row in zip(names, pictures, members, rows, strict=True):
        folder = place / {"negated": "delta"}.get(name, name)
        wanted = torch.from_numpy(outputs(plain(folder), view_of(folder, picture))["logits"]).softmax(0)
        np.testing.assert_allclose(row, wanted, atol=1e-4)
        best = answer(row, member, 1)
        assert best["class"] == SHAPES[int(wanted.argmax())]
        if name == "base":
            [own] = logged.predict([{"image": picture}])
            np.testing.assert_allclose(own["probabilities"], wanted, atol=1e-4)
    assert json.dumps(hosted.listing())
