"""The gateway and a replica of `vitray serve` in one process, without Ray: answers, errors, retries, counts."""

import asyncio
import base64
import json
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.exceptions import BackPressureError
from starlette.requests import Request
from test_serve import folder as folder
from test_serve import form, logged_answer, png

from vitray.config.serving import Limits, Serving
from vitray.serving import app
from vitray.serving import gateway as gateway_module
from vitray.serving.app import RayGateway
from vitray.serving.replica import Batches, Replica

TOKEN = "a-secret-of-the-tests"


class Reply(NamedTuple):
    """The answer to a request."""

    status: int
    body: Any
    headers: Any


class Method(NamedTuple):
    """A method of a replica, as Serve's handle calls it."""

    remote: Callable[..., Awaitable[Any]]


class Handle:
    """A replica that fails as often as it is told to, with the errors that Serve raises."""

    def __init__(self, network: Any, errors: list[Exception]) -> None:
        self.network, self.errors = network, errors

    def __getattr__(self, name: str) -> Method:
        async def remote(*arguments: Any) -> Any:
            if self.errors:
                raise self.errors.pop(0)
            return await getattr(self.network, name)(*arguments)

        return Method(remote)


def serving(folder, **changes) -> Serving:
    settings = {"base": str(folder / "base"), "limits": Limits(body_bytes=50_000, pixels=10_000, images=8)}
    return Serving.model_validate(settings | changes)


def ask_all(folder, requests: list[dict[str, Any]], errors: list[Exception] | None = None, **changes) -> list[Reply]:
    """Return the replies to requests that arrive together."""

    async def run() -> list[Reply]:
        network = Replica(serving(folder, **changes))
        await network.reconfigure({"tasks": {"a": str(folder / "a"), "b": str(folder / "b")}})
        network.check_health()
        gateway = RayGateway.func_or_class(serving(folder, **changes), Handle(network, errors or []))
        return list(await asyncio.gather(*(ask(gateway, **request) for request in requests)))

    return asyncio.run(run())


async def ask(gateway: Any, path: str, body: bytes = b"", method: str = "POST", **headers: str) -> Reply:
    path, _, query = path.partition("?")
    given = {"content_type": "image/png"} | headers
    lines = [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()]
    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": lines}
    scope |= {"server": ("127.0.0.1", 8000), "scheme": "http", "root_path": ""}
    parts = [body[start : start + 10_000] for start in range(0, len(body), 10_000)] or [b""]

    async def receive() -> dict[str, Any]:
        if "x_pause" in headers:
            await asyncio.sleep(float(headers["x_pause"]))
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    response = await gateway(Request(scope, receive))
    is_json = response.media_type == "application/json"
    content = bytes(response.body)
    return Reply(response.status_code, json.loads(content) if is_json else content.decode(), response.headers)


def test_requests_of_all_tasks_are_answered_each_by_its_network(folder):
    images = [png(value) for value in range(4)]
    texts = [base64.b64encode(image).decode() for image in images]
    files = form(*((f'name="i"; filename="{index}"', image) for index, image in enumerate(images)))
    requests = [{"path": f"/v1/predict?task={task}", "body": image} for task in ("base", "a", "b") for image in images]
    requests += [
        {"path": "/v1/predict", "body": files, "content_type": "multipart/form-data; boundary=x1y2"},
        {
            "path": "/v1/predict",
            "body": json.dumps({"images": texts, "task": "a", "top_k": 2}).encode(),
            "content_type": "application/json",
        },
    ]
    *single, by_form, by_json = ask_all(folder, requests)
    assert {reply.status for reply in [*single, by_form, by_json]} == {200}
    tasks = [task for task in ("base", "a", "b") for _ in images]
    for reply, task, image in zip(single, tasks, images * 3, strict=True):
        assert (reply.body["task"], reply.body["model"]) == (task, str(folder / task))
        check_answer(reply.body["predictions"][0], logged_answer(folder / task, image))
    for reply, task, count in ((by_form, "base", 5), (by_json, "a", 2)):
        for prediction, image in zip(reply.body["predictions"], images, strict=True):
            assert len(prediction["top"]) == count
            check_answer(prediction, logged_answer(folder / task, image))


