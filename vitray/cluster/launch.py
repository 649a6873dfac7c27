"""A cluster's file checked before anything is launched, what its nodes need of an AWS account made, and `ray up`.

`make up` is `python -m vitray.cluster.launch cluster.yaml`; words after the file are `ray up`'s.
"""

import ipaddress
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from vitray.errors import ConfigError

UNSET = "YOUR-"
# What the files mount on nodes, made where it is not there yet; only its owner may read it.
TOKEN, CREDENTIALS = "~/.ray/auth_token", "~/.vitray/mlflow_credentials"
HEAD, NODE = "vitray-head", "vitray-node"
# Who a permission lets in, in which lists, and by which of their fields.
WHO = {"IpRanges": "CidrIp", "Ipv6Ranges": "CidrIpv6", "UserIdGroupPairs": "GroupId", "PrefixListIds": "PrefixListId"}
# Seconds until a new role is known where nodes are launched.
SETTLING = 15

Tree = dict[str, Any]


def read_cluster(path: str) -> Tree:
    """A cluster's file, found fit to be launched; otherwise one message that lists what is wrong."""
    try:
        tree = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict) or "provider" not in tree:
        raise ConfigError(f"{path}: not a cluster's file; wanted one as cluster.yaml or deploy/local.yaml")
    unset = sorted({f"{where}: {text}" for where, text in _texts(tree) if UNSET in text})
    if unset:
        raise ConfigError(f"{path}: not set: {'; '.join(unset)}; what each is stands above it in the file")
    if wrong := [*_schema_faults(tree), *_start_faults(tree), *_aws_faults(tree)]:
        raise ConfigError(f"{path}: {'; '.join(wrong)}")
    return tree


def _texts(tree: Any, where: str = "") -> Iterator[tuple[str, str]]:
    match tree:
        case dict():
            for key, value in tree.items():
                yield from _texts(value, f"{where}.{key}" if where else str(key))
        case list():
            for index, value in enumerate(tree):
                yield from _texts(value, f"{where}.{index}")
        case str():
            yield where, tree


def _schema_faults(tree: Tree) -> Iterator[str]:
    from ray.autoscaler._private.util import prepare_config, validate_config

    try:
        validate_config(prepare_config(json.loads(json.dumps(tree))))
    except Exception as error:  # of half a dozen libraries
        yield " ".join(str(getattr(error, "message", error)).split())[:300]


def _start_faults(tree: Tree) -> Iterator[str]:
    """Nobody is let in without a token, and the dashboard is at the end of a tunnel."""
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        started = [command for command in tree.get(key, []) if "ray start" in command]
        if not started:
            yield f"{key}: wanted a `ray start` of its own: Ray's opens the dashboard to the network, without a token"
        for command in started:
            if "RAY_AUTH_MODE=token" not in command:
                yield f"{key}: wanted RAY_AUTH_MODE=token before `ray start`, without which anybody is let in"
            if "--head" in command and not re.search(r"--dashboard-host[= ](127\.0\.0\.1|localhost)", command):
                yield f"{key}: wanted --dashboard-host=127.0.0.1, the far end of `make tunnel`"


def _aws_faults(tree: Tree) -> Iterator[str]:
    if tree["provider"].get("type") != "aws":
        return
    import botocore.session
    from botocore.validate import ParamValidator

    session = botocore.session.get_session()
    shape = session.get_service_model("ec2").operation_model("RunInstances").input_shape
    for name, kind in tree.get("available_node_types", {}).items():
        # Ray resolves the subnets to one; the rest is handed to AWS as it is, after the head has been paid for.
        asked = {key: value for key, value in kind.get("node_config", {}).items() if key != "SubnetIds"}
        report = ParamValidator().validate({"MinCount": 1, "MaxCount": 1, **asked}, shape)
        if report.has_errors():
            yield f"{name}.node_config: {' '.join(report.generate_report().split())[:300]}"
        if asked.get("MetadataOptions", {}).get("HttpTokens") != "required":
            yield f"{name}.node_config.MetadataOptions.HttpTokens: wanted required: version 1 hands a role to any page"
    ranges = [place for rule in permissions(tree) for place in _places(rule)]
    if not ranges:
        yield "provider.security_group.IpPermissions: wanted ssh from your address: Ray would add it from everywhere"
    for place in ranges:
        try:
            network = ipaddress.ip_network(place)
        except ValueError as error:
            yield f"provider.security_group: {error}; wanted an address as 203.0.113.7/32"
        else:
            if network.num_addresses > 2**16:
                yield f"provider.security_group: {place} is open to too many; wanted your address, as 203.0.113.7/32"


