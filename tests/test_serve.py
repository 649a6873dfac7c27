"""`vitray serve`: a real Ray Serve and real HTTP clients; the parts without Ray are tested without it."""

import base64
import io
import json
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_deltas import fresh, is_attention, tuned

from pipelines.__main__ import main
from vitray.config import Run
from vitray.config.serving import TOKEN_VARIABLE, Limits, Serving, check_address, default_task, parse_tasks
from vitray.errors import ConfigError
from vitray.models.vit import ViT
from vitray.serving.hosted import Hosted, Item, check_tasks
from vitray.serving.options import build_parser, read_settings
from vitray.serving.replica import Replica
from vitray.serving.request_body import BadRequest, Query, read_form, read_query
from vitray.serving.serve import bundle_of, checked, gpus_of_a_replica
from vitray.weights import load_model, save_model

CLASSES = ["ant", "bee", "cat", "dog", "eel"]
TOKEN = "a-secret-of-the-tests"


# ---- the body of a request -------------------------------------------------------------------------------------------


def form(*parts: tuple[str, bytes], boundary: str = "x1y2") -> bytes:
    """Return a multipart form as browsers and curl write it."""
    lines = b""
    for head, content in parts:
        lines += f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n".encode()
        lines += b"Content-Type: application/octet-stream\r\n\r\n" + content + b"\r\n"
    return lines + f"--{boundary}--\r\n".encode()


def read(body: bytes, kind: str = "image/png", limits: Limits | None = None, **parameters: str) -> Query:
    return read_query(parameters, kind, body, limits or Limits())


FORM = "multipart/form-data; boundary=x1y2"


def test_raw_json_and_form_bodies_hold_the_same_images():
    first, second = b"\x89PNG\r\n\x1a\n--x1y\r\n\r\n\xff", bytes(range(256)) * 3
    assert read(first) == Query(None, None, [first])
    assert read(first, "application/x-www-form-urlencoded", task="birds", top_k="3") == Query("birds", 3, [first])
    texts = [base64.encodebytes(image).decode() for image in (first, second)]
    body = json.dumps({"images": texts, "task": "cars", "top_k": 2}).encode()
    assert read(body, "application/json; charset=utf-8") == Query("cars", 2, [first, second])
    assert read(body, "application/json", task="birds").task == "birds"
    assert read(json.dumps({"image": texts[0]}).encode(), "application/json").images == [first]
    files = form(
        ('name="image"; filename="a.png"', first), ('name="b"; filename="b.png"', second), ('name="top_k"', b"4")
    )
    assert read(files, FORM) == Query(None, 4, [first, second])
    assert read(files, 'multipart/form-data; charset=x; boundary="x1y2"') == Query(None, 4, [first, second])


def test_the_form_of_the_standard_library_is_read():
    """Python's own writer of MIME messages is the reference."""
    from email.mime.application import MIMEApplication
    from email.mime.multipart import MIMEMultipart
    from email.policy import HTTP

    images = [bytes([value]) * 50 for value in (65, 10, 13)]
    message = MIMEMultipart("form-data", boundary="====q====", policy=HTTP)
    for index, image in enumerate(images):
        part = MIMEApplication(image, _encoder=lambda part: None, policy=HTTP)
        part.set_payload("@" * 50)  # replaced below: the writer would change line ends
        part.add_header("Content-Disposition", "form-data", name=f"f{index}", filename=f"{index}.bin")
        message.attach(part)
    body = message.as_bytes().partition(b"\r\n\r\n")[2]
    for image in images:
        body = body.replace(b"@" * 50, image, 1)
    assert read(body, message["content-type"]).images == images