def check_answer(prediction: dict[str, Any], expected: np.ndarray) -> None:
    order = np.argsort(-expected, kind="stable")[: len(prediction["top"])]
    assert [row["label"] for row in prediction["top"]] == order.tolist()
    np.testing.assert_allclose([row["probability"] for row in prediction["top"]], expected[order], atol=1e-5)


def test_errors_are_json_with_one_message(folder):
    cases = [
        ({"path": "/v1/predict"}, 400, "the body is empty"),
        ({"path": "/v1/predict", "body": b"x"}, 400, "image 0: not an image"),
        ({"path": "/v1/predict", "body": png(size=(200, 100))}, 400, "image 0: too large: 100x200"),
        ({"path": "/v1/predict?task=c", "body": png()}, 404, "task: got 'c', expected one of base, a, b"),
        ({"path": "/v1/predict?top_k=6", "body": png()}, 400, "top_k: got 6, expected 1 to 5"),
        ({"path": "/v1/predict", "body": bytes(50_001)}, 413, "more than 50,000 bytes"),
        ({"path": "/v1/predict", "body": b"x", "content_length": "999999"}, 413, "more than 50,000 bytes"),
        ({"path": "/v1/predict", "method": "GET"}, 405, "expected POST"),
        ({"path": "/v1/predictions", "body": png()}, 404, "path: got /v1/predictions"),
        ({"path": "/v1/predict", "body": b"x", "content_type": "text/html"}, 415, "got text/html"),
    ]
    replies = ask_all(folder, [request for request, _, _ in cases])
    for reply, (request, status, message) in zip(replies, cases, strict=True):
        assert reply.status == status, (request, reply)
        assert list(reply.body) == ["error"]
        assert message in reply.body["error"]


def test_a_network_that_fails_is_500_and_other_tasks_are_answered(folder):
    async def run() -> list[Reply]:
        network = Replica(serving(folder))
        await network.reconfigure({"tasks": {"a": str(folder / "a")}})
        failing, probabilities = network.hosted.sources["a"].member, network.hosted.probabilities

        def fail(items: list[Any]) -> list[np.ndarray]:
            if any(item.member is failing for item in items):
                raise RuntimeError("no room for the batch")
            return probabilities(items)

        network.hosted.probabilities = fail
        gateway = RayGateway.func_or_class(serving(folder), Handle(network, []))
        return [await ask(gateway, f"/v1/predict?task={task}", png()) for task in ("a", "base")]

    failed, answered = asyncio.run(run())
    assert failed[:2] == (500, {"error": "task a, image 0: RuntimeError: no room for the batch"})
    assert answered.status == 200


def test_a_request_whose_replica_dies_is_sent_again_and_counted(folder, monkeypatch):
    monkeypatch.setattr(app, "FIRST_PAUSE", 0.001)
    died = [ActorUnavailableError("gone", None) for _ in range(3)]
    requests = [{"path": "/v1/predict", "body": png()}, {"path": "/v1/tasks", "method": "GET"}]
    predicted, tasks = ask_all(folder, requests, died)
    assert predicted.status == tasks.status == 200
    assert died == []
    assert [row["task"] for row in tasks.body["tasks"]] == ["base", "a", "b"]
    for_ever = [ActorUnavailableError("gone", None) for _ in range(2 * app.MOST_ATTEMPTS)]
    monkeypatch.setattr(app, "LONGEST_PAUSE", 0.001)
    [failed] = ask_all(folder, requests[:1], for_ever)
    assert failed.status == 503
    assert len(for_ever) == app.MOST_ATTEMPTS


def test_a_request_that_kills_replicas_is_sent_on_twice(folder, monkeypatch):
    monkeypatch.setattr(app, "FIRST_PAUSE", 0.001)
    died = [ActorDiedError() for _ in range(5)]
    replies = ask_all(folder, [{"path": "/v1/predict", "body": png()}], died)
    assert (replies[0].status, len(died)) == (503, 2)
    [reply] = ask_all(folder, [{"path": "/v1/predict", "body": png()}], died)
    assert (reply.status, died) == (200, [])


def test_a_replica_decodes_as_many_images_at_a_time_as_it_has_cpus(folder):
    network = Replica(serving(folder, cpus=2.5))
    decoded, item = [], network.hosted.item

    def watched(*arguments):
        decoded.append(threading.current_thread())
        time.sleep(0.01)
        return item(*arguments)

    network.hosted.item = watched
    answer = asyncio.run(network.predict("base", None, [png(value) for value in range(8)]))
    assert len(answer["predictions"]) == len(decoded) == 8
    assert len(set(decoded)) == 2


