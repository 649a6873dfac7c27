"""`make up`: check a cluster file, make the secrets and the AWS account's roles that its nodes need, and run `ray up`.

Usage: `python -m vitray.cluster.launch cluster.yaml [arguments of ray up]`.
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

from vitray.config.parsing import parse_yaml, read_text, short
from vitray.config.sections import MOST_COUNT
from vitray.errors import ConfigError, nearest

PLACEHOLDER = "YOUR-"
MOST_NODES, LONGEST_NAME = 10_000, 100
# Files that nodes mount; only their owner may read them.
TOKEN, CREDENTIALS = "~/.ray/auth_token", "~/.vitray/mlflow_credentials"
HEAD_ROLE, NODE_ROLE = "vitray-head", "vitray-node"
# The lists of a permission, and the field of their entries that identifies a source.
SOURCE_FIELDS = {
    "IpRanges": "CidrIp",
    "Ipv6Ranges": "CidrIpv6",
    "UserIdGroupPairs": "GroupId",
    "PrefixListIds": "PrefixListId",
}
# Seconds until EC2 knows a new role.
ROLE_DELAY = 15

Tree = dict[str, Any]


# ---- the file --------------------------------------------------------------------------------------------------------


def read_cluster(path: str) -> Tree:
    """Return the contents of a cluster file; raise one ConfigError with all its problems."""
    text = read_text(Path(path))
    parse_yaml(text, path)  # for its bounds; `ray up` reads YAML 1.1, which has merges
    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # a ValueError is a date that does not exist
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict) or not isinstance(tree.get("provider"), dict):
        raise ConfigError(f"{path}: not a cluster file; expected one such as cluster.yaml or deploy/local.yaml")
    values = [token for token in yaml.scan(text) if isinstance(token, yaml.ScalarToken)]
    if unset := [f"line {each.start_mark.line + 1}: {each.value}" for each in values if PLACEHOLDER in each.value]:
        raise ConfigError(f"{path}: not set: {'; '.join(unset)}; comments in the file explain each")
    # Each check relies on the types and numbers that the one before has checked.
    problems = [*_number_problems(tree)] or [*_schema_problems(tree)]
    if problems := problems or [*_start_problems(tree), *_aws_problems(tree)]:
        raise ConfigError(f"{path}: {'; '.join(problems)}")
    return tree


def _number_problems(tree: Any, path: str = "") -> Iterator[str]:
    """Yield a problem for each number that no cluster has; Ray's schema has no upper bounds."""
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _number_problems(value, f"{path}.{key}".lstrip("."))
    elif isinstance(tree, int | float):
        least, most = (0, MOST_NODES) if path.endswith("_workers") else (-MOST_COUNT, MOST_COUNT)
        if not least <= tree <= most:
            yield f"{path}: got {short(tree)}, expected a number from {least:,} to {most:,}"


def _schema_problems(tree: Tree) -> Iterator[str]:
    import jsonschema  # which Ray requires, for the same check at the start of `ray up`
    import ray.autoscaler
    from ray.autoscaler.sdk import fillout_defaults

    types, head = tree.get("available_node_types"), tree.get("head_node_type")
    names = list(map(str, types)) if isinstance(types, dict) else []
    if names and isinstance(head, str) and head not in names:
        yield f"head_node_type: got {head!r}, expected one of {', '.join(names)}{nearest(head, names)}"
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    try:
        jsonschema.validate(fillout_defaults(json.loads(json.dumps(tree))), schema)
    except Exception as error:  # from half a dozen libraries
        place = ".".join(map(str, getattr(error, "absolute_path", ())))
        yield f"{place}: {' '.join(str(getattr(error, 'message', error)).split())[:300]}".removeprefix(": ")
    if len(name := str(tree.get("cluster_name"))) > LONGEST_NAME:
        yield f"cluster_name: got {short(name)}, expected at most {LONGEST_NAME} characters"


def _start_problems(tree: Tree) -> Iterator[str]:
    """Yield a problem for each `ray start` without a token, or with a dashboard that is open to the network."""
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        starts = [command for command in tree.get(key, []) if "ray start" in command]
        if not starts:
            yield f"{key}: expected a `ray start`: Ray's default opens the dashboard to the network, without a token"
        for command in starts:
            if "RAY_AUTH_MODE=token" not in command:
                yield f"{key}: expected RAY_AUTH_MODE=token before `ray start`, without which Ray admits anyone"
            if "--head" in command and not re.search(r"--dashboard-host[= ](127\.0\.0\.1|localhost)", command):
                yield f"{key}: expected --dashboard-host=127.0.0.1, the far end of `make tunnel`"