@pytest.mark.parametrize(
    ("kind", "body", "parameters", "status", "message"),
    [
        ("image/png", b"", {}, 400, "the body is empty"),
        ("text/html", b"x", {}, 415, "got text/html"),
        ("image/png", b"x", {"tsak": "a"}, 400, "got the parameter tsak"),
        ("image/png", b"x", {"top_k": "0"}, 400, "top_k: got '0'"),
        ("image/png", b"x", {"top_k": "1.5"}, 400, "top_k: got '1.5'"),
        ("image/png", b"x", {"top_k": "9" * 100}, 400, "top_k: got"),
        ("application/json", b"{", {}, 400, "not JSON"),
        ("application/json", b"[" * 100_000, {}, 400, "not JSON"),
        ("application/json", b"[1]", {}, 400, "JSON: got list"),
        ("application/json", b"{}", {}, 400, "either image or images"),
        ("application/json", b'{"image": "aGk=", "images": []}', {}, 400, "either image or images"),
        ("application/json", b'{"images": []}', {}, 400, "got 0 images, expected 1 to 2"),
        ("application/json", b'{"images": ["aGk=", "aGk=", "aGk="]}', {}, 400, "got 3 images, expected 1 to 2"),
        ("application/json", b'{"images": "aGk="}', {}, 400, "images: got str"),
        ("application/json", b'{"image": 5}', {}, 400, "image 0: got int"),
        ("application/json", b'{"image": "!"}', {}, 400, "image 0: not base64"),
        ("application/json", '{"image": "ü"}'.encode(), {}, 400, "image 0: not base64"),
        ("application/json", b'{"image": ""}', {}, 400, "image 0: empty"),
        ("application/json", b'{"image": "aGk=", "task": 3}', {}, 400, "task: got int"),
        ("application/json", b'{"image": "aGk=", "top_k": true}', {}, 400, "top_k: got 'True'"),
        ("application/json", b'{"image": "aGk=", "topk": 3}', {}, 400, "the field 'topk'"),
        ("multipart/form-data", b"x", {}, 400, "no boundary"),
        (FORM, b"x", {}, 400, "the form has no end"),
        (FORM, form(('name="image"', b"x"))[:-6], {}, 400, "the form has no end"),
        (FORM, form(("filename=a", b"x")), {}, 400, "a part without a name"),
        (FORM, form(('name="tsak"', b"x")), {}, 400, "the field b'tsak'"),
        (FORM, form(('name="task"', b"x")), {}, 400, "got 0 images"),
    ],
)
def test_a_bad_body_is_one_message(kind, body, parameters, status, message):
    with pytest.raises(BadRequest) as bad:
        read(body, kind, Limits(images=2), **parameters)
    assert bad.value.status == status
    assert message in bad.value.message
    assert len(bad.value.message) <= 500
    assert bad.value.message.isprintable()


def test_too_many_values_or_images_are_refused_before_they_are_parsed_or_decoded(monkeypatch):
    def never(*arguments: object, **settings: object) -> None:
        raise AssertionError("read too early")

    monkeypatch.setattr("base64.b64decode", never)
    limits = Limits(images=2)
    three = json.dumps({"images": ["aGk="] * 3}).encode()
    with pytest.raises(BadRequest, match="got 3 images, expected 1 to 2"):
        read(three, "application/json", limits)
    monkeypatch.setattr("json.loads", never)
    for body in (b'{"images": [%s""]}' % (b'"",' * 10_000), b"[%s]" % (b"{}," * 10_000)):
        with pytest.raises(BadRequest, match=r"JSON: got 10,001 values, expected at most 2 images, task and top_k"):
            read(body, "application/json", limits)


def test_a_form_has_no_more_parts_than_images_task_and_top_k():
    limits, words = Limits(images=2), [('name="task"', b"a"), ('name="top_k"', b"3")]
    images = [('name="image"', bytes([value % 256])) for value in range(1000)]
    assert read(form(*words, *images[1:3]), FORM, limits) == Query("a", 3, [b"\1", b"\2"])
    with pytest.raises(BadRequest, match="got 3 images, expected 1 to 2"):
        read(form(*images[:3]), FORM, limits)
    for parts in (5, 1000):
        with pytest.raises(BadRequest, match="more than 4 parts; expected 2 images at most"):
            read(form(*images[:parts]), FORM, limits)


