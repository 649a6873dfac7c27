"""The cluster files: their validation, the nodes and permissions on a simulated AWS, and the services of a node."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import crds
import jsonschema
import pytest
import yaml
from hosts import Site, until

from vitray.cluster import launch
from vitray.cluster.jobs import STOP_GRACE
from vitray.errors import ConfigError

ROOT = Path(__file__).parent.parent
AWS, LOCAL, KUBERAY = ROOT / "cluster.yaml", ROOT / "deploy" / "local.yaml", ROOT / "deploy" / "kuberay.yaml"
EIGHT = ROOT / "deploy" / "eight-gpus.yaml"
KUEUE, SERVE = ROOT / "deploy" / "kueue.yaml", ROOT / "deploy" / "serve.yaml"
CLUSTERS = (AWS, EIGHT, LOCAL, KUBERAY, KUEUE)
VALUES = {
    "YOUR-ADDRESS": "203.0.113.7",
    "YOUR-ARTIFACTS": "/srv/mlflow",
    "YOUR-BUCKET": "vitray-test",
    "YOUR-CAPACITY-BLOCK": "cr-0123456789abcdef0",
    "YOUR-FIRST-WORKER": "192.168.1.11",
    "YOUR-GROUP": "sg-0123456789abcdef0",
    "YOUR-HEAD": "192.168.1.10",
    "YOUR-INTERFACE": "eth0",
    "YOUR-PLACEMENT-GROUP": "near",
    "YOUR-PRIVATE-SUBNET": "subnet-0123456789abcdef0",
    "YOUR-SECOND-WORKER": "192.168.1.12",
    "YOUR-USER": "somebody",
}
RAY = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]


def filled(source, target, **ids):
    """Return the path of a cluster file with all placeholders set."""
    text = source.read_text()
    for name, value in (VALUES | {f"YOUR-{name}".replace("_", "-"): value for name, value in ids.items()}).items():
        text = text.replace(name, value)
    target.write_text(text)
    return str(target)


# ---- validation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [AWS, EIGHT, LOCAL])
def test_unset_placeholders_are_rejected(source):
    with pytest.raises(ConfigError) as error:
        launch.read_cluster(str(source))
    placeholders = {word.rstrip(".,;:/]") for word in re.findall(r"YOUR-[A-Z-]+", source.read_text())}
    assert all(name in str(error.value) for name in placeholders)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("source", [AWS, EIGHT, LOCAL])
def test_a_file_with_all_placeholders_set_is_valid(source, tmp_path):
    launch.read_cluster(filled(source, tmp_path / "cluster.yaml"))


def gpu(tree):
    return tree["available_node_types"]["gpu_spot"]["node_config"]


def ingress(source):
    return lambda tree: tree["provider"]["security_group"]["IpPermissions"][0].update(IpRanges=[{"CidrIp": source}])


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
        (lambda tree: gpu(tree).update(MetadataOptions={}), "gpu_spot.*HttpTokens: expected required"),
        (ingress("0.0.0.0/0"), "0.0.0.0/0 admits too many"),
        (ingress("1.2.3.4/8"), "1.2.3.4/8 has host bits set"),
        (lambda tree: tree["provider"].pop("security_group"), "expected ssh from your address"),
        (replaced("worker_start_ray_commands", "RAY_AUTH_MODE=token", ""), "worker_start_ray_commands: .*token"),
        (replaced("head_start_ray_commands", "RAY_AUTH_MODE=token", ""), "head_start_ray_commands: .*token"),
        (replaced("head_start_ray_commands", "host=127.0.0.1", "host=0.0.0.0"), "--dashboard-host=127.0.0.1"),
        (lambda tree: tree.pop("head_start_ray_commands"), "head_start_ray_commands: expected a `ray start`"),
    ],
)
def test_an_invalid_or_insecure_file_is_rejected(change, message, tmp_path):
    check_refusal(change, message, tmp_path)


def check_refusal(change, message, folder):
    """Check that a changed cluster file is refused in one line."""
    path = folder / "cluster.yaml"
    tree = yaml.safe_load(Path(filled(AWS, path)).read_text())
    change(tree)
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=message) as error:
        launch.read_cluster(str(path))
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 1500


def head(tree):
    return tree["available_node_types"]["head"]["node_config"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree.update(max_workers=10**6), "max_workers: got 1000000, expected a number from 0 to 10,000"),
        (lambda tree: tree.update(max_workers=10**400), "max_workers: got 1000.*expected a number from 0 to 10,000"),
        (lambda tree: tree["available_node_types"]["head"].update(min_workers=-1), r"head\.min_workers: got -1"),
        (
            lambda tree: tree.update(idle_timeout_minutes=float("nan")),
            "idle_timeout_minutes: got nan, expected a number",
        ),
        (lambda tree: tree.update(upscaling_speed=float("inf")), "upscaling_speed: got inf, expected a number"),
        (lambda tree: tree.update(metadata=[]), r"metadata: \[\] is not of type"),
        (lambda tree: tree.update(provider=None), "not a cluster file"),
        (lambda tree: tree.update(available_node_types={1: 2}), "got 'head', expected one of 1"),
        (lambda tree: tree.update(head_node_type=[1]), r"\[1\]"),
        (lambda tree: tree["provider"].pop("region"), r"provider\.region: got None, expected one such as us-west-2"),
        (lambda tree: tree["provider"]["security_group"].pop("GroupName"), "provider.security_group: .*GroupName"),
        (lambda tree: tree["provider"]["security_group"].update(IpPermissions=[None]), "provider.security_group: "),
        (
            lambda tree: tree["provider"]["security_group"]["IpPermissions"][0].pop("IpProtocol"),
            "expected an IpProtocol",
        ),
        (ingress(None), "provider.security_group: .*CidrIp"),
        (lambda tree: head(tree).update(MetadataOptions=True), "head.node_config: .*MetadataOptions"),
        (lambda tree: tree.update(cluster_name="x" * 10**5), "cluster_name: .*at most 100 characters"),
    ],
)
def test_bad_values_are_one_message(change, message, tmp_path):
    check_refusal(change, message, tmp_path)


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 9))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, "expected at most 20,000 values, each use of an alias counted"),
        (MERGES, "expected at most 20,000 values, each use of an alias counted"),
        ("a: &a [*a]", "expected at most 20 levels of lists and mappings"),
        ("a: " + "[" * 5000, "expected at most 20 levels of lists and mappings"),
        ("a: " + "x" * 300_000, "expected at most 200,000 characters"),
        ("a: 2026-13-45", "month must be in 1..12"),
        ("a: !!python/name:os.system", "got the tag"),
        ("max_workers: 1" + "0" * 5000, "not YAML: Exceeds the limit"),
        ("max_workers: 1\nmax_workers: 2", "max_workers: given twice"),
        ("a: \udcff", "cannot be read as text"),
    ],
)
def test_a_text_beyond_the_bounds_ends_a_launch(text, message, tmp_path, capsys):
    (tmp_path / "a.yaml").write_text(text, errors="surrogateescape")
    assert launch.main([str(tmp_path / "a.yaml")]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert len(printed) < 1500


def test_a_missing_file_ends_a_launch(tmp_path, capsys):
    assert launch.main([str(tmp_path / "cluster.yml")]) == launch.main(["x" * 300]) == launch.main([str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 3
    assert "no such file" in printed


@pytest.mark.parametrize("text", ["a: [", "[1, 2]", "a: 1"])
def test_a_file_of_another_kind_is_rejected(text, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"a\.yaml: "):
        launch.read_cluster(str(tmp_path / "a.yaml"))


# ---- on a simulated AWS ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def aws(tmp_path_factory):
    """The file, and Ray's configuration and RunInstances requests, in an account that `make up` prepared."""
    from moto import mock_aws

    folder = tmp_path_factory.mktemp("aws")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        settings = {"AWS_DEFAULT_REGION": "us-west-2", "HOME": str(folder), "MOTO_EC2_LOAD_DEFAULT_AMIS": "false"}
        for name, value in settings.items():
            patch.setenv(name, value)
        patch.setattr(launch, "ROLE_DELAY", 0)
        with mock_aws():  # it sets its own keys
            import boto3

            region = {"LocationConstraint": "us-west-2"}
            boto3.client("s3").create_bucket(Bucket="vitray-test", CreateBucketConfiguration=region)
            tree = launch.read_cluster(filled(AWS, folder / "cluster.yaml"))
            changes = launch.make_account(tree)
            config = bootstrapped(tree)
            yield SimpleNamespace(tree=tree, changes=changes, config=config, requests=instance_requests(config))