def permissions(tree: Tree) -> list[Tree]:
    """Who else may reach the nodes, as the file says."""
    return tree["provider"].get("security_group", {}).get("IpPermissions", [])


def _places(rule: Tree) -> list[str]:
    four = [each.get("CidrIp", "") for each in rule.get("IpRanges", [])]
    return four + [each.get("CidrIpv6", "") for each in rule.get("Ipv6Ranges", [])]


# ---- what nodes and their owner need ---------------------------------------------------------------------------------


def check_tools() -> None:
    """What `ray up` reaches nodes by, whose absence it would tell in forty lines."""
    if missing := [tool for tool in ("ssh", "rsync") if shutil.which(tool) is None]:
        raise ConfigError(
            f"{', '.join(missing)}: not found here; files go to nodes by it: apt-get install rsync openssh-client"
        )


def make_secrets() -> list[str]:
    """Make the secrets that are mounted on nodes, where they are not there yet; which were made."""
    password = secrets.token_urlsafe(24)
    contents = {
        TOKEN: secrets.token_hex(32),
        CREDENTIALS: f"[mlflow]\nmlflow_tracking_username = vitray\nmlflow_tracking_password = {password}\n",
    }
    made = []
    for place, content in contents.items():
        path = Path(place).expanduser()
        if path.exists():
            path.chmod(0o600)
            continue
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(path, "w", opener=lambda name, flags: os.open(name, flags | os.O_EXCL, 0o600)) as file:
            file.write(content)
        made.append(f"made {place}")
    return made


def make_account(tree: Tree) -> list[str]:
    """Make the security group and the two roles that a file names, or bring them in line; what was done."""
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    region, bucket = tree["provider"]["region"], tree.get("metadata", {}).get("bucket")
    if not bucket or not any(f"s3://{bucket}/" in command for command in tree.get("head_setup_commands", [])):
        raise ConfigError("metadata.bucket: wanted the bucket that head_setup_commands give to MLflow")
    if os.environ.get("AWS_ENDPOINT_URL"):
        raise ConfigError("AWS_ENDPOINT_URL: is set, so that another server would be asked for nodes; wanted it unset")
    try:
        _check_bucket(bucket, boto3.client("s3", region_name=region))
        done = _make_group(tree, boto3.client("ec2", region_name=region))
        roles = _make_roles(bucket, tree["cluster_name"], boto3.client("iam", region_name=region))
    except (BotoCoreError, ClientError) as error:
        raise ConfigError(f"AWS in {region}: {' '.join(str(error).split())[:300]}") from None
    if roles:
        time.sleep(SETTLING)
    return done + roles


def _check_bucket(bucket: str, s3: Any) -> None:
    from botocore.exceptions import ClientError

    try:
        s3.head_bucket(Bucket=bucket)
    except ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        said = "no such bucket, and vitray makes none" if status == 404 else f"not to be looked at (status {status})"
        raise ConfigError(f"metadata.bucket: s3://{bucket}: {said}; wanted one of yours") from None


def _make_group(tree: Tree, ec2: Any) -> list[str]:
    """The security group, with the file's rules and no other, so that Ray finds it complete and adds none."""
    from ray.autoscaler._private.aws.config import _configure_subnet
    from ray.autoscaler._private.util import prepare_config

    # Where Ray will look for it: in the network of the subnets that it chooses.
    chosen = _configure_subnet(prepare_config(json.loads(json.dumps(tree))))
    subnet = chosen["available_node_types"][tree["head_node_type"]]["node_config"]["SubnetIds"][0]
    network = ec2.describe_subnets(SubnetIds=[subnet])["Subnets"][0]["VpcId"]
    name = tree["provider"]["security_group"]["GroupName"]
    named = [{"Name": "group-name", "Values": [name]}, {"Name": "vpc-id", "Values": [network]}]
    done = []
    if not (found := ec2.describe_security_groups(Filters=named)["SecurityGroups"]):
        ec2.create_security_group(GroupName=name, Description="vitray: ssh from its owner", VpcId=network)
        found = ec2.describe_security_groups(Filters=named)["SecurityGroups"]
        done.append(f"made the security group {name}")
    group = found[0]
    among = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group["GroupId"]}]}
    wanted = {rule for permission in (*permissions(tree), among) for rule in _rules(permission)}
    there = {rule for permission in group["IpPermissions"] for rule in _rules(permission)}
    for change, call in (
        (there - wanted, ec2.revoke_security_group_ingress),
        (wanted - there, ec2.authorize_security_group_ingress),
    ):
        if change:
            call(GroupId=group["GroupId"], IpPermissions=[_permission(*rule) for rule in sorted(change, key=str)])
    opened = [f"{place} on {port}" for _, port, _, key, place in sorted(wanted, key=str) if key != "UserIdGroupPairs"]
    return done if there == wanted else [*done, f"{name} lets in {', '.join(opened)} and its own nodes, nobody else"]