# ---- names, addresses and limits -------------------------------------------------------------------------------------


def test_tasks_are_words():
    assert parse_tasks(["a=x", "b-2.c_d=models:/b@champion"]) == {"a": "x", "b-2.c_d": "models:/b@champion"}
    assert default_task(["base", "a"]) == "base"
    assert default_task(["a"]) == "a"
    assert default_task(["a", "b"]) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["birds"], "birds: expected TASK=DELTA"),
        (["=x"], "=x: expected TASK=DELTA"),
        (["a="], "a=: expected TASK=DELTA"),
        (["a b=x"], "expected TASK=DELTA"),
        (["base=x"], "base is the task of MODEL itself"),
        (["a=x", "a=y"], "the task a is there already, as a=x"),
    ],
)
def test_bad_words_are_rejected(words, message):
    with pytest.raises(ConfigError, match=message):
        parse_tasks(words)


def test_serve_does_not_listen_on_all_interfaces_without_a_token(monkeypatch):
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=r"RAY_SERVE_ENABLE_HA_PROXY: got 1, .* unset it, or set VITRAY_SERVE_TOKEN"):
        checked(Serving(base="no such folder", replicas=(2, 2)), "127.0.0.1", 8000)
    with pytest.raises(ConfigError, match="no such folder"):  # this process serves, without Ray Serve
        checked(Serving(base="no such folder"), "127.0.0.1", 8000)


def test_an_address_beyond_this_machine_needs_a_token():
    check_address("127.0.0.1", None)
    check_address("0.0.0.0", TOKEN)
    with pytest.raises(ConfigError, match=r"--host: got 0.0.0.0, which other machines reach, and no token"):
        check_address("0.0.0.0", None)
    with pytest.raises(ConfigError, match=r"VITRAY_SERVE_TOKEN: got 5 characters, expected at least 16"):
        check_address("127.0.0.1", "short")


# ---- the networks of a replica ---------------------------------------------------------------------------------------


def png(value: int = 0, size: tuple[int, int] = (40, 50), kind: str = "PNG") -> bytes:
    coarse = np.random.default_rng(value).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((size[1], size[0]), Image.Resampling.NEAREST).save(file, kind)
    return file.getvalue()