def bootstrapped(tree):
    """Return the configuration as `ray up` completes it before it launches anything."""
    from ray.autoscaler._private.aws.config import bootstrap_aws
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(json.loads(json.dumps(tree)))
    validate_config(prepared)
    return AWSNodeProvider.fillout_available_node_types_resources(bootstrap_aws(prepared))


def instance_requests(config):
    """Return {node type: the parameters of RunInstances} for one node of each type."""
    from botocore.client import BaseClient
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
    from ray.autoscaler.tags import NODE_KIND_HEAD, NODE_KIND_WORKER, TAG_RAY_NODE_KIND, TAG_RAY_USER_NODE_TYPE

    requests = {}
    original = BaseClient._make_api_call

    def call(client, name, parameters):
        if name == "RunInstances":
            requests["latest"] = parameters
        return original(client, name, parameters)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseClient, "_make_api_call", call)
        provider = AWSNodeProvider(config["provider"], config["cluster_name"])
        for name, kind in config["available_node_types"].items():
            role = NODE_KIND_HEAD if name == config["head_node_type"] else NODE_KIND_WORKER
            tags = {TAG_RAY_NODE_KIND: role, TAG_RAY_USER_NODE_TYPE: name, "ray-launch-config": "x"}
            tags |= {"ray-node-name": name, "ray-node-status": "uninitialized"}
            provider.create_node(kind["node_config"], tags, 1)
            requests[name] = requests.pop("latest")
    return requests


