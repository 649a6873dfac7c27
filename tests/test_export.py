"""`vitray export`: the proof in the artifact, refusals that leave nothing, and bad input in one message."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from image_sets import write_dataset
from networks import scrambled

from pipelines.__main__ import main
from vitray import Model, Run, ViT, save_model
from vitray.config.augmentation import CenterCrop
from vitray.data.augment.mixing import normalized
from vitray.errors import ConfigError, RunError
from vitray.exports import options
from vitray.exports.export import export_network
from vitray.exports.options import ExportRequest
from vitray.exports.parity import compare_logits, views
from vitray.exports.writers import image_processor_of, preprocessing_of
from vitray.inference.images import open_images

CLASSES = ["cat", "dog", "owl", "fox", "hen"]


def saved(folder: Path, base: Path | None = None, seed: int = 0, **settings) -> ViT:
    """A network with random weights, and its model folder; of a base, a delta with another bias."""
    vit = ViT(Model(**{"name": "vit_u2x1_16", "image_size": 32, "num_classes": len(CLASSES)} | settings))
    scrambled(vit, seed).requires_grad_(False)
    if base is not None:
        vit.head.bias += 1
    classes = CLASSES if vit.model.num_classes else None
    save_model(str(folder), Run(model=vit.model), vit, classes, relative_to=base and str(base))
    return vit


def quick(model: Path, target: str, out: Path | str, **more) -> ExportRequest:
    request = ExportRequest(str(model), target, out=str(out), images=40, rounds=1, seconds=0.001)
    return request._replace(**more)


def content(out: Path, name: str):
    return json.loads((out / f"{name}.json").read_text())


def test_a_latency_beside_other_work_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("vitray.exports.export.MOST_OTHERS", -1.0)
    saved(tmp_path / "m")
    export = export_network(quick(tmp_path / "m", "timm", tmp_path / "out"))
    assert export.latency is content(tmp_path / "out", "parity")["latency"] is None
    assert "latency: not measured, as other processes were using the CPUs" in export.text()


def test_the_command_writes_a_proven_onnx_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("vitray.exports.export.MOST_OTHERS", 9.0)  # the machine of tests is busy
    vit = saved(tmp_path / "m")
    write_dataset(tmp_path / "data", {"val": 50}, corrupt=2)
    args = ["--to", "onnx", "--out", str(tmp_path / "out"), "--data", str(tmp_path / "data"), "--rounds", "1", "--json"]
    assert main(["export", str(tmp_path / "m"), *args]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result) == {"path", "max_logit_difference", "changed_top1", "images"}
    assert (result["path"], result["images"]) == (str(tmp_path / "out"), 48)
    # The same comparison by hand, as a user of the files would make it.
    images = open_images(str(tmp_path / "data"), "val")
    pixels = torch.cat([batch for batch, _ in views(images, 50, [(32, 32)], CenterCrop())])
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    (logits,) = session.run(["logits"], {"images": pixels.numpy()})
    ours = vit(normalized(pixels.permute(0, 2, 3, 1), Run().data.normalize)).numpy()
    assert np.abs(logits - ours).max() < 1e-5
    assert result["max_logit_difference"] < 1e-5
    assert (logits.argmax(1) != ours.argmax(1)).sum() == result["changed_top1"] == 0
    parity = content(tmp_path / "out", "parity")
    assert parity["left_out"] == ["val:0 (not an image)", "val:1 (not an image)"]
    assert parity["largest_logit"] == pytest.approx(np.abs(ours).max(), rel=1e-4)
    assert parity["predicted_classes"] == len(set(ours.argmax(1)))
    assert parity["kind"] == "real"
    assert set(parity["latency"]) == {"1", "32"}
    assert all(row[f"{name}_ms"] > 0 for row in parity["latency"].values() for name in ("before", "after"))
    assert "torch" in parity["circumstances"]
    described = content(tmp_path / "out", "export")
    stored = onnx.load(tmp_path / "out" / "model.onnx")
    assert {each.domain: each.version for each in stored.opset_import} == {"": 20}
    assert (described["opset"], described["network"]) == (20, "vit_u2x1_16")
    assert described["output"] == {"name": "logits", "shape": ["any", 5], "probabilities": "softmax"}
    assert {"torch", "onnx", "onnxruntime", "onnxscript"} <= set(described["versions"])
    assert content(tmp_path / "out", "classes") == CLASSES
    prepared = content(tmp_path / "out", "preprocessing")
    assert prepared["resize"]["smallest_that_covers"] == [36, 36]
    assert prepared["input"] == {"name": "images", "type": "uint8", "layout": "BCHW", "shape": ["any", 3, 32, 32]}
    assert prepared["normalize"]["inside_the_export"] is True


def test_a_squeezed_view_is_stated_as_one():
    run = Run().replace({"data.eval_crop.crop_ratio": None})
    steps = preprocessing_of(run, (32, 48), in_graph=True, any_multiple_of=None)
    assert (steps["resize"]["to"], steps["resize"]["keeps_aspect_ratio"]) == ([32, 48], False)
    processor = image_processor_of(run, (32, 32))
    assert (processor["size"], processor["do_center_crop"]) == ({"height": 32, "width": 32}, False)


def test_hugging_face_gives_sigmoids_after_bce(tmp_path):
    from PIL import Image
    from transformers import pipeline

    vit = saved(tmp_path / "first")
    save_model(str(tmp_path / "m"), Run(model=vit.model).replace({"task.loss": "bce"}), vit, CLASSES)
    export_network(quick(tmp_path / "m", "hf", tmp_path / "out"))
    assert content(tmp_path / "out", "export")["output"]["probabilities"] == "sigmoid"
    gray = np.full((32, 32, 3), 90, np.uint8)
    answers = pipeline("image-classification", str(tmp_path / "out"), device="cpu", top_k=5)(Image.fromarray(gray))
    wanted = vit(normalized(torch.from_numpy(gray)[None], Run().data.normalize)).sigmoid()[0].tolist()
    assert {each["label"]: each["score"] for each in answers} == pytest.approx(
        dict(zip(CLASSES, wanted, strict=True)), abs=1e-4
    )


@pytest.mark.slow
def test_a_delta_is_exported_whole(tmp_path):
    saved(tmp_path / "base", name="vit_u2x2_16_hmlp_ln", layerscale=0.1)
    saved(tmp_path / "m", base=tmp_path / "base", name="vit_u2x2_16_hmlp_ln", layerscale=0.1)
    export = export_network(quick(tmp_path / "m", "timm", tmp_path / "out"))
    assert (export.parity.images, export.parity.changed_top1) == (40, 0)
    assert export.parity.max_logit_difference < 1e-4
    assert content(tmp_path / "out", "preprocessing")["input"]["type"] == "float32"
    code = "import sys; sys.modules['vitray'] = None; from load import model; print(model.head.out_features)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path / "out", capture_output=True, text=True, check=True)
    assert int(done.stdout) == len(CLASSES)


def test_a_delta_of_another_base_is_refused(tmp_path):
    saved(tmp_path / "base")
    saved(tmp_path / "m", base=tmp_path / "base")
    shutil.rmtree(tmp_path / "base")
    saved(tmp_path / "base", seed=1)
    with pytest.raises(ConfigError, match=r"a delta of .*base, which has changed"):
        export_network(quick(tmp_path / "m", "torchvision", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_hugging_face_prepares_images_as_we_do(tmp_path):
    from PIL import Image
    from transformers import AutoImageProcessor

    from vitray.data.augment.crops import crop_center

    saved(tmp_path / "m")
    export_network(quick(tmp_path / "m", "hf", tmp_path / "out"))
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
    smooth = np.linspace(0, 255, 60 * 44 * 3).reshape(60, 44, 3).astype(np.uint8)
    theirs = processor(Image.fromarray(smooth), return_tensors="pt")["pixel_values"]
    ours = normalized(torch.from_numpy(crop_center(smooth, CenterCrop(), (32, 32)))[None], Run().data.normalize)
    assert theirs.shape == ours.shape
    assert (theirs - ours).abs().mean() < 0.03


def test_an_export_above_the_bound_is_refused_and_leaves_nothing(tmp_path):
    vit = saved(tmp_path / "first")
    # Nearly equal classes, which int8 weights confuse.
    vit.head.weight.data = vit.head.weight.data[:1] + 1e-4 * vit.head.weight.data
    vit.head.bias.data.zero_()
    save_model(str(tmp_path / "m"), Run(model=vit.model), vit, CLASSES)
    request = quick(tmp_path / "m", "torch_export", tmp_path / "exports" / "out", int8="weights")
    with pytest.raises(
        RunError, match=r"top-1 changed for \d+ of 40 images .*expected at most 0.10%: nothing is written"
    ):
        export_network(request)
    assert not (tmp_path / "exports").exists()
    export = export_network(request._replace(allow=True))
    assert export.parity.changed_top1 > 0
    assert [path.name for path in (tmp_path / "exports").iterdir()] == ["out"]
    assert content(tmp_path / "exports" / "out", "parity")["allowed_above"] is True


def test_logits_that_are_not_numbers_are_refused():
    pixels = [(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), [])]
    with pytest.raises(ConfigError, match="the export's logits are not finite"):
        compare_logits(lambda x: torch.zeros(len(x), 3), lambda x: torch.full((len(x), 3), torch.nan), pixels)
    with pytest.raises(ConfigError, match=r"no image to compare: a \(bad\)"):
        compare_logits(lambda x: x, lambda x: x, [(torch.zeros(0, 3, 8, 8), ["a (bad)"])])


def test_differences_are_counted_over_all_batches():
    ours = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, -2.0]])
    theirs = torch.tensor([[1.0, 0.5], [1.5, 1.0], [0.0, -2.0]])
    batches = [(torch.tensor([[index]]), []) for index in range(3)]
    parity = compare_logits(lambda x: ours[x[:, 0]], lambda x: theirs[x[:, 0]], batches)
    assert (parity.images, parity.changed_top1, parity.predicted_classes) == (3, 1, 2)
    assert (parity.max_logit_difference, parity.largest_logit) == (1.5, 2.0)


@pytest.mark.parametrize(
    ("settings", "request_", "message"),
    [
        ({}, {"target": "onx"}, "--to onx: expected one of onnx, .*; did you mean onnx"),
        (
            {},
            {"target": "timm", "int8": "weights"},
            "--int8 weights --to timm: expected --to onnx or --to torch_export",
        ),
        ({}, {"target": "onnx", "int8": "wieghts"}, "expected one of weights, dynamic; did you mean weights"),
        ({}, {"target": "torch_export", "int8": "dynamic"}, "expected one of weights"),
        ({}, {"target": "hf", "any_size": True}, "--any-size --to hf: expected --to onnx or --to torch_export"),
        ({}, {"target": "onnx", "any_size": True}, "learned positions belong to 2 x 2 patches"),
        ({"num_classes": None}, {"target": "onnx"}, "has no head"),
        ({"name": "vit_u2x2_16"}, {"target": "hf"}, "hf has no parallel branches, and this model has 2"),
        ({"name": "vit_u2x1_16_conv"}, {"target": "torchvision"}, "torchvision has no stem conv"),
        ({}, {"target": "onnx", "settings": ["heads=2"]}, "a model folder has its own settings; got heads"),
        ({}, {"target": "torchvision", "data": "absent"}, "absent: no files here"),
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing(tmp_path, settings, request_, message):
    saved(tmp_path / "m", **settings)
    with pytest.raises(ConfigError, match=message):
        export_network(quick(tmp_path / "m", "onnx", tmp_path / "out")._replace(**request_))
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_named_with_its_command(tmp_path, monkeypatch, capsys):
    present = importlib.util.find_spec
    monkeypatch.setattr(options, "find_spec", lambda name: None if name == "onnxscript" else present(name))
    assert main(["export", str(tmp_path), "--to", "onnx"]) == 2
    assert "needs onnxscript, not installed here; run pip install onnx" in capsys.readouterr().err


def test_a_folder_that_exists_is_refused(tmp_path, capsys):
    saved(tmp_path / "m")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("mine")
    assert main(["export", str(tmp_path / "m"), "--to", "hf", "--out", str(tmp_path / "out")]) == 2
    assert "exists already; expected a new folder" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes"]


def test_s3_takes_the_same_files(tmp_path, s3_server):
    saved(tmp_path / "m")
    url = "s3://bucket/exports/torchvision"
    export_network(quick(tmp_path / "m", "torchvision", url))
    export_network(quick(tmp_path / "m", "torchvision", tmp_path / "out"))
    assert {path.name for path in (s3_server / "bucket/exports/torchvision").iterdir()} == {
        path.name for path in (tmp_path / "out").iterdir()
    }
    with pytest.raises(ConfigError, match="exists already"):
        export_network(quick(tmp_path / "m", "torchvision", url))