def _rules(permission: Tree) -> Iterator[tuple[str, int | None, int | None, str, str]]:
    """A permission's single rules: protocol, ports, and who."""
    protocol = permission["IpProtocol"]
    has_ports = protocol != "-1"
    first, last = (permission.get(port) if has_ports else None for port in ("FromPort", "ToPort"))
    for key, field in WHO.items():
        for who in permission.get(key, []):
            yield protocol, first, last, key, who[field]


def _permission(protocol: str, first: int | None, last: int | None, key: str, who: str) -> Tree:
    ports = {} if first is None else {"FromPort": first, "ToPort": last}
    return {"IpProtocol": protocol, **ports, key: [{WHO[key]: who}]}


def _make_roles(bucket: str, cluster: str, iam: Any) -> list[str]:
    """The roles of the head and of the other nodes, each with what it needs: no keys lie on any node."""
    done = []
    trust = {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
    account: str | None = None
    for name in (NODE, HEAD):
        try:
            role = iam.get_role(RoleName=name)["Role"]
        except iam.exceptions.NoSuchEntityException:
            role = iam.create_role(RoleName=name, AssumeRolePolicyDocument=_policy(trust))["Role"]
            iam.create_instance_profile(InstanceProfileName=name)
            iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
            done.append(f"made the role {name}")
        statements = _bucket_statements(bucket)
        if name == NODE:
            account = role["Arn"]
        else:
            statements += _launch_statements(cluster, str(account))
        iam.put_role_policy(RoleName=name, PolicyName="vitray", PolicyDocument=_policy(*statements))
    return done


def _policy(*statements: Tree) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": statements})


def _bucket_statements(bucket: str) -> list[Tree]:
    """Read and write one bucket; nobody makes one, or removes it."""
    whole = ["s3:ListBucket", "s3:GetBucketLocation", "s3:ListBucketMultipartUploads"]
    each = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"]
    return [
        {"Effect": "Allow", "Action": whole, "Resource": f"arn:aws:s3:::{bucket}"},
        {"Effect": "Allow", "Action": each, "Resource": f"arn:aws:s3:::{bucket}/*"},
    ]


def _launch_statements(cluster: str, node_role: str) -> list[Tree]:
    """Launch nodes with the nodes' role, and end those of this cluster alone."""
    launch = ["ec2:RunInstances", "ec2:DescribeInstances", "ec2:DescribeInstanceTypes", "ec2:DescribeImages"]
    launch += ["ec2:DescribeSubnets", "ec2:DescribeSecurityGroups"]
    new = {"StringEquals": {"ec2:CreateAction": "RunInstances"}}
    ours = {"StringEquals": {"aws:ResourceTag/ray-cluster-name": cluster}}
    spot = "arn:aws:iam::*:role/aws-service-role/spot.amazonaws.com/*"  # an account's first spot node makes this role
    images = "arn:aws:ssm:*:*:parameter/aws/service/*"  # public: AWS's and Canonical's names of their latest images
    return [
        {"Effect": "Allow", "Action": launch, "Resource": "*"},
        {"Effect": "Allow", "Action": "ec2:CreateTags", "Resource": "*", "Condition": new},
        {"Effect": "Allow", "Action": ["ec2:CreateTags", "ec2:TerminateInstances"], "Resource": "*", "Condition": ours},
        {"Effect": "Allow", "Action": "iam:PassRole", "Resource": node_role},
        {"Effect": "Allow", "Action": "iam:CreateServiceLinkedRole", "Resource": spot},
        {"Effect": "Allow", "Action": "ssm:GetParameters", "Resource": images},
    ]


def main(words: list[str]) -> int:
    """Check a cluster's file, make what it needs, say so, and launch it."""
    if not words:
        print("usage: python -m vitray.cluster.launch cluster.yaml [WORDS of ray up]", file=sys.stderr)
        return 2
    try:
        tree = read_cluster(words[0])
        check_tools()
        done = make_secrets()
        if tree["provider"]["type"] == "aws":
            done += make_account(tree)
    except ConfigError as error:
        print(f"vitray: {error}", file=sys.stderr)
        return 2
    print("\n".join(f"vitray: {line}" for line in [*done, f"{words[0]} is fit to be launched"]), file=sys.stderr)
    # The newer autoscaler takes the head of one's own machines for one that has ended, and starts no node (Ray 2.60).
    newer = "0" if tree["provider"]["type"] == "local" else "1"
    ray = Path(sys.executable).with_name("ray")
    return subprocess.call([ray, "up", *words], env=os.environ | {"RAY_UP_enable_autoscaler_v2": newer})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
