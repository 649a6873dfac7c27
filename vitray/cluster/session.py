"""The connection to Ray: the caller's, the cluster at RAY_ADDRESS, or a local one that ends with the work."""

import atexit
import json
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from vitray.errors import ConfigError, RunError, one_line
from vitray.system.scratch import temporary_folder

# Set before Ray is imported, unless the user has set them.
RAY_SETTINGS = {
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    # Ray Data reports a lack of CPUs only after this time; its default is half an hour.
    "RAY_DATA_EXECUTION_NO_PROGRESS_TIMEOUT_S": "300",
    # A lost worker is noticed within a second; Ray's default is every two seconds.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # A preemption notice may come only seconds ahead; Ray's default is every five seconds.
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",  # the dashboard lists the run, its workers and their reports
    # Limits the placement of a worker group, not the start of its workers: a lost node stays listed for a while, and a
    # group that was placed on it is soon placed again.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # otherwise a worker's print appears twice
    "RAY_AIR_NEW_OUTPUT": "0",  # Tune's new output ignores verbose=0
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",  # the sweep's logger reports failed trials
}
# For a local Ray, beside its token.
LOCAL_RAY_SETTINGS = {
    # Without clusters, as on macOS, Ray takes 127.0.0.1 as the machine's address, so all its processes listen there.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a local machine is not preempted, and the watcher logs an error
    "RAY_raylet_start_wait_time_s": "180",  # Ray's 30 were twice too few on a busy machine
}
CREDENTIAL_PLACES = "RAY_AUTH_TOKEN_PATH, RAY_AUTH_TOKEN or ~/.ray/auth_token, and RAY_AUTH_MODE=token"
# Actors of Ray's libraries that may outlive their job, and request no placement group.
RAY_LIBRARY_ACTORS = {
    "ActorLocationTracker",
    "AutoscalingRequester",
    "PlacementGroupCleaner",
    "TrainStateActor",
    "_AutoscalingCoordinatorActor",
    "_StatsActor",
    "_StatsSummaryActor",
    "_UsageCollectionActor",
}
# The class of Ray Train's workers, as Ray lists it.
TRAIN_WORKER = "RayTrainWorker"
# Part of Ray's error where its own processes do not start in time; it has no class of its own.
START_TIMED_OUT = "timed out during startup"
# Seconds between two removals of placement groups: of those that ended jobs have left, and of those that failed starts
# of a run's workers have left.
CLEANUP_INTERVAL, START_CLEANUP_INTERVAL = 60.0, 10.0
# Checks in a row, START_CLEANUP_INTERVAL apart, after which a broken placement group is removed.
CHECKS_WITH_DEAD_WORKER, CHECKS_WITHOUT_ACTOR = 2, 6
# The most jobs, actors or placement groups that Ray lists.
LIST_LIMIT = 10_000
# An interrupted sweep waits RELEASE_SECONDS for the end of its trials' actors, and QUICK_LISTING_SECONDS for each of
# Ray's listings: a submitted job is killed after 30 s (STOP_GRACE), of which its trials may take 20 (SAVE_SECONDS).
RELEASE_SECONDS, QUICK_LISTING_SECONDS = 5, 2


