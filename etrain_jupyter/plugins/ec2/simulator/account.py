"""Create an account's resources, and list what a cluster has left behind."""

from __future__ import annotations

import json
from typing import Any

from moto.core.exceptions import ServiceException
from moto.ec2.models import ec2_backends
from moto.iam.models import iam_backends
from moto.s3.models import s3_backends
from moto.ssm.models import ssm_backends

from etrain_jupyter.plugins.ec2.client.policy import trust_policy
from etrain_jupyter.plugins.ec2.ec2_api import CLUSTER_TAG
from etrain_jupyter.plugins.ec2.simulator.backend import Backend
from etrain_jupyter.plugins.ec2.simulator.wire import ACCOUNT

IMAGE_PARAMETER = "/etrain/node-image"
_LIVE = ("pending", "running", "stopping", "stopped")


def make_account(
    backend: Backend, *, region: str, bucket: str, role: str, role_policy: dict[str, Any] | None
) -> dict[str, str]:
    """Create a bucket, a role with an instance profile of the same name, and an image.

    Existing resources are left unchanged. Returns the fields of ``cloud.Account``.
    """
    with backend.lock:
        s3 = s3_backends[ACCOUNT]["aws"]
        if bucket not in s3.buckets:
            s3.create_bucket(bucket, region)
        iam = iam_backends[ACCOUNT]["aws"]
        try:
            iam.get_role(role)
        except ServiceException:
            iam.create_role(role, json.dumps(trust_policy()), "/", None, "", [], "3600")
            iam.create_instance_profile(role, "/", [], [])
            iam.add_role_to_instance_profile(role, role)
        # Replace an existing role's policy as well, because a test may call this again with another
        # one.
        if role_policy is not None:
            iam.put_role_policy(role, "etrain", json.dumps(role_policy))
        ec2 = ec2_backends[ACCOUNT][region]
        name = "etrain-node-image"
        images = [ami.id for ami in ec2.amis.values() if ami.name == name]
        image = images[0] if images else str(ec2.register_image(name, "made by fakeaws").id)
        ssm_backends[ACCOUNT][region].put_parameter(
            name=IMAGE_PARAMETER,
            description="",
            value=image,
            parameter_type="String",
            allowed_pattern="",
            keyid="",
            overwrite=True,
            tags=[],
            data_type="text",
            tier="Standard",
            policies=None,
        )
    return {
        "account_id": ACCOUNT,
        "region": region,
        "bucket": bucket,
        "role": role,
        "instance_profile": role,
        "role_arn": f"arn:aws:iam::{ACCOUNT}:role/{role}",
        "image": image,
        "image_parameter": IMAGE_PARAMETER,
    }


def make_user(backend: Backend, *, name: str, policies: list[dict[str, Any]]) -> dict[str, str]:
    """Create a user with these policies; return the environment variables for boto3."""
    with backend.lock:
        iam = iam_backends[ACCOUNT]["aws"]
        try:
            iam.get_user(name)
        except ServiceException:
            iam.create_user("us-east-1", name)
        for number, policy in enumerate(policies):
            iam.put_user_policy(name, f"policy-{number}", json.dumps(policy))
        key = iam.create_access_key(name)
    return {"AWS_ACCESS_KEY_ID": key.access_key_id, "AWS_SECRET_ACCESS_KEY": key.secret_access_key}


def find_leftovers(backend: Backend, *, cluster: str, prefix: str) -> dict[str, list[str]]:
    """Return the remaining resources of one or all clusters, by kind; see ``FakeAws.leftovers``."""
    found: dict[str, list[str]] = {}
    with backend.lock:
        for ec2 in list(ec2_backends[ACCOUNT].values()):
            instances = [one for held in ec2.reservations.values() for one in held.instances]
            # EC2's listings still contain terminated instances, which do not count.
            alive = [one for one in instances if one.state in _LIVE]
            templates = list(ec2.launch_templates.values())
            groups = [one for held in ec2.groups.values() for one in held.values()]
            # Each VPC has a group "default", which cannot be deleted.
            made = [one for one in groups if one.name != "default"]
            for kind, things in (
                ("instances", alive),
                ("volumes", list(ec2.volumes.values())),
                ("launch_templates", templates),
                ("security_groups", made),
            ):
                names = [one.id for one in things if _belongs(one, cluster)]
                found.setdefault(kind, []).extend(names)
        below = f"{prefix}{cluster}/" if cluster else prefix
        for name, bucket in list(s3_backends[ACCOUNT]["aws"].buckets.items()):
            keys = [key for key in list(bucket.keys) if key.startswith(below)]
            found.setdefault("objects", []).extend(f"s3://{name}/{key}" for key in sorted(keys))
    return {kind: names for kind, names in found.items() if names}


def _belongs(thing: Any, cluster: str) -> bool:
    tags = {tag["key"]: tag["value"] for tag in thing.get_tags()}
    return not cluster or tags.get(CLUSTER_TAG) == cluster
