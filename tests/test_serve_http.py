"""`vitray serve` as a process: a real Ray Serve, real HTTP clients, a real MLflow registry, kills."""

import base64
import http.client
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import mlflow
import numpy as np
import psutil
import pytest
from mlflow import MlflowClient
from PIL import Image
from test_deltas import fresh, is_attention, tuned
from test_serve import CLASSES, form, logged_answer, png, store_network

from vitray.serving.flavor import log_model
from vitray.tracking.model_registry import register_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

TOKEN = "a-secret-of-the-tests"
START_SECONDS = 1200
FORM = "multipart/form-data; boundary=x1y2"


class Reply(NamedTuple):
    """The answer to a request."""

    status: int
    body: Any


class Server:
    """A running `vitray serve`."""

    def __init__(self, words: Sequence[str], cwd: Path, token: str | None = None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "pipelines.serve", *words, "--port", str(self.port)]
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment.pop("VITRAY_SERVE_TOKEN", None)
        self.token = token
        if token:
            environment["VITRAY_SERVE_TOKEN"] = token
        self.log = cwd / f"serve-{self.port}.log"
        with self.log.open("w") as output:
            self.process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=output, stderr=output)
        deadline = time.monotonic() + START_SECONDS
        while f"serving http://127.0.0.1:{self.port} " not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)

    def ask(self, method: str, path: str, body: bytes | None = None, kind: str = "image/png", **headers: str) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            given = {"Content-Type": kind} | ({"Authorization": f"Bearer {self.token}"} if self.token else {})
            connection.request(method, path, body, given | headers)
            response = connection.getresponse()
            content = response.read()
            is_json = response.headers.get_content_type() == "application/json"
            return Reply(response.status, json.loads(content) if is_json else content.decode())
        finally:
            connection.close()

    def predict(self, image: bytes, task: str = "base", top_k: int = 3) -> Reply:
        return self.ask("POST", f"/v1/predict?task={task}&top_k={top_k}", image)

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        lines = self.ask("GET", "/metrics").body.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def replicas(self, deployment: str = "network") -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if f"ServeReplica:vitray:{deployment}" in " ".join(child.cmdline())]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(120)
        finally:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("http")
    base = fresh()
    store_network(place / "base", base, classes=CLASSES)
    store_network(place / "a", tuned(base, is_attention, 1, num_classes=3), place / "base", ["x", "y", "z"])
    store_network(place / "b", tuned(base, is_attention, 2, image_size=48), place / "base")
    for number in (1, 2):
        store_network(place / f"v{number}", tuned(base, is_attention, 10 + number, num_classes=4), place / "base")
    return place


@pytest.fixture(scope="module")
def registry(folder) -> Iterator[MlflowClient]:
    """An MLflow with two versions of `birds`, of which the first is the champion."""
    with pytest.MonkeyPatch.context() as patch:
        uri = f"sqlite:///{folder}/mlruns.db"
        patch.setenv("MLFLOW_TRACKING_URI", uri)
        mlflow.set_tracking_uri(uri)
        client = MlflowClient()
        experiment = client.create_experiment("serve", artifact_location=str(folder / "artifacts"))
        for number in (1, 2):
            run = client.create_run(experiment).info.run_id
            register_model(client, log_model(run, str(folder / f"v{number}")), "birds", None, None)
        client.set_registered_model_alias("birds", "champion", "1")
        yield client
        mlflow.set_tracking_uri(None)


@pytest.fixture(scope="module")
def server(folder, registry) -> Iterator[Server]:
    words = [str(folder / "base"), f"a={folder / 'a'}", f"b={folder / 'b'}", "birds=models:/birds@champion"]
    words += ["--replicas", "2", "--follow", "1", "--max-pixels", "100000", "--max-mb", "1"]
    words += ["--memory-mb", "2"]
    words += ["--batch", "8", "--queue", "40"]  # 72 requests at once: two batches of each replica, and the queue
    running = Server(words, folder, TOKEN)
    yield running
    running.stop()


def encoded(kind: str, value: int = 0) -> bytes:
    file = io.BytesIO()
    Image.open(io.BytesIO(png(value))).save(file, kind)
    return file.getvalue()


def is_answer_of(prediction: dict[str, Any], url: Path, image: bytes) -> bool:
    expected = logged_answer(url, image)
    order = np.argsort(-expected, kind="stable")[: len(prediction["top"])]
    got = [(row["label"], row["probability"]) for row in prediction["top"]]
    return all(
        label == wanted and abs(probability - expected[wanted]) < 1e-4
        for (label, probability), wanted in zip(got, order, strict=True)
    )


