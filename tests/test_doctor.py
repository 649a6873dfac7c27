"""A cluster looked at before a run: what is wrong is said with its node and what to do, and nothing else is."""

import os
import subprocess
import sys

import pytest
from test_layers import ROOT

from pipelines import doctor
from vitray.cluster.doctor import Seen, examine, judge
from vitray.errors import RunError

WELL = Seen(
    name="one", address="10.0.0.1", cpus=8.0, gpus=1.0, store=8e9, versions={"python": "3.12.3", "ray": "2.60.0"},
    devices=1, usable=1, disk=0.4, files=65536, clock=0.01, listens="10.0.0.1", interface="eth0", storage=None,
    tracking=None,
)  # fmt: skip
OTHERS = [WELL._replace(name=name, address=at, listens=at) for name, at in (("two", "10.0.0.2"), ("three", "10.0.0.3"))]


@pytest.fixture(autouse=True)
def with_token(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")


def test_nothing_is_wrong_with_nodes_that_are_alike():
    assert judge([WELL, *OTHERS]) == []
    assert judge([]) == []
    # Whoever is alone needs no other to find it, and no token.
    assert judge([WELL._replace(listens="127.0.0.1", gpus=0.0, devices=0, usable=0)]) == []


@pytest.mark.parametrize(
    ("change", "what", "wanted"),
    [
        ({"versions": {"python": "3.12.3", "ray": "2.59.0"}}, "ray 2.59.0, and the others have 2.60.0", "make up"),
        ({"versions": {"python": "3.11.2", "ray": "2.60.0"}}, "python 3.11.2, and the others have 3.12.3", "the same"),
        ({"versions": {"python": "3.12.3"}}, "ray none, and the others have 2.60.0", "constraints.txt"),
        ({"devices": 0, "usable": 0}, "Ray gives out 1 GPUs, the driver lists 0 and torch can use 0", "nvidia-smi"),
        ({"usable": 0}, "the driver lists 1 and torch can use 0", "NVIDIA's driver"),
        ({"gpus": 0.0}, "the driver lists 1 GPUs, and Ray gives out 0", "--num-gpus"),
        ({"disk": 0.93}, "the disk of Ray's folder is 93% full", "--temp-dir"),
        ({"store": 3e8}, "an object store of 0.3 GB", "--object-store-memory"),
        ({"files": 1024}, "1024 open files are allowed", "ulimit -n 65536"),
        ({"clock": -40.0}, "its clock is 40 s behind the others", "set-ntp"),
        ({"listens": "127.0.1.1"}, "gloo would listen on 127.0.1.1", "GLOO_SOCKET_IFNAME=eth0"),
        ({"storage": "s3://b: no such bucket"}, "results: s3://b: no such bucket", ""),
        ({"tracking": "http://m does not answer"}, "MLflow: http://m does not answer", ""),
    ],
)  # fmt: skip
def test_each_fault_is_said_of_its_node_alone(change, what, wanted):
    (fault,) = judge([OTHERS[0], WELL._replace(**change), OTHERS[1]])
    assert fault.node == "one"
    assert what in fault.what
    assert wanted in fault.wanted


def test_a_cluster_that_lets_everybody_in_is_said(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    (fault,) = judge([WELL, *OTHERS])
    assert fault.node == "the cluster"
    assert "whoever reaches a port of it runs code" in fault.what


@pytest.mark.ray
def test_this_machine_is_asked_what_it_has(ray_cluster, s3_server, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlruns.db'}")
    health = examine("s3://bucket/runs")
    (node,) = health.nodes
    assert node.cpus == 3
    assert node.versions["torch"].partition("+")[0].count(".") == 2
    assert abs(node.clock) < 2
    assert (node.storage, node.tracking) == (None, None)
    assert not (tmp_path / "mlruns.db").exists()
    # The object store of the tests is small; what a machine's disk and limits are is its own.
    assert any("an object store of 0.5 GB" in fault.what for fault in health.faults)
    wrong = examine("s3://nowhere/runs").faults
    assert any("results: s3://nowhere" in fault.what and "no such bucket" in fault.what for fault in wrong)


@pytest.mark.ray
@pytest.mark.slow
def test_a_server_that_is_away_is_said(ray_cluster, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(RunError, match=r"\d faults on 1 nodes"):
        doctor.main([str(tmp_path)])
    said = capsys.readouterr().out
    assert "MLflow: http://127.0.0.1:9 does not answer" in said
    assert "results:" not in said


# In a process of its own: the other tests have another Ray.
SCRIPT = """
import json, os, sys
from vitray import cluster
cluster.prepare_environment()
from ray.cluster_utils import Cluster

nodes = Cluster(head_node_args={"num_cpus": 1}, initialize_head=True)
nodes.add_node(num_cpus=2)
os.environ["RAY_ADDRESS"] = nodes.address
with cluster.running():
    from vitray.cluster.doctor import examine
    health = examine(sys.argv[1])
print(json.dumps([[node.cpus for node in health.nodes], [[*fault] for fault in health.faults]]))
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("interface", ["lo", "nothing0"])
def test_nodes_meet_as_workers_do(tmp_path, interface):
    environment = os.environ | {
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlruns.db'}",
        "GLOO_SOCKET_IFNAME": interface,
        "RAY_AUTH_MODE": "disabled",
    }
    words = [sys.executable, "-c", SCRIPT, str(tmp_path / "runs")]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()[-1]
    assert said.startswith("[[1.0, 2.0]") or said.startswith("[[2.0, 1.0]")
    assert "MLflow's store is a file" in said
    assert "whoever reaches a port of it runs code" in said
    # Two nodes of one machine find each other at its loopback, and at no interface that is not there.
    assert ("does not meet the other nodes by gloo" in said) == (interface == "nothing0")