def group_of(aws):
    import boto3

    (ids,) = {tuple(request["SecurityGroupIds"]) for request in aws.requests.values()}
    return boto3.client("ec2").describe_security_groups(GroupIds=list(ids))["SecurityGroups"][0]


def test_only_the_owner_and_the_nodes_reach_the_nodes(aws):
    group = group_of(aws)
    rules = {rule for permission in group["IpPermissions"] for rule in launch.split_rules(permission)}
    internal = ("-1", None, None, "UserIdGroupPairs", group["GroupId"])
    assert rules == {("tcp", 22, 22, "IpRanges", "203.0.113.7/32"), internal}
    # EFA needs the rule to the group itself, beside AWS's own to everywhere.
    sent = {rule for permission in group["IpPermissionsEgress"] for rule in launch.split_rules(permission)}
    assert sent == {("-1", None, None, "IpRanges", "0.0.0.0/0"), internal}
    launch.make_account(aws.tree)  # it is there already


def test_a_node_with_eight_gpus_has_all_its_network_cards(aws, tmp_path):
    import boto3

    group = group_of(aws)
    (subnet, *_) = boto3.client("ec2").describe_subnets(Filters=[{"Name": "vpc-id", "Values": [group["VpcId"]]}])[
        "Subnets"
    ]
    ids = {"GROUP": group["GroupId"], "PRIVATE_SUBNET": subnet["SubnetId"]}
    tree = launch.read_cluster(filled(EIGHT, tmp_path / "cluster.yaml", **ids))
    assert launch.make_account(tree) == []
    config = bootstrapped(tree)
    assert {name: kind["resources"]["GPU"] for name, kind in config["available_node_types"].items()} == {
        "head": 0,
        "p5": 8,
        "p4d": 8,
    }
    requests = instance_requests(config)
    for name, cards, kind in (("p5", 32, "efa-only"), ("p4d", 4, "efa")):
        first, *more = requests[name]["NetworkInterfaces"]
        assert {each["SubnetId"] for each in (first, *more)} == {subnet["SubnetId"]}
        assert all(each["Groups"] == [group["GroupId"]] for each in (first, *more))
        assert (first["NetworkCardIndex"], first["DeviceIndex"], first["InterfaceType"]) == (0, 0, "efa")
        assert [each["NetworkCardIndex"] for each in more] == list(range(1, cards))
        assert {(each["DeviceIndex"], each["InterfaceType"]) for each in more} == {(1, kind)}
    assert requests["p5"]["InstanceMarketOptions"] == {"MarketType": "capacity-block"}
    assert requests["p4d"]["Placement"] == {"GroupName": "near"}
    assert "vitray admits 203.0.113.7/32 on 22 and its own nodes, nobody else" in aws.changes


def test_a_new_address_replaces_the_old_one(aws):
    assert launch.make_account(aws.tree) == []
    tree = json.loads(json.dumps(aws.tree).replace("203.0.113.7", "198.51.100.9"))
    assert launch.make_account(tree) == ["vitray admits 198.51.100.9/32 on 22 and its own nodes, nobody else"]
    assert "203.0.113.7" not in str(group_of(aws))
    launch.make_account(aws.tree)


def test_a_security_group_that_ray_makes_is_open_to_everyone(aws):
    import boto3

    tree = json.loads(json.dumps(aws.tree))
    tree["provider"]["security_group"]["GroupName"] = "left-to-ray"
    group = bootstrapped(tree)["available_node_types"]["head"]["node_config"]["SecurityGroupIds"]
    description = boto3.client("ec2").describe_security_groups(GroupIds=group)["SecurityGroups"][0]
    assert "0.0.0.0/0" in str(description["IpPermissions"])  # therefore `make up` creates the group


