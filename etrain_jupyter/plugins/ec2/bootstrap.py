"""Prepare what nodes need to boot: objects in the bucket, launch template, user-data.

Every process on a node can read the user-data, and so can anyone who is allowed to describe the
instance. The user-data therefore contains no secrets. The certificates are in the bucket, and a
node reads them with its role, which all nodes of a pool share. A node cannot read the keys of
another cluster because it does not know the name of the folder that contains them: the name cannot
be guessed, the role cannot list it, and only that cluster's own user-data contains it. Reading the
keys requires both the name and the role.
"""

from __future__ import annotations

import base64
import dataclasses
import getpass
import hashlib
import json
import shlex
import zlib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from etrain_jupyter.config.store_url import split_s3_url
from etrain_jupyter.errors import PoolError, StoreError
from etrain_jupyter.plugins.ec2.aws_messages import pool_error
from etrain_jupyter.plugins.ec2.ec2_api import CLUSTER_TAG, Clients, tag_list
from etrain_jupyter.plugins.ec2.network import NOTHING, Network
from etrain_jupyter.plugins.ec2.node_config import NodeConfig
from etrain_jupyter.plugins.ec2.spec import KIND, AwsSpotSpec
from etrain_jupyter.storage.objects.s3_messages import code_of

AGENT = "etrain_jupyter.plugins.ec2.machine.agent"
MOST_USER_DATA = 16_384
"""EC2's limit in bytes. Our script has a few hundred bytes, plus the size of ``image.setup``."""
ROOT = "ETRAIN_ROOT"
"""Variable with the folder of a node's environments, by default /opt/etrain."""
KEYS = "keys"
"""Parent of the key folders; the role may not list it."""
NODE_TLS = ("ca.pem", "worker.pem", "worker.key")
SETTINGS = "settings.json"
"""Settings of a cluster whose head runs on its own machine."""
HEAD_TLS = ("ca.pem", "scheduler.pem", "scheduler.key", "client.pem", "client.key")


def config_of(
    spec: AwsSpotSpec,
    cluster_id: str,
    *,
    fingerprint: Mapping[str, str] | None = None,
    supervisor: str = "",
) -> NodeConfig:
    """Return the configuration for a cluster's agents."""
    # If empty, NodeConfig's default applies.
    given = {"supervisor": supervisor} if supervisor else {}
    return NodeConfig(
        cluster_id=cluster_id,
        region=spec.region,
        role_env=dict(spec.environment),
        imds_poll_s=spec.interruption.imds_poll,
        lease_ttl_s=spec.lifetime.lease_ttl,
        # Ten checks per ttl: a node turns itself off at most two checks after the lease has
        # expired.
        lease_check_s=spec.lifetime.lease_ttl / 10,
        lifetime_s=spec.lifetime.max,
        drain_s=spec.interruption.drain,
        first_hour=spec.interruption.first_hour,
        workers_per_node=spec.workers.per_node,
        fingerprint=dict(fingerprint or {}),
        **given,
    )


