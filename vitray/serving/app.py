"""The Serve application; `vitray.serving.app:build` is its import path in a Serve config, as in deploy/serve.yaml."""

from typing import Any

from ray.serve import Application

from vitray.config.serving import Serving
from vitray.serving.gateway import Gateway
from vitray.serving.network import Network
from vitray.tracking.model_uri import pin_uri


def build(serving: Serving) -> Application:
    """Return the application: a gateway for HTTP in front of replicas that compute.

    The tasks are Serve's `user_config`: other tasks reach running replicas without a restart.
    """
    serving = serving.model_copy(update={"base": pin_uri(serving.base)})  # the same for all replicas
    fewest, most = serving.replicas
    # Two batches: one is computed while the images of the next are decoded.
    ongoing, queue = 2 * serving.batch, serving.limits.queue
    count: dict[str, Any] = {"num_replicas": fewest}
    if most > fewest:
        bounds = {"min_replicas": fewest, "max_replicas": most, "target_ongoing_requests": serving.batch}
        count = {"autoscaling_config": bounds}
    network = Network.options(
        max_ongoing_requests=ongoing,
        max_queued_requests=queue,
        user_config={"tasks": serving.tasks},
        ray_actor_options={"num_cpus": serving.cpus, "num_gpus": serving.gpus},
        health_check_period_s=5,
        **count,
    ).bind(serving.model_copy(update={"tasks": {}}))
    # Enough for all replicas and for the queue, which is full first: its answer is JSON.
    gateway = Gateway.options(max_ongoing_requests=ongoing * most + queue + 16, ray_actor_options={"num_cpus": 0})
    return gateway.bind(serving.model_copy(update={"tasks": {}}), network)
