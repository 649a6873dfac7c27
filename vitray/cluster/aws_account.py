"""The security group and the roles that a cluster's nodes need in an AWS account."""

import json
import os
import time
from collections.abc import Iterator
from typing import Any

from vitray.errors import ConfigError

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


def ingress_permissions(tree: Tree) -> list[Tree]:
    """Return the permissions of a cluster file, those of its own nodes aside."""
    return tree["provider"].get("security_group", {}).get("IpPermissions", [])


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
    current = {rule for permission in group["IpPermissions"] for rule in split_rules(permission)}
    for rules, update in (
        (current - wanted, ec2.revoke_security_group_ingress),
        (wanted - current, ec2.authorize_security_group_ingress),
    ):
        if rules:
            update(GroupId=group["GroupId"], IpPermissions=[_permission(*rule) for rule in sorted(rules, key=str)])
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


def _permission(protocol: str, first: int | None, last: int | None, key: str, source: str) -> Tree:
    ports = {} if first is None else {"FromPort": first, "ToPort": last}
    return {"IpProtocol": protocol, **ports, key: [{SOURCE_FIELDS[key]: source}]}


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