def test_images_of_all_tasks_and_formats_are_answered_as_by_each_network_alone(server, folder):
    jobs = [(task, encoded(kind, value)) for task in ("base", "a", "b") for kind in ("PNG", "JPEG", "WEBP")
            for value in range(4)]  # fmt: skip
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda job: server.predict(job[1], job[0]), jobs))
    for (task, image), reply in zip(jobs, replies, strict=True):
        assert reply.status == 200, reply
        assert (reply.body["task"], reply.body["model"]) == (task, str(folder / task))
        if image[:2] != b"\xff\xd8":  # Pillow's JPEG decoder of the reference rounds differently
            assert is_answer_of(reply.body["predictions"][0], folder / task, image)


def test_several_images_come_as_a_form_or_as_json(server, folder):
    images = [png(value) for value in range(3)]
    body = form(
        *((f'name="image"; filename="{i}.png"', image) for i, image in enumerate(images)), ('name="task"', b"a")
    )
    texts = [base64.b64encode(image).decode() for image in images]
    for reply in (
        server.ask("POST", "/v1/predict?top_k=2", body, FORM),
        server.ask(
            "POST", "/v1/predict", json.dumps({"images": texts, "task": "a", "top_k": 2}).encode(), "application/json"
        ),
    ):
        assert reply.status == 200, reply
        assert [row["class"] in "xyz" for row in reply.body["predictions"]] == [True] * 3
        for prediction, image in zip(reply.body["predictions"], images, strict=True):
            assert is_answer_of(prediction, folder / "a", image)


def test_the_other_pages_answer(server):
    listed = {row["task"]: row for row in server.ask("GET", "/v1/tasks").body["tasks"]}
    assert list(listed) == ["base", "a", "b", "birds"]
    assert listed["base"]["classes"] == CLASSES
    assert listed["birds"]["model"] == "models:/birds/1"
    assert server.ask("GET", "/healthz", Authorization="") == Reply(200, {"status": "ok", "tasks": 4})
    before = server.metric("vitray_images_total")
    assert server.predict(png()).status == 200
    assert server.metric("vitray_images_total") == before + 1


@pytest.mark.parametrize(
    ("path", "body", "kind", "status", "message"),
    [
        ("/v1/predict", b"", "image/png", 400, "the body is empty"),
        ("/v1/predict", b"no image", "image/png", 400, "image 0: not an image"),
        ("/v1/predict", png(size=(500, 400)), "image/png", 400, "image 0: too large: 400x500"),
        ("/v1/predict", png(size=(2, 40_000)), "image/png", 400, "image 0: too narrow"),
        ("/v1/predict?task=bird", png(), "image/png", 404, "did you mean birds"),
        ("/v1/predict?top_k=9", png(), "image/png", 400, "top_k: got 9, expected 1 to 5"),
        ("/v1/predict", bytes(2**20 + 1), "image/png", 413, "more than 1,048,576 bytes"),
        ("/v1/predict", b"{", "application/json", 400, "not JSON"),
        ("/v1/predict", b"x", "text/html", 415, "got text/html"),
        ("/v2/predict", png(), "image/png", 404, "path: got /v2/predict"),
    ],
)
def test_a_bad_request_is_one_message_and_the_server_stays_up(server, path, body, kind, status, message):
    reply = server.ask("POST", path, body, kind)
    assert reply.status == status
    assert list(reply.body) == ["error"]
    assert message in reply.body["error"]
    assert server.predict(png()).status == 200


def test_a_wrong_token_or_method_is_refused(server):
    for header in ("", "Bearer wrong", f"Basic {TOKEN}", TOKEN):
        assert server.ask("POST", "/v1/predict", png(), Authorization=header).status == 401
    assert server.ask("GET", "/metrics", Authorization="").status == 401
    assert server.ask("GET", "/v1/predict").status == 405


