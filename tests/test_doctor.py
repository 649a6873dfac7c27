"""The check of a cluster: each problem is reported with its node and a remedy, without false alarms."""

import os
import subprocess
import sys

import pytest
from test_layers import ROOT

from pipelines import doctor
from vitray.cluster.doctor import UNAUTHORIZED, NodeProbe, check_cluster, check_results, find_problems
from vitray.errors import ConfigError, RunError

HEALTHY = NodeProbe(
    name="one", address="10.0.0.1", cpus=8.0, gpus=1.0, store=8e9, versions={"python": "3.12.3", "ray": "2.60.0"},
    devices=1, usable=1, disk=0.4, files=65536, clock=0.01, listens="10.0.0.1", interface="eth0", storage=None,
    tracking=None,
)  # fmt: skip
OTHERS = [
    HEALTHY._replace(name=name, address=at, listens=at) for name, at in (("two", "10.0.0.2"), ("three", "10.0.0.3"))
]


@pytest.fixture(autouse=True)
def with_token(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")


def test_equal_nodes_have_no_problems():
    assert find_problems([HEALTHY, *OTHERS]) == []
    assert find_problems([]) == []
    # A single node needs no reachable address and no token.
    assert find_problems([HEALTHY._replace(listens="127.0.0.1", gpus=0.0, devices=0, usable=0)]) == []


@pytest.mark.parametrize(
    ("change", "problem", "remedy"),
    [
        ({"versions": {"python": "3.12.3", "ray": "2.59.0"}}, "ray 2.59.0, and the others have 2.60.0", "make up"),
        ({"versions": {"python": "3.11.2", "ray": "2.60.0"}}, "python 3.11.2, and the others have 3.12.3", "the same"),
        ({"versions": {"python": "3.12.3"}}, "ray none, and the others have 2.60.0", "constraints.txt"),
        ({"devices": 0, "usable": 0}, "Ray assigns 1 GPUs, the driver lists 0 and torch can use 0", "nvidia-smi"),
        ({"usable": 0}, "the driver lists 1 and torch can use 0", "NVIDIA's driver"),
        ({"gpus": 0.0}, "the driver lists 1 GPUs, and Ray assigns 0", "--num-gpus"),
        ({"disk": 0.93}, "the disk with Ray's folder is 93% full", "--temp-dir"),
        ({"store": 3e8}, "an object store of 0.3 GB", "--object-store-memory"),
        ({"files": 1024}, "1024 open files are allowed", "ulimit -n 65536"),
        ({"clock": -40.0}, "its clock is 40 s behind the others", "set-ntp"),
        ({"listens": "127.0.1.1"}, "gloo would listen on 127.0.1.1", "GLOO_SOCKET_IFNAME=eth0"),
        ({"storage": "s3://b: no such bucket"}, "results: s3://b: no such bucket", ""),
        ({"tracking": "http://m does not answer"}, "MLflow: http://m does not answer", "a reachable MLflow"),
        ({"tracking": f"http://m:4010: {UNAUTHORIZED}"}, "MLflow: http://m:4010", "MLFLOW_TRACKING_USERNAME and"),
        ({"tracking": "http://m:4010: error code 500"}, "MLflow: http://m:4010", "a reachable MLflow"),
    ],
)  # fmt: skip
def test_each_problem_is_reported_for_its_node(change, problem, remedy):
    (finding,) = find_problems([OTHERS[0], HEALTHY._replace(**change), OTHERS[1]])
    assert finding.node == "one"
    assert problem in finding.problem
    assert remedy in finding.remedy


def test_results_on_a_path_that_a_node_does_not_share_are_reported(tmp_path):
    marker = tmp_path / "runs" / ".vitray-doctor-1"
    with pytest.raises(ConfigError, match="runs: is another folder here than for the driver; expected s3://bucket/key"):
        check_results(str(tmp_path / "runs"), str(marker))
    marker.touch()
    assert check_results(str(tmp_path / "runs"), str(marker)) is None


def test_a_cluster_without_a_token_is_reported(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    (finding,) = find_problems([HEALTHY, *OTHERS])
    assert finding.node == "the cluster"
    assert "anyone who reaches one of its ports can run code" in finding.problem


@pytest.mark.ray
def test_a_local_ray_is_checked(ray_cluster, s3_server, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlruns.db'}")
    (node,), findings = check_cluster("s3://bucket/runs")
    assert node.cpus == 3
    assert node.versions["torch"].partition("+")[0].count(".") == 2
    assert abs(node.clock) < 2
    assert (node.storage, node.tracking) == (None, None)
    assert not (tmp_path / "mlruns.db").exists()
    # The tests' object store is small; the disk and the limits depend on the machine.
    assert any("an object store of 0.5 GB" in finding.problem for finding in findings)
    _, findings = check_cluster("s3://nowhere/runs")
    assert any("results: s3://nowhere" in problem and "no such bucket" in problem for _, problem, _ in findings)


@pytest.mark.ray
@pytest.mark.slow
def test_an_unreachable_server_is_reported(ray_cluster, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(RunError, match=r"\d problems on 1 nodes"):
        doctor.main([str(tmp_path)])
    output = capsys.readouterr().out
    assert "MLflow: http://127.0.0.1:9 does not answer" in output
    assert "results:" not in output


# Runs in its own process, since the other tests share one Ray.
SCRIPT = """
import json, os, sys
from vitray.cluster import session
session.prepare_environment()
os.environ["RAY_AUTH_MODE"] = "disabled"
from ray.cluster_utils import Cluster

nodes = Cluster(head_node_args={"num_cpus": 1}, initialize_head=True)
nodes.add_node(num_cpus=2)
os.environ["RAY_ADDRESS"] = nodes.address
with session.ray_session():
    from vitray.cluster.doctor import check_cluster
    nodes, findings = check_cluster(sys.argv[1])
print(json.dumps([[node.cpus for node in nodes], [[*finding] for finding in findings]]))
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("interface", ["lo", "nothing0"])
def test_nodes_all_reduce_as_workers_do(tmp_path, interface):
    environment = os.environ | {
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlruns.db'}",
        "GLOO_SOCKET_IFNAME": interface,
    }
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    output = done.stdout.splitlines()[-1]
    assert output.startswith("[[1.0, 2.0]") or output.startswith("[[2.0, 1.0]")
    assert "MLflow's store is a file" in output
    assert "anyone who reaches one of its ports can run code" in output
    # Two nodes of one machine reach each other by its loopback, and not by a missing interface.
    assert ("cannot reach the other nodes by gloo" in output) == (interface == "nothing0")