def _aws_problems(tree: Tree) -> Iterator[str]:
    if tree["provider"].get("type") != "aws":
        return
    import botocore.session
    from botocore.validate import ParamValidator

    ec2 = botocore.session.get_session().get_service_model("ec2")
    shape = ec2.operation_model("RunInstances").input_shape
    for name, node_type in tree.get("available_node_types", {}).items():
        # Ray reduces SubnetIds to one. It passes the rest to AWS unchecked, for workers after the head has started.
        settings = {key: value for key, value in node_type.get("node_config", {}).items() if key != "SubnetIds"}
        report = ParamValidator().validate({"MinCount": 1, "MaxCount": 1, **settings}, shape)
        if report.has_errors():
            yield f"{name}.node_config: {' '.join(report.generate_report().split())[:300]}"
        elif settings.get("MetadataOptions", {}).get("HttpTokens") != "required":
            yield (
                f"{name}.node_config.MetadataOptions.HttpTokens: expected required: with version 1 any page that a"
                " process fetches can read the node's role"
            )
    if not isinstance(tree["provider"].get("region"), str):
        yield f"provider.region: got {short(tree['provider'].get('region'))}, expected one such as us-west-2"
    yield from _ingress_problems(tree, ec2.operation_model("AuthorizeSecurityGroupIngress").input_shape)


def _ingress_problems(tree: Tree, shape: Any) -> Iterator[str]:
    from botocore.validate import ParamValidator

    group = tree["provider"].get("security_group", {})
    request = {"GroupName": group.get("GroupName"), "IpPermissions": group.get("IpPermissions", [])}
    if group and (report := ParamValidator().validate(request, shape)).has_errors():
        yield f"provider.security_group: {' '.join(report.generate_report().split())[:300]}"
        return
    if any("IpProtocol" not in permission for permission in request["IpPermissions"]):
        yield "provider.security_group.IpPermissions: expected an IpProtocol in each"
    sources = [
        source.get("CidrIp", source.get("CidrIpv6", ""))
        for permission in ingress_permissions(tree)
        for source in (*permission.get("IpRanges", []), *permission.get("Ipv6Ranges", []))
    ]
    if not sources:
        yield "provider.security_group.IpPermissions: expected ssh from your address: Ray would add it from everywhere"
    for source in sources:
        try:
            network = ipaddress.ip_network(source)
        except ValueError as error:
            yield f"provider.security_group: {error}; expected an address as 203.0.113.7/32"
        else:
            if network.num_addresses > 2**16:
                yield f"provider.security_group: {source} admits too many; expected your address, as 203.0.113.7/32"


def ingress_permissions(tree: Tree) -> list[Tree]:
    """Return the permissions of a cluster file, those of its own nodes aside."""
    return tree["provider"].get("security_group", {}).get("IpPermissions", [])


# ---- the security group and the roles of its nodes in an AWS account -------------------------------------------------


def make_account(tree: Tree) -> list[str]:
    """Make or update the security group and the two roles of a cluster file; return a line for each change."""
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    region, bucket = tree["provider"]["region"], tree.get("metadata", {}).get("bucket")
    if not bucket or not any(f"s3://{bucket}/" in command for command in tree.get("head_setup_commands", [])):
        raise ConfigError("metadata.bucket: expected the bucket of the s3:// address in head_setup_commands")
    if os.environ.get("AWS_ENDPOINT_URL"):
        raise ConfigError("unset AWS_ENDPOINT_URL: requests for nodes would go to another server")
    try:
        _check_bucket(bucket, boto3.client("s3", region_name=region))
        changes = _update_security_group(tree, boto3.client("ec2", region_name=region))
        new_roles = _update_roles(bucket, tree["cluster_name"], boto3.client("iam", region_name=region))
    except (BotoCoreError, ClientError) as error:
        raise ConfigError(f"AWS in {region}: {' '.join(str(error).split())[:300]}") from None
    if new_roles:
        time.sleep(ROLE_DELAY)
    return changes + new_roles


def _check_bucket(bucket: str, s3: Any) -> None:
    from botocore.exceptions import ClientError

    try:
        s3.head_bucket(Bucket=bucket)
    except ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        problem = "no such bucket, and vitray makes none" if status == 404 else f"access denied (status {status})"
        raise ConfigError(f"metadata.bucket: s3://{bucket}: {problem}; expected one of yours") from None