def test_each_node_is_requested_as_configured(aws):
    assert set(aws.requests) == {"head", "cpu_spot", "cpu_on_demand", "gpu_spot", "gpu_on_demand"}
    for name, request in aws.requests.items():
        assert request["MetadataOptions"]["HttpTokens"] == "required"
        assert request["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
        assert all(disk["Ebs"]["Encrypted"] for disk in request["BlockDeviceMappings"])
        assert request["IamInstanceProfile"] == {"Name": "vitray-head" if name == "head" else "vitray-node"}
        assert request.get("InstanceMarketOptions", {}).get("MarketType") == ("spot" if "spot" in name else None)
        assert request["ImageId"].startswith("resolve:ssm:/aws/service/")
        assert ("nvidia" in request["ImageId"]) == ("gpu" in name)
        assert request["KeyName"]
    for kind in ("cpu", "gpu"):
        requests = [{**aws.requests[f"{kind}_{market}"]} for market in ("spot", "on_demand")]
        for request in requests:
            for field in ("InstanceMarketOptions", "TagSpecifications", "ClientToken"):
                request.pop(field, None)
        assert requests[0] == requests[1]


def test_the_head_takes_no_tasks_and_other_nodes_use_their_hardware(aws):
    kinds = aws.config["available_node_types"]
    assert kinds["head"]["resources"] == {"CPU": 0, "GPU": 0}
    assert "--num-cpus=0 --num-gpus=0" in aws.tree["head_start_ray_commands"][-1]
    assert kinds["gpu_spot"]["resources"].items() >= {"CPU": 8, "GPU": 1}.items()
    assert kinds["cpu_spot"]["resources"]["CPU"] == 16
    assert "GPU" not in kinds["cpu_spot"]["resources"]


@pytest.mark.parametrize(
    ("demand", "failed", "chosen"),
    [
        ({"GPU": 1, "CPU": 1}, [], "gpu_spot"),
        ({"GPU": 1, "CPU": 1}, ["gpu_spot"], "gpu_on_demand"),
        ({"CPU": 1}, [], "cpu_spot"),
        ({"CPU": 1}, ["cpu_spot"], "cpu_on_demand"),
    ],
)
def test_spot_comes_first_and_on_demand_if_there_is_none(aws, demand, failed, chosen):
    from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
    from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
    from ray.autoscaler.v2.utils import ResourceRequestUtil

    config = AutoscalingConfig(json.loads(json.dumps(aws.config)), skip_content_hash=True)
    request = SchedulingRequest(
        node_type_configs=config.get_node_type_configs(),
        max_num_nodes=config.get_max_num_nodes(),
        disable_launch_config_check=True,
        resource_requests=ResourceRequestUtil.group_by_count([ResourceRequestUtil.make(demand)]),
        recoverable_resource_availabilities=dict.fromkeys(failed, 0.5),
    )

    class NoEvents:
        def __getattr__(self, name):
            return lambda *args, **options: None

    launched = ResourceDemandScheduler(NoEvents()).schedule(request).to_launch
    assert {launch.instance_type for launch in launched if launch.instance_type != "head"} == {chosen}


def statements(role, cluster="vitray"):
    import boto3

    document = boto3.client("iam").get_role_policy(RoleName=role, PolicyName=f"vitray-{cluster}")["PolicyDocument"]
    return document["Statement"]


def test_nodes_may_use_one_bucket_and_the_head_may_launch_and_end_its_own(aws):
    for role in ("vitray-head", "vitray-node"):
        for statement in statements(role):
            actions = statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
            assert not any(action.endswith("*") for action in actions)
            if any(action.startswith("s3:") for action in actions):
                assert statement["Resource"] in ("arn:aws:s3:::vitray-test", "arn:aws:s3:::vitray-test/*")
                assert "s3:CreateBucket" not in actions
    assert all(action.startswith("s3:") for statement in statements("vitray-node") for action in statement["Action"])
    terminating = [
        statement for statement in statements("vitray-head") if "ec2:TerminateInstances" in statement["Action"]
    ]
    assert terminating[0]["Condition"] == {"StringEquals": {"aws:ResourceTag/ray-cluster-name": "vitray"}}
    (pass_role,) = (statement for statement in statements("vitray-head") if statement["Action"] == "iam:PassRole")
    assert pass_role["Resource"].endswith(":role/vitray-node")


def test_a_second_cluster_leaves_the_first_one_its_rights(aws):
    before = statements("vitray-head")
    launch.make_account(aws.tree | {"cluster_name": "other"})
    assert statements("vitray-head") == before
    assert '"other"' in json.dumps(statements("vitray-head", "other"))


def test_a_missing_instance_profile_of_a_role_is_made(aws):
    import boto3

    name = {"InstanceProfileName": "vitray-node"}
    iam = boto3.client("iam")
    iam.remove_role_from_instance_profile(**name, RoleName="vitray-node")
    assert launch.make_account(aws.tree) == ["made the instance profile vitray-node"]
    iam.remove_role_from_instance_profile(**name, RoleName="vitray-node")
    iam.delete_instance_profile(**name)
    assert launch.make_account(aws.tree) == ["made the instance profile vitray-node"]
    assert [role["RoleName"] for role in iam.get_instance_profile(**name)["InstanceProfile"]["Roles"]] == [
        "vitray-node"
    ]


def test_a_missing_bucket_is_reported_and_not_made(aws):
    import boto3

    tree = json.loads(json.dumps(aws.tree).replace("vitray-test", "vitray-mistyped"))
    with pytest.raises(ConfigError, match="s3://vitray-mistyped: no such bucket"):
        launch.make_account(tree)
    assert [bucket["Name"] for bucket in boto3.client("s3").list_buckets()["Buckets"]] == ["vitray-test"]
    tree["metadata"]["bucket"] = "vitray-test"
    with pytest.raises(ConfigError, match=r"metadata\.bucket: expected the bucket of the s3:// address in head"):
        launch.make_account(tree)


def test_secrets_are_made_once_and_readable_by_one_user(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"auth_token, ~/.vitray/mlflow_credentials: missing, and the running cluster"
    ):
        launch.check_secrets()
    assert launch.make_secrets() == ["made ~/.ray/auth_token", "made ~/.vitray/mlflow_credentials"]
    launch.check_secrets()
    files = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(files) == 2
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)
    assert launch.make_secrets() == []
    assert {path: path.read_text() for path in files} == files
    for source in (AWS, LOCAL):
        mounted = yaml.safe_load(source.read_text())["file_mounts"].values()
        assert {launch.TOKEN, launch.CREDENTIALS} <= set(mounted)


