"""`vitray serve`: checks the input, and serves until Ctrl-C: in this process, or as a Ray Serve application."""

import logging
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from vitray.cluster import local_ray
from vitray.cluster.session import (
    autoscaling_device,
    autoscaling_timeout,
    local_cpus,
    ray_session,
    wait_for_nodes,
)
from vitray.config.serving import LOOPBACK, TOKEN_VARIABLE, Serving, check_address
from vitray.errors import ConfigError, RunError, one_line
from vitray.serving.hosted import check_tasks
from vitray.system.mlflow_client import tracking_uri
from vitray.weights.addresses import is_model_uri, pin_uri

NAME = "vitray"
# With this, HAProxy, gateways and replicas of Serve listen on all interfaces, whatever --host says.
HA_PROXY = "RAY_SERVE_ENABLE_HA_PROXY"


def serve_until_stopped(serving: Serving, host: str, port: int) -> None:
    """Serve a family at an address until Ctrl-C or SIGTERM."""
    serving = checked(serving, host, port)
    place = serving_here if computes_here(serving) else serving_on_ray
    with place(serving, host, port) as check:
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        print(f"serving {url}   (Ctrl-C ends it)", file=sys.stderr, flush=True)
        while True:
            check()
            time.sleep(0.5)


def computes_here(serving: Serving) -> bool:
    """Whether this process serves: one replica, and no cluster."""
    return "RAY_ADDRESS" not in os.environ and serving.replicas == (1, 1)


@contextmanager
def serving_here(serving: Serving, host: str, port: int) -> Iterator[Callable[[], None]]:
    """Serve in this process for a block; yield a function that raises if the server has failed."""
    import torch

    from vitray.serving.here import serving_from  # loads a web server

    gpus = float(torch.cuda.is_available()) if serving.gpus is None else serving.gpus
    with serving_from(serving.model_copy(update={"gpus": gpus}), host, port) as running:
        yield running.check


@contextmanager
def serving_on_ray(serving: Serving, host: str, port: int) -> Iterator[Callable[[], None]]:
    """Serve as an application of Ray Serve for a block; yield a function that raises if Ray is lost."""
    with ray_session(cpus=max(local_cpus(), math.ceil(serving.replicas[1] * serving.cpus))):
        import ray
        from ray import serve
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException
        from ray.serve.schema import LoggingConfig

        from vitray.serving.app import build

        if serving.gpus is None:
            gpus = int(ray.cluster_resources().get("GPU", 0))
            serving = serving.model_copy(update={"gpus": gpus_of_a_replica(serving.replicas[1], gpus)})
        if serve.status().proxies:
            raise RunError(
                "Serve runs on this cluster already, and its address and other applications would be changed; expected"
                " a cluster without it: end the other `vitray serve`, or run `serve shutdown`"
            )
        if (seconds := autoscaling_timeout()) is not None:
            wait_for_nodes([bundle_of(serving)] * serving.replicas[0], seconds)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)  # of this process; the configuration is for the others
        config: Any = LoggingConfig(log_level="WARNING", enable_access_log=False)
        try:
            try:
                serve.start(http_options={"host": host, "port": port}, logging_config=config)
                serve.run(build(serving), name=NAME, route_prefix="/", logging_config=config)
            except (RuntimeError, RayError, RayServeException) as error:
                raise RunError(f"serve: {one_line(error)[:1000]}") from None
            yield _check_ray
        finally:
            with suppress(RayError, RayServeException, RuntimeError):  # Serve or Ray may have ended
                serve.delete(NAME)
                # A local Ray ends next, and with it Serve; to end it before prints an error of its controller.
                if not local_ray.is_running() and not serve.status().applications:
                    serve.shutdown()


def _check_ray() -> None:
    if local_ray.is_lost():
        raise RunError("Ray's raylet on this machine was killed, perhaps for lack of memory; start the command again")


def gpus_of_a_replica(replicas: int, gpus: int) -> float:
    """Return a whole GPU where a cluster adds nodes with GPUs or has one for each replica, otherwise an equal share.

    It is 0 without GPUs.
    """
    if autoscaling_timeout() is not None and autoscaling_device() == "gpu":
        return 1.0
    return 1 / math.ceil(replicas / gpus) if gpus else 0.0


def bundle_of(serving: Serving) -> dict[str, float]:
    """Return the resources of a replica, without those that it does not use."""
    return {"CPU": serving.cpus} | ({"GPU": serving.gpus} if serving.gpus else {})


def checked(serving: Serving, host: str, port: int) -> Serving:
    """Return the settings with addresses that hold everywhere; refuse bad input before Ray starts."""
    check_address(host, token := os.environ.get(TOKEN_VARIABLE))
    if os.environ.get(HA_PROXY) == "1" and not token and not computes_here(serving):
        raise ConfigError(
            f"{HA_PROXY}: got 1, with which Ray Serve listens on all interfaces, and no token; unset it, or set"
            f" {TOKEN_VARIABLE} to a secret that requests then give as `Authorization: Bearer SECRET`"
        )
    _check_port(host, port)
    check_tasks(serving.base, serving.tasks)
    serving = serving.model_copy(update={"base": pin_uri(serving.base)})  # fixed, also for later replicas
    urls = [serving.base, *serving.tasks.values()]
    return serving.model_copy(
        update={
            "base": _anywhere(serving.base),
            "tasks": {name: _anywhere(url) for name, url in serving.tasks.items()},
            "token": bool(os.environ.get(TOKEN_VARIABLE)) or host not in LOOPBACK,
            "store": tracking_uri() if any(map(is_model_uri, urls)) else None,
        }
    )


def _anywhere(url: str) -> str:
    return url if is_model_uri(url) else pin_uri(url)


def _check_port(host: str, port: int) -> None:
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind, protocol) as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(address)
    except (socket.gaierror, UnicodeError):
        raise ConfigError(f"--host: got {host!r}, expected an address of this machine, as in 127.0.0.1") from None
    except OSError as error:
        raise ConfigError(
            f"--port: got {port} at {host}: {error.strerror}; expected a free port, as in --port 8001"
        ) from None
