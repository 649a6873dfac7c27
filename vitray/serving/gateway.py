"""HTTP before the replicas: token, limits, counts and errors as JSON. Knows nothing of Ray."""

import asyncio
import hmac
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from vitray.config.serving import LOOPBACK, TOKEN_VARIABLE, Serving, check_address
from vitray.errors import one_line
from vitray.serving.front_page import DOCS, OPENAPI, PAGE, PAGE_HEADERS
from vitray.serving.hosted import logger
from vitray.serving.request_body import BadRequest, Query, read_query

HEALTH_SECONDS = 5
# Bodies that are parsed at a time, beside the event loop.
PARSERS = 2
ROUTES = {"/v1/predict": "POST", "/v1/tasks": "GET", "/healthz": "GET", "/metrics": "GET"}
ROUTES |= {"/": "GET", "/docs": "GET", "/openapi.json": "GET"}


class Metrics:
    """The counts of one gateway, as Prometheus reads them."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "vitray_requests", "Requests by task and HTTP status", ["task", "status"], registry=registry
        )
        self.images = Counter("vitray_images", "Images answered by task", ["task"], registry=registry)
        self.retries = Counter("vitray_retries", "Requests sent again: a replica was lost", registry=registry)
        self.seconds = Histogram("vitray_request_seconds", "Time of an answered prediction", registry=registry)
        self.waiting = Gauge("vitray_requests_in_progress", "Requests without an answer yet", registry=registry)


class QueueFull(Exception):  # noqa: N818 - the name says what happened
    """More requests wait already than limits.queue."""


class NoReplica(Exception):  # noqa: N818
    """No replica can answer."""


# Calls a method of a replica with some arguments; raises QueueFull and NoReplica.
Ask = Callable[[str, tuple[Any, ...]], Awaitable[Any]]


class Gateway:
    """Answers the requests of a server."""

    def __init__(self, serving: Serving, ask: Ask) -> None:
        self.limits, self._ask = serving.limits, ask
        token = os.environ.get(TOKEN_VARIABLE)
        if serving.token and not token:
            raise RuntimeError(f"{TOKEN_VARIABLE} is not set on this node; expected the secret that requests give")
        check_address(LOOPBACK[0], token)  # its length
        self.token = token.encode() if token else None
        self.metrics = Metrics()
        self.parsers = ThreadPoolExecutor(PARSERS)
        self.held = 0  # bytes of the bodies of all requests that have no answer yet

    async def answer(self, request: Request) -> Response:
        """Answer one request."""
        began = time.perf_counter()
        task = ""
        with self.metrics.waiting.track_inprogress():
            try:
                response, task = await self._response(request)
            except BadRequest as bad:
                response = _error(bad.status, bad.message)
            except ClientDisconnect:
                response = _error(400, "the body ended early")
            except QueueFull:
                response = _error(503, f"the queue is full: {self.limits.queue} requests wait already")
            except NoReplica:
                response = _error(503, "no replica answers; the server's log has the reason")
            except Exception as error:
                logger.exception("a request failed")
                response = _error(500, one_line(error)[:300])
        if request.url.path == "/v1/predict":
            self.metrics.requests.labels(task, str(response.status_code)).inc()
            if response.status_code == 200:
                self.metrics.seconds.observe(time.perf_counter() - began)
        return response

    async def _response(self, request: Request) -> tuple[Response, str]:
        """Return the response and the task that answered."""
        path = request.url.path
        if path not in ROUTES:
            raise BadRequest(404, f"path: got {path[:100]}, expected one of {', '.join(ROUTES)}")
        if request.method != ROUTES[path]:
            raise BadRequest(405, f"method: got {request.method[:20]}, expected {ROUTES[path]} for {path}")
        if path == "/healthz":
            return await self._health(), ""
        if path in ("/", "/docs"):
            return Response(DOCS if path == "/docs" else PAGE, media_type="text/html", headers=PAGE_HEADERS), ""
        if path == "/openapi.json":
            return JSONResponse(OPENAPI), ""
        self._check_token(request.headers.get("authorization", ""))
        if path == "/metrics":
            return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST), ""
        if path == "/v1/tasks":
            return JSONResponse({"tasks": await self._ask("tasks", ())}), ""
        with self._room() as take:
            query = await self._query(request, take)
            result = await self._ask("predict", tuple(query))
        if "error" in result:
            raise BadRequest(result["status"], result["error"])
        self.metrics.images.labels(result["task"]).inc(len(query.images))
        return JSONResponse(result), result["task"]

    @contextmanager
    def _room(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts bytes of a body for the block, and refuses those for which there is no room."""
        own = 0

        def take(size: int) -> None:
            nonlocal own
            own += size
            self.held += size
            if self.held > self.limits.memory_bytes:
                most = f"{self.limits.memory_bytes:,} bytes"
                raise BadRequest(503, f"the server is busy: the bodies of its requests take {most}, the limit")

        try:
            yield take
        finally:
            self.held -= own

    async def _query(self, request: Request, take: Callable[[int], None]) -> Query:
        parameters, content_type = dict(request.query_params), request.headers.get("content-type", "")
        body = await self._body(request, take)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.parsers, read_query, parameters, content_type, body, self.limits)

    async def _body(self, request: Request, take: Callable[[int], None]) -> bytes:
        """Return the body, and stop reading one that is longer, or slower, than allowed, or has no room."""
        most, seconds = self.limits.body_bytes, self.limits.upload_seconds
        length = request.headers.get("content-length", "0")
        body = bytearray()
        if not length.isdigit() or int(length) <= most:
            try:
                async with asyncio.timeout(seconds):
                    async for chunk in request.stream():
                        body += chunk
                        if len(body) > most:
                            break
                        take(len(chunk))
                    else:
                        return bytes(body)
            except TimeoutError:
                message = f"body: got {len(body):,} bytes in {seconds:g} s, the longest time of an upload"
                raise BadRequest(408, message) from None
        raise BadRequest(413, f"body: more than {most:,} bytes, the limit")

    def _check_token(self, header: str) -> None:
        kind, _, given = header.partition(" ")
        is_right = self.token is None or hmac.compare_digest(given.strip().encode(), self.token)
        if not is_right or (self.token is not None and kind.lower() != "bearer"):
            raise BadRequest(401, "expected the header `Authorization: Bearer TOKEN` with the token of this server")

    async def _health(self) -> Response:
        try:
            tasks = await asyncio.wait_for(self._ask("tasks", ()), HEALTH_SECONDS)
        except QueueFull:  # busy, so alive
            return JSONResponse({"status": "busy"})
        except Exception as error:
            return _error(503, f"no replica answers: {one_line(error)[:200]}")
        return JSONResponse({"status": "ok", "tasks": len(tasks)})


def _error(status: int, message: str) -> Response:
    headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}.get(status)
    return JSONResponse({"error": message}, status_code=status, headers=headers)