def store_network(place: Path, vit: ViT, base: Path | None = None, classes: list[str] | None = None) -> str:
    run = Run(model=vit.model).replace({"data.eval_crop": {"crop_ratio": 0.8}})
    save_model(str(place), run, vit, classes, relative_to=None if base is None else str(base))
    return str(place)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A base with five classes, and deltas of it: a (3 classes), b (48 px), and a stranger."""
    place = tmp_path_factory.mktemp("serve")
    base = fresh()
    store_network(place / "base", base, classes=CLASSES)
    store_network(place / "a", tuned(base, is_attention, 1, num_classes=3), place / "base", ["x", "y", "z"])
    store_network(place / "a2", tuned(base, is_attention, 5, num_classes=3), place / "base", ["x", "y", "z"])
    store_network(place / "b", tuned(base, is_attention, 2, image_size=48), place / "base")
    store_network(place / "other", fresh(seed=7))
    store_network(place / "stranger", tuned(fresh(seed=7)), place / "other")
    store_network(place / "headless", tuned(base, num_classes=None), place / "base")
    return place


def hosted_in(folder: Path, tasks: dict[str, str]) -> Hosted:
    hosted = Hosted(Serving(base=str(folder / "base"), limits=Limits(pixels=10_000)), torch.device("cpu"))
    hosted.set_tasks({name: str(folder / url) for name, url in tasks.items()})
    return hosted


def answers(hosted: Hosted, task: str | None, images: list[bytes]) -> list[np.ndarray]:
    _, source, _ = hosted.choose(task, None)
    return hosted.probabilities([hosted.item(source.member, image, index) for index, image in enumerate(images)])


def logged_answer(url: Path, image: bytes) -> np.ndarray:
    """Return the probabilities of a network by itself, with the cropping written out."""
    from vitray.data.augment.crops import crop_center
    from vitray.data.augment.mixing import normalized
    from vitray.weights import load_model

    run, vit, _ = load_model(str(url))
    pixels = np.asarray(Image.open(io.BytesIO(image)).convert("RGB"))
    view = crop_center(pixels, run.data.eval_crop, run.model.image_shape)
    with torch.inference_mode():
        return vit(normalized(torch.from_numpy(view)[None], run.data.normalize)).softmax(1)[0].numpy()


def test_a_long_header_of_a_form_takes_no_time():
    body = b"--b\r\n" + b"content-disposition:" * 20_000 + b"\r\n--b--"
    with pytest.raises(BadRequest, match="a part without a name in its first 8,192 bytes"):
        read_form("multipart/form-data; boundary=b", body, Limits())


def test_a_replica_answers_for_each_task_and_changes_tasks(folder):
    hosted = hosted_in(folder, {"a": "a", "b": "b"})
    images = [png(value) for value in range(3)]
    for task in ("base", "a", "b"):
        for got, image in zip(answers(hosted, task, images), images, strict=True):
            np.testing.assert_allclose(got, logged_answer(folder / task, image), atol=1e-5)
    held = hosted.choose("a", None)[1].member
    hosted.set_tasks({"a": str(folder / "a2"), "c": str(folder / "b")})
    assert [row["task"] for row in hosted.listing()] == ["base", "a", "c"]
    [new] = answers(hosted, "a", images[:1])
    np.testing.assert_allclose(new, logged_answer(folder / "a2", images[0]), atol=1e-5)
    [old] = hosted.probabilities([hosted.item(held, images[0], 0)])
    np.testing.assert_allclose(old, logged_answer(folder / "a", images[0]), atol=1e-5)


@pytest.mark.parametrize(
    ("task", "top_k", "status", "message"),
    [
        ("bird", None, 404, "task: got 'bird', expected one of base, birds; did you mean birds"),
        ("birds", 4, 400, "top_k: got 4, expected 1 to 3"),
    ],
)
def test_a_wrong_task_or_top_k_is_named(folder, task, top_k, status, message):
    with pytest.raises(BadRequest) as bad:
        hosted_in(folder, {"birds": "a"}).choose(task, top_k)
    assert (bad.value.status, bad.value.message[: len(message)]) == (status, message)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no image", "image 3: not an image"),
        (png(size=(101, 100)), "image 3: too large: 100x101, max_pixels=10000"),
        (png()[:200], "image 3: cannot be decoded"),
    ],
)
def test_bytes_that_are_no_image_are_refused(folder, data, message):
    hosted = hosted_in(folder, {})
    with pytest.raises(BadRequest) as bad:
        hosted.item(hosted.choose(None, None)[1].member, data, 3)
    assert message in bad.value.message


def test_an_alias_is_followed_and_a_broken_network_is_not(folder, monkeypatch):
    """The registry is a table here; the test with a real Serve uses MLflow's."""
    from vitray.serving import hosted as module

    versions = {"models:/birds@champion": str(folder / "a")}
    monkeypatch.setattr(module, "pin_uri", lambda url: versions.get(url, url))
    hosted = Hosted(Serving(base=str(folder / "base")), torch.device("cpu"))
    hosted.set_tasks({"birds": "models:/birds@champion"})
    assert hosted.follow_aliases() == []
    versions["models:/birds@champion"] = str(folder / "a2")
    assert hosted.follow_aliases() == ["birds"]
    np.testing.assert_allclose(answers(hosted, "birds", [png()])[0], logged_answer(folder / "a2", png()), atol=1e-5)
    versions["models:/birds@champion"] = str(folder / "stranger")
    assert hosted.follow_aliases() == []
    [_, row] = hosted.listing()
    assert row["model"] == str(folder / "a2")
    assert "expected a delta of" in row["error"]
    np.testing.assert_allclose(answers(hosted, "birds", [png()])[0], logged_answer(folder / "a2", png()), atol=1e-5)


