"""Serving of logged models by MLflow alone, without vitray or Ray installed: same predictions as the network."""

import ast
import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import NamedTuple

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import load_model as load_logged
from mlflow.pyfunc import scoring_server
from PIL import Image
from starlette.testclient import TestClient
from torchvision.transforms.v2 import functional as vision

from vitray.config import Run
from vitray.errors import ConfigError
from vitray.models.vit import ViT
from vitray.serving.flavor import REQUIREMENTS, log_family, log_model
from vitray.system import storage
from vitray.weights import load_model, save_model

CLASSES = ["ant", "bee", "cat", "dog", "eel"]
RUN = Run().replace(
    {
        "model.name": "vit_u2x2_8",
        "model.image_size": [32, 48],
        "model.num_classes": 5,
        "data.eval_crop": {"crop_ratio": 0.8, "interpolation": "bilinear"},
        "data.normalize": {"mean": [0.4, 0.5, 0.6], "std": [0.1, 0.2, 0.3]},
    }
)
CENSUS = """
import importlib.util, json, sys
from pathlib import Path

sys.path = [folder for folder in sys.path if not (Path(folder) / "vitray").is_dir()]
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]
assert importlib.util.find_spec("vitray") is None
sys.modules["ray"] = None  # any import of it fails
import mlflow, numpy

model = mlflow.pyfunc.load_model(sys.argv[1])
files = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "vitray"]
files += [module.__file__ for name, module in sys.modules.items() if name.startswith("code_model_")]
png = Path("image.png").read_bytes()
pixels = [{"image": image} for image in numpy.load("pixels.npy")]
result = {"records": model.predict([{"image": png}]), "pixels": model.predict(pixels), "files": files}
Path("result.json").write_text(json.dumps(result))
"""


@cache
def network(run: Run = RUN) -> ViT:
    """Return a fixed random network, whose outputs differ between images."""
    generator = torch.Generator().manual_seed(3)
    vit = ViT(run.model).eval()
    for tensor in vit.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
    return vit


def pictures(count: int) -> np.ndarray:
    """Return images of coarse colored noise, 50 x 70 pixels."""
    coarse = np.random.default_rng(0).integers(0, 256, (count, 5, 7, 3), dtype=np.uint8)
    return coarse.repeat(10, axis=1).repeat(10, axis=2)


def encoded(image: np.ndarray, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, kind)
    return file.getvalue()


def text(image: np.ndarray) -> str:
    return base64.b64encode(encoded(image)).decode()


def rows(images: np.ndarray) -> pd.DataFrame:
    """Return the pixels of images as input rows."""
    return pd.DataFrame({"image": list(images)})


def expected(images: np.ndarray) -> np.ndarray:
    """Return the probabilities, computed directly from the settings above."""
    rows = []
    for image in images:
        resized = vision.resize(torch.from_numpy(image).permute(2, 0, 1), [42, 60], antialias=True)
        view = vision.center_crop(resized, [32, 48]).double() / 255
        for color, (mean, std) in enumerate([(0.4, 0.1), (0.5, 0.2), (0.6, 0.3)]):
            view[color] = (view[color] - mean) / std
        rows.append(network()(view.float()[None])[0])
    return torch.stack(rows).detach().softmax(dim=1).numpy()


def probabilities(answers: list[dict]) -> np.ndarray:
    """Return the probabilities of answers; check that each answer names the most probable class."""
    for answer in answers:
        assert answer["label"] == int(np.argmax(answer["probabilities"]))
        assert answer["class"] == CLASSES[answer["label"]]
        assert answer["probability"] == max(answer["probabilities"])
    return np.array([answer["probabilities"] for answer in answers])