@pytest.mark.parametrize(("source", "version_2"), [(AWS, "1"), (LOCAL, "0")])
def test_a_valid_file_is_launched(source, version_2, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    for tool in ("ssh", "rsync"):
        (tmp_path / tool).touch(mode=0o755)
    monkeypatch.setattr(launch, "make_account", lambda tree: [])
    monkeypatch.setattr(launch.subprocess, "call", lambda command, env: calls.append((command, env)) or 3)
    path = filled(source, tmp_path / "cluster.yaml")
    assert launch.main([path, "--yes"]) == 3
    ((command, environment),) = calls
    assert command[1:] == ["up", path, "--yes"]
    assert environment["RAY_UP_enable_autoscaler_v2"] == version_2


def test_a_missing_tool_is_one_message(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "ssh").touch(mode=0o755)
    assert launch.main([filled(LOCAL, tmp_path / "cluster.yaml")]) == 2
    assert capsys.readouterr().err.startswith("vitray: rsync: not found on this machine")
    assert not (tmp_path / ".ray").exists()


# ---- the scripts of a node -------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path):
    """Folders of a head, in which scripts run with stubs that record their calls."""
    home, calls = tmp_path / "home", tmp_path / "calls"
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
    for name, action in stubs.items():
        (home / name).write_text(f'#!/bin/sh\necho "{name} $@" >>{calls}\n{action}\n')
        (home / name).chmod(0o755)

    environment = {"HOME": str(home), "USER": "somebody", "PATH": f"{home}/bin:{os.environ['PATH']}"}

    def run(name, *args):
        text = (ROOT / "deploy" / name).read_text().replace('"$(dirname "$0")/.."', str(ROOT))
        for system_path in ("/etc/", "/var/lib/"):
            text = text.replace(system_path, f"{tmp_path}{system_path}")
        (tmp_path / name).write_text(text)
        command = ["bash", str(tmp_path / name), *args]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return calls.read_text()

    return SimpleNamespace(run=run, root=tmp_path, home=home, environment=environment)


def test_mlflow_is_a_service_that_asks_for_a_password(machine):
    import configparser

    machine.run("mlflow.sh", "s3://vitray-test/mlflow")
    unit_folder = machine.root / "etc/systemd/system"
    units = {path.name: path.read_text() for path in unit_folder.iterdir()}
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
    assert "mlflow_store.py restore" in server
    assert server.count("s3://vitray-test/mlflow-server") == 1  # no artifact, which every user could read
    assert f"InaccessiblePaths=-{machine.home}/.ray -{machine.home}/.ssh -{machine.home}/.vitray\n" in server
    assert not any("0.0.0.0" in text or "canary" in text or "ca=na" in text for text in units.values())
    (listening,) = re.findall(r"ListenStream=(\S+):5000", units["vitray-mlflow-private.socket"])
    assert re.fullmatch(r"[\d.]+", listening)
    settings = machine.root / "etc/vitray"
    assert {path.stat().st_mode & 0o777 for path in settings.iterdir()} == {0o600}
    ini = configparser.ConfigParser()
    ini.read(settings / "mlflow.ini")
    assert ini["mlflow"]["default_permission"] == "READ"
    assert re.fullmatch("admin-[0-9a-f]{8}", ini["mlflow"]["admin_username"])
    assert re.fullmatch("[0-9a-f]{64}", ini["mlflow"]["admin_password"])
    assert f"ExecStartPost={machine.home}/venv/bin/python" in server
    kept = {path: path.read_text() for path in settings.iterdir()}
    machine.run("mlflow.sh", "s3://vitray-test/mlflow", "203.0.113.7")
    assert "ListenStream=203.0.113.7:5000" in (unit_folder / "vitray-mlflow-private.socket").read_text()
    # MLflow answers 403 to other names, except the loopback and networks that are private by RFC 1918.
    assert re.search(r"_ALLOWED_HOSTS=\S*,203.0.113.7:\*,", (unit_folder / "vitray-mlflow.service").read_text())
    # A new key would end all browser sessions, and the users that exist know the administrator.
    assert {path: path.read_text() for path in settings.iterdir()} == kept


def test_mlflow_and_its_backup_use_the_same_s3_server(machine):
    server = {"AWS_ENDPOINT_URL": "http://10.0.0.9:9000", "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required"}
    machine.environment |= server | {"AWS_SECRET_ACCESS_KEY": "canary"}
    machine.run("mlflow.sh", "s3://vitray-test/mlflow")
    settings = machine.root / "etc/vitray/mlflow.env"
    lines = {line for line in settings.read_text().splitlines() if line.startswith("AWS_")}
    assert lines == {f"{name}={value}" for name, value in server.items()}
    for name in ("vitray-mlflow.service", "vitray-mlflow-save.service"):
        assert f"EnvironmentFile={settings}\n" in (machine.root / "etc/systemd/system" / name).read_text()


@pytest.mark.slow  # for systemd-analyze, which `make test-full` installs
def test_systemd_accepts_the_units(machine):
    machine.run("mlflow.sh", "s3://vitray-test/mlflow")
    (machine.home / "venv/bin/python").symlink_to(sys.executable)
    folder = machine.root / "etc/systemd/system"
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, sorted(folder.iterdir()))], capture_output=True, text=True
    )
    complaints = [line for line in done.stderr.splitlines() if str(folder) in line or "vitray" in line]
    assert complaints == []


