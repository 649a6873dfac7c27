"""Contracts with the platforms: their texts, loggers and variables that vitray matches by name.

No public name exists for them, so a new release may change them without an error. Each stands here beside the file of
the platform that has it, and the test fails where the installed release has none.
"""

import ast
import functools
import importlib.util
import io
import logging
import re
import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from ray.exceptions import OutOfMemoryError

from vitray.cluster import doctor, jobs, session
from vitray.data.stream import ray_reader
from vitray.errors import ConfigError
from vitray.pages import plotting
from vitray.runs import failures
from vitray.sweeps import tuning

ROOT = Path(__file__).parent.parent
FILES = [
    *(path for folder in ("vitray", "pipelines") for path in sorted((ROOT / folder).rglob("*.py"))),
    *sorted((ROOT / "deploy").iterdir()),
    *(ROOT / name for name in ("cluster.yaml", "tests/conftest.py")),
]

# {file of a platform: the texts that vitray looks for in messages of it}
TEXTS = {
    "ray/_private/node.py": {session.START_TIMED_OUT},
    "ray/dashboard/modules/job/job_head.py": {jobs.NO_AGENT},
    "ray/_private/authentication/http_token_authentication.py": {jobs.NO_TOKEN[0], jobs.WRONG_TOKEN},
    "ray/_private/authentication/authentication_constants.py": {jobs.NO_TOKEN[1]},
    "ray/core/src/ray/raylet/raylet": {failures.LOW_MEMORY, "connection error code ", "Worker exit detail: "},
    "ray/core/src/ray/gcs/gcs_server": {"its node has died"},
    "ray/train/v2/_internal/exceptions.py": {
        f"class {failures.START_ERRORS}TimeoutError",
        f"class {failures.START_ERRORS}FailedError",
        "self.health_check_failure = failure",
    },
    "ray/train/v2/_internal/execution/worker_group/worker.py": {f"class {session.TRAIN_WORKER}:"},
}
# {logger: (method, text) of the record that vitray silences}
RECORDS = {
    "ray.dashboard.modules.dashboard_sdk": ("info", "Uploading package"),
    "ray.data._internal.execution.streaming_executor": ("info", "execution finished in"),
    "ray.data._internal.execution.resource_manager": ("warning", "The job may hang forever unless the cluster scales"),
    "ray.data._internal.logging": ("info", "registers for logging while another dataset"),
    "ray.data._internal.progress": ("warning", "Progress bars disabled. To enable"),
    "ray.train.v2._internal.callbacks.backend_setup": ("warning", "Graceful shutdown of backend failed"),
    "ray.train.v2._internal.execution.scaling_policy.autoscaling_coordinator_client": ("warning", "resource request"),
    "ray.tune.tune": ("error", "Trials did not complete"),
}
QUIET_LOGGERS = ray_reader.QUIET_LOGGERS | jobs.QUIET_LOGGERS | failures.QUIET_LOGGERS | tuning.QUIET_LOGGERS
# {file of a platform: the environment variables that it reads, and that vitray, its deployment or its tests set}
VARIABLES = {
    "ray/_common/usage/usage_constants.py": {"RAY_USAGE_STATS_ENABLED"},
    "ray/_common/utils.py": {"RAY_TMPDIR"},
    "ray/_private/accelerators/accelerator.py": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"},
    "ray/_private/authentication/authentication_token_setup.py": {"RAY_AUTH_MODE"},
    "ray/_private/ray_constants.py": {
        "RAY_ADDRESS",
        "RAY_API_SERVER_ADDRESS",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER",
        "RAY_GCS_SERVER_PORT",
        "RAY_worker_niceness",
    },
    "ray/_private/runtime_env/constants.py": {"RAY_JOB_CONFIG_JSON_ENV_VAR"},
    "ray/_private/worker.py": {"RAY_IGNORE_UNHANDLED_ERRORS"},
    "ray/_raylet.so": {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"},
    "ray/air/constants.py": {"RAY_AIR_NEW_OUTPUT"},
    "ray/autoscaler/_private/commands.py": {"RAY_UP_enable_autoscaler_v2"},
    "ray/autoscaler/_private/util.py": {"RAY_HEAD_IP"},
    "ray/core/src/ray/gcs/gcs_server": {
        "RAY_grpc_client_keepalive_time_ms",
        "RAY_grpc_client_keepalive_timeout_ms",
        "RAY_health_check_period_ms",
        "RAY_health_check_timeout_ms",
        "RAY_raylet_start_wait_time_s",
    },
    "ray/dashboard/modules/job/job_supervisor.py": {"RAY_JOB_STOP_WAIT_TIME_S"},
    "ray/data/_internal/usage/collector.py": {"RAY_DATA_USAGE_DISABLED"},
    "ray/data/context.py": {"RAY_DATA_DISABLE_PROGRESS_BARS", "RAY_DATA_EXECUTION_NO_PROGRESS_TIMEOUT_S"},
    "ray/serve/_private/constants.py": {"RAY_SERVE_ENABLE_HA_PROXY"},
    "ray/train/constants.py": {"RAY_TRAIN_ENABLE_STATE_TRACKING"},
    "ray/train/v2/_internal/constants.py": {
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER",
        "RAY_TRAIN_ENABLE_PRINT_PATCH",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S",
        "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S",
    },
    "ray/tune/constants.py": {"TUNE_DISABLE_SIGINT_HANDLER", "TUNE_PRINT_ALL_TRIAL_ERRORS"},
    "mlflow/environment_variables.py": {
        "MLFLOW_DISABLE_TELEMETRY",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR",
        "MLFLOW_FLASK_SERVER_SECRET_KEY",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES",
        "MLFLOW_HTTP_REQUEST_TIMEOUT",
        "MLFLOW_LOGGING_LEVEL",
        "MLFLOW_S3_ENDPOINT_URL",
        "MLFLOW_SERVER_ALLOWED_HOSTS",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT",
        "MLFLOW_TRACKING_PASSWORD",
        "MLFLOW_TRACKING_TOKEN",
        "MLFLOW_TRACKING_URI",
        "MLFLOW_TRACKING_USERNAME",
    },
    "mlflow/cli/__init__.py": {"MLFLOW_BACKEND_STORE_URI"},
    "mlflow/server/auth/config.py": {"MLFLOW_AUTH_CONFIG_PATH"},
}
# {file of Ray: its actor that outlives a job}; a job that has ended may still have one.
LIBRARY_ACTORS = {
    "ray/data/_internal/cluster_autoscaler/default_autoscaling_coordinator.py": "_AutoscalingCoordinatorActor",
    "ray/data/_internal/execution/autoscaling_requester.py": "AutoscalingRequester",
    "ray/data/_internal/execution/node_trackers/actor_location.py": "ActorLocationTracker",
    "ray/data/_internal/stats.py": "_StatsActor",
    "ray/data/_internal/stats_summary_actor.py": "_StatsSummaryActor",
    "ray/data/_internal/usage/actor.py": "_UsageCollectionActor",
    "ray/train/v2/_internal/callbacks/placement_group_callback.py": "PlacementGroupCleaner",
    "ray/train/v2/_internal/state/state_actor.py": "TrainStateActor",
}
# Actors that outlive a job too, of features that vitray does not use.
OTHER_ACTORS = {
    "ray/data/_internal/execution/operators/shuffle_operators/disk_shuffle_runtime.py",
    "ray/data/_internal/execution/operators/shuffle_operators/disk_shuffle_tasks.py",
    "ray/data/_internal/memory_tracing.py",
    "ray/train/_internal/state/state_actor.py",
}
# {listing of Ray's state: the fields that vitray reads}
STATE = {
    "ActorState": {"class_name", "job_id", "placement_group_id", "state"},
    "JobState": {"job_id", "status"},
    "PlacementGroupState": {"creator_job_id", "is_detached", "placement_group_id", "state"},
}


def package_dir(package: str) -> Path:
    return Path(importlib.util.find_spec(package).origin).parent


@functools.cache
def content(file: str) -> str:
    """Return a file of an installed package; the strings of Python source are joined as the parser joins them."""
    package, _, name = file.partition("/")
    path = package_dir(package) / name
    if path.suffix != ".py":
        return path.read_bytes().decode("latin-1")
    text = path.read_text()
    return "\n".join([text, *strings(text)])


def lacking(file: str, texts: Iterable[str]) -> list[str]:
    """Return the texts that a file lacks: pytest would take minutes to show the file."""
    return [text for text in texts if text not in content(file)]


def strings(source: str) -> list[str]:
    """Return the string literals of a module; an f-string without its fields."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value for part in node.values if isinstance(part, ast.Constant)))
    return found


@pytest.mark.parametrize(("file", "text"), [(file, text) for file, texts in TEXTS.items() for text in sorted(texts)])
def test_the_platform_has_the_text(file, text):
    assert lacking(file, [text]) == []


def test_the_text_of_a_memory_kill_names_the_node_and_its_usage():
    template = re.search(r"Memory on the node[^\0\n]+", content("ray/core/src/ray/raylet/raylet"))[0]
    values = iter(["192.0.2.2", "5af6ae", "4.69", "23.54", "0.199254"])
    message = re.sub(r"%[sf]", lambda _: next(values), template)
    killed = OutOfMemoryError(f"1 worker(s) were killed due to the node {failures.LOW_MEMORY}. {message}")
    assert failures.out_of_memory_reason(killed) == "node 192.0.2.2 ran out of memory, 4.69GB of 23.54GB taken"


@pytest.mark.parametrize(("logger", "level"), QUIET_LOGGERS.items())
def test_the_platform_logs_the_record_that_is_silenced(logger, level):
    method, text = RECORDS[logger]
    module = Path(importlib.util.find_spec(logger).origin).read_text()
    assert "logging.getLogger(__name__)" in module
    assert f"logger.{method}(" in module
    assert any(text in string for string in strings(module))
    assert getattr(logging, method.upper()) < level


def test_ray_train_logs_a_workers_traceback_while_its_error_is_handled():
    source = Path(importlib.util.find_spec(failures.TRACEBACKS).origin).read_text()
    assert "logger = logging.getLogger(__name__)" in source
    assert "traceback.format_exc(" in source[: source.index('logger.error(f"Error in training function:')]


def test_ray_data_logs_a_lack_of_resources_only():
    """Silencing the logger hides nothing else."""
    module = Path(importlib.util.find_spec("ray.data._internal.execution.resource_manager").origin).read_text()
    assert len(re.findall(r"logger\.(?:warning|error|exception|critical)\(", module)) == 1


def test_the_controller_logs_each_failed_attempt_to_start_workers():
    module = Path(importlib.util.find_spec(failures.CONTROLLER).origin).read_text()
    assert "logger = logging.getLogger(__name__)" in module
    assert re.search(r"logger\.exception\(\"[^\"]*%s\", e\)\n\s*training_error = ControllerError", module)


def test_no_logger_of_a_platform_is_named_elsewhere():
    named = set()
    for path in FILES:
        if path.suffix == ".py":
            named |= {
                ast.unparse(node.args[0])
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "logging.getLogger"
            }
    variables = {"name", "module", "_name", "CONTROLLER", "TRACEBACKS"}
    # Ray Serve documents its own logger for what an application writes.
    assert named <= {"__name__", "'vitray.tracking'", "'botocore'", "'ray.serve'"} | variables


@pytest.mark.parametrize("file", VARIABLES)
def test_the_platform_reads_the_variables(file):
    is_native = not file.endswith(".py")  # Ray's native settings have names without RAY_
    names = [name.removeprefix("RAY_") if is_native else name for name in VARIABLES[file]]
    assert lacking(file, names) == []


def test_every_variable_of_a_platform_is_listed():
    ours = {"RAY_LIBRARY_ACTORS", "RAY_SETTINGS", "LOCAL_RAY_SETTINGS", "RAY_TRAIN"}
    used = set().union(*(re.findall(r"\b(?:RAY|TUNE|MLFLOW)_\w*[A-Za-z0-9]\b", path.read_text()) for path in FILES))
    assert used - ours == set().union(*VARIABLES.values())


def test_rays_actors_that_outlive_a_job_are_listed():
    ray = package_dir("ray")
    detached = {
        str(path.relative_to(ray.parent))
        for library in ("data", "train", "tune")
        for path in (ray / library).rglob("*.py")
        if 'lifetime="detached"' in path.read_text() and "tests" not in path.parts
    }
    assert detached <= LIBRARY_ACTORS.keys() | OTHER_ACTORS
    for file in detached & LIBRARY_ACTORS.keys():
        assert lacking(file, [LIBRARY_ACTORS[file]]) == []
    assert set(LIBRARY_ACTORS.values()) == session.RAY_LIBRARY_ACTORS


@pytest.mark.parametrize("listing", STATE)
def test_rays_listings_have_the_fields(listing):
    from ray.util.state import common

    assert STATE[listing] <= set(getattr(common, listing).list_columns(detail=True))


def test_mlflows_client_names_the_status_of_a_refusal(monkeypatch):
    class Refusal(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_error(401)

        def log_message(self, *_):
            pass

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusal) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        with pytest.raises(ConfigError, match=doctor.UNAUTHORIZED):
            doctor._check_tracking(f"http://127.0.0.1:{server.server_address[1]}")
        server.shutdown()


def test_matplotlib_warns_of_a_letter_that_the_font_lacks():
    figure = Figure()
    figure.text(0.5, 0.5, "中")
    with pytest.warns(UserWarning, match=plotting.MISSING_GLYPH):
        figure.savefig(io.BytesIO(), format="png")
    assert plotting.to_png(figure)


def test_botocore_logs_the_source_of_credentials(monkeypatch, caplog):
    from vitray.system import storage

    logger = logging.getLogger("botocore")
    for level, records in ((logging.INFO, 1), (logging.NOTSET, 0)):
        caplog.clear()
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "canary")
        boto3 = storage.import_boto3()
        if level:
            logger.setLevel(level)
        boto3.Session().get_credentials()
        assert len([each for each in caplog.records if each.name.startswith("botocore")]) == records
