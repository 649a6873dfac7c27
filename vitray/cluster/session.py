"""A running Ray: the caller's, the cluster at RAY_ADDRESS, or one of this machine that ends with the work."""

import json
import logging
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vitray.errors import ConfigError, RunError

# What every process of ours says to Ray before it is imported; what the user has set stands.
ENVIRONMENT = {
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    # Starved of CPUs, Ray Data would wait half an hour before it says so.
    "RAY_DATA_EXECUTION_NO_PROGRESS_TIMEOUT_S": "300",
    # A lost worker is noticed within a second; every two seconds is Ray's default.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # Workers are led by the driver's process (vitray/runs/trainer.py), in which this would close all handlers of logs.
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
    # Workers that wait for the room of a node that is lost, and still listed, soon look again; not of their start.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # otherwise a worker's print appears twice
    "RAY_AIR_NEW_OUTPUT": "0",  # Tune's new output speaks even where it is told to be silent
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
# A cluster of this machine alone, which nobody else is to reach.
LOCAL = {
    "RAY_AUTH_MODE": "disabled",  # else the first start writes a token to the home folder and warns
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # nobody takes this machine away, and its absence logs an error
    "RAY_raylet_start_wait_time_s": "180",  # Ray's 30 were twice too few beside other work
}
# Actors of Ray's libraries that outlive the job that started them, for seconds or for good, and ask for no room.
HELPERS = {"PlacementGroupCleaner", "_StatsActor", "_AutoscalingCoordinatorActor"}
# Seconds between two looks for what ended jobs have left.
RECLAIMS_EVERY = 60.0
# Of jobs, actors and placement groups that Ray is asked for.
MOST_LISTED = 10_000


def prepare_environment() -> None:
    """Set what Ray reads when it is imported."""
    is_local = "RAY_ADDRESS" not in os.environ
    for name, value in (ENVIRONMENT | LOCAL if is_local else ENVIRONMENT).items():
        os.environ.setdefault(name, value)


@contextmanager
def running(cpus: int | None = None, store: int | None = None, *, dashboard: bool = True) -> Iterator[bool]:
    """Ray, for as long as the block lasts; whether it ends with the block, and nobody else uses it.

    Of a cluster of this machine: how many tasks run at a time, and the bytes of its object store, None being Ray's
    choice; and whether it has a dashboard, whose start takes a second.
    """
    prepare_environment()
    import ray  # takes a second, which a refused word must not

    if ray.is_initialized():
        yield False
        return
    ended, is_own = threading.Event(), "RAY_ADDRESS" not in os.environ
    is_shared = _start(cpus, store, dashboard)
    sweeper = threading.Thread(target=_reclaim_now_and_then, args=[ended], name="reclaim", daemon=True)
    if is_shared:
        sweeper.start()
    try:
        yield is_own
    finally:
        ended.set()
        if is_shared:
            sweeper.join(5)
        ray.shutdown()


def begin_helpers() -> None:
    """Start the actors of Ray Data that the leader of Ray Train's workers and a stream would start, and wait for.

    They outlive whoever asks first, near whom they run: this is for a Ray that ends with the run.
    """
    with suppress(ImportError):  # another Ray starts them as before
        from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
            get_or_create_autoscaling_coordinator,
        )
        from ray.data._internal.stats import get_or_create_stats_actor

        get_or_create_autoscaling_coordinator()
        get_or_create_stats_actor()


def reclaim() -> None:
    """Remove the placement groups of jobs that are over.

    Ray does so as a job ends; one that a run asks for in that moment is made all the same, and would keep its CPUs.
    """
    from ray.util.state import list_actors, list_jobs

    jobs: Any = list_jobs(**_here())
    actors: Any = list_actors(filters=[("state", "!=", "DEAD")], **_here())
    over = {job.job_id for job in jobs if job.status in ("SUCCEEDED", "FAILED", "STOPPED")}
    # What a detached actor has asked for is its own.
    _remove_groups(over - {actor.job_id for actor in actors if actor.class_name not in HELPERS})


def _reclaim_now_and_then(ended: threading.Event) -> None:
    """Others' jobs may end while ours waits for what they have left."""
    while not ended.wait(RECLAIMS_EVERY):
        with suppress(Exception):  # of a dashboard that is busy or away for now
            reclaim()