def test_a_nodes_secrets_are_private_and_its_path_has_the_project(machine):
    machine.run("node.sh")
    calls = machine.run("node.sh")
    assert calls.count("--require-hashes -r deploy/requirements.txt") == 2
    assert calls.count("--no-deps --no-build-isolation -e .") == 2
    assert (machine.home / "venv" / "uv.txt").read_text().startswith("uv==")
    assert "ray==" not in (machine.home / "venv" / "uv.txt").read_text()
    lines = (machine.home / ".bashrc").read_text().splitlines()
    assert lines.count('export RAY_AUTH_MODE=token PATH="$HOME/venv/bin:$PATH"') == 1
    for name in (".ray/auth_token", ".mlflow/credentials"):
        assert (machine.home / name).stat().st_mode & 0o777 == 0o600


# ---- Kubernetes ------------------------------------------------------------------------------------------------------


def manifests(path):
    """Return {kind: resource} of a file; of several of a kind, the last."""
    return {each["kind"]: each for each in yaml.safe_load_all(path.read_text())}


def kuberay():
    found = manifests(KUBERAY)
    return found["RayCluster"], found["RayJob"]


def cluster_of(path):
    """Return the part of a file that describes a Ray cluster."""
    found = manifests(path)
    if "RayCluster" in found:
        return found["RayCluster"]["spec"]
    if "RayService" in found:
        return found["RayService"]["spec"]["rayClusterConfig"]
    return found["RayJob"]["spec"]["rayClusterSpec"]