def test_images_behind_a_bad_one_of_a_request_are_not_decoded(folder):
    network = Replica(serving(folder, cpus=1))
    decoded, item = [], network.hosted.item

    def watched(*arguments):
        decoded.append(arguments)
        time.sleep(0.01)
        return item(*arguments)

    network.hosted.item = watched
    images = [b"bad", *(png(value) for value in range(60))]
    answer = asyncio.run(network.predict("base", None, images))
    assert answer["status"] == 400
    assert len(decoded) < 30


def test_images_that_arrive_while_a_batch_is_computed_are_the_next_one():
    computed, first, more = [], threading.Event(), threading.Event()

    def compute(items: Any) -> Any:
        first.set()
        assert more.wait(60)
        computed.append(list(items))
        if items == ["bad"]:
            raise RuntimeError("no room")
        return [item * 2 for item in items]

    async def run() -> None:
        batches: Any = Batches(compute, most=3)
        alone = asyncio.create_task(batches.answer("a"))
        await until(first.is_set)
        others = [asyncio.create_task(batches.answer(item)) for item in "bcdef"]
        await asyncio.sleep(0.01)
        others[-1].cancel()  # a client that has left
        await asyncio.sleep(0.01)
        more.set()
        assert await alone == "aa"
        assert await asyncio.gather(*others[:-1]) == ["bb", "cc", "dd", "ee"]
        with pytest.raises(RuntimeError, match="no room"):
            await batches.answer("bad")
        assert await batches.answer("g") == "gg"

    asyncio.run(run())
    assert computed == [["a"], ["b", "c", "d"], ["e"], ["bad"], ["g"]]


def test_a_full_queue_is_503_at_once(folder):
    [reply] = ask_all(folder, [{"path": "/v1/predict", "body": png()}], [BackPressureError(3, 3)])
    assert reply.status == 503
    assert reply.body["error"].startswith("the queue is full")
    assert reply.headers["retry-after"] == "1"


def test_a_token_is_needed_for_all_but_the_health(folder, monkeypatch):
    monkeypatch.setenv("VITRAY_SERVE_TOKEN", TOKEN)
    page = {"path": "/metrics", "method": "GET"}
    requests = [page | {"authorization": header} for header in (f"Bearer {TOKEN}", f"bearer {TOKEN}")]
    requests += [page, *(page | {"authorization": header} for header in ("Bearer x", f"Basic {TOKEN}", TOKEN, "ü"))]
    requests += [{"path": "/healthz", "method": "GET"}, {"path": "/v1/predict", "body": png()}]
    replies = ask_all(folder, requests, token=True)
    assert [reply.status for reply in replies] == [200, 200, 401, 401, 401, 401, 401, 200, 401]
    monkeypatch.delenv("VITRAY_SERVE_TOKEN")
    with pytest.raises(RuntimeError, match="VITRAY_SERVE_TOKEN is not set on this node"):
        ask_all(folder, [], token=True)


def test_the_metrics_count_requests_images_and_errors(folder):
    async def run() -> tuple[str, Reply]:
        network = Replica(serving(folder))
        await network.reconfigure({"tasks": {}})
        gateway = RayGateway.func_or_class(serving(folder), Handle(network, [ActorUnavailableError("gone", None)]))
        await ask(gateway, "/v1/predict", png())
        await ask(gateway, "/v1/predict", b"x")
        return (await ask(gateway, "/metrics", method="GET")).body, await ask(gateway, "/healthz", method="GET")

    page, health = asyncio.run(run())
    assert 'vitray_requests_total{status="200",task="base"} 1.0' in page
    assert 'vitray_requests_total{status="400",task=""} 1.0' in page
    assert 'vitray_images_total{task="base"} 1.0' in page
    assert "vitray_retries_total 1.0" in page
    assert "vitray_request_seconds_count 1.0" in page
    assert health[:2] == (200, {"status": "ok", "tasks": 1})