def agree(answers: list[dict], images: np.ndarray) -> bool:
    return np.allclose(probabilities(answers), expected(images), rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Iterator[MlflowClient]:
    """An MLflow database for this process and its children."""
    folder = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        patch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
        client = MlflowClient()
        client.create_experiment("serving", artifact_location=str(folder / "artifacts"))
        yield client
        mlflow.set_tracking_uri(None)


def new_run(store: MlflowClient) -> str:
    return store.create_run(store.get_experiment_by_name("serving").experiment_id).info.run_id


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    url = str(tmp_path_factory.mktemp("weights") / "model")
    save_model(url, RUN, network(), CLASSES)
    return url


@pytest.fixture(scope="module")
def uri(store, folder) -> str:
    return log_model(new_run(store), folder)


@pytest.fixture(scope="module")
def model(uri):
    return load_logged(uri)


class ServeProcess(NamedTuple):
    """A started `mlflow models serve`."""

    address: str
    process: subprocess.Popen
    log: Path


@pytest.fixture(scope="module")
def starting(uri, tmp_path_factory) -> Iterator[ServeProcess]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("server")
    args = ["-m", "mlflow", "models", "serve", "-m", uri, "--env-manager", "local", "--port", str(port)]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *args], cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield ServeProcess(f"http://127.0.0.1:{port}", process, folder / "log")
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def server(starting) -> str:
    """The address of a server that responds."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        assert starting.process.poll() is None, starting.log.read_text()
        try:
            with urllib.request.urlopen(f"{starting.address}/ping", timeout=5):
                return starting.address
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"no server within three minutes: {starting.log.read_text()}")


def test_every_input_format_gets_the_predictions_of_the_network(model):
    images = pictures(3)
    texts, contents = [text(image) for image in images], [encoded(image) for image in images]
    requests = {
        "whole numbers in a frame": rows(images.astype(np.int64)),
        "texts in a frame": pd.DataFrame({"image": texts}),
        "bytes in a frame": pd.DataFrame({"image": contents}),
        "pixels in a frame": pd.DataFrame({"image": list(images)}),
        "records": [{"image": content} for content in contents],
        "records as the server reads them": [{"image": np.array(content)} for content in texts],
        "columns": {"image": np.array(texts)},
        "columns of pixels": {"image": images},
    }
    assert [name for name, request in requests.items() if not agree(model.predict(request), images)] == []


def test_a_request_may_mix_image_sizes_or_hold_a_single_image(model):
    large, small = pictures(2)[0], pictures(2)[1][:40, :45]
    for request in (
        [{"image": large}, {"image": small}],
        {"image": [large.tolist(), small.tolist()]},
        pd.DataFrame({"image": [large, small]}),
    ):
        answers = model.predict(request)
        assert agree(answers[:1], large[None])
        assert np.allclose(
            probabilities(answers[1:]), probabilities(model.predict(rows(small[None]))), rtol=0, atol=1e-5
        )
    for single in ({"image": text(large)}, {"image": np.array(text(large))}, [{"image": encoded(large)}]):
        assert agree(model.predict(single), large[None])


def test_a_request_may_be_longer_than_a_batch(model):
    images = pictures(70)
    answers, checked = model.predict(rows(images)), [0, 63, 64, 69]
    assert len(answers) == 70
    assert agree([answers[index] for index in checked], images[checked])
    assert model.predict(rows(images[:0])) == []


def test_jpegs_are_accepted_too(model):
    jpeg = encoded(pictures(1)[0], "JPEG")
    with Image.open(io.BytesIO(jpeg)) as opened:
        pixels = np.array(opened)
    assert agree(model.predict([{"image": jpeg}]), pixels[None])


def test_top_k_replaces_the_list_of_all_probabilities(model):
    images = pictures(2)
    for answer, row in zip(model.predict(rows(images), params={"top_k": 3}), expected(images), strict=True):
        order = np.argsort(-row)[:3]
        assert [one["label"] for one in answer["top"]] == order.tolist()
        assert [one["class"] for one in answer["top"]] == [CLASSES[label] for label in order]
        assert np.allclose([one["probability"] for one in answer["top"]], row[order], rtol=0, atol=1e-5)
        assert {name: answer[name] for name in ("label", "class", "probability")} == answer["top"][0]
        assert "probabilities" not in answer


@pytest.mark.parametrize(
    ("second", "fault"),
    [
        (b"hello", "image 1: not an image"),
        ("no base64!", "image 1: not base64"),
        (b"", "image 1: empty file"),
        (None, "image 1: got NoneType of shape (), expected base64 or height x width x 3"),
        (np.zeros((4, 4, 4), np.uint8), "image 1: got ndarray of shape (4, 4, 4)"),
        (np.full((4, 4, 3), 0.5), "image 1: got float64 from 0.5 to 0.5, expected whole numbers 0 to 255"),
        (np.full((4, 4, 3), 256), "image 1: got int64 from 256 to 256"),
    ],
)
def test_a_bad_image_is_named_by_its_index(model, second, fault):
    with pytest.raises(MlflowException) as rejected:
        model.predict([{"image": encoded(pictures(1)[0])}, {"image": second}])
    assert fault in str(rejected.value)


def test_bad_requests_are_rejected_by_name(model):
    with pytest.raises(MlflowException, match=r"missing inputs \['image'\].*extra inputs: \['picture'\]"):
        model.predict(pd.DataFrame({"picture": ["x"]}))
    with pytest.raises(MlflowException, match="top_k: got 6, expected 1 to 5"):
        model.predict(rows(pictures(1)), params={"top_k": 6})
    with pytest.raises(MlflowException, match=r"image 0: got ndarray of shape \(70, 3\)"):
        model.predict(rows(pictures(1)[0]))


def test_bce_gives_sigmoids_and_unnamed_classes_are_numbers(store, tmp_path):
    save_model(str(tmp_path / "model"), RUN.replace({"task.loss": "bce"}), network())
    [answer] = load_logged(log_model(new_run(store), str(tmp_path / "model"))).predict(rows(pictures(1)))
    # The softmax of the logits, recovered from the sigmoids, is the expected one.
    sigmoids = np.array(answer["probabilities"])
    logits = np.log(sigmoids / (1 - sigmoids))
    assert np.allclose(np.exp(logits) / np.exp(logits).sum(), expected(pictures(1))[0], rtol=0, atol=1e-5)
    assert abs(sigmoids.sum() - 1) > 0.01
    assert answer["class"] == str(answer["label"])


def shown_request(uri: str, folder: Path) -> dict:
    """Return the request that MLflow's page shows for a model."""
    root = Path(mlflow.artifacts.download_artifacts(uri, dst_path=str(folder)))
    return json.loads((root / "serving_input_example.json").read_text())