def spoiled(folder: Path, place: Path, value: float) -> str:
    """Write a delta of the base whose logits of the second class are that value, or infinite."""
    run, vit, classes = load_model(str(folder / "a"))
    vit.head.bias.data[1] = value
    vit.head.weight.data[1] = value
    save_model(str(place), run, vit, classes, relative_to=str(folder / "base"))
    return str(place)


@pytest.mark.parametrize(
    ("value", "reason"),
    [(torch.nan, "not finite as float32 in head.bias"), (3e38, "the logits of a black image are not finite")],
)
def test_an_alias_on_a_network_that_cannot_answer_is_not_followed_and_logged_once(
    folder, tmp_path, monkeypatch, value, reason
):
    from vitray.serving import hosted as module

    lines: list[str] = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *words: lines.append(text % words))
    versions = {"models:/birds@champion": str(folder / "a")}
    monkeypatch.setattr(module, "pin_uri", lambda url: versions.get(url, url))
    hosted = Hosted(Serving(base=str(folder / "base")), torch.device("cpu"))
    hosted.set_tasks({"birds": "models:/birds@champion"})
    versions["models:/birds@champion"] = spoiled(folder, tmp_path / "bad", value)
    for _ in range(3):
        assert hosted.follow_aliases() == []
    [_, row] = hosted.listing()
    assert row["model"] == str(folder / "a")
    assert reason in row["error"]
    np.testing.assert_allclose(answers(hosted, "birds", [png()])[0], logged_answer(folder / "a", png()), atol=1e-5)
    [line] = lines
    assert line.startswith(f"task birds keeps {folder / 'a'}: ConfigError: {tmp_path / 'bad'}: ")
    versions["models:/birds@champion"] = str(folder / "a2")
    assert hosted.follow_aliases() == ["birds"]
    assert hosted.listing()[1]["error"] is None


def test_a_task_that_cannot_answer_is_not_taken_into_service(folder, tmp_path):
    url = spoiled(folder, tmp_path / "bad", 3e38)
    hosted = Hosted(Serving(base=str(folder / "base")), torch.device("cpu"))
    hosted.set_tasks({"a": str(folder / "a"), "bad": url})
    assert [row["task"] for row in hosted.listing()] == ["base", "a"]
    with pytest.raises(BadRequest, match=r"task bad: ConfigError: .*the logits of a black image are not finite") as bad:
        hosted.choose("bad", None)
    assert bad.value.status == 503


class Failing:
    """Stands before the networks of a replica and fails for those of `tasks`, and for black images if `broken`."""

    def __init__(self, hosted: Hosted, tasks: list[str], broken: bool) -> None:
        self.probabilities = hosted.probabilities
        self.members, self.broken = {hosted.sources[task].member for task in tasks}, broken

    def __call__(self, items: list[Item]) -> list[np.ndarray]:
        if any(item.member in self.members and (self.broken or item.view.any()) for item in items):
            raise RuntimeError("mat1 and mat2 must have the same dtype")
        return self.probabilities(items)


def mixed_batch(hosted: Hosted, tasks: list[str]) -> list[Item]:
    return [hosted.item(hosted.choose(task, None)[1].member, png(at), at) for at, task in enumerate(tasks)]


