"""The Serve application; `vitray.serving.app:build` is its import path in a Serve config, as in deploy/serve.yaml."""

import asyncio
from typing import Any

from ray import serve
from ray.exceptions import ActorDiedError, RayActorError
from ray.serve import Application
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from vitray.config.serving import Serving
from vitray.serving.gateway import Gateway, NoReplica, QueueFull
from vitray.serving.replica import Replica
from vitray.weights.addresses import pin_uri

# A request whose replica cannot be reached is sent again; a prediction has no side effects.
MOST_ATTEMPTS, FIRST_PAUSE, LONGEST_PAUSE = 10, 0.05, 2.0
# After so many deaths of replicas a request is given up: it may be their cause.
MOST_DEATHS = 3

# Serve itself holds the whole bodies of requests that wait for the gateway. So none waits: the gateway bounds the
# bodies, and answers the overflow of the queue in JSON.
MOST_CONNECTIONS = 100_000


network = serve.deployment(name="network")(Replica)


@serve.deployment(name="gateway")
class RayGateway:
    """The gateway as a deployment, which asks the replicas by Serve's handle."""

    def __init__(self, serving: Serving, handle: DeploymentHandle) -> None:
        self.handle, self.gateway = handle, Gateway(serving, self.ask)

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        return await self.gateway.answer(request)

    async def ask(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call a replica; if it is dead or unreachable, another one."""
        deaths = 0
        for attempt in range(MOST_ATTEMPTS):
            try:
                return await getattr(self.handle, method).remote(*arguments)
            except BackPressureError as error:
                raise QueueFull from error
            except DeploymentUnavailableError as error:
                raise NoReplica from error
            except (RayActorError, ReplicaUnavailableError) as error:
                deaths += isinstance(error, ActorDiedError)
                if attempt == MOST_ATTEMPTS - 1 or deaths == MOST_DEATHS:
                    raise NoReplica from error
                self.gateway.metrics.retries.inc()
                await asyncio.sleep(min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt))
        raise AssertionError("the last attempt returns or raises")


def build(serving: Serving) -> Application:
    """Return the application: a gateway for HTTP in front of replicas that compute.

    The tasks are Serve's `user_config`: other tasks reach running replicas without a restart.
    """
    serving = serving.model_copy(update={"base": pin_uri(serving.base)})  # the same for all replicas
    # Two batches: one is computed while the images of the next are decoded.
    replicas = network.options(
        max_ongoing_requests=2 * serving.batch,
        max_queued_requests=serving.limits.queue,
        user_config={"tasks": serving.tasks},
        ray_actor_options={"num_cpus": serving.cpus, "num_gpus": serving.gpus or 0},
        health_check_period_s=5,
        **replica_count(serving),
    ).bind(serving.model_copy(update={"tasks": {}}))
    gateway = RayGateway.options(max_ongoing_requests=MOST_CONNECTIONS, ray_actor_options={"num_cpus": 0})
    return gateway.bind(serving.model_copy(update={"tasks": {}}), replicas)


def replica_count(serving: Serving) -> dict[str, Any]:
    """Return Serve's options for a fixed number of replicas, or for bounds: a batch in work for each replica."""
    fewest, most = serving.replicas
    if most == fewest:
        return {"num_replicas": fewest}
    bounds = {"min_replicas": fewest, "max_replicas": most, "target_ongoing_requests": serving.batch}
    return {"autoscaling_config": bounds}