def tags_of(
    spec: AwsSpotSpec, cluster_id: str, *, expires_at: float, role: str = "node"
) -> dict[str, str]:
    """Return the tags of all resources of a cluster."""
    return {
        CLUSTER_TAG: cluster_id,
        "etrain:pool": KIND,
        "etrain:owner": spec.owner or getpass.getuser(),
        "etrain:expires": str(int(expires_at)),
        "etrain:role": role,
        # Location of the cluster's objects. `etrain reap` needs it because it has only credentials.
        "etrain:home": spec.home(cluster_id),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class BootFacts:
    """Information that a node's agent needs to find and read its files."""

    keys: str
    """Folder of the cluster's keys, below its home."""
    owner: str = ""
    """Account that the bucket must belong to; empty for any."""


def keys_folder(tls_dir: Path) -> str:
    """Return the folder of a cluster's keys, which all heads derive from the same key."""
    # The name is derived instead of stored, so only a member of the cluster can compute it. The
    # hash does not reveal the key to those who can read the user-data.
    secret = (tls_dir / "worker.key").read_bytes()
    return f"{KEYS}/{hashlib.sha256(b'etrain keys folder' + secret).hexdigest()[:32]}"


def put_node_files(
    clients: Clients,
    cluster_id: str,
    config: NodeConfig,
    tls_dir: Path,
    *,
    with_head: bool = False,
) -> BootFacts:
    """Write the nodes' files to the bucket; return what a node needs to find them.

    Raises:
        PoolError: If the bucket cannot be written.
    """
    bucket, folder, keys = clients.bucket, f"clusters/{cluster_id}", keys_folder(tls_dir)
    try:
        for name in NODE_TLS:
            bucket.put(f"{folder}/{keys}/{name}", (tls_dir / name).read_bytes(), "storing a key")
        # Keep these out of the nodes' key folder, because nodes must not read the scheduler's and
        # client's keys.
        for name in HEAD_TLS if with_head else ():
            data = (tls_dir / name).read_bytes()
            bucket.put(f"{folder}/tls-head/{name}", data, "storing a key")
        data = json.dumps(dataclasses.asdict(config), indent=1).encode()
        bucket.put(f"{folder}/config.json", data, "storing the nodes' configuration")
        return BootFacts(keys=keys, owner=clients.bucket_owner())
    except StoreError as exc:
        raise PoolError(
            f"the nodes' files cannot be stored: {exc}. {NOTHING} `%etrain pools policy` prints "
            "the policy that the role or user needs."
        ) from exc


def user_data(spec: AwsSpotSpec, cluster_id: str, boot: BootFacts, *, role: str = "node") -> str:
    """Return the script that a node runs first, as root.

    ::

        shutdown -h +BOOT       a timer that turns the machine off if all else fails
        archive, setup          commands of the pool
        python3 -c ...          installs the kernel's environment; see `machine.install`
        python -m ...agent      serves, and re-arms the timer for the lifetime
        shutdown -h now         if the agent did not start, or failed to turn the machine off

    Raises:
        PoolError: If the script is too long for EC2, or ``image.archive`` has no digest.
    """
    minutes = max(1, round(spec.lifetime.boot / 60))
    lines = [
        "#!/bin/bash",
        f"shutdown -h +{minutes}",
        f"export AWS_DEFAULT_REGION={spec.region} ETRAIN_ROLE={role}",
    ]
    if spec.image.archive:
        lines += _unpack_archive(spec, boot)
    lines += spec.image.setup
    python = spec.image.interpreter
    if manifest := spec.image.manifest:
        lines += _install_environment(spec, cluster_id, boot)
        python = f'"${ROOT}/environments/{manifest[:16]}/bin/python"'
    command = [AGENT, spec.home(cluster_id), "--keys", boot.keys]
    command += ["--owner", boot.owner] if boot.owner else []
    lines.append(f"{python} -m {shlex.join(command)}")
    lines.append("shutdown -h now")
    text = "\n".join(lines) + "\n"
    # EC2's limit applies before base64 encoding.
    size = len(text.encode())
    if size > MOST_USER_DATA:
        raise PoolError(
            f"the script that starts a node is {size} bytes long; EC2's limit is {MOST_USER_DATA}. "
            f"{NOTHING} Move commands of image.setup into image.archive."
        )
    if "PRIVATE KEY" in text:
        raise PoolError(
            f"image.setup contains a private key, which every process of a node could read. "
            f"{NOTHING} Put it into the bucket or a secret store, and read it with the node's role."
        )
    return text


def _install_environment(spec: AwsSpotSpec, cluster_id: str, boot: BootFacts) -> list[str]:
    """Return the commands that install the kernel's environment.

    The script contains the installer, so the image needs nothing but Python. It also contains the
    digest of the manifest, so that a node refuses a manifest that was changed in the bucket.
    """
    source = files("etrain_jupyter.plugins.ec2.machine").joinpath("install.py").read_bytes()
    packed = base64.b64encode(zlib.compress(source, 9)).decode()
    code = f"import base64,zlib;exec(zlib.decompress(base64.b64decode('{packed}')))"
    arguments = [
        *("--bucket", spec.bucket, "--prefix", spec.prefix, "--region", spec.region),
        *("--cluster", cluster_id, "--manifest", spec.image.manifest),
        *(("--owner", boot.owner) if boot.owner else ()),
    ]
    failed = "etrain: the environment was not installed; see above."
    return [
        f'export {ROOT}="${{{ROOT}:-/opt/etrain}}"',
        # With -I, neither the image's variables nor its files change the imports.
        f'python3 -I -c "{code}" {shlex.join(arguments)} --folder "${ROOT}"'
        f" || {{ echo {shlex.quote(failed)}; shutdown -h now; exit 1; }}",
        f'export ETRAIN_BOOT_PHASES="${ROOT}/phases.json"',
    ]


def _unpack_archive(spec: AwsSpotSpec, boot: BootFacts) -> list[str]:
    """Return the commands that fetch ``image.archive``, verify it, and then unpack it."""
    archive, digest = spec.image.archive or "", spec.image.archive_sha256
    if not digest:
        raise PoolError(
            f"image.archive ({archive}) has no image.archive_sha256. {NOTHING} Nodes unpack it at "
            "/ as root, so a digest is required. Add the digest that "
            f"`sha256sum {archive.rpartition('/')[2]}` prints."
        )
    bucket, key = split_s3_url(archive)
    get = ["aws", "s3api", "get-object", "--bucket", bucket, "--key", key]
    if boot.owner and bucket == spec.bucket:
        # `boot.owner` owns the pool's bucket; another bucket may belong to another account.
        get += ["--expected-bucket-owner", boot.owner]
    refused = (
        f"etrain: {archive} could not be fetched, or does not match image.archive_sha256. "
        "Nothing was unpacked."
    )
    return [
        # Verify the complete file first, because a pipe into tar would unpack it as root before the
        # digest is known. Use /var/tmp, because /tmp may be in memory.
        "ARCHIVE=$(mktemp -d -p /var/tmp)/archive.tar.gz",
        f'{shlex.join(get)} "$ARCHIVE" > /dev/null &&'
        f' echo "{digest}  $ARCHIVE" | sha256sum --check --quiet -'
        f" || {{ echo {shlex.quote(refused)}; shutdown -h now; exit 1; }}",
        'tar -xzf "$ARCHIVE" -C / ; rm -rf "${ARCHIVE%/*}"',
    ]


def describe_image(clients: Clients, spec: AwsSpotSpec) -> dict[str, Any]:
    """Return EC2's description of the pool's image; raise ``ClientError`` if there is none."""
    ami = spec.image.ami
    if ami.startswith("ssm:"):
        ami = clients.ssm.get_parameter(Name=ami.removeprefix("ssm:"))["Parameter"]["Value"]
    images: list[dict[str, Any]] = clients.ec2.describe_images(ImageIds=[ami])["Images"]
    if not images:
        # Treat an empty list like the error that EC2 returns for an unknown id.
        error = {"Error": {"Code": "InvalidAMIID.NotFound", "Message": ""}}
        raise ClientError(error, "DescribeImages")
    return images[0]


def find_image(clients: Clients, spec: AwsSpotSpec) -> tuple[str, str]:
    """Return the image's id and root device; raise ``PoolError`` if EC2 has no such image."""
    try:
        image = describe_image(clients, spec)
    except ClientError as exc:
        raise pool_error(f"image.ami={spec.image.ami} cannot be used", exc, NOTHING) from exc
    return image["ImageId"], image.get("RootDeviceName") or "/dev/xvda"


def make_template(
    clients: Clients,
    spec: AwsSpotSpec,
    cluster_id: str,
    network: Network,
    tags: Mapping[str, str],
    boot: BootFacts,
    *,
    role: str = "node",
) -> str:
    """Return the id of the cluster's launch template; create it if it does not exist."""
    name = f"etrain-{cluster_id}" + ("" if role == "node" else f"-{role}")
    # Look it up first, because an on-demand head may use templates but not create them.
    filters = [{"Name": "launch-template-name", "Values": [name]}]
    if found := clients.ec2.describe_launch_templates(Filters=filters)["LaunchTemplates"]:
        return str(found[0]["LaunchTemplateId"])
    ami, root = find_image(clients, spec)
    data = template_data(spec, cluster_id, network, tags, boot, ami=ami, root=root, role=role)
    try:
        made = clients.ec2.create_launch_template(
            LaunchTemplateName=name,
            LaunchTemplateData=data,
            TagSpecifications=[{"ResourceType": "launch-template", "Tags": tag_list(tags)}],
        )
        return str(made["LaunchTemplate"]["LaunchTemplateId"])
    except ClientError as exc:
        # Another head of this cluster has created it since the lookup, so use that one.
        if code_of(exc) != "InvalidLaunchTemplateName.AlreadyExistsException":
            raise pool_error("the launch template cannot be created", exc, NOTHING) from exc
    found = clients.ec2.describe_launch_templates(LaunchTemplateNames=[name])["LaunchTemplates"]
    return str(found[0]["LaunchTemplateId"])


def template_data(
    spec: AwsSpotSpec,
    cluster_id: str,
    network: Network,
    tags: Mapping[str, str],
    boot: BootFacts,
    *,
    ami: str,
    root: str,
    role: str = "node",
) -> dict[str, Any]:
    """Return the ``LaunchTemplateData`` of all machines of a cluster."""
    script = user_data(spec, cluster_id, boot, role=role).encode()
    data: dict[str, Any] = {
        "ImageId": ami,
        "UserData": base64.b64encode(script).decode(),
        # With the default, stop, `shutdown -h` would keep the disk, which costs money.
        "InstanceInitiatedShutdownBehavior": "terminate",
        "IamInstanceProfile": {
            "Name": spec.iam.head_profile if role == "head" else spec.iam.instance_profile
        },
        # Require a session token with a hop limit of 1: containers and forwarded requests get none.
        "MetadataOptions": {
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 1,
            "HttpEndpoint": "enabled",
        },
        "BlockDeviceMappings": [
            {
                "DeviceName": root,
                "Ebs": {
                    "VolumeSize": spec.volume.gib,
                    "VolumeType": spec.volume.type,
                    "DeleteOnTermination": True,
                    "Encrypted": True,
                },
            }
        ],
        "TagSpecifications": [
            # Disks get their own tags, so that `reap` finds those whose machine is gone.
            {"ResourceType": kind, "Tags": tag_list(tags)}
            for kind in ("instance", "volume")
        ],
    }
    if role == "head":
        data["InstanceType"] = spec.head_type
    if spec.network.public_ip:
        # A public address requires an explicit interface, which then carries the security group.
        data["NetworkInterfaces"] = [
            {
                "DeviceIndex": 0,
                "AssociatePublicIpAddress": True,
                "Groups": [network.security_group],
                "DeleteOnTermination": True,
            }
        ]
    else:
        data["SecurityGroupIds"] = [network.security_group]
    return data