@pytest.mark.parametrize("broken", [False, True])
def test_a_failing_task_fails_alone_and_only_a_broken_replica_is_replaced(folder, monkeypatch, broken):
    network = Replica(Serving(base=str(folder / "base")))
    hosted = network.hosted
    hosted.set_tasks({"a": str(folder / "a"), "b": str(folder / "b")})
    tasks = ["a", "base", "b", "a", "base"]
    items = mixed_batch(hosted, tasks)
    wanted = hosted.probabilities(items)
    monkeypatch.setattr(hosted, "probabilities", Failing(hosted, ["a"], broken))
    for _ in range(3):
        network.check_health()
        for task, row, expected in zip(tasks, hosted.answers(items), wanted, strict=True):
            if task == "a":
                assert row == "RuntimeError: mat1 and mat2 must have the same dtype"
            else:
                np.testing.assert_allclose(row, expected, atol=1e-5)
    if broken:
        with pytest.raises(RuntimeError, match="3 batches in a row failed"):
            network.check_health()
    else:
        network.check_health()
    monkeypatch.undo()
    assert [type(row) for row in hosted.answers(items)] == [np.ndarray] * 5
    network.check_health()


def test_logits_that_are_not_finite_for_one_image_leave_the_others_their_answers(folder):
    hosted = hosted_in(folder, {"a": "a"})
    member = hosted.sources["a"].member
    odd = replace(member, state=member.state | {"head.weight": torch.full_like(member.state["head.weight"], 3e38)})
    items = [*mixed_batch(hosted, ["a", "base"]), Item(odd, hosted.item(member, png(), 0).view)]
    rows = hosted.answers(items)
    assert rows[2] == "the network's logits are not finite"
    for row, expected in zip(rows[:2], hosted.probabilities(items[:2]), strict=True):
        np.testing.assert_allclose(row, expected, atol=1e-5)
    assert hosted.failures == 0


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ([], {"num_replicas": 1}),
        (["--replicas", "3"], {"num_replicas": 3}),
        (["--replicas", "2-5", "--batch", "32"], {"autoscaling_config": (2, 5, 32)}),
    ],
)
def test_replicas_are_a_number_or_bounds_that_serve_accepts(option, expected):
    from ray.serve.schema import DeploymentSchema

    from vitray.serving.app import replica_count

    count = replica_count(read_settings(build_parser().parse_args(["models/base", *option])))
    assert count.keys() == expected.keys()
    checked = DeploymentSchema.model_validate({"name": "network", **count})
    if "num_replicas" in expected:
        assert checked.num_replicas == expected["num_replicas"]
    else:
        bounds = count["autoscaling_config"]
        assert tuple(bounds.values()) == expected["autoscaling_config"]
        assert list(bounds) == ["min_replicas", "max_replicas", "target_ongoing_requests"]


@pytest.mark.parametrize(
    ("option", "bundle"),
    [([], {"CPU": 1}), (["--gpus", "0"], {"CPU": 1}), (["--gpus", "0.5", "--cpus", "2"], {"CPU": 2, "GPU": 0.5})],
)
def test_a_replica_takes_its_cpus_and_the_gpus_of_an_option(option, bundle):
    assert bundle_of(read_settings(build_parser().parse_args(["models/base", *option]))) == bundle


def test_bodies_have_room_for_the_largest():
    settings = read_settings(build_parser().parse_args(["models/base", "--max-mb", "1024", "--memory-mb", "2048"]))
    assert (settings.limits.body_bytes, settings.limits.memory_bytes) == (2**30, 2**31)
    with pytest.raises(ConfigError, match="--memory-mb: got 512, expected at least --max-mb, 1024"):
        read_settings(build_parser().parse_args(["models/base", "--max-mb", "1024"]))
    with pytest.raises(ValueError, match="memory_bytes: got 10, expected at least body_bytes, 11"):
        Limits(body_bytes=11, memory_bytes=10)


@pytest.mark.parametrize("number", ["-1", "9", "nan"])
def test_a_useless_number_of_gpus_is_refused(number):
    with pytest.raises(ConfigError, match=f"--gpus: got {number}, expected a number from 0 to 8"):
        read_settings(build_parser().parse_args(["models/base", f"--gpus={number}"]))