def prepare_environment() -> None:
    """Set the variables that Ray reads when it is imported."""
    ray, is_local = sys.modules.get("ray"), starts_local_ray()
    for name, value in (RAY_SETTINGS | LOCAL_RAY_SETTINGS if is_local else RAY_SETTINGS).items():
        os.environ.setdefault(name, value)
    if is_local:
        # Without a token any user of this machine, or of its network, could run code as this one. In the environment it
        # is in no file and in no list of processes; a given one opens the dashboard.
        if not (os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")):
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        if ray is None:
            os.environ["RAY_AUTH_MODE"] = "token"
        elif os.environ.get("RAY_AUTH_MODE") != "token":
            # The caller's Ray has read another mode: it takes up tokens itself where none is set.
            os.environ.pop("RAY_AUTH_MODE", None)
    if "RAY_ADDRESS" in os.environ:
        send_token()


def starts_local_ray() -> bool:
    """Whether a session would start a Ray on this machine."""
    # A trial's process is connected to its sweep's Ray, without an address in its environment.
    ray = sys.modules.get("ray")
    return "RAY_ADDRESS" not in os.environ and not (ray and ray.is_initialized())


def send_token() -> None:
    """Have Ray send this machine's token, if there is one: to a given address it sends none without this mode."""
    has_token = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if "RAY_AUTH_MODE" not in os.environ and (has_token or (Path.home() / ".ray" / "auth_token").exists()):
        os.environ["RAY_AUTH_MODE"] = "token"


_kept: ExitStack | None = None  # ends the local Ray that a session has kept


@contextmanager
def ray_session(
    cpus: int | None = None, object_store_bytes: int | None = None, *, keep: bool = False
) -> Iterator[None]:
    """Connect to Ray for the block, or start a local one, which ends with the block; SIGTERM ends it with status 143.

    `cpus` and `object_store_bytes` are those of a local Ray: the tasks that run at a time, and the size of its object
    store (None: Ray's choice). With `keep` a local Ray stays for later blocks, until one fails or the process ends.
    """
    global _kept
    prepare_environment()
    import ray  # takes a second, so bad input is rejected first

    from vitray.cluster import local_ray  # imports psutil, which a served model lacks

    if _kept and (not ray.is_initialized() or local_ray.is_lost() or "RAY_ADDRESS" in os.environ):
        _end_kept()
    if ray.is_initialized() and not _kept:
        yield
        return
    ending, is_new, is_listable = _kept or ExitStack(), _kept is None, False
    _kept = None
    is_main = threading.current_thread() is threading.main_thread()  # others cannot set a handler
    handler = signal.getsignal(signal.SIGTERM)
    is_ended = False

    def end(number: int, _frame: Any) -> None:
        nonlocal is_ended
        if not is_ended:  # `timeout` sends the signal twice, and the end takes seconds
            is_ended = True
            raise SystemExit(128 + number)

    folder = ending.enter_context(temporary_folder()) if is_new else None
    # Service managers and `timeout` send SIGTERM to all processes of a command. Those of Ray inherit that it is
    # blocked, so this one decides what ends, and when.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        try:
            if folder:
                ending.callback(local_ray.shut_down, ray.shutdown)
                is_listable = _connect_or_start(cpus, object_store_bytes, folder)
        finally:
            if is_main:
                signal.signal(signal.SIGTERM, end)  # Ray's own handler aborts
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # Other jobs may end while this one waits for their resources.
        with abandoned_groups_removed(CLEANUP_INTERVAL) if is_listable else nullcontext():
            yield
        if local_ray.is_running() and (keep or not is_new):
            _kept = ending.pop_all()
            atexit.unregister(_end_kept)
            atexit.register(_end_kept)  # so that it runs before Ray's own function, which takes seconds
    except BaseException as error:
        if is_ended:  # Ray's calls turn the exception into an exit with status 1, or into an error of their own
            raise SystemExit(128 + signal.SIGTERM) from error
        raise
    finally:
        ending.close()
        if is_main:
            signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)


def _end_kept() -> None:
    global _kept
    ending, _kept = _kept, None
    if ending:
        ending.close()


def remove_abandoned_groups(before: Mapping[str, int], *, own_starts: bool = False) -> dict[str, int]:
    """Remove placement groups that keep CPUs for nobody; return {group: checks in a row}, for the next call.

    Of ended jobs: Ray removes them when a job ends, but still creates a group that was requested at that moment.

    With `own_starts`, of failed starts of this job's workers: if a worker dies while its group starts, Ray Train starts
    another group and forgets the placement group of the first, with its other workers. A group with a dead worker is
    removed at the second check: Ray Train never replaces a single worker, and removes such a group itself if it has not
    forgotten it. One without an actor, as a start that times out may leave, is removed later, as it may be starting.
    One that still waits for its resources keeps none, and somebody waits for it: Ray Tune for hours, on a busy cluster.
    """
    import ray
    from ray.util.state import list_actors, list_jobs

    options = _list_options()
    jobs: Any = list_jobs(**options)
    alive: Any = list_actors(filters=[("state", "!=", "DEAD")], detail=own_starts, **options)
    ended = {job.job_id for job in jobs if job.status in ("SUCCEEDED", "FAILED", "STOPPED")}
    # A detached actor keeps the groups that it requested.
    ended -= {actor.job_id for actor in alive if actor.class_name not in RAY_LIBRARY_ACTORS}
    own, used, failed, checks = None, set(), set(), {}
    if own_starts:
        own = ray.get_runtime_context().get_job_id()
        filters: Any = [("job_id", "=", own), ("class_name", "=", TRAIN_WORKER), ("state", "=", "DEAD")]
        dead: Any = list_actors(filters=filters, detail=True, **options)
        used, failed = ({actor.placement_group_id for actor in actors} for actors in (alive, dead))

    def is_abandoned(group: Any) -> bool:
        place = group.placement_group_id
        if group.creator_job_id in ended:
            return True
        if group.creator_job_id != own or group.state != "CREATED" or (place in used and place not in failed):
            return False
        checks[place] = before.get(place, 0) + 1
        return checks[place] >= (CHECKS_WITH_DEAD_WORKER if place in failed else CHECKS_WITHOUT_ACTOR)

    _remove_groups(is_abandoned)
    return checks


