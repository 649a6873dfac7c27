"""The files that make clusters: what Ray and a simulated AWS make of them, and who is let in."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hosts import Site, until

from vitray.cluster import launch
from vitray.cluster.jobs import GRACE
from vitray.errors import ConfigError

ROOT = Path(__file__).parent.parent
AWS, LOCAL, KUBERAY = ROOT / "cluster.yaml", ROOT / "deploy" / "local.yaml", ROOT / "deploy" / "kuberay.yaml"
SET = {
    "YOUR-ADDRESS": "203.0.113.7",
    "YOUR-ARTIFACTS": "/srv/mlflow",
    "YOUR-BUCKET": "vitray-test",
    "YOUR-FIRST-WORKER": "192.168.1.11",
    "YOUR-HEAD": "192.168.1.10",
    "YOUR-INTERFACE": "eth0",
    "YOUR-SECOND-WORKER": "192.168.1.12",
    "YOUR-USER": "somebody",
}
RAY = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]


def filled(source, target):
    """A file as its owner leaves it."""
    text = source.read_text()
    for name, value in SET.items():
        text = text.replace(name, value)
    target.write_text(text)
    return str(target)


# ---- what is refused before anything is launched ---------------------------------------------------------------------


@pytest.mark.parametrize("source", [AWS, LOCAL])
def test_a_file_that_nobody_has_filled_in_is_refused(source):
    with pytest.raises(ConfigError) as error:
        launch.read_cluster(str(source))
    named = {word.rstrip(".,;:/]") for word in re.findall(r"YOUR-[A-Z-]+", source.read_text())}
    assert all(name in str(error.value) for name in named)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("source", [AWS, LOCAL])
def test_a_file_that_is_filled_in_is_fit(source, tmp_path):
    launch.read_cluster(filled(source, tmp_path / "cluster.yaml"))


def gpu(tree):
    return tree["available_node_types"]["gpu_spot"]["node_config"]


def ingress(place):
    return lambda tree: tree["provider"]["security_group"]["IpPermissions"][0].update(IpRanges=[{"CidrIp": place}])


def replaced(key, old, new):
    def change(tree):
        assert any(old in command for command in tree[key])
        tree[key] = [command.replace(old, new) for command in tree[key]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree.update(setup_comands=[]), "setup_comands"),
        (lambda tree: tree["available_node_types"]["head"].update(min_worker=1), "min_worker"),
        (lambda tree: tree.update(head_node_type="haed"), "head_node_type"),
        (lambda tree: gpu(tree).update(InstanceTyp="g5.2xlarge"), "gpu_spot.node_config: .*InstanceTyp"),
        (lambda tree: gpu(tree).update(MetadataOptions={}), "gpu_spot.*HttpTokens: wanted required"),
        (ingress("0.0.0.0/0"), "0.0.0.0/0 is open to too many"),
        (ingress("1.2.3.4/8"), "1.2.3.4/8 has host bits set"),
        (lambda tree: tree["provider"].pop("security_group"), "wanted ssh from your address"),
        (replaced("worker_start_ray_commands", "RAY_AUTH_MODE=token", ""), "worker_start_ray_commands: .*token"),
        (replaced("head_start_ray_commands", "RAY_AUTH_MODE=token", ""), "head_start_ray_commands: .*token"),
        (replaced("head_start_ray_commands", "host=127.0.0.1", "host=0.0.0.0"), "--dashboard-host=127.0.0.1"),
        (lambda tree: tree.pop("head_start_ray_commands"), "head_start_ray_commands: wanted a `ray start`"),
    ],
)
def test_a_file_that_would_fail_or_let_others_in_is_refused(change, message, tmp_path):
    path = tmp_path / "cluster.yaml"
    tree = yaml.safe_load(Path(filled(AWS, path)).read_text())
    change(tree)
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=message) as error:
        launch.read_cluster(str(path))
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["a: [", "[1, 2]", "a: 1"])
def test_what_is_no_clusters_file_is_said(text, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"a\.yaml: "):
        launch.read_cluster(str(tmp_path / "a.yaml"))


# ---- on a simulated AWS ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def aws(tmp_path_factory):
    """What Ray makes of the file in an account that `make up` has prepared: its tree, and what it asked AWS to run."""
    from moto import mock_aws

    place = tmp_path_factory.mktemp("aws")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        settings = {"AWS_DEFAULT_REGION": "us-west-2", "HOME": str(place), "MOTO_EC2_LOAD_DEFAULT_AMIS": "false"}
        for name, value in settings.items():
            patch.setenv(name, value)
        patch.setattr(launch, "SETTLING", 0)
        with mock_aws():  # which brings keys of its own
            import boto3

            where = {"LocationConstraint": "us-west-2"}
            boto3.client("s3").create_bucket(Bucket="vitray-test", CreateBucketConfiguration=where)
            tree = launch.read_cluster(filled(AWS, place / "cluster.yaml"))
            done = launch.make_account(tree)
            up = bootstrapped(tree)
            yield SimpleNamespace(tree=tree, done=done, up=up, asked=asked_of_aws(up, patch))


def bootstrapped(tree):
    """As `ray up` does before it launches anything."""
    from ray.autoscaler._private.aws.config import bootstrap_aws
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(json.loads(json.dumps(tree)))
    validate_config(prepared)
    return AWSNodeProvider.fillout_available_node_types_resources(bootstrap_aws(prepared))


def asked_of_aws(up, patch):
    """{node type: the parameters of RunInstances} of one node of each type."""
    from botocore.client import BaseClient
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
    from ray.autoscaler.tags import NODE_KIND_HEAD, NODE_KIND_WORKER, TAG_RAY_NODE_KIND, TAG_RAY_USER_NODE_TYPE

    asked = {}
    plain = BaseClient._make_api_call

    def call(client, name, parameters):
        if name == "RunInstances":
            asked["latest"] = parameters
        return plain(client, name, parameters)

    patch.setattr(BaseClient, "_make_api_call", call)
    provider = AWSNodeProvider(up["provider"], up["cluster_name"])
    for name, kind in up["available_node_types"].items():
        role = NODE_KIND_HEAD if name == up["head_node_type"] else NODE_KIND_WORKER
        tags = {TAG_RAY_NODE_KIND: role, TAG_RAY_USER_NODE_TYPE: name, "ray-launch-config": "x", "ray-node-name": name}
        provider.create_node(kind["node_config"], {**tags, "ray-node-status": "uninitialized"}, 1)
        asked[name] = asked.pop("latest")
    return asked


def group_of(aws):
    import boto3

    (found,) = {tuple(asked["SecurityGroupIds"]) for asked in aws.asked.values()}
    return boto3.client("ec2").describe_security_groups(GroupIds=list(found))["SecurityGroups"][0]


def test_nobody_but_the_owner_and_the_nodes_reaches_the_nodes(aws):
    group = group_of(aws)
    rules = {rule for permission in group["IpPermissions"] for rule in launch._rules(permission)}
    among = ("-1", None, None, "UserIdGroupPairs", group["GroupId"])
    assert rules == {("tcp", 22, 22, "IpRanges", "203.0.113.7/32"), among}
    assert "vitray lets in 203.0.113.7/32 on 22 and its own nodes, nobody else" in aws.done


def test_another_address_replaces_the_old_one_and_the_same_one_changes_nothing(aws):
    assert launch.make_account(aws.tree) == []
    tree = json.loads(json.dumps(aws.tree).replace("203.0.113.7", "198.51.100.9"))
    assert launch.make_account(tree) == ["vitray lets in 198.51.100.9/32 on 22 and its own nodes, nobody else"]
    assert "203.0.113.7" not in str(group_of(aws))
    launch.make_account(aws.tree)


def test_without_it_ray_would_let_everybody_try(aws):
    import boto3

    tree = json.loads(json.dumps(aws.tree))
    tree["provider"]["security_group"]["GroupName"] = "left-to-ray"
    group = bootstrapped(tree)["available_node_types"]["head"]["node_config"]["SecurityGroupIds"]
    found = boto3.client("ec2").describe_security_groups(GroupIds=group)["SecurityGroups"][0]
    assert "0.0.0.0/0" in str(found["IpPermissions"])  # why `make up` makes the group; once Ray does not, it need not


def test_every_node_is_asked_for_as_the_file_says(aws):
    assert set(aws.asked) == {"head", "cpu_spot", "cpu_on_demand", "gpu_spot", "gpu_on_demand"}
    for name, asked in aws.asked.items():
        assert asked["MetadataOptions"]["HttpTokens"] == "required"
        assert asked["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
        assert all(disk["Ebs"]["Encrypted"] for disk in asked["BlockDeviceMappings"])
        assert asked["IamInstanceProfile"] == {"Name": "vitray-head" if name == "head" else "vitray-node"}
        assert asked.get("InstanceMarketOptions", {}).get("MarketType") == ("spot" if "spot" in name else None)
        assert asked["ImageId"].startswith("resolve:ssm:/aws/service/")
        assert ("nvidia" in asked["ImageId"]) == ("gpu" in name)
        assert asked["KeyName"]
    for kind in ("cpu", "gpu"):
        same = [{**aws.asked[f"{kind}_{how}"]} for how in ("spot", "on_demand")]
        for asked in same:
            for varying in ("InstanceMarketOptions", "TagSpecifications", "ClientToken"):
                asked.pop(varying, None)
        assert same[0] == same[1]


def test_the_head_has_no_resources_for_work_and_the_others_what_their_machines_have(aws):
    kinds = aws.up["available_node_types"]
    assert kinds["head"]["resources"] == {"CPU": 0, "GPU": 0}
    assert "--num-cpus=0 --num-gpus=0" in aws.tree["head_start_ray_commands"][-1]
    assert kinds["gpu_spot"]["resources"].items() >= {"CPU": 8, "GPU": 1}.items()
    assert kinds["cpu_spot"]["resources"]["CPU"] == 16
    assert "GPU" not in kinds["cpu_spot"]["resources"]


@pytest.mark.parametrize(
    ("asked", "failed", "wanted"),
    [
        ({"GPU": 1, "CPU": 1}, [], "gpu_spot"),
        ({"GPU": 1, "CPU": 1}, ["gpu_spot"], "gpu_on_demand"),
        ({"CPU": 1}, [], "cpu_spot"),
        ({"CPU": 1}, ["cpu_spot"], "cpu_on_demand"),
    ],
)
def test_spot_comes_first_and_on_demand_where_there_is_none(aws, asked, failed, wanted):
    from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
    from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
    from ray.autoscaler.v2.utils import ResourceRequestUtil

    config = AutoscalingConfig(json.loads(json.dumps(aws.up)), skip_content_hash=True)
    request = SchedulingRequest(
        node_type_configs=config.get_node_type_configs(),
        max_num_nodes=config.get_max_num_nodes(),
        disable_launch_config_check=True,
        resource_requests=ResourceRequestUtil.group_by_count([ResourceRequestUtil.make(asked)]),
        recoverable_resource_availabilities=dict.fromkeys(failed, 0.5),
    )

    class NoEvents:
        def __getattr__(self, name):
            return lambda *words, **settings: None

    launched = ResourceDemandScheduler(NoEvents()).schedule(request).to_launch
    assert {launch.instance_type for launch in launched if launch.instance_type != "head"} == {wanted}


def statements(role):
    import boto3

    document = boto3.client("iam").get_role_policy(RoleName=role, PolicyName="vitray")["PolicyDocument"]
    return document["Statement"]


def test_nodes_may_touch_one_bucket_and_the_head_may_launch_and_end_its_own(aws):
    for role in ("vitray-head", "vitray-node"):
        for statement in statements(role):
            actions = statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
            assert not any(action.endswith("*") for action in actions)
            if any(action.startswith("s3:") for action in actions):
                assert statement["Resource"] in ("arn:aws:s3:::vitray-test", "arn:aws:s3:::vitray-test/*")
                assert "s3:CreateBucket" not in actions
    assert all(action.startswith("s3:") for statement in statements("vitray-node") for action in statement["Action"])
    ends = [statement for statement in statements("vitray-head") if "ec2:TerminateInstances" in statement["Action"]]
    assert ends[0]["Condition"] == {"StringEquals": {"aws:ResourceTag/ray-cluster-name": "vitray"}}
    (passes,) = (statement for statement in statements("vitray-head") if statement["Action"] == "iam:PassRole")
    assert passes["Resource"].endswith(":role/vitray-node")


def test_a_bucket_that_is_not_there_is_said_and_not_made(aws):
    import boto3

    tree = json.loads(json.dumps(aws.tree).replace("vitray-test", "vitray-mistyped"))
    with pytest.raises(ConfigError, match="s3://vitray-mistyped: no such bucket"):
        launch.make_account(tree)
    assert [bucket["Name"] for bucket in boto3.client("s3").list_buckets()["Buckets"]] == ["vitray-test"]
    tree["metadata"]["bucket"] = "vitray-test"
    with pytest.raises(ConfigError, match=r"metadata\.bucket: wanted the bucket that head_setup_commands give"):
        launch.make_account(tree)


def test_secrets_are_made_once_and_for_one_user(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert launch.make_secrets() == ["made ~/.ray/auth_token", "made ~/.vitray/mlflow_credentials"]
    files = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(files) == 2
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)
    assert launch.make_secrets() == []
    assert {path: path.read_text() for path in files} == files
    for source in (AWS, LOCAL):
        mounted = yaml.safe_load(source.read_text())["file_mounts"].values()
        assert {launch.TOKEN, launch.CREDENTIALS} <= set(mounted)


@pytest.mark.parametrize(("source", "newer"), [(AWS, "1"), (LOCAL, "0")])
def test_what_is_fit_is_launched(source, newer, tmp_path, monkeypatch):
    called = []
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    for tool in ("ssh", "rsync"):
        (tmp_path / tool).touch(mode=0o755)
    monkeypatch.setattr(launch, "make_account", lambda tree: [])
    monkeypatch.setattr(launch.subprocess, "call", lambda words, env: called.append((words, env)) or 3)
    path = filled(source, tmp_path / "cluster.yaml")
    assert launch.main([path, "--yes"]) == 3
    ((words, environment),) = called
    assert words[1:] == ["up", path, "--yes"]
    assert environment["RAY_UP_enable_autoscaler_v2"] == newer


def test_a_missing_tool_is_one_message(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "ssh").touch(mode=0o755)
    assert launch.main([filled(LOCAL, tmp_path / "cluster.yaml")]) == 2
    assert capsys.readouterr().err.startswith("vitray: rsync: not found here")
    assert not (tmp_path / ".ray").exists()


# ---- what nodes run --------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path):
    """A head as far as its services' files go: scripts run with commands that only note that they were called."""
    home, called = tmp_path / "home", tmp_path / "called"
    for name in (".mlflow", ".ray", "venv/bin", "bin"):
        (home / name).mkdir(parents=True)
    (home / ".mlflow" / "credentials").write_text(
        "[mlflow]\nmlflow_tracking_username = me\nmlflow_tracking_password = ca=na ry\n"
    )
    (home / ".ray" / "auth_token").write_text("canary-token")
    (home / "vitray").symlink_to(ROOT)
    for name in ("etc/systemd/system", "etc/vitray", "var/lib/vitray"):
        (tmp_path / name).mkdir(parents=True)
    stubs = {"bin/sudo": 'exec "$@"', "bin/systemctl": "", "bin/install": "", "venv/bin/uv": "", "venv/bin/pip": ""}
    for name, does in stubs.items():
        (home / name).write_text(f'#!/bin/sh\necho "{name} $@" >>{called}\n{does}\n')
        (home / name).chmod(0o755)

    def run(name, *words):
        text = (ROOT / "deploy" / name).read_text().replace('"$(dirname "$0")/.."', str(ROOT))
        for place in ("/etc/", "/var/lib/"):
            text = text.replace(place, f"{tmp_path}{place}")
        (tmp_path / name).write_text(text)
        environment = {"HOME": str(home), "USER": "somebody", "PATH": f"{home}/bin:{os.environ['PATH']}"}
        command = ["bash", str(tmp_path / name), *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return called.read_text()

    return SimpleNamespace(run=run, place=tmp_path, home=home)


def test_mlflow_is_a_service_that_asks_for_a_password(machine):
    import configparser

    first = machine.run("mlflow.sh", "s3://vitray-test/mlflow")
    assert "-e " in first
    assert "[server]" in first
    units_place = machine.place / "etc/systemd/system"
    units = {path.name: path.read_text() for path in units_place.iterdir()}
    assert set(units) == {
        "vitray-mlflow.service",
        "vitray-mlflow-private.service",
        "vitray-mlflow-private.socket",
        "vitray-mlflow-save.service",
        "vitray-mlflow-save.timer",
    }
    server = units["vitray-mlflow.service"]
    assert "--app-name basic-auth --host 127.0.0.1" in server
    assert "--artifacts-destination s3://vitray-test/mlflow" in server
    assert "Restart=always" in server
    assert not any("0.0.0.0" in text or "canary" in text or "ca=na" in text for text in units.values())
    (listening,) = re.findall(r"ListenStream=(\S+):5000", units["vitray-mlflow-private.socket"])
    assert re.fullmatch(r"[\d.]+", listening)
    settings = machine.place / "etc/vitray"
    assert {path.stat().st_mode & 0o777 for path in settings.iterdir()} == {0o600}
    ini = configparser.ConfigParser()
    ini.read(settings / "mlflow.ini")
    assert dict(ini["mlflow"])["default_permission"] == "NO_PERMISSIONS"
    assert (ini["mlflow"]["admin_username"], ini["mlflow"]["admin_password"]) == ("me", "ca=na ry")
    made = (settings / "mlflow.env").read_text()
    machine.run("mlflow.sh", "s3://vitray-test/mlflow", "203.0.113.7")
    assert "ListenStream=203.0.113.7:5000" in (units_place / "vitray-mlflow-private.socket").read_text()
    # Else MLflow answers 403 to a name that is neither the loopback's nor of a network that is private by RFC 1918.
    assert re.search(r"_ALLOWED_HOSTS=\S*,203.0.113.7:\*,", (units_place / "vitray-mlflow.service").read_text())
    assert (settings / "mlflow.env").read_text() == made  # another key would end every session of a browser


@pytest.mark.slow  # for systemd-analyze, which `make test-full` installs
def test_units_are_what_systemd_takes(machine):
    machine.run("mlflow.sh", "s3://vitray-test/mlflow")
    (machine.home / "venv/bin/python").symlink_to(sys.executable)
    folder = machine.place / "etc/systemd/system"
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, sorted(folder.iterdir()))], capture_output=True, text=True
    )
    said = [line for line in done.stderr.splitlines() if str(folder) in line or "vitray" in line]
    assert said == []


