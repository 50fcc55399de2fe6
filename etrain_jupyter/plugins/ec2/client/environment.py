"""Store the kernel's environment for a new cluster's nodes, as ``image.environment`` says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from etrain_jupyter.errors import PoolError, StoreError
from etrain_jupyter.plugins.ec2.account.machines import find_architecture
from etrain_jupyter.plugins.ec2.ec2_api import Clients
from etrain_jupyter.plugins.ec2.environment.manifest import key_of
from etrain_jupyter.plugins.ec2.environment.prepare import NodeNeeds, Prepared, prepare
from etrain_jupyter.plugins.ec2.environment.torch_builds import capabilities_of
from etrain_jupyter.plugins.ec2.launch_context import find_types
from etrain_jupyter.plugins.ec2.network import NOTHING
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec, EnvironmentSpec
from etrain_jupyter.process.state_root import open_state_root

MACHINES = {"x86_64": "x86_64", "arm64": "aarch64"}
"""Architectures of EC2, and their names in wheels."""
CACHE = "environments"
MB = 1e6


def with_environment(
    clients: Clients, spec: AwsSpotSpec, say: Callable[[str], object] = print
) -> AwsSpotSpec:
    """Return the spec with the manifest of the stored environment; blocks until it is stored.

    Pools whose image has its own interpreter are returned unchanged.

    Raises:
        PoolError: If a package cannot be sent, or the bucket cannot be used.
    """
    if not spec.image.is_kernel:
        return spec
    try:
        if spec.image.manifest:
            _check_stored(clients, spec)
            return spec
        prepared = prepare(
            clients.bucket,
            needs_of(clients, spec),
            cache=open_state_root() / CACHE,
            say=say,
        )
    except StoreError as exc:
        raise PoolError(
            f"the kernel's environment cannot be stored in the bucket {spec.bucket}: {exc}. "
            f"{NOTHING} `%etrain pools policy` prints the policy that the user needs. To use an "
            "interpreter of the image instead, set image.python."
        ) from exc
    say(describe(prepared))
    return spec.with_manifest(prepared.digest)


def needs_of(clients: Clients, spec: AwsSpotSpec) -> NodeNeeds:
    """Return what the pool's machines need.

    Raises:
        PoolError: If the image does not exist.
    """
    environment = spec.image.environment or EnvironmentSpec()
    named = spec.capacity.gpu is None
    types = spec.capacity.types if named else tuple(find_types(clients, spec))
    folder = environment.wheels
    return NodeNeeds(
        machine=MACHINES.get(find_architecture(clients, spec), "x86_64"),
        capabilities=capabilities_of(types),
        exclude=environment.exclude,
        wheels=Path(folder).expanduser() if folder is not None else None,
    )


def describe(prepared: Prepared) -> str:
    """Return the line about a stored environment."""
    wheels = prepared.manifest.wheels
    size = sum(one.size for one in wheels) / MB
    uploaded = (
        f"{prepared.num_uploaded} wheels ({prepared.uploaded_bytes / MB:.0f} MB) uploaded"
        if prepared.num_uploaded
        else "all in the bucket"
    )
    return (
        f"etrain: nodes install this kernel's environment: {len(wheels)} packages, {size:.0f} MB, "
        f"{uploaded} ({prepared.seconds:.1f} s)"
    )


def _check_stored(clients: Clients, spec: AwsSpotSpec) -> None:
    key = key_of(spec.image.manifest)
    if clients.bucket.head(key, "looking up the environment") is None:
        raise PoolError(
            f"image.environment.manifest names an environment that s3://{spec.bucket}/"
            f"{spec.prefix}{key} does not contain. {NOTHING} Remove the key, to store the kernel's "
            "environment."
        )