@contextmanager
def abandoned_groups_removed(interval: float, *, own_starts: bool = False) -> Iterator[None]:
    """Repeat `remove_abandoned_groups` during a block; its errors are ignored: the dashboard may be busy or away.

    After an exception the block does not wait for a call that still runs: an interrupted job has only seconds.
    """
    ended = threading.Event()

    def work() -> None:
        checks: dict[str, int] = {}
        while not ended.wait(interval):
            with suppress(Exception):
                checks = remove_abandoned_groups(checks, own_starts=own_starts)

    thread = threading.Thread(target=work, name="cleanup", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
    thread.join(5)


def release_resources(actor_class: str) -> None:
    """Wait until all actors of this class in this job have ended, then remove the job's placement groups.

    It takes about 9 seconds at most. The next command, or one that runs already, removes the remaining groups.
    """
    import ray
    from ray.util.state import list_actors
    from ray.util.state.exception import RayStateApiException

    job = ray.get_runtime_context().get_job_id()
    alive: Any = [("job_id", "=", job), ("class_name", "=", actor_class), ("state", "!=", "DEAD")]
    deadline = time.monotonic() + RELEASE_SECONDS
    with suppress(ConnectionError, RayStateApiException):  # no dashboard, or one that does not answer
        while list_actors(filters=alive, timeout=QUICK_LISTING_SECONDS, **_list_options()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.5)
        _remove_groups(lambda group: group.creator_job_id == job, QUICK_LISTING_SECONDS)


def _remove_groups(is_removed: Callable[[Any], bool], timeout: int = 30) -> None:
    """Remove the placement groups for which a function of Ray's listing is true, detached ones aside."""
    import ray
    from ray.util.placement_group import PlacementGroup, remove_placement_group
    from ray.util.state import list_placement_groups

    groups: Any = list_placement_groups(
        filters=[("state", "!=", "REMOVED")], detail=True, timeout=timeout, **_list_options()
    )
    for group in groups:
        if group.is_detached or not is_removed(group):
            continue
        if not ray.is_initialized():  # a late call would start another Ray
            return
        remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(group.placement_group_id)))


def _list_options() -> Any:
    """Return the options of Ray's listings: this cluster, and all entries."""
    import ray

    if not ray.is_initialized():  # the next line would start another Ray
        raise ConnectionError("the connection to Ray has ended")
    return {"address": ray.get_runtime_context().gcs_address, "limit": LIST_LIMIT}


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_cpus() -> int:
    """Return the number of CPUs that a local Ray gets."""
    # At least two, even on one core, as Ray only counts them: workers leave one of them to decode images.
    return max(2, usable_cpus())


def job_dir() -> Path | None:
    """Return the temporary folder of the submitted job that this process belongs to, or None."""
    config = os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR")
    working_dir = json.loads(config).get("runtime_env", {}).get("working_dir") if config else None
    return Path.cwd() if working_dir and not working_dir.startswith("local:") else None


def autoscaling_timeout() -> float | None:
    """Return the seconds in which this cluster adds the nodes that a run needs; None if its size is fixed.

    Ray itself does not report whether a cluster can grow, so its configuration sets VITRAY_GROWS_WITHIN.
    """
    text = os.environ.get("VITRAY_GROWS_WITHIN")
    try:
        return float(text) if text else None
    except ValueError:
        raise ConfigError(f"VITRAY_GROWS_WITHIN: got {text!r}, expected seconds, as in 1800") from None