def templates(path):
    cluster = cluster_of(path)
    return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


@pytest.mark.parametrize("path", [KUBERAY, KUEUE, SERVE], ids=lambda path: path.stem)
def test_every_resource_fits_its_schema(path):
    for resource in yaml.safe_load_all(path.read_text()):
        crds.check(resource)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("RayJob", lambda spec: spec.update(suspended=True)),
        ("RayJob", lambda spec: spec["rayClusterSpec"]["workerGroupSpecs"][0].update(replicas="two")),
        ("ClusterQueue", lambda spec: spec.update(preemption={"withinClusterQueue": "Lower"})),
        ("NetworkPolicy", lambda spec: spec["ingress"][0].update(form=[])),
    ],
)
def test_a_resource_that_does_not_fit_is_refused(kind, change):
    resource = manifests(KUEUE)[kind]
    change(resource["spec"])
    with pytest.raises(jsonschema.ValidationError):
        crds.check(resource)


@pytest.mark.parametrize("path", [KUBERAY, KUEUE, SERVE], ids=lambda path: path.stem)
def test_the_ports_of_ray_admit_the_pods_of_their_own_cluster(path):
    spec = manifests(path)["NetworkPolicy"]["spec"]
    own = spec["podSelector"]["matchLabels"]
    assert all(template["metadata"]["labels"] == own for template in templates(path))
    assert spec["policyTypes"] == ["Ingress"]
    every_port = [rule for rule in spec["ingress"] if "ports" not in rule]
    assert every_port == [{"from": [{"podSelector": {"matchLabels": own}}]}]
    to_all = [port["port"] for rule in spec["ingress"] if "from" not in rule for port in rule["ports"]]
    assert to_all == ([8000] if path is SERVE else [])