def test_a_node_keeps_secrets_to_one_user_and_finds_the_project(machine):
    machine.run("node.sh")
    called = machine.run("node.sh")
    assert called.count("-c constraints.txt -e .") == 2
    lines = (machine.home / ".bashrc").read_text().splitlines()
    assert lines.count('export RAY_AUTH_MODE=token PATH="$HOME/venv/bin:$PATH"') == 1
    for name in (".ray/auth_token", ".mlflow/credentials"):
        assert (machine.home / name).stat().st_mode & 0o777 == 0o600


# ---- Kubernetes ------------------------------------------------------------------------------------------------------


def kuberay():
    cluster, job = yaml.safe_load_all(KUBERAY.read_text())
    return cluster, job


def test_kuberay_gets_a_cluster_and_a_job_on_it():
    cluster, job = kuberay()
    assert (cluster["kind"], job["kind"]) == ("RayCluster", "RayJob")
    assert {cluster["apiVersion"], job["apiVersion"]} == {"ray.io/v1"}
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    assert "shutdownAfterJobFinishes" not in job["spec"]  # KubeRay refuses it beside a selector
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    assert cluster["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_ray_reads_kuberays_resources_as_the_file_means_them():
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    cluster, _ = kuberay()
    cluster["metadata"]["namespace"] = "default"
    kinds = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
    assert {name: (kind["min_workers"], kind["max_workers"]) for name, kind in kinds.items()} == {
        "headgroup": (0, 0),
        "cpu": (0, 4),
        "gpu": (0, 4),
    }
    assert kinds["headgroup"]["resources"]["CPU"] == 0
    assert kinds["cpu"]["resources"]["CPU"] == 16
    assert kinds["gpu"]["resources"].items() >= {"CPU": 8, "GPU": 1}.items()


def test_every_pod_says_what_it_takes_and_holds_no_secret():
    cluster, _ = kuberay()
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    for group in groups:
        pod = group["template"]["spec"]
        assert pod["serviceAccountName"] == "vitray"
        (container,) = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        for variable in container["env"]:
            secret = any(word in variable["name"] for word in ("PASSWORD", "USERNAME", "TOKEN", "KEY"))
            assert ("secretKeyRef" in variable.get("valueFrom", {})) == secret


def test_the_job_is_one_that_vitray_takes():
    from pipelines import recipes
    from vitray.config import load_run

    entry = kuberay()[1]["spec"]["entrypoint"].replace("YOUR-BUCKET", "b").split()
    assert entry[:3] == ["python", "-m", "pipelines.train"]
    assert load_run(recipes.path_of(entry[3]), [word for word in entry[4:] if "=" in word]).compute.workers == 2
    assert entry[entry.index("--out") + 1].startswith("s3://")


def test_versions_are_those_of_the_project():
    cluster, _ = kuberay()
    assert cluster["spec"]["rayVersion"] == RAY
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    tags = {group["template"]["spec"]["containers"][0]["image"].rpartition(":")[2] for group in groups}
    assert tags == {f"ray-{RAY}"}
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    assert f"FROM rayproject/ray:{RAY}-py312-gpu" in dockerfile
    assert f"vitray:ray-{RAY}" in dockerfile


def test_a_job_that_is_stopped_has_the_same_time_on_every_kind_of_cluster():
    told = [
        re.findall(r"RAY_JOB_STOP_WAIT_TIME_S(?:=|, value: \")(\d+)", path.read_text())
        for path in (AWS, LOCAL, KUBERAY)
    ]
    assert told == [[str(GRACE)]] * 3


def test_workers_load_alike_on_every_kind_of_cluster():
    found = [
        re.findall(r"RAY_preload_python_modules(?:=|, value: \")([\w.]+)", path.read_text()) for path in (AWS, LOCAL)
    ]
    assert found == [["vitray.waking"] * 2] * 2  # heads and workers
    assert KUBERAY.read_text().count("env: *environment") == 2
    assert 'RAY_preload_python_modules, value: "vitray.waking"' in KUBERAY.read_text()


def test_a_lost_node_is_noticed_alike_on_every_kind_of_cluster():
    told = [
        set(re.findall(r"(RAY_(?:health_check|grpc_client)_\w+)(?:=|, value: \")(\d+)", path.read_text()))
        for path in (AWS, LOCAL, KUBERAY)
    ]
    wanted = {
        ("RAY_health_check_period_ms", "2000"),
        ("RAY_health_check_timeout_ms", "3000"),
        ("RAY_grpc_client_keepalive_time_ms", "75000"),
        ("RAY_grpc_client_keepalive_timeout_ms", "30000"),
    }
    assert told == [wanted] * 3
    for path in (AWS, LOCAL):  # who has sent something to a lost node is on any node
        assert (
            path.read_text().count("RAY_grpc_client_keepalive_time_ms=75000 RAY_grpc_client_keepalive_timeout_ms=30000")
            == 2
        )


# ---- `make tunnel`, to a host of its own -----------------------------------------------------------------------------


@pytest.fixture
def site():
    with tempfile.TemporaryDirectory(prefix="vt") as name:
        made = Site(ROOT, Path(name), {})
        try:
            yield made
        finally:
            made.end()


@pytest.mark.slow
def test_the_tunnel_leads_from_here_alone_to_what_listens_on_the_heads_loopback(site):
    here, head, folder = site.add("here", 1), site.add("head", 2), site.folder
    for name in ("user", "machine"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-m", "PEM", "-N", "", "-f", folder / name], check=True)
    allowed = folder / "home" / ".ssh" / "authorized_keys"
    allowed.parent.mkdir(parents=True, mode=0o700)
    allowed.write_bytes((folder / "user.pub").read_bytes())
    (folder / "passwd").write_text(f"guest:x:0:0::{folder}/home:/bin/bash\n{Path('/etc/passwd').read_text()}")
    head.call(["mount", "--bind", folder / "passwd", "/etc/passwd"])
    head.call(["dropbearconvert", "openssh", "dropbear", folder / "machine", folder / "key"])
    head.start(["dropbear", "-F", "-E", "-r", folder / "key", "-P", folder / "pid"], folder / "ssh.log")
    ports = {8265: "the dashboard", 5000: "the records"}
    for port, page in ports.items():
        (folder / str(port)).mkdir()
        (folder / str(port) / "index.html").write_text(page)
        words = [sys.executable, "-m", "http.server", port, "--bind", "127.0.0.1", "--directory", folder / str(port)]
        head.start(words, folder / "pages.log")
    file = folder / "cluster.yaml"
    tree = {"cluster_name": "tunnel", "head_start_ray_commands": ["true"], "worker_start_ray_commands": ["true"]}
    tree |= {"provider": {"type": "local", "head_ip": head.address, "worker_ips": []}}
    tree |= {"auth": {"ssh_user": "guest", "ssh_private_key": str(folder / "user")}}
    file.write_text(yaml.safe_dump(tree))
    told = {"RAY_TMPDIR": str(here.own), "TERM": "dumb"}
    here.call([sys.executable, "-m", "ray.scripts.scripts", "up", "--yes", "--no-config-cache", file], told)

    # A terminal whose user types nothing.
    tunnel = f"sleep infinity | script --quiet --return --command 'make tunnel CLUSTER={file}' /dev/null"
    here.start(["sh", "-c", tunnel], folder / "tunnel.log", told)
    read = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode())"
    for port, page in ports.items():
        words = here.command([sys.executable, "-c", read, f"http://127.0.0.1:{port}"])
        until(
            lambda words=words, page=page: page in subprocess.run(words, capture_output=True, text=True).stdout,
            60,
            page,
            folder / "tunnel.log",
        )
        # Nobody else enters there.
        stranger = head.command([sys.executable, "-c", read, f"http://{here.address}:{port}"])
        assert "Connection refused" in subprocess.run(stranger, capture_output=True, text=True).stderr