def test_the_example_that_mlflow_shows_is_a_request(model, uri, tmp_path):
    assert model.metadata.signature.inputs.to_dict() == [{"type": "any", "name": "image", "required": True}]
    example = shown_request(uri, tmp_path)
    with TestClient(scoring_server.init(model)) as client:
        response = client.post("/invocations", json=example)
    [answer] = response.json()["predictions"]
    with Image.open(io.BytesIO(base64.b64decode(model.input_example[0]["image"]))) as image:
        [wanted] = model.predict(rows(np.array(image)[None]))
    assert answer["class"] == wanted["class"]
    np.testing.assert_allclose(answer["probabilities"], wanted["probabilities"], rtol=0, atol=1e-6)


def test_one_request_mixes_the_tasks_of_a_family(store, folder, tmp_path):
    """The reference is each network by itself."""
    networks = {}
    for task, classes in (("birds", 3), ("cars", 4)):
        run = RUN.replace({"model.num_classes": classes, "model.image_size": [16, 24] if task == "cars" else [32, 48]})
        networks[task] = run, ViT(run.model).eval()
        own = network().state_dict()
        kept = [name for name, tensor in networks[task][1].state_dict().items() if tensor.shape == own[name].shape]
        networks[task][1].load_state_dict({name: own[name] for name in kept if ".attn" not in name}, strict=False)
        save_model(str(tmp_path / task), *networks[task], relative_to=folder)
    places = {task: str(tmp_path / task) for task in networks}
    uri = log_family("serving", "family", folder, places)
    logged = store.get_logged_model(uri.removeprefix("models:/"))
    assert (logged.tags["vitray.tasks"], logged.status.value) == ("base, birds, cars", "READY")
    images, tasks = pictures(4), ["birds", "cars", None, "birds"]
    alone = [load_logged(log_model(new_run(store), places[task] if task else folder)) for task in tasks]
    wanted = [one.predict(rows(image[None]))[0] for one, image in zip(alone, images, strict=True)]
    for task in networks:  # the model needs only itself
        (tmp_path / task).rename(tmp_path / f"{task}_moved")
    model = load_logged(uri)
    columns = [(column["name"], column["required"]) for column in model.metadata.signature.inputs.to_dict()]
    assert columns == [("image", True), ("task", False)]
    records = [
        {"image": text(image)} | ({"task": task} if task else {}) for image, task in zip(images, tasks, strict=True)
    ]
    example = shown_request(uri, tmp_path)
    with TestClient(scoring_server.init(model)) as client:
        answers = client.post("/invocations", json={"dataframe_records": records}).json()["predictions"]
        shown = client.post("/invocations", json=example)
        unknown = client.post("/invocations", json={"dataframe_records": [{"image": text(images[0]), "task": "bird"}]})
    assert [len(answer["probabilities"]) for answer in answers] == [3, 4, 5, 3]
    for answer, one in zip(answers, wanted, strict=True):
        assert answer["class"] == one["class"]
        np.testing.assert_allclose(answer["probabilities"], one["probabilities"], rtol=0, atol=1e-5)
    assert [len(answer["probabilities"]) for answer in shown.json()["predictions"]] == [5, 3]
    assert unknown.status_code == 400
    assert (
        "image 0: task: got 'bird', expected one of base, birds, cars; did you mean birds" in unknown.json()["message"]
    )


