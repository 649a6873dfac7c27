"""Jobs: the files, command and environment that are sent, rejected input, and jobs on a real head."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import pytest

from pipelines.__main__ import main
from vitray.cluster import jobs, session
from vitray.cluster.job_package import (
    SECRET_VARIABLES,
    SENT_VARIABLES,
    UPLOAD_LIMIT,
    PackageFiles,
    check_size,
    check_tracking,
    job_environment,
    list_files,
    write_package,
)
from vitray.cluster.storage_check import check_outlives_job
from vitray.errors import ConfigError
from vitray.system import host_facts
from vitray.system.host_facts import commit_facts, commit_variables
from vitray.system.mlflow_client import tracking_uri

ROOT = Path(__file__).parent.parent


def git(folder, *args):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(folder), *identity, *args], check=True, capture_output=True)


@pytest.fixture
def folder(tmp_path):
    """A small repository with tracked, new, removed and ignored files, and a folder with its own .gitignore."""
    work = tmp_path / "work"
    for name, content in {
        "kept.py": "1",
        "removed.py": "2",
        "big.bin": "3" * 5000,
        "below/kept.yaml": "4",
        ".gitignore": "data/\n*.log\n",
        "below/.gitignore": "secret*\n",
    }.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(content)
    git(tmp_path, "init", "-q", "work")
    git(work, "add", ".")
    git(work, "commit", "-qm", "x")
    (work / "removed.py").unlink()
    for name in ("new file ü.txt", "data/images.parquet", "run.log", "below/secret.txt"):
        (work / name).parent.mkdir(exist_ok=True)
        (work / name).write_text("5")
    return work


def test_files_that_git_does_not_ignore_are_sent(folder):
    files = list_files(folder)
    kept = {".gitignore", "below/.gitignore", "below/kept.yaml", "big.bin", "kept.py", "new file ü.txt"}
    assert set(files.sizes) == kept
    assert files.sizes["big.bin"] == 5000
    assert set(list_files(folder / "below").sizes) == {".gitignore", "kept.yaml"}
    (folder / ".rayignore").write_text("*.bin\nnew*\n")
    assert set(list_files(folder).sizes) == kept - {"big.bin", "new file ü.txt"} | {".rayignore"}


def test_untracked_secrets_are_not_sent(folder):
    for name in (".env", ".env.local", "below/key.pem", ".aws/credentials"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("5")
    git(folder, "add", "-f", "below/key.pem")  # as public as the repository
    files = list_files(folder)
    assert files.secrets == [".aws/credentials", ".env", ".env.local"]
    assert "below/key.pem" in files.sizes
    assert not {*files.secrets} & {*files.sizes}


def test_a_folder_outside_git_is_sent_without_environments(tmp_path):
    for name in ("a.py", "b/c.yaml", ".venv/bin/python", "b/__pycache__/c.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    assert set(list_files(tmp_path).sizes) == {"a.py", "b/c.yaml"}


def test_a_git_that_speaks_another_language_is_understood(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    answer = '[ "$LC_ALL" = C ] && echo "fatal: not a git repository" >&2 || echo "kein Repository" >&2'
    (tmp_path / "bin" / "git").write_text(f"#!/bin/sh\n{answer}\nexit 128\n")
    (tmp_path / "bin" / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    assert "bin/git" in list_files(tmp_path).sizes


def test_files_that_cannot_be_sent_are_listed(folder):
    (folder / "link").symlink_to(folder / "below", target_is_directory=True)
    (folder / "broken").symlink_to(folder / "nowhere")
    assert list_files(folder).skipped == ["link"]


def test_the_same_files_give_the_same_package(folder, tmp_path):
    (folder / "kept.py").chmod(0o755)
    files = list_files(folder)
    write_package(files, tmp_path / "one.zip")
    for path in folder.rglob("*"):
        os.utime(path, (0, 0))
    write_package(list_files(folder), tmp_path / "two.zip")
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()
    assert (tmp_path / "one.zip").stat().st_size <= files.total
    with zipfile.ZipFile(tmp_path / "one.zip") as package:
        assert set(package.namelist()) == set(files.sizes)
        assert package.getinfo("kept.py").external_attr >> 16 == 0o100755


def test_a_package_over_the_limit_is_rejected_with_its_largest_parts(tmp_path):
    from ray._private.ray_constants import DASHBOARD_CLIENT_MAX_SIZE

    assert UPLOAD_LIMIT == DASHBOARD_CLIENT_MAX_SIZE
    sizes = {f"photos/{i}.png": 90_000 for i in range(1000)} | {"weights.pt": 30_000_000, "a.py": 1}
    with pytest.raises(ConfigError) as error:
        check_size(PackageFiles(tmp_path, sizes, [], []))
    assert "120.2 MB in 1002 files, and a cluster takes 105 MB" in str(error.value)
    assert "the largest: photos/ (90.0 MB), weights.pt (30.0 MB), a.py (0.0 MB)" in str(error.value)
    check_size(PackageFiles(tmp_path, {"a": 90_000_000}, [], []))


RAY_VARIABLES = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR")


@pytest.fixture
def bare_environment(monkeypatch):
    """An environment without addresses of stores or of a cluster."""
    for name in (*SENT_VARIABLES, *SECRET_VARIABLES, *RAY_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_addresses_are_sent_and_secrets_are_not(bare_environment):
    bare_environment.setenv("AWS_ENDPOINT_URL", "https://s3.example.org")
    bare_environment.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    bare_environment.setenv("AWS_REGION", "eu-west-1")
    bare_environment.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    bare_environment.setenv("HOME_MADE_TOKEN", "canary")
    variables, messages = job_environment()
    assert variables == {"AWS_ENDPOINT_URL": "https://s3.example.org", "AWS_REGION": "eu-west-1"}
    assert "canary" not in "".join(messages)
    assert any("MLFLOW_TRACKING_URI: an address of this machine, not sent" in line for line in messages)
    assert any("AWS_SECRET_ACCESS_KEY" in line for line in messages)


def test_a_tracking_server_that_refuses_connections_is_rejected_before_anything_is_sent(
    bare_environment, folder, capsys
):
    bare_environment.chdir(folder)
    command = ["submit", "--dry-run", "train", "demo", "data.url=s3://b/demo", "--out", "s3://b/runs"]
    assert main(command) == 0
    assert "MLFLOW_TRACKING_URI: none is sent; the job uses the cluster's own" in capsys.readouterr().err
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]  # bound, but nothing listens
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: nothing listens there"):
            check_tracking("train", {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}"})
        listener.listen()
        assert check_tracking("train", {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}/path"}) == []
    (message,) = check_tracking("train", {"MLFLOW_TRACKING_URI": "http://nowhere.invalid:5000"})
    assert "not reached from here" in message


def test_no_sent_variable_is_named_like_a_secret():
    assert not [
        name for name in SENT_VARIABLES for part in ("KEY", "SECRET", "TOKEN", "PASS", "USER", "CRED") if part in name
    ]


@pytest.mark.parametrize("name", ["MLFLOW_TRACKING_URI", "AWS_ENDPOINT_URL"])
def test_an_address_with_a_password_is_rejected_and_not_printed(bare_environment, name):
    bare_environment.setenv(name, "https://me:canary@example.org")
    with pytest.raises(ConfigError, match=f"{name}: has a password in it") as error:
        job_environment()
    assert "canary" not in str(error.value)


OUT = ["--out", "s3://b/runs"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "demo"], "--out: got runs, in the job's own folder"),
        (["sweep", "demo", "lr", "--out=mine"], "--out: got mine, in the job's own folder"),
        (["evaluate", "s3://b/x", "s3://b/d"], "--out: got evaluations, in the job's own folder"),
        (["train", "demo", "data.url=data/demo", *OUT], "data.url=data/demo: would not be sent"),
        (["train", "demo", "data.url=s3://me:canary@b/x", *OUT], "train: an argument has a password in it"),
        (["promote", "vit@challenger", "s3://b/d"], "--out: got evaluations, in the job's own folder"),
        (["inspect", "s3://b/x"], "--out: got inspect, in the job's own folder"),
        (["trian", "demo"], "got 'trian', expected one of .*did you mean train"),
        (["ui"], "got 'ui', expected one of"),
        (["train", "demo", *OUT, "--follow"], "--follow: expected before train"),
        (["train", "demo", *OUT], "RAY_ADDRESS: not set; expected the cluster's dashboard"),
    ],
)
def test_invalid_jobs_are_rejected_before_anything_is_sent(bare_environment, capsys, args, message):
    assert main(["submit", *args]) == 2
    printed = capsys.readouterr().err.splitlines()[-1]
    assert "canary" not in printed
    assert re.search(message, printed), printed


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("10.0.0.1:6379", "RAY_ADDRESS: got 10.0.0.1:6379; expected the cluster's dashboard"),
        ("http://me:canary@10.0.0.1:8265", "RAY_ADDRESS: has a password in it"),
        ("http://127.0.0.1:1", "RAY_ADDRESS: http://127.0.0.1:1: cannot be reached"),
    ],
)
def test_an_unreachable_cluster_is_reported(bare_environment, capsys, address, message):
    bare_environment.setenv("RAY_ADDRESS", address)
    began = time.monotonic()
    assert main(["jobs"]) == 2
    assert time.monotonic() - began < 6
    printed = capsys.readouterr().err
    assert message in printed
    assert "canary" not in printed


def test_a_dry_run_lists_the_package_and_the_command(bare_environment, capsys):
    assert main(["submit", "--dry-run", "train", "demo", "data.url=s3://b/d", *OUT, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["command"] == "python -m pipelines.train demo data.url=s3://b/d --out s3://b/runs --json"
    assert result["files"] > 100
    assert result["environment"] == sorted(commit_variables())


def test_a_verb_whose_file_has_another_name_runs_as_a_job(bare_environment, capsys):
    command = ["submit", "--dry-run", "inspect", "s3://b/model", "--out", "s3://b/inspect", "--json"]
    assert main(command) == 0
    words = json.loads(capsys.readouterr().out.splitlines()[-1])["command"].split()
    assert (ROOT / f"{words[2].replace('.', '/')}.py").exists()


def test_a_job_knows_the_commit_that_it_was_submitted_from(bare_environment, folder, tmp_path, capsys):
    bare_environment.chdir(folder)
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    facts = {"git.commit": head, "git.dirty": "true"}  # a file is removed
    assert commit_facts() == facts
    sent = commit_variables()
    assert main(["submit", "--dry-run", "train", "demo", *OUT, "--json"]) == 0
    assert set(sent) <= set(json.loads(capsys.readouterr().out.splitlines()[-1])["environment"])
    bare_environment.chdir(tmp_path)
    assert commit_facts() == commit_variables() == {}  # no repository, as in a job
    for name, value in sent.items():
        bare_environment.setenv(name, value)
    assert commit_facts() == facts
    assert facts.items() <= host_facts.facts().items()


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [("SUCCEEDED", 0, 0), ("FAILED", 2, 2), ("FAILED", -9, 137), ("FAILED", None, 1), ("STOPPED", None, 143)],
)
def test_a_followed_job_sets_the_exit_status(status, code, expected):
    assert jobs.exit_status(jobs.ClusterJob("a", status, "x", 0, 1, code)) == expected


# ---- inside a job ----------------------------------------------------------------------------------------------------


@pytest.fixture
def job(bare_environment, tmp_path):
    """The environment inside a job: its temporary folder, and the variable that Ray sets."""
    bare_environment.chdir(tmp_path)
    bare_environment.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": {"working_dir": "gcs://a.zip"}}))
    assert session.job_dir() == tmp_path
    return bare_environment


def test_results_and_records_in_a_jobs_own_folder_are_rejected(job, tmp_path):
    from vitray.runs.resolve import check_storage

    job.setenv("MLFLOW_TRACKING_URI", "http://10.0.0.5:5000")
    for out in ("runs", str(tmp_path / "runs")):
        with pytest.raises(ConfigError, match="runs: lies in the folder of this job"):
            check_storage(out)
    shared = tempfile.mkdtemp(dir=tmp_path.parent)
    check_storage(shared)
    assert list(Path(shared).iterdir()) == []
    for uri in (None, "sqlite:///mlruns.db"):
        job.delenv("MLFLOW_TRACKING_URI") if uri is None else job.setenv("MLFLOW_TRACKING_URI", uri)
        with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI: got"):
            tracking_uri()
    job.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{shared}/mlruns.db")
    assert tracking_uri().endswith("/mlruns.db")


def test_exports_and_model_folders_in_a_jobs_own_folder_are_rejected(job):
    from pipelines import export, model, weights

    Path("runs/first/model").mkdir(parents=True)
    for verb, args in (
        (export.main, ["runs/first/model", "--to", "onnx"]),
        (model.main, ["deit_b.pth", "--save", "models/deit_b"]),
        (weights.main, ["flatten", "runs/first/model", "models/whole"]),
        (weights.main, ["repatch", "runs/first/model", "8", "models/whole"]),
        (weights.main, ["checkpoint", "runs/first", "models/whole"]),
    ):
        with pytest.raises(ConfigError, match=r"(exports|models)/\S+: lies in the folder of this job"):
            verb(args)
    check_outlives_job("s3://bucket/models/whole")


def test_a_dataset_that_was_not_sent_is_reported(job):
    from vitray.data.shards import open_dataset

    with pytest.raises(ConfigError, match=r"data/demo: not a vitray dataset.*only the files that were sent with it"):
        open_dataset("data/demo")


def test_a_job_without_its_own_folder_may_write_to_its_working_directory(bare_environment, tmp_path):
    bare_environment.chdir(tmp_path)
    for environment in ({}, {"working_dir": "local:///srv/vitray"}):
        bare_environment.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": environment}))
        assert session.job_dir() is None


def test_a_run_cannot_connect_to_a_dashboard(bare_environment):
    bare_environment.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    with pytest.raises(ConfigError, match="`vitray submit` sends jobs"):
        session._connect_or_start(None, None, Path())


# ---- on a real head --------------------------------------------------------------------------------------------------


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """A head with a dashboard and a token, and the environment of a user who has the token."""
    base_dir = tmp_path_factory.mktemp("cluster")
    (base_dir / "token").write_text("a-token-of-this-test-alone-0123456789")
    temp_dir = tempfile.mkdtemp(prefix="vj", dir="/tmp")  # longer paths exceed the limit of sockets
    names = ("port", "dashboard-port", "ray-client-server-port", "dashboard-agent-listen-port")
    ports = {name: free_port() for name in names}
    settings = [f"--{name}={port}" for name, port in ports.items()]
    without = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "MLFLOW_", "RAY_"))}
    environment = without | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(base_dir / "token"),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_raylet_start_wait_time_s": "180",
        "RAY_worker_niceness": "0",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MLFLOW_TRACKING_URI": f"sqlite:///{base_dir / 'mlruns.db'}",
        "VITRAY_HOME": str(base_dir / "home"),
    }
    args = ["start", "--head", "--block", "--num-cpus=3", "--dashboard-host=127.0.0.1", "--disable-usage-stats"]
    args += [*settings, f"--temp-dir={temp_dir}", "--object-store-memory=200000000"]
    ray = str(Path(sys.executable).with_name("ray"))
    with (base_dir / "log").open("w") as log:
        process = subprocess.Popen([ray, *args], env=environment, stdout=log, stderr=log)
    try:
        for _ in range(1800):
            assert process.poll() is None, (base_dir / "log").read_text()
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", ports["dashboard-port"])) == 0:
                    break
            time.sleep(0.1)
        yield base_dir, environment | {"RAY_ADDRESS": f"http://127.0.0.1:{ports['dashboard-port']}"}
    finally:
        process.terminate()
        process.wait(60)
        shutil.rmtree(temp_dir, ignore_errors=True)


def vitray(environment, *args, command=("-m", "pipelines")):
    return subprocess.run([sys.executable, *command, *args], cwd=ROOT, env=environment, capture_output=True, text=True)


def settings_of(base_dir):
    return [
        *["demo", f"data.url={base_dir / 'demo'}", "model.name=vit_u2x2_8", "model.image_size=32", "optim.batch=16"],
        *["optim.warmup=0 steps", "compute.workers=1", "tracking.register_as=null", "tracking.every=1 step"],
    ]


def all_runs(base_dir, query=""):
    import mlflow

    return mlflow.MlflowClient(f"sqlite:///{base_dir / 'mlruns.db'}").search_runs(["1"], query)


def runs_of(base_dir, name):
    return all_runs(base_dir, f"attributes.run_name = '{name}'")


def status_of(base_dir, name):
    (run,) = runs_of(base_dir, name)
    return run.info.status


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_jobs_run_and_stopped_ones_are_killed(head):
    base_dir, environment = head
    # A token exists, and RAY_AUTH_MODE is not set.
    user = {name: value for name, value in environment.items() if name != "RAY_AUTH_MODE"}
    canary = user | {"MLFLOW_TRACKING_PASSWORD": "canary", "AWS_SECRET_ACCESS_KEY": "canary"}
    args = ["submit", "--follow", "shard", "demo", str(base_dir / "demo"), "images=100", "image_size=32"]
    done = vitray(canary, *args, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["status"] == "SUCCEEDED"
    logged = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"url"')]
    assert logged[0]["url"] == str(base_dir / "demo")

    # `ray job submit` works too, and rejects results in the job's own folder.
    submit = ["job", "submit", "--working-dir", ".", "--", "python", "-m", "pipelines.train", *settings_of(base_dir)]
    submit += ["optim.duration=4 steps", "--name", "whole", "--json"]
    ray = ("-m", "ray.scripts.scripts")
    rejected = vitray(environment, *submit, command=ray)
    assert rejected.returncode != 0
    assert "runs/whole: lies in the folder of this job" in rejected.stdout + rejected.stderr
    done = vitray(environment, *submit, "--out", str(base_dir / "runs"), command=ray)
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"name"')))
    assert (outcome["steps"], outcome["state"]) == (4, "finished")
    assert status_of(base_dir, "whole") == "FINISHED"

    # Of a network by its address in MLflow, on the CPUs of the cluster.
    run_id = runs_of(base_dir, "whole")[0].info.run_id
    model = f"runs:/{run_id}/vit_u2x2_8"
    args = ["evaluate", model, str(base_dir / "demo"), "--out", str(base_dir / "evaluations"), "--json"]
    done = vitray(canary, "submit", "--follow", *args)
    assert done.returncode == 0, done.stdout + done.stderr
    scored = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"data"')))
    assert scored["top1"] == outcome["val_top1"]
    assert (base_dir / "evaluations" / "index.html").exists()
    commit = commit_facts()["git.commit"]
    evaluated = next(run for run in all_runs(base_dir) if run.data.tags.get("vitray.kind") == "evaluation")
    assert evaluated.data.tags["mlflow.source.git.commit"] == commit
    assert evaluated.data.tags["mlflow.parentRunId"] == run_id

    endless = ["optim.duration=100000 steps", "checkpoint.every=5 steps", "--name", "stopped"]
    done = vitray(
        canary, "submit", "train", *settings_of(base_dir), *endless, "--out", str(base_dir / "runs"), "--json"
    )
    assert done.returncode == 0, done.stderr
    name = json.loads(done.stdout)["id"]
    while not list((base_dir / "runs").glob("stopped/checkpoints/*/checkpoint.json")):
        time.sleep(0.2)  # until the test times out
    while not runs_of(base_dir, "stopped"):
        time.sleep(0.2)  # the driver imports MLflow while the workers start
    listed = json.loads(vitray(environment, "jobs", "--json").stdout.splitlines()[-1])["jobs"]
    assert [job["status"] for job in listed if job["id"] == name] == ["RUNNING"]
    done = vitray(environment, "stop", name, "--json")
    assert json.loads(done.stdout.splitlines()[-1])["status"] == "STOPPED", done.stderr
    assert status_of(base_dir, "stopped") == "KILLED"
    assert vitray(environment, "stop", name).stdout == f"{name}: STOPPED\n"

    def latest():
        return max(path.parent.name for path in (base_dir / "runs").glob("stopped/checkpoints/*/checkpoint.json"))

    saved = latest()

    # As deploy/kueue.yaml does before the head ends: all jobs, which go on where they were.
    submit = ["submit", "train", *settings_of(base_dir), *endless, "--out", str(base_dir / "runs"), "--json"]
    again = json.loads(vitray(canary, *submit).stdout)["id"]
    while "resumed at step" not in vitray(environment, "jobs", again).stdout:
        time.sleep(0.5)
    done = vitray(environment, "stop", "--all", "--json")
    (job,) = json.loads(done.stdout.splitlines()[-1])["jobs"]
    assert (job["id"], job["status"]) == (again, "STOPPED"), done.stderr
    assert latest() > saved
    assert vitray(environment, "stop", "--all").stdout == "no job is running\n"

    all_jobs = vitray(environment, "list", "--log-style=record", command=(*ray, "job")).stdout
    assert name in all_jobs
    assert "RAY_JOB_STOP_WAIT_TIME_S" in all_jobs
    assert "canary" not in all_jobs + vitray(environment, "jobs", name).stdout

    unknown = vitray(environment, "stop", f"{name}x")
    assert unknown.returncode == 2
    assert f"did you mean {name}" in unknown.stderr


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cluster_rejects_missing_and_wrong_tokens(head, tmp_path):
    _, environment = head
    (tmp_path / "other").write_text("another-token-0123456789-0123456789")
    bare = {name: value for name, value in environment.items() if not name.startswith("RAY_AUTH")}
    without_token = vitray(bare | {"HOME": str(tmp_path)}, "jobs")
    assert without_token.returncode == 2
    assert "asks for a token, and none was sent" in without_token.stderr
    wrong_token = vitray(bare | {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "other")}, "jobs")
    assert wrong_token.returncode == 2
    assert "refuses the token" in wrong_token.stderr
    assert "another-token" not in wrong_token.stderr
    assert vitray(bare | {"RAY_AUTH_TOKEN_PATH": environment["RAY_AUTH_TOKEN_PATH"]}, "jobs").returncode == 0