def test_a_queued_job_waits_for_kueue_and_saves_before_its_pods_end():
    job = manifests(KUEUE)["RayJob"]
    spec = job["spec"]
    # What Kueue demands of a job with a queue.
    assert job["metadata"]["labels"].keys() == {"kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"}
    assert (spec["suspend"], spec["shutdownAfterJobFinishes"]) == (True, True)
    assert "clusterSelector" not in spec
    assert "enableInTreeAutoscaling" not in spec["rayClusterSpec"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] in KUEUE.read_text().partition("kind: RayJob")[0]
    head, worker = (template["spec"] for template in templates(KUEUE))
    stop = head["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert stop[-1].endswith("python -m pipelines.stop --all")
    seconds = int(worker["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert STOP_GRACE + 15 < seconds < worker["terminationGracePeriodSeconds"] == head["terminationGracePeriodSeconds"]
    group = spec["rayClusterSpec"]["workerGroupSpecs"][0]
    gpus = group["replicas"] * worker["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert f"compute.workers={gpus} " in spec["entrypoint"]


def test_the_kuberay_file_has_a_cluster_and_a_job_on_it():
    cluster, job = kuberay()
    assert (cluster["kind"], job["kind"]) == ("RayCluster", "RayJob")
    assert {cluster["apiVersion"], job["apiVersion"]} == {"ray.io/v1"}
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    assert "shutdownAfterJobFinishes" not in job["spec"]  # KubeRay rejects it together with a selector
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    assert cluster["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_ray_derives_the_intended_resources_from_the_kuberay_file():
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


@pytest.mark.parametrize("path", [KUBERAY, KUEUE, SERVE], ids=lambda path: path.stem)
def test_every_pod_has_limits_and_no_secret(path):
    for template in templates(path):
        pod = template["spec"]
        assert pod["serviceAccountName"] == "vitray"
        (container,) = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        for variable in container["env"]:
            secret = any(word in variable["name"] for word in ("PASSWORD", "USERNAME", "TOKEN", "KEY"))
            assert ("secretKeyRef" in variable.get("valueFrom", {})) == secret


@pytest.mark.parametrize(("path", "workers"), [(KUBERAY, 2), (KUEUE, 16)], ids=["kuberay", "kueue"])
def test_the_job_is_a_valid_command(path, workers):
    from pipelines import recipes
    from vitray.config import load_run

    entry = manifests(path)["RayJob"]["spec"]["entrypoint"].replace("YOUR-BUCKET", "b").split()
    assert entry[:3] == ["python", "-m", "pipelines.train"]
    assert load_run(recipes.path_of(entry[3]), [arg for arg in entry[4:] if "=" in arg]).compute.workers == workers
    assert entry[entry.index("--out") + 1].startswith("s3://")


@pytest.mark.parametrize("path", [KUBERAY, KUEUE, SERVE], ids=lambda path: path.stem)
def test_versions_match_the_project_and_images_have_a_digest(path):
    assert cluster_of(path)["rayVersion"] == RAY
    images = {template["spec"]["containers"][0]["image"] for template in templates(path)}
    assert images == {f"YOUR-REGISTRY/vitray:ray-{RAY}@sha256:YOUR-DIGEST"}
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    assert f"rayproject/ray:{RAY}-py312-gpu" in dockerfile
    assert f"vitray:ray-{RAY}" in dockerfile


def test_a_stopped_job_has_the_same_grace_period_on_every_kind_of_cluster():
    settings = [re.findall(r"RAY_JOB_STOP_WAIT_TIME_S(?:=|, value: \")(\d+)", path.read_text()) for path in CLUSTERS]
    assert settings == [[str(STOP_GRACE)]] * len(CLUSTERS)


def test_a_file_with_nodes_that_have_gpus_names_them_as_the_device():
    named = {AWS: "gpu_spot:", EIGHT: "p5:", LOCAL: "gpu_spot:"}
    for path in CLUSTERS:
        has_gpus = named.get(path, "nvidia.com/gpu: ")
        text = path.read_text()
        assert bool(re.search(r"VITRAY_GROWS_DEVICE(?:=|, value: )gpu\b", text)) == (has_gpus in text)
        assert ("VITRAY_GROWS_DEVICE" in text) == ("VITRAY_GROWS_WITHIN" in text)


def test_heartbeats_are_the_same_on_every_kind_of_cluster():
    settings = [
        set(re.findall(r"(RAY_(?:health_check|grpc_client)_\w+)(?:=|, value: \")(\d+)", path.read_text()))
        for path in CLUSTERS
    ]
    expected = {
        ("RAY_health_check_period_ms", "2000"),
        ("RAY_health_check_timeout_ms", "3000"),
        ("RAY_grpc_client_keepalive_time_ms", "75000"),
        ("RAY_grpc_client_keepalive_timeout_ms", "30000"),
    }
    assert settings == [expected] * len(CLUSTERS)
    for path in (AWS, EIGHT, LOCAL):  # any node may wait for a reply of a lost node
        assert (
            path.read_text().count("RAY_grpc_client_keepalive_time_ms=75000 RAY_grpc_client_keepalive_timeout_ms=30000")
            == 2
        )


# ---- `make tunnel` to a separate host --------------------------------------------------------------------------------


@pytest.fixture
def site():
    with tempfile.TemporaryDirectory(prefix="vt") as name:
        simulated = Site(ROOT, Path(name), {})
        try:
            yield simulated
        finally:
            simulated.end()


@pytest.mark.slow
def test_the_tunnel_connects_only_this_machine_to_the_heads_loopback(site):
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
        command = [sys.executable, "-m", "http.server", port, "--bind", "127.0.0.1", "--directory", folder / str(port)]
        head.start(command, folder / "pages.log")
    file = folder / "cluster.yaml"
    tree = {"cluster_name": "tunnel", "head_start_ray_commands": ["true"], "worker_start_ray_commands": ["true"]}
    tree |= {"provider": {"type": "local", "head_ip": head.address, "worker_ips": []}}
    tree |= {"auth": {"ssh_user": "guest", "ssh_private_key": str(folder / "user")}}
    file.write_text(yaml.safe_dump(tree))
    environment = {"RAY_TMPDIR": str(here.own), "TERM": "dumb"}
    here.call([sys.executable, "-m", "ray.scripts.scripts", "up", "--yes", "--no-config-cache", file], environment)

    # A terminal without input.
    tunnel = f"sleep infinity | script --quiet --return --command 'make tunnel CLUSTER={file}' /dev/null"
    here.start(["sh", "-c", tunnel], folder / "tunnel.log", environment)
    script = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode())"
    for port, page in ports.items():
        command = here.command([sys.executable, "-c", script, f"http://127.0.0.1:{port}"])
        until(
            lambda command=command, page=page: page in subprocess.run(command, capture_output=True, text=True).stdout,
            60,
            page,
            folder / "tunnel.log",
        )
        # Other hosts cannot connect to it.
        from_head = head.command([sys.executable, "-c", script, f"http://{here.address}:{port}"])
        assert "Connection refused" in subprocess.run(from_head, capture_output=True, text=True).stderr