def test_a_family_of_strangers_or_of_bad_names_is_refused(store, folder, tmp_path):
    save_model(str(tmp_path / "other"), RUN, ViT(RUN.model))
    for task, url, fault in (
        ("birds", str(tmp_path / "other"), "it is whole"),
        ("a/b", folder, "expected a task of letters"),
        ("base", folder, "other than base"),
        ("birds", folder, "expected a delta of"),
    ):
        with pytest.raises(ConfigError, match=fault):
            log_family("serving", "family", folder, {task: url})


def test_logging_a_model_changes_only_its_run(store, folder):
    active_id, run_id = new_run(store), new_run(store)
    store.log_param(run_id, "optim.lr", "3e-4")

    def log_in_an_active_run() -> str:
        with mlflow.start_run(active_id):
            uri = log_model(run_id, folder)
            assert mlflow.active_run().info.run_id == active_id
            assert mlflow.get_active_model_id() is None
            assert mlflow.last_logged_model() is None
        return uri

    with ThreadPoolExecutor(1) as thread:  # MLflow remembers the last model of a thread, and other tests log some
        uri = thread.submit(log_in_an_active_run).result()
    logged = store.get_logged_model(uri.removeprefix("models:/"))
    assert (logged.source_run_id, logged.name, logged.status.value) == (run_id, "vit_u2x2_8", "READY")
    assert logged.experiment_id == store.get_run(run_id).info.experiment_id
    assert logged.params == {"optim.lr": "3e-4"}
    assert [output.model_id for output in store.get_run(run_id).outputs.model_outputs] == [logged.model_id]
    assert store.get_run(active_id).outputs is None or not store.get_run(active_id).outputs.model_outputs


def test_a_logged_model_holds_no_pickle(uri, tmp_path):
    root = Path(mlflow.artifacts.download_artifacts(uri, dst_path=str(tmp_path)))
    files = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    assert {"artifacts/model/model.safetensors", "code/vitray/system/storage.py", "serving.py", "MLmodel"} <= set(files)
    kinds = {Path(name).suffix for name in files}
    assert kinds <= {".safetensors", ".py", ".html", ".css", ".yaml", ".json", ".txt", ""}
    assert {name for name in files if not Path(name).suffix} <= {"MLmodel", "registered_model_meta"}
    # The first bytes of a pickle, and of the archive that torch.save writes.
    assert [name for name, path in files.items() if path.read_bytes()[:2] in (b"\x80\x04", b"\x80\x05", b"PK")] == []


