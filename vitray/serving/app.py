"""The Serve application; `vitray.serving.app:build` is its import path in a Serve config, as in deploy/serve.yaml."""

from typing import Any

from ray.serve import Application

from vitray.config.serving import Serving
from vitray.serving.gateway import Gateway
from vitray.serving.network import Network
from vitray.weights.addresses import pin_uri

# Serve itself holds the whole bodies of requests that wait for the gateway. So none waits: the gateway bounds the
# bodies, and answers the overflow of the queue in JSON.
MOST_CONNECTIONS = 100_000


def build(serving: Serving) -> Application:
    """Return the application: a gateway for HTTP in front of replicas that compute.

    The tasks are Serve's `user_config`: other tasks reach running replicas without a restart.
    """
    serving = serving.model_copy(update={"base": pin_uri(serving.base)})  # the same for all replicas
    # Two batches: one is computed while the images of the next are decoded.
    network = Network.options(
        max_ongoing_requests=2 * serving.batch,
        max_queued_requests=serving.limits.queue,
        user_config={"tasks": serving.tasks},
        ray_actor_options={"num_cpus": serving.cpus, "num_gpus": serving.gpus or 0},
        health_check_period_s=5,
        **replica_count(serving),
    ).bind(serving.model_copy(update={"tasks": {}}))
    gateway = Gateway.options(max_ongoing_requests=MOST_CONNECTIONS, ray_actor_options={"num_cpus": 0})
    return gateway.bind(serving.model_copy(update={"tasks": {}}), network)


def replica_count(serving: Serving) -> dict[str, Any]:
    """Return Serve's options for a fixed number of replicas, or for bounds: a batch in work for each replica."""
    fewest, most = serving.replicas
    if most == fewest:
        return {"num_replicas": fewest}
    bounds = {"min_replicas": fewest, "max_replicas": most, "target_ongoing_requests": serving.batch}
    return {"autoscaling_config": bounds}