def test_the_serve_config_for_kubernetes_is_valid():
    import yaml
    from ray.serve.schema import ServeDeploySchema

    service, _ = yaml.safe_load_all((Path(__file__).parents[1] / "deploy" / "serve.yaml").read_text())
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    [application] = config.applications
    assert application.import_path == "vitray.serving.app:build"
    serving = Serving.model_validate(application.args)
    assert (serving.replicas, serving.token, list(serving.tasks)) == ((1, 4), True, ["cars", "birds"])
    cluster = service["spec"]["rayClusterConfig"]
    assert f"ray=={cluster['rayVersion']}\n" in (Path(__file__).parents[1] / "constraints.txt").read_text()
    assert cluster["authOptions"] == {"mode": "token"}
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        secrets = {each["name"]: each["valueFrom"] for each in container["env"] if "valueFrom" in each}
        assert secrets == {
            "VITRAY_SERVE_TOKEN": {"secretKeyRef": {"name": "vitray-serve", "key": "token"}},
            "MLFLOW_TRACKING_USERNAME": {"secretKeyRef": {"name": "vitray-mlflow", "key": "username"}},
            "MLFLOW_TRACKING_PASSWORD": {"secretKeyRef": {"name": "vitray-mlflow", "key": "password"}},
        }


@pytest.mark.parametrize(("replicas", "gpus", "share"), [(1, 1, 1.0), (2, 4, 1.0), (2, 1, 0.5), (3, 2, 0.5), (2, 0, 0)])
def test_replicas_share_the_gpus_of_a_cluster_that_does_not_grow(replicas, gpus, share, monkeypatch):
    monkeypatch.delenv("VITRAY_GROWS_WITHIN", raising=False)
    assert gpus_of_a_replica(replicas, gpus) == share


@pytest.mark.parametrize(
    ("gpus", "device", "share"),
    [(0, "gpu", 1.0), (1, "gpu", 1.0), (1, "cpu", 0.25), (2, "", 0.5), (0, "", 0), (0, "cpu", 0)],
)
def test_a_replica_has_a_whole_gpu_where_a_cluster_adds_them(gpus, device, share, monkeypatch):
    monkeypatch.setenv("VITRAY_GROWS_WITHIN", "1800")
    monkeypatch.setenv("VITRAY_GROWS_DEVICE", device)
    assert gpus_of_a_replica(4, gpus) == share


# ---- bad input ends before Ray starts --------------------------------------------------------------------------------


def test_the_tasks_are_checked_without_reading_the_deltas(folder):
    assert check_tasks(str(folder / "base"), {"a": str(folder / "a")}) == ["base", "a"]
    with pytest.raises(ConfigError, match=r"s=.*stranger: it is a delta of .*other .*; expected a delta of .*base"):
        check_tasks(str(folder / "base"), {"s": str(folder / "stranger")})
    with pytest.raises(ConfigError, match=r"headless: a network of task supervised without classes"):
        check_tasks(str(folder / "base"), {"h": str(folder / "headless")})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{base}", "s={stranger}"], "expected a delta of"),
        (["{base}", "s={other}"], "it is whole"),
        (["{base}", "a={a}", "a={b}"], "the task a is there already"),
        (["{absent}"], "absent"),
        (["{base}", "a={absent}"], "absent: no such file or folder"),
        (["{base}", "--replicas", "3-2"], "--replicas: got 3-2"),
        (["{base}", "--host", "0.0.0.0"], "VITRAY_SERVE_TOKEN"),
        (["{base}", "--port", "{taken}"], "--port: got"),
    ],
)
def test_bad_input_is_one_line_and_status_2(folder, words, message, capsys, monkeypatch):
    monkeypatch.delenv("VITRAY_SERVE_TOKEN", raising=False)
    places = {name: folder / name for name in ("base", "a", "b", "stranger", "other", "absent")}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        args = [word.format(taken=taken.getsockname()[1], **places) for word in words]
        assert main(["serve", *args]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
