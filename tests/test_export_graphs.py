"""Graphs of a network compute the same for any number of images, in files that hold no pickle and need no vitray."""

import itertools
import os
import subprocess
import sys
import zipfile

import onnx
import pytest
import torch
from networks import scrambled

from vitray.config import Model
from vitray.config.augmentation import Normalize
from vitray.config.model_names import STEMS
from vitray.exports.folding import FoldedBlock, Int8Linear, fold
from vitray.exports.writers import trace_program, write_onnx, write_torch_export
from vitray.models.blocks import Block
from vitray.models.branches import BlockSpec
from vitray.models.vit import ViT

NORMALIZE = Normalize(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
# A test of any size has these besides the network's own.
OTHER_SIZES = ((48, 32), (64, 80))


def our_vit(**settings) -> ViT:
    vit = ViT(Model(**{"name": "vit_u2x1_16", "image_size": 32, "num_classes": 5} | settings))
    return scrambled(vit).requires_grad_(False)


def graph_error(vit: ViT, write, path, *, any_size: bool = False, int8: bool = False) -> float:
    """The largest difference of a logit between a network and a file of it, over batches and sizes."""
    network = fold(vit, NORMALIZE, any_size=any_size, int8_weights=int8)
    patch = vit.model.shape.patch if any_size else None
    run = write(trace_program(network, vit.model.image_shape, patch), path)
    vit.execution, error = "loop", 0.0
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (NORMALIZE.mean, NORMALIZE.std))
    generator = torch.Generator().manual_seed(0)
    for batch, size in itertools.product((1, 2, 5), (vit.model.image_shape, *(OTHER_SIZES if any_size else ()))):
        images = torch.randint(0, 256, (batch, 3, *size), dtype=torch.uint8, generator=generator)
        error = max(error, (run(images) - vit((images / 255 - mean) / std)).abs().max().item())
    return error


@pytest.mark.parametrize(
    ("branches", "layerscale", "activation"), [*itertools.product((1, 2, 3), (None, 0.1), ("gelu", "gelu_tanh"))]
)
def test_a_folded_block_is_the_block(branches, layerscale, activation):
    spec = BlockSpec(64, 2, branches, layerscale, activation=activation, norm_eps=1e-3, execution="loop")
    block = scrambled(Block(spec)).double().requires_grad_(False)
    x_BND = torch.randn(3, 7, 64, dtype=torch.float64)
    assert torch.allclose(FoldedBlock(block)(x_BND), block(x_BND), atol=1e-12, rtol=1e-12)


TURNED = {
    "positions": "rope",
    "qk_norm": True,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "registers": 4,
    "bias": False,
}
RELATIVE = {"positions": "relative", "class_token": False, "pool": "mean", "qk_norm": True}
LEVELS = {"positions": {"kind": "learned2d", "where": "levels"}, "registers": 2}
AXIAL = {"attention": "axial", "class_token": False, "pool": "mean"}


@pytest.mark.parametrize("settings", [TURNED, RELATIVE, LEVELS, AXIAL])
@pytest.mark.parametrize(
    ("write", "ending"), [(write_torch_export, "pt2"), pytest.param(write_onnx, "onnx", marks=pytest.mark.slow)]
)
def test_networks_that_cannot_be_folded_are_exported_branch_by_branch(settings, write, ending, tmp_path):
    assert graph_error(our_vit(name="vit_u2x2_16", **settings), write, tmp_path / f"model.{ending}") < 1e-4


def test_folding_leaves_the_network_as_it_is():
    vit = our_vit(name="vit_u2x2_16")
    before = {name: tensor.clone() for name, tensor in vit.state_dict().items()}
    folded = fold(vit, NORMALIZE, any_size=False, int8_weights=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in vit.state_dict().items())
    assert not set(folded.state_dict().values()) & set(vit.state_dict().values())


def test_int8_weights_are_within_half_a_step_of_each_row():
    linear = torch.nn.Linear(64, 32)
    linear.weight.data *= torch.logspace(-3, 3, 32)[:, None]
    linear.weight.data[7] = 0
    quantized = Int8Linear(linear)
    steps = linear.weight.abs().amax(1, keepdim=True) / 127
    identity = quantized(torch.eye(64)).T - linear.bias[:, None]
    assert quantized.weight.dtype == torch.int8
    assert ((identity - linear.weight).abs() <= 0.5001 * steps + 1e-6).all()


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "vit_u2x2_16_hmlp_bn", "layerscale": 0.1, "pool": "mean", "class_token": False},
        {"positions": "sincos2d", "any_size": True},
        {"positions": "rope", "registers": 2, "any_size": True},
        {"int8": True},
    ],
)
def test_an_archive_computes_the_same(tmp_path, settings):
    any_size, int8 = settings.pop("any_size", False), settings.pop("int8", False)
    error = graph_error(our_vit(**settings), write_torch_export, tmp_path / "m.pt2", any_size=any_size, int8=int8)
    assert error < (0.02 if int8 else 1e-5)