def autoscaling_device() -> str | None:
    """Return gpu or cpu: the device of the nodes that this cluster adds; None if its configuration does not say."""
    device = os.environ.get("VITRAY_GROWS_DEVICE") or None
    if device not in ("gpu", "cpu", None):
        raise ConfigError(f"VITRAY_GROWS_DEVICE: got {device!r}, expected gpu or cpu")
    return device


def check_reachable(address: str, remedy: str) -> None:
    """Raise a ConfigError if nothing answers at an address, where Ray's clients would wait for minutes."""
    parts = urllib.parse.urlsplit(address if "//" in address else f"//{address}")
    port = 443 if parts.scheme == "https" else 80
    try:
        socket.create_connection((parts.hostname or "", parts.port or port), 5).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"RAY_ADDRESS: {address}: cannot be reached ({error}); expected a running cluster, and {remedy}"
        ) from None


def wait_for_nodes(bundles: Sequence[dict[str, float]], seconds: float) -> None:
    """Wait until all bundles fit the cluster at the same time; the request makes an autoscaling cluster grow."""
    from ray.util.placement_group import placement_group, remove_placement_group

    counts = Counter(" + ".join(f"{amount:g} {name}" for name, amount in bundle.items()) for bundle in bundles)
    text = ", ".join(f"{count} x ({shape})" for shape, count in counts.items())
    group, began = placement_group(list(bundles)), time.monotonic()
    try:
        while not group.wait(2):
            waited = time.monotonic() - began
            if waited > seconds:
                raise RunError(f"no room for {text} within {seconds:g} seconds; `ray status` on the head shows why")
            if waited < 4:
                message = f"vitray: waiting for nodes with {text}, {seconds:g} seconds at most"
                print(message, file=sys.stderr, flush=True)
    finally:
        remove_placement_group(group)  # new nodes stay for some idle minutes, in which the workers take them


def _connect_or_start(cpus: int | None, object_store_bytes: int | None, folder: Path) -> bool:
    """Connect to the cluster at RAY_ADDRESS, or start a local one; return whether it is shared and can be listed.

    `folder` is for the temporary files of a local one.
    """
    import ray

    if os.environ.get("RAY_ADDRESS", "").startswith(("http://", "https://")):
        raise ConfigError(
            "RAY_ADDRESS: got the address of a dashboard, where `vitray submit` sends jobs; to drive a run from this"
            " machine, expected an address as host:6379"
        )
    if "RAY_ADDRESS" in os.environ:
        from ray.exceptions import AuthenticationError

        if ":" in (address := os.environ["RAY_ADDRESS"]):  # else auto, local or a name that Ray resolves
            check_reachable(address, "this machine on its network")
        try:
            has_dashboard = bool(ray.init(logging_level=logging.WARNING).dashboard_url)
        except (ConnectionError, AuthenticationError) as error:
            raise ConfigError(
                f"RAY_ADDRESS: {address}: no cluster answers, or it refuses this machine's token"
                f" ({one_line(error)}); expected a running cluster, and its token in {CREDENTIAL_PLACES}"
            ) from None
        if has_dashboard:
            with suppress(Exception):  # it may admit the head alone, where another command or the next one cleans up
                remove_abandoned_groups({})
        return has_dashboard
    from vitray.cluster import local_ray

    # Ray's own processes look the address up and fail where a machine runs several clusters, so it is chosen here.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"RAY_GCS_SERVER_PORT": str(port), "RAY_ADDRESS": f"{ray.util.get_node_ip_address()}:{port}"}
    # Ray kills its processes at its end, and their temporary folders would stay; its logs shall stay.
    settings |= {"TMPDIR": str(folder), "RAY_TMPDIR": os.environ.get("RAY_TMPDIR", tempfile.gettempdir())}
    before = {name: os.environ.get(name) for name in settings}
    os.environ |= settings
    try:
        options = {"object_store_memory": object_store_bytes, "logging_level": logging.WARNING}
        local_ray.start(partial(ray.init, "local", num_cpus=max(2, cpus or local_cpus()), **options))
    except Exception as error:
        if START_TIMED_OUT not in str(error):
            raise
        timeout = os.environ["RAY_raylet_start_wait_time_s"]  # noqa: SIM112 (Ray's spelling)
        raise RunError(
            f"Ray did not start on this machine within {timeout} seconds, as when other work takes the CPUs or the"
            " disk; try the same command again when the machine is less busy"
        ) from error
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return False