def _update_security_group(tree: Tree, ec2: Any) -> list[str]:
    """Give the security group the rules of the file and no other, so that Ray adds none."""
    network = _network(tree, ec2)
    name = tree["provider"]["security_group"]["GroupName"]
    filters = [{"Name": "group-name", "Values": [name]}, {"Name": "vpc-id", "Values": [network]}]
    changes = []
    if not (groups := ec2.describe_security_groups(Filters=filters)["SecurityGroups"]):
        ec2.create_security_group(GroupName=name, Description="vitray: ssh from its owner", VpcId=network)
        groups = ec2.describe_security_groups(Filters=filters)["SecurityGroups"]
        changes.append(f"made the security group {name}")
    group = groups[0]
    among_nodes = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group["GroupId"]}]}
    wanted = {rule for permission in (*ingress_permissions(tree), among_nodes) for rule in split_rules(permission)}
    # AWS's fast network cards (EFA) need an outgoing rule that names the group; one for all addresses is not enough.
    if not {*split_rules(among_nodes)} <= {rule for each in group["IpPermissionsEgress"] for rule in split_rules(each)}:
        ec2.authorize_security_group_egress(GroupId=group["GroupId"], IpPermissions=[among_nodes])
    current = {rule for permission in group["IpPermissions"] for rule in split_rules(permission)}
    for rules, update in (
        (current - wanted, ec2.revoke_security_group_ingress),
        (wanted - current, ec2.authorize_security_group_ingress),
    ):
        if rules:
            permissions = []
            for protocol, first, last, key, source in sorted(rules, key=str):
                ports = {} if first is None else {"FromPort": first, "ToPort": last}
                permissions.append({"IpProtocol": protocol, **ports, key: [{SOURCE_FIELDS[key]: source}]})
            update(GroupId=group["GroupId"], IpPermissions=permissions)
    opened = [f"{source} on {port}" for _, port, _, key, source in sorted(wanted, key=str) if key != "UserIdGroupPairs"]
    if current != wanted:
        changes.append(f"{name} admits {', '.join(opened)} and its own nodes, nobody else")
    return changes


def _network(tree: Tree, ec2: Any) -> str:
    """Return the network of the subnets that Ray may choose, where it looks for the security group."""
    node_config = tree["available_node_types"][tree["head_node_type"]].get("node_config", {})
    if named := node_config.get("SubnetIds"):
        subnets = ec2.describe_subnets(SubnetIds=named)["Subnets"]
    else:
        subnets = [
            subnet
            for subnet in ec2.describe_subnets()["Subnets"]
            if subnet["State"] == "available"
            and (subnet["MapPublicIpOnLaunch"] or tree["provider"].get("use_internal_ips", False))
        ]
    networks = sorted({subnet["VpcId"] for subnet in subnets})
    if len(networks) != 1:
        raise ConfigError(
            f"{tree['head_node_type']}.node_config.SubnetIds: got subnets of {', '.join(networks) or 'no network'},"
            " expected those of one network"
        )
    return networks[0]


def split_rules(permission: Tree) -> Iterator[tuple[str, int | None, int | None, str, str]]:
    """Yield the single rules of a permission: protocol, first and last port, list of sources, source."""
    protocol = permission["IpProtocol"]
    has_ports = protocol != "-1"
    first, last = (permission.get(port) if has_ports else None for port in ("FromPort", "ToPort"))
    for key, field in SOURCE_FIELDS.items():
        for source in permission.get(key, []):
            yield protocol, first, last, key, source[field]


def _update_roles(bucket: str, cluster: str, iam: Any) -> list[str]:
    """Make the roles of the head and of the other nodes, so that no node holds keys; return a line for each new one.

    The clusters of an account share the roles; each has its own policy in them.
    """
    new = []
    trust = {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
    arns: dict[str, str] = {}
    for name in (NODE_ROLE, HEAD_ROLE):
        try:
            role = iam.get_role(RoleName=name)["Role"]
        except iam.exceptions.NoSuchEntityException:
            role = iam.create_role(RoleName=name, AssumeRolePolicyDocument=_policy(trust))["Role"]
            new.append(f"made the role {name}")
        # Checked by itself: an earlier launch may have made the role and then have been refused the profile.
        try:
            profile = iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]
        except iam.exceptions.NoSuchEntityException:
            profile = iam.create_instance_profile(InstanceProfileName=name)["InstanceProfile"]
        if not profile["Roles"]:
            iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
            new.append(f"made the instance profile {name}")
        arns[name] = role["Arn"]
        statements = _bucket_statements(bucket)
        if name == HEAD_ROLE:
            statements += _launch_statements(cluster, arns[NODE_ROLE])
        iam.put_role_policy(RoleName=name, PolicyName=f"vitray-{cluster}", PolicyDocument=_policy(*statements))
    return new


def _policy(*statements: Tree) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": statements})