def test_a_model_without_a_head_is_logged_and_registered_but_not_served(store, tmp_path):
    run = RUN.replace({"model.num_classes": None})
    save_model(str(tmp_path / "model"), run, network(run))
    run_id = new_run(store)
    uri = log_model(run_id, str(tmp_path / "model"))
    registered = mlflow.register_model(uri, "headless")
    for address in (uri, f"runs:/{run_id}/vit_u2x2_8", f"models:/headless/{registered.version}"):
        assert load_model(address).vit.state_dict().keys() == network(run).state_dict().keys()
    with pytest.raises(MlflowException, match="python_function"):
        load_logged(uri)


def test_a_folder_on_s3_is_logged_too(store, folder, s3_server):
    for name in storage.list_files(folder):
        storage.write_bytes(storage.join("s3://bucket/served", name), storage.read_bytes(storage.join(folder, name)))
    images = pictures(1)
    assert agree(load_logged(log_model(new_run(store), "s3://bucket/served")).predict(rows(images)), images)


def test_a_registered_model_is_loaded_by_its_alias(store, uri):
    registered = mlflow.register_model(uri, "vit")
    store.set_registered_model_alias("vit", "champion", registered.version)
    images = pictures(1)
    assert agree(load_logged("models:/vit@champion").predict(rows(images)), images)


@pytest.mark.slow
def test_it_loads_without_vitray_and_ray_and_its_requirements_match_its_imports(uri, starting, tmp_path):
    # Meanwhile the server starts.
    images = pictures(2)
    (tmp_path / "image.png").write_bytes(encoded(images[0]))
    np.save(tmp_path / "pixels.npy", images)
    command = [sys.executable, "-c", CENSUS, uri]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert agree(result["records"], images[:1])
    assert agree(result["pixels"], images)
    package = str(Path(__file__).parents[1] / "vitray")
    assert [file for file in result["files"] if file.startswith(package)] == []
    trees = [ast.parse(Path(file).read_text()) for file in result["files"]]
    loaded = {name for tree in trees for name in imported(tree.body)}
    # Imported inside functions, for networks of torchvision and for JPEG files.
    later = {name for tree in trees for name in imported(ast.walk(tree))} & {"torchvision", "simplejpeg"}
    # pydantic pins pydantic_core itself.
    needed = loaded - sys.stdlib_module_names - {"vitray", "pydantic_core"}
    owners = {name: {owner.lower() for owner in packages_distributions()[name]} for name in needed}
    assert [name for name, packages in owners.items() if not packages & set(REQUIREMENTS)] == []
    assert set(REQUIREMENTS) <= later.union(*owners.values())


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the packages that some nodes of a module import."""
    found = list(nodes)
    names = {alias.name for node in found if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in found if isinstance(node, ast.ImportFrom) and node.module}
    return {name.partition(".")[0] for name in names}


# ---- the server ------------------------------------------------------------------------------------------------------


def post(address: str, body: dict) -> list[dict]:
    content = json.dumps(body).encode()
    request = urllib.request.Request(f"{address}/invocations", content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["predictions"]


def test_the_server_answers_encoded_images_and_pixels(server):
    images = pictures(2)
    records = [{"image": text(image)} for image in images]
    for body in (
        {"dataframe_records": records},
        {"dataframe_split": {"columns": ["image"], "data": [[record["image"]] for record in records]}},
        {"inputs": records},
        {"instances": records},
        {"inputs": [{"image": image.tolist()} for image in images]},
    ):
        assert agree(post(server, body), images)
    [answer] = post(server, {"dataframe_records": records[:1], "params": {"top_k": 2}})
    assert [one["label"] for one in answer["top"]] == np.argsort(-expected(images[:1])[0])[:2].tolist()


def test_the_server_names_a_bad_image(server):
    good, bad = {"image": text(pictures(1)[0])}, {"image": base64.b64encode(b"hello").decode()}
    with pytest.raises(urllib.error.HTTPError) as rejected:
        post(server, {"dataframe_records": [good, bad]})
    with rejected.value as response:
        assert response.code == 400
        assert json.load(response)["message"].endswith("Error: image 1: not an image")