def test_bodies_beyond_the_memory_are_refused_while_they_arrive_and_the_others_are_answered(server):
    """Eight clients send 900 kB each and stop before the end: two of them fit into 2 MiB."""
    head = f"POST /v1/predict HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: image/png\r\n"
    head += "Content-Length: 900001\r\n\r\n"
    with ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60)) for _ in range(8)
        ]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda client: client.sendall(head.encode() + bytes(900_000)), clients))
        refused: list[socket.socket] = []
        deadline = time.monotonic() + 60
        while len(refused) < 6 and time.monotonic() < deadline:
            refused = select.select(clients, [], [], 1)[0]
        assert len(refused) == 6
        assert server.predict(png(), "a").status == 200
        for client in clients:
            if client not in refused:
                client.sendall(b"x")
        for client in clients:
            response = http.client.HTTPResponse(client)
            response.begin()
            error = json.load(response)["error"]
            if client in refused:
                assert (response.status, response.headers["retry-after"]) == (503, "1")
                assert error == "the server is busy: the bodies of its requests take 2,097,152 bytes, the limit"
            else:
                assert (response.status, error) == (400, "image 0: not an image")


class Load:
    """Clients that ask without a pause, each on its own connection."""

    def __init__(self, server: Server, task: str, clients: int) -> None:
        self.server, self.task = server, task
        self.replies: list[Reply] = []
        self.errors: list[str] = []
        self.ended = threading.Event()
        self.threads = [threading.Thread(target=self._run, args=(number,)) for number in range(clients)]

    def _run(self, number: int) -> None:
        while not self.ended.is_set():
            try:
                self.replies.append(self.server.predict(png(number), self.task))
            except OSError as error:
                self.errors.append(repr(error))

    def __enter__(self) -> "Load":
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join()

    def wait(self, count: int) -> None:
        deadline = time.monotonic() + 300
        while len(self.replies) < count and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(self.replies) >= count


def test_no_request_is_lost_while_replicas_are_killed(server):
    with Load(server, "a", 8) as load:
        load.wait(20)
        for _ in range(2):
            before = {process.pid for process in server.replicas()}
            victim = server.replicas()[0]
            victim.kill()
            load.wait(len(load.replies) + 50)
            deadline = time.monotonic() + 300
            while len({process.pid for process in server.replicas()} - before) < 1 and time.monotonic() < deadline:
                time.sleep(0.2)
        load.wait(len(load.replies) + 50)
    assert load.errors == []
    assert {reply.status for reply in load.replies} == {200}
    print(f"{len(load.replies)} requests, {server.metric('vitray_retries_total'):.0f} sent again, 2 replicas killed")


def test_a_moved_alias_is_followed_without_a_lost_request(server, registry, folder):
    with Load(server, "birds", 4) as load:
        load.wait(20)
        registry.set_registered_model_alias("birds", "champion", "2")
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            latest = load.replies[-20:]
            if all(reply.status == 200 and reply.body["model"] == "models:/birds/2" for reply in latest):
                break
            load.wait(len(load.replies) + 20)
    assert load.errors == []
    assert {reply.status for reply in load.replies} == {200}
    models = [reply.body["model"] for reply in load.replies]
    assert set(models) == {"models:/birds/1", "models:/birds/2"}
    for number in (1, 2):
        wanted = {
            image: np.sort(logged_answer(folder / f"v{number}", png(image)))[::-1][:3].round(4).tolist()
            for image in range(4)
        }
        for reply in load.replies:
            if reply.body["model"] == f"models:/birds/{number}":
                got = [row["probability"] for row in reply.body["predictions"][0]["top"]]
                assert any(np.allclose(got, values, atol=2e-4) for values in wanted.values())
    print(f"{len(load.replies)} requests while the alias moved, none lost")


def test_a_full_queue_is_refused_and_no_accepted_request_is_lost_with_its_replica(server):
    """Both replicas are halted: the queue fills. One dies, the other goes on."""
    victims = server.replicas()
    assert len(victims) == 2
    for replica in victims:
        replica.suspend()
    try:
        with ThreadPoolExecutor(120) as clients:
            asked = [clients.submit(server.predict, png(number % 8), "a") for number in range(120)]
            deadline = time.monotonic() + 60
            while not any(each.done() for each in asked) and time.monotonic() < deadline:
                time.sleep(0.05)
            victims[0].kill()
            time.sleep(1)
            victims[1].resume()
            replies = [each.result() for each in asked]
    finally:
        for replica in victims:
            if replica.is_running():
                replica.resume()
    statuses = [reply.status for reply in replies]
    refused = [reply for reply in replies if reply.status == 503]
    again = server.metric("vitray_retries_total")
    print(f"{statuses.count(200)} answered, {len(refused)} refused, {again:.0f} sent again since the start")
    assert set(statuses) == {200, 503}
    assert all(reply.body["error"] == "the queue is full: 40 requests wait already" for reply in refused)
    assert statuses.count(200) >= 40