def _bucket_statements(bucket: str) -> list[Tree]:
    """Return the permissions to read and write one bucket, but not to make or remove it."""
    whole = ["s3:ListBucket", "s3:GetBucketLocation", "s3:ListBucketMultipartUploads"]
    each = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"]
    return [
        {"Effect": "Allow", "Action": whole, "Resource": f"arn:aws:s3:::{bucket}"},
        {"Effect": "Allow", "Action": each, "Resource": f"arn:aws:s3:::{bucket}/*"},
    ]


def _launch_statements(cluster: str, node_role: str) -> list[Tree]:
    """Return the permissions to launch nodes with the nodes' role, and to end those of this cluster only."""
    launch = ["ec2:RunInstances", "ec2:DescribeInstances", "ec2:DescribeInstanceTypes", "ec2:DescribeImages"]
    launch += ["ec2:DescribeSubnets", "ec2:DescribeSecurityGroups"]
    new = {"StringEquals": {"ec2:CreateAction": "RunInstances"}}
    own = {"StringEquals": {"aws:ResourceTag/ray-cluster-name": cluster}}
    spot = "arn:aws:iam::*:role/aws-service-role/spot.amazonaws.com/*"  # an account's first spot node makes this role
    images = "arn:aws:ssm:*:*:parameter/aws/service/*"  # public: AWS's and Canonical's names of their latest images
    return [
        {"Effect": "Allow", "Action": launch, "Resource": "*"},
        {"Effect": "Allow", "Action": "ec2:CreateTags", "Resource": "*", "Condition": new},
        {"Effect": "Allow", "Action": ["ec2:CreateTags", "ec2:TerminateInstances"], "Resource": "*", "Condition": own},
        {"Effect": "Allow", "Action": "iam:PassRole", "Resource": node_role},
        {"Effect": "Allow", "Action": "iam:CreateServiceLinkedRole", "Resource": spot},
        {"Effect": "Allow", "Action": "ssm:GetParameters", "Resource": images},
    ]


# ---- the launch ------------------------------------------------------------------------------------------------------


def check_tools() -> None:
    """Raise a ConfigError if a program that `ray up` needs is missing; its own error takes forty lines."""
    if missing := [tool for tool in ("ssh", "rsync") if shutil.which(tool) is None]:
        raise ConfigError(
            f"{', '.join(missing)}: not found on this machine; `ray up` copies files with it: apt-get install rsync"
            " openssh-client"
        )


def check_secrets() -> None:
    """Raise a ConfigError if a secret is missing: a new one would replace a file that the running Ray has read."""
    if missing := [name for name in (TOKEN, CREDENTIALS) if not Path(name).expanduser().exists()]:
        raise ConfigError(
            f"{', '.join(missing)}: missing, and the running cluster has its own; expected a copy from the machine of"
            " `make up`, or `make up`, which restarts Ray with new ones"
        )


def make_secrets() -> list[str]:
    """Make the secrets that nodes mount, unless they exist; return a line for each new one."""
    password = secrets.token_urlsafe(24)
    contents = {
        TOKEN: secrets.token_hex(32),
        CREDENTIALS: f"[mlflow]\nmlflow_tracking_username = vitray\nmlflow_tracking_password = {password}\n",
    }
    new = []
    for name, content in contents.items():
        path = Path(name).expanduser()
        if path.exists():
            path.chmod(0o600)
            continue
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(path, "w", opener=lambda name, flags: os.open(name, flags | os.O_EXCL, 0o600)) as file:
            file.write(content)
        new.append(f"made {name}")
    return new


def main(args: list[str]) -> int:
    """Check a cluster file, make the secrets and roles that it needs, and launch it; return the exit status."""
    if not args:
        print("usage: python -m vitray.cluster.launch cluster.yaml [ARGUMENTS of ray up]", file=sys.stderr)
        return 2
    try:
        tree = read_cluster(args[0])
        check_tools()
        if "--no-restart" in args:
            check_secrets()
        changes = make_secrets()
        if tree["provider"]["type"] == "aws":
            changes += make_account(tree)
    except ConfigError as error:
        print(f"vitray: {error}", file=sys.stderr)
        return 2
    print("\n".join(f"vitray: {line}" for line in [*changes, f"{args[0]} is ready to launch"]), file=sys.stderr)
    # With provider `local` the newer autoscaler believes that the head has ended, and starts no node (Ray 2.60).
    version_2 = "0" if tree["provider"]["type"] == "local" else "1"
    ray = Path(sys.executable).with_name("ray")
    return subprocess.call([ray, "up", *args], env=os.environ | {"RAY_UP_enable_autoscaler_v2": version_2})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
