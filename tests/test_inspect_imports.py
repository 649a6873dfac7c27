"""`vitray inspect` on networks of other libraries: their own attention, every figure, and networks that are refused."""

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from networks import scrambled
from safetensors.torch import save_file
from test_weights import WIDTH, Deit, google_arrays, hugging_face, images, imported, timm_vit
from timm.models.vision_transformer import ParallelThingsBlock
from torchvision.models.resnet import BasicBlock, ResNet
from torchvision.models.swin_transformer import SwinTransformer
from transformers import ViTImageProcessor

from pipelines.__main__ import main
from vitray.config.evaluation import NEEDS
from vitray.inspection import attention_distances, attention_maps
from vitray.inspection.report.inspect_networks import Request, make_figures
from vitray.weights import import_weights, save_model

LAYOUTS = ("timm", "timm_parallel", "torchvision", "hugging_face", "deit", "deit_parallel", "google", "big_vision")


def torchvision_vit():
    sizes = {"num_layers": 3, "num_heads": 2, "hidden_dim": WIDTH, "mlp_dim": 4 * WIDTH, "num_classes": 5}
    return torchvision.models.VisionTransformer(image_size=32, patch_size=8, **sizes)


def write(layout, folder):
    """A network of a library, its address, and the network as we import it."""
    match layout:
        case "timm":
            theirs = scrambled(timm_vit())
        case "timm_parallel":
            theirs = scrambled(timm_vit(block_fn=ParallelThingsBlock, init_values=0.1))
        case "torchvision":
            theirs = scrambled(torchvision_vit())
        case "hugging_face":
            theirs = hugging_face()
            theirs.save_pretrained(folder)
            ViTImageProcessor().save_pretrained(folder)  # the normalization
            return theirs, str(folder), import_weights(str(folder))
        case "deit" | "deit_parallel":
            theirs = scrambled(Deit(2 if layout.endswith("parallel") else 1))
        case _:
            theirs = scrambled(timm_vit(act_layer="gelu_tanh"))
            np.savez(folder / "w.npz", **google_arrays(theirs, layout == "big_vision"))
            return theirs, str(folder / "w.npz"), import_weights(str(folder / "w.npz"))
    save_file(theirs.state_dict(), folder / "w.safetensors")
    settings = {"positions": "learned"} if layout.startswith("deit") else {}
    return theirs, str(folder / "w.safetensors"), imported(folder / "w.safetensors", **settings)


@torch.no_grad()
def attention_of(theirs, batch) -> list[torch.Tensor]:
    """The attention weights that a library computes: BHNN of each branch, level by level."""
    if hasattr(theirs, "set_attn_implementation"):
        theirs.set_attn_implementation("eager")
        return list(theirs(batch, output_attentions=True).attentions)
    joint = []

    def keep(module, inputs, output):
        if isinstance(module, torch.nn.MultiheadAttention):
            output = F.linear(inputs[0], module.in_proj_weight, module.in_proj_bias)
        joint.append(output)

    wanted = [m for name, m in theirs.named_modules() if name.endswith(("qkv", "self_attention"))]
    for module in wanted:
        module.register_forward_hook(keep)
    theirs(batch)
    weights = []
    for rows_BNK in joint:
        query, key, _ = rows_BNK.unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        weights.append(torch.einsum("bhid,bhjd->bhij", query, key).div(query.shape[-1] ** 0.5).softmax(-1))
    return weights


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_attention_of_an_imported_network_is_that_of_its_library(tmp_path, layout):
    theirs, _, (_, ours) = write(layout, tmp_path)
    batch, branches = images(), ours.model.shape.branches
    weights = attention_of(theirs, batch)
    assert len(weights) == 3 * branches
    rollout = torch.eye(17).expand(3, -1, -1)
    for level in range(3):
        of_level = torch.stack(weights[level * branches : (level + 1) * branches])
        step = torch.eye(17) + of_level.mean(dim=2).sum(dim=0)
        rollout = step / step.sum(-1, keepdim=True) @ rollout
    maps, spread = attention_maps(ours, batch), attention_distances(ours, batch)
    torch.testing.assert_close(maps.rollout.flatten(1), rollout[:, 0, 1:], atol=1e-5, rtol=1e-4)
    entropy = -(torch.stack(weights) * torch.stack(weights).log()).sum(-1).mean(-1)
    torch.testing.assert_close(spread.entropy, entropy.unflatten(0, (3, branches)).mT, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_figure_is_made_of_an_imported_network(tmp_path, layout):
    (tmp_path / "theirs").mkdir()
    _, address, (run, vit) = write(layout, tmp_path / "theirs")
    if address.endswith(".safetensors"):  # which does not show its heads; `vitray model FILE heads=2 --save FOLDER`
        address = str(tmp_path / "model")
        save_model(address, run, vit, None)
    inspection, _ = make_figures(Request(address, ["demo"], images=6, out=str(tmp_path / "out")))
    assert [result.name for result in inspection.results] == [name for name, needs in NEEDS.items() if not needs.two]
    without = {result.name for result in inspection.results if not result.drawings}
    assert without == ({"branches"} if vit.model.shape.branches == 1 else set()) | (
        {"layerscale"} if vit.model.layerscale is None else set()
    )


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (lambda: ResNet(BasicBlock, [1, 1, 1, 1], 5), "a network without attention, and not a Vision Transformer"),
        (lambda: timm.create_model("convnext_atto", depths=(1, 1, 1, 1)), "a network without attention"),
        (lambda: SwinTransformer([4, 4], 24, [1, 1], [2, 2], [4, 4], num_classes=5), "relative positions, as Swin"),
    ],
    ids=["resnet", "convnext", "swin"],
)
def test_networks_that_are_no_vit_are_one_message(tmp_path, network, reason, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_file(network().state_dict(), tmp_path / "w.safetensors")
    assert main(["inspect", "w.safetensors", "demo", "--json"]) == 2
    printed = capsys.readouterr()
    [line] = printed.err.splitlines()
    assert line.startswith("vitray: ")
    assert f"w.safetensors: {reason}" in line or f"w.safetensors: a network with {reason}" in line
    assert printed.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]