@pytest.mark.parametrize(
    "settings", [{"name": "vit_u1x3_16_linear_bn_gelu"}, {"positions": "sincos2d", "any_size": True}]
)
def test_onnx_computes_the_same(tmp_path, settings):
    any_size = settings.pop("any_size", False)
    assert graph_error(our_vit(**settings), write_onnx, tmp_path / "m.onnx", any_size=any_size) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_torch_export, write_onnx])
@pytest.mark.parametrize(
    "settings",
    [
        *({"name": f"vit_u2x{branches}_16_{stem}"} for stem, branches in itertools.product(STEMS, (1, 2))),
        {"pool": "mean_then_norm", "class_token": False},
        {"positions": "none", "any_size": True},
        {"name": "vit_u2x2_16", "positions": "rope", "any_size": True},
        {"positions": "sincos2d", "any_size": True} | AXIAL,
        {"name": "vit_u2x2_16", "positions": "rope", "any_size": True} | AXIAL,
        {"name": "vit_u2x2_16_conv", "positions": "sincos2d", "any_size": True},
        {"name": "vit_u2x2_8_hmlp_ln", "positions": {"kind": "sincos2d", "frequencies": "mae"}, "any_size": True},
        {"head": "mlp", "activation": "gelu_tanh", "norm_eps": 0.1},
        {"image_size": [32, 64]},
    ],
)
def test_every_network_computes_the_same_in_a_graph(tmp_path, write, settings):
    settings = dict(settings)
    any_size = settings.pop("any_size", False)
    assert graph_error(our_vit(**settings), write, tmp_path / "m", any_size=any_size) < 1e-5


@pytest.mark.slow
def test_int8_takes_less_than_half_of_the_file_and_changes_logits_a_little(tmp_path):
    vit = our_vit(name="vit_u2x3_16", layerscale=0.5)
    network = fold(vit, NORMALIZE, any_size=False, int8_weights=False)
    program = trace_program(network, (32, 32))
    write_onnx(program, tmp_path / "float.onnx")
    dynamic = write_onnx(program, tmp_path / "dynamic.onnx", "dynamic")
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    assert 0 < (dynamic(images) - network(images)).abs().max() < 0.1 * network(images).abs().max()
    assert 0 < graph_error(vit, write_onnx, tmp_path / "weights.onnx", int8=True) < 0.02
    whole = (tmp_path / "float.onnx").stat().st_size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dynamic.onnx", "float.onnx", "weights.onnx"]
    assert all((tmp_path / f"{kind}.onnx").stat().st_size < 0.5 * whole for kind in ("dynamic", "weights"))


ALONE = """
import sys
sys.modules["vitray"] = None  # an import of vitray fails
import torch
network = torch.export.load(sys.argv[1]).module()
{compile}
images = torch.load(sys.argv[2], weights_only=True)
torch.save([network(images[:batch]) for batch in (1, 3)], sys.argv[3])
"""


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["as_it_is", "compiled"])
def test_an_archive_runs_without_vitray_and_holds_no_pickle(tmp_path, compiled):
    vit = our_vit(name="vit_u2x2_16")
    network = fold(vit, NORMALIZE, any_size=False, int8_weights=False)
    write_torch_export(trace_program(network, (32, 32)), tmp_path / "m.pt2")
    with zipfile.ZipFile(tmp_path / "m.pt2") as archive:
        heads = {name: archive.read(name)[:2] for name in archive.namelist()}
    assert len(heads) > 20
    assert [name for name, head in heads.items() if head in (b"PK", b"\x80\x02", b"\x80\x04", b"\x80\x05")] == []
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    torch.save(images, tmp_path / "images")
    code = ALONE.format(compile="network = torch.compile(network)" if compiled else "")
    arguments = [str(tmp_path / name) for name in ("m.pt2", "images", "logits")]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, cwd=tmp_path)
    for logits_BK in torch.load(tmp_path / "logits", weights_only=True):
        assert torch.allclose(logits_BK, network(images[: len(logits_BK)]), atol=1e-5)


READ_AN_ONNX_FILE = """
import sys
from pathlib import Path
from vitray.exports import writers
assert "onnxruntime" not in sys.modules
quantize = writers._quantize_dynamically if sys.argv[2] == "quantize" else writers.open_onnx
quantize(Path(sys.argv[1]))
assert "onnxruntime" in sys.modules
"""


@pytest.mark.parametrize("use", ["run", "quantize"])
def test_onnxruntime_stores_no_device_id_and_queues_no_events(tmp_path, use):
    """Without its variable, onnxruntime writes both below the user's cache while it is imported."""
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("images", "logits")]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["images"], ["logits"])], "g", values[:1], values[1:])
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10), tmp_path / "m"
    )
    home = tmp_path / "home"
    home.mkdir()
    # onnxruntime's telemetry is off where CI is set, too.
    environment = {key: value for key, value in os.environ.items() if key not in ("CI", "ORT_DISABLE_TELEMETRY")}
    environment |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}
    subprocess.run([sys.executable, "-c", READ_AN_ONNX_FILE, str(tmp_path / "m"), use], check=True, env=environment)
    assert [path for path in home.rglob("*") if "Microsoft" in path.parts] == []