def test_a_slow_upload_is_refused_and_others_are_answered_meanwhile(folder):
    limits = Limits(body_bytes=50_000, pixels=10_000, images=8, upload_seconds=0.5)
    requests = [
        {"path": "/v1/predict", "body": bytes(20_000), "x_pause": "60"},
        {"path": "/v1/predict", "body": png(1)},
    ]
    slow, usual = ask_all(folder, requests, limits=limits)
    assert usual.status == 200
    assert (slow.status, slow.body["error"]) == (408, "body: got 0 bytes in 0.5 s, the longest time of an upload")


# ---- bodies ----------------------------------------------------------------------------------------------------------


class Waiting:
    """A replica that answers when it is told to."""

    def __init__(self) -> None:
        self.asked, self.told = 0, asyncio.Event()

    async def predict(self, *arguments: Any) -> dict[str, Any]:
        self.asked += 1
        await self.told.wait()
        return {"task": "base", "model": "", "predictions": []}

    async def tasks(self) -> list[dict[str, Any]]:
        return []


class Upload:
    """A client that sends parts of a body for ever, or goes away after some."""

    def __init__(self, size: int, parts: int | None = None) -> None:
        self.size, self.parts, self.sent = size, parts, 0

    async def receive(self) -> dict[str, Any]:
        await asyncio.sleep(0)
        if self.sent == self.parts:
            return {"type": "http.disconnect"}
        self.sent += 1
        return {"type": "http.request", "body": bytes(self.size), "more_body": True}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def test_bodies_take_no_more_memory_than_allowed_and_the_next_request_gets_503(folder):
    limits = Limits(body_bytes=50_000, memory_bytes=60_000)

    async def run() -> None:
        network = Waiting()
        gateway = RayGateway.func_or_class(serving(folder, limits=limits), Handle(network, []))
        waiting = asyncio.create_task(ask(gateway, "/v1/predict", bytes(40_000)))
        await until(lambda: network.asked == 1)
        refused = await ask(gateway, "/v1/predict", bytes(30_000))
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert refused.body["error"] == "the server is busy: the bodies of its requests take 60,000 bytes, the limit"
        small = asyncio.create_task(ask(gateway, "/v1/predict", bytes(20_000)))
        await until(lambda: network.asked == 2)
        assert gateway.gateway.held == 60_000
        network.told.set()
        assert {(await each).status for each in (waiting, small)} == {200}
        assert gateway.gateway.held == 0
        assert (await ask(gateway, "/v1/predict", bytes(50_000))).status == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    ("memory", "parts", "status", "sent"),
    [(10**6, None, 413, 51), (50_000, None, 413, 51), (10**6, 7, 400, 7)],
)
def test_an_upload_without_end_is_read_no_further_than_its_limit(folder, memory, parts, status, sent):
    limits = Limits(body_bytes=50_000, memory_bytes=memory)

    async def run() -> None:
        gateway = RayGateway.func_or_class(serving(folder, limits=limits), Handle(Waiting(), []))
        upload = Upload(1000, parts)
        scope = {"type": "http", "method": "POST", "path": "/v1/predict", "query_string": b"", "headers": []}
        response = await gateway(Request(scope, upload.receive))
        assert (response.status_code, upload.sent, gateway.gateway.held) == (status, sent, 0)

    asyncio.run(run())


def test_the_event_loop_answers_others_while_bodies_are_parsed_two_at_a_time(folder, monkeypatch):
    """The parsers wait until another request has been answered."""
    answered, threads, read_query = threading.Event(), [], gateway_module.read_query

    def read(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        assert answered.wait(20)
        return read_query(*arguments)

    monkeypatch.setattr(gateway_module, "read_query", read)

    async def run() -> None:
        network = Waiting()
        network.told.set()
        gateway = RayGateway.func_or_class(serving(folder), Handle(network, []))
        slow = [asyncio.create_task(ask(gateway, "/v1/predict", b"x")) for _ in range(6)]
        await until(lambda: len(threads) == 2)
        assert (await ask(gateway, "/v1/tasks", method="GET")).status == 200
        assert (len(threads), sum(each.done() for each in slow)) == (2, 0)
        answered.set()
        assert {reply.status for reply in await asyncio.gather(*slow)} == {200}

    asyncio.run(run())
    assert len(threads) == 6
    assert len(set(threads)) == 2
    assert threading.main_thread() not in threads
