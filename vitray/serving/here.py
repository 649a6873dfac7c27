"""A server in the process that was called, without Ray: one replica, and the gateway before it."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from vitray.config.serving import Serving
from vitray.errors import ConfigError, RunError
from vitray.serving.gateway import Gateway, NoReplica, QueueFull
from vitray.serving.replica import Replica

# Seconds in which open requests are answered at the end.
END_SECONDS = 10


class LocalServer:
    """One replica and its gateway, as an ASGI application."""

    def __init__(self, serving: Serving) -> None:
        self._replica, self._gateway = Replica(serving), Gateway(serving, self.ask)
        self._asked, self._most = 0, 2 * serving.batch + serving.limits.queue

    def start(self, tasks: dict[str, str]) -> None:
        """Load the tasks."""
        asyncio.run(self._replica.reconfigure({"tasks": tasks}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        response = await self._gateway.answer(Request(scope, receive))
        await response(scope, receive, send)

    async def ask(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call the replica, unless too many requests wait for it, or it is broken."""
        if self._asked >= self._most:
            raise QueueFull
        self.check()
        self._asked += 1
        try:
            return await getattr(self._replica, method)(*arguments)
        finally:
            self._asked -= 1

    def check(self) -> None:
        """Raise NoReplica if the replica is broken."""
        try:
            self._replica.check_health()
        except RuntimeError as error:
            raise NoReplica(str(error)) from error


class Running:
    """A server on a thread of its own."""

    def __init__(self, application: LocalServer, listening: socket.socket) -> None:
        config = uvicorn.Config(
            application,
            http="h11",  # httptools keeps headers of any length, before a token is looked at
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=END_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self._application = application
        self._thread = threading.Thread(target=self._server.run, args=([listening],), name="server", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise RunError if the server does not answer any more."""
        try:
            self._application.check()
        except NoReplica as error:
            raise RunError(f"the network does not answer any more, so the server ends: {error}") from None
        if not self._thread.is_alive():
            raise RunError("the server has ended by itself; the lines above have the reason")

    def close(self) -> None:
        """Answer the open requests, and end."""
        self._server.should_exit = True
        self._thread.join(2 * END_SECONDS)


@contextmanager
def serving_from(serving: Serving, host: str, port: int) -> Iterator[Running]:
    """Serve at an address for a block."""
    application = LocalServer(serving.model_copy(update={"tasks": {}}))
    application.start(serving.tasks)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:  # taken while the networks were read
        raise ConfigError(f"--port: got {port} at {host}: {error.strerror}; expected a free port") from None
    with listening:
        running = Running(application, listening)
        try:
            yield running
        finally:
            running.close()