def give_back(trial: str) -> None:
    """Wait until of this job no actor of this class is left, all having ended, and remove what they have asked for."""
    import ray
    from ray.util.state import list_actors

    job = ray.get_runtime_context().get_job_id()
    ours: Any = [("job_id", "=", job), ("class_name", "=", trial), ("state", "!=", "DEAD")]
    until = time.monotonic() + 30
    with suppress(ConnectionError):  # a cluster without a dashboard, which cannot be asked
        while list_actors(filters=ours, **_here()) and time.monotonic() < until:
            time.sleep(0.5)
        _remove_groups({job})


def _remove_groups(jobs: Collection[str]) -> None:
    import ray
    from ray.util.placement_group import PlacementGroup, remove_placement_group
    from ray.util.state import list_placement_groups

    groups: Any = list_placement_groups(filters=[("state", "!=", "REMOVED")], detail=True, **_here())
    for group in groups:
        if group.creator_job_id in jobs and not group.is_detached:
            remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(group.placement_group_id)))


def _here() -> Any:
    """Of Ray's listings: the cluster that this process is in, and all of it."""
    import ray

    return {"address": ray.get_runtime_context().gcs_address, "limit": MOST_LISTED}


def cpus_here() -> int:
    """CPUs of a cluster that is started here."""
    # Two at least, which are only numbers to Ray: where workers take all there are, nothing decodes images.
    return max(2, os.cpu_count() or 1)


def job_folder() -> Path | None:
    """The temporary folder that this process runs in as a job of a cluster; None where nothing of that is so."""
    told = os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR")
    sent = json.loads(told).get("runtime_env", {}).get("working_dir") if told else None
    return Path.cwd() if sent and not sent.startswith("local:") else None


def grows_within() -> float | None:
    """Seconds in which this cluster may grow by what a run needs, as those say who made it; None of one that does not.

    Ray itself does not tell whether more nodes would come.
    """
    told = os.environ.get("VITRAY_GROWS_WITHIN")
    try:
        return float(told) if told else None
    except ValueError:
        raise ConfigError(f"VITRAY_GROWS_WITHIN: got {told!r}, wanted seconds, as in 1800") from None


def wait_for_room(bundles: Sequence[dict[str, float]], seconds: float) -> None:
    """Wait until a cluster has room for all of these at the same time; that they are asked for makes it grow."""
    from ray.util.placement_group import placement_group, remove_placement_group

    asked = Counter(" + ".join(f"{amount:g} {name}" for name, amount in bundle.items()) for bundle in bundles)
    text = ", ".join(f"{count} x ({shape})" for shape, count in asked.items())
    group, began = placement_group(list(bundles)), time.monotonic()
    try:
        while not group.wait(2):
            waited = time.monotonic() - began
            if waited > seconds:
                raise RunError(f"no room for {text} within {seconds:g} seconds; `ray status` on the head says why")
            if waited < 4:
                said = f"vitray: waiting for nodes with {text}, {seconds:g} seconds at most"
                print(said, file=sys.stderr, flush=True)
    finally:
        remove_placement_group(group)  # what has come stays for some idle minutes, and is taken by the workers


def _start(cpus: int | None, store: int | None, dashboard: bool) -> bool:
    """Whether it is a cluster of others too, which can be asked what they have left."""
    import ray

    if os.environ.get("RAY_ADDRESS", "").startswith(("http://", "https://")):
        raise ConfigError(
            "RAY_ADDRESS: got the address of a dashboard, where `vitray submit` sends jobs; to drive a run from this"
            " machine, wanted an address as host:6379"
        )
    if "RAY_ADDRESS" in os.environ:
        tells = bool(ray.init(logging_level=logging.WARNING).dashboard_url)
        if tells:
            reclaim()
        return tells
    # Ray's own helpers look the address up, and give up where several clusters run on a machine: it is known before.
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    os.environ |= {"RAY_GCS_SERVER_PORT": str(port), "RAY_ADDRESS": f"{ray.util.get_node_ip_address()}:{port}"}
    try:
        ray.init(
            "local",
            num_cpus=max(2, cpus or cpus_here()),
            object_store_memory=store,
            include_dashboard=None if dashboard else False,
            logging_level=logging.WARNING,
        )
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        patience = os.environ["RAY_raylet_start_wait_time_s"]  # noqa: SIM112 (Ray's spelling)
        raise RunError(
            f"Ray did not start on this machine within {patience} seconds, as when other work takes the CPUs or the"
            " disk; wanted a calmer moment and the same command"
        ) from error
    finally:
        del os.environ["RAY_GCS_SERVER_PORT"], os.environ["RAY_ADDRESS"]
    return False
