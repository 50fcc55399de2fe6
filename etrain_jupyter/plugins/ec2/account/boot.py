"""Look up what a node needs, and account for its boot: ``%etrain pools check``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from etrain_jupyter.errors import PoolError, StoreError
from etrain_jupyter.plugins.ec2.account.machines import check_machines, check_quotas, describe
from etrain_jupyter.plugins.ec2.account.site import reason_of
from etrain_jupyter.plugins.ec2.aws_messages import AwsErrors
from etrain_jupyter.plugins.ec2.client.check import check_account
from etrain_jupyter.plugins.ec2.ec2_api import Clients, list_instances
from etrain_jupyter.plugins.ec2.head.cluster_files import BootPhase, ClusterFiles
from etrain_jupyter.plugins.ec2.reaping import find_tagged
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase between the submission of a job and the end of its machine."""

    name: str
    seconds: float
    cents: float
    """Cost of the machine during the phase, in US cents."""

    def __str__(self) -> str:
        return f"{self.name:<24}{self.seconds:8.1f} s {self.cents:8.3f} cents"


def phases_of(
    marks: Sequence[tuple[str, float]], *, launched_at: float, usd_per_h: float
) -> list[Phase]:
    """Return the phases between marks.

    Args:
        marks: The end of each phase in seconds since the epoch, oldest first, with the phase's
            name; the first mark is the start, and its name is not used.
        launched_at: When EC2 began to charge for the machine.
        usd_per_h: Price of the machine.
    """
    found = []
    for (_, start), (name, end) in pairwise(marks):
        # The clocks of EC2 and of the scheduler differ by fractions of a second.
        seconds = max(0.0, end - start)
        charged = max(0.0, end - max(start, launched_at))
        cents = 100.0 * usd_per_h * min(charged, seconds) / 3600
        found.append(Phase(name=name, seconds=seconds, cents=cents))
    return found


def total_of(phases: Sequence[Phase]) -> Phase:
    """Return the sum of all phases."""
    return Phase(
        name="total",
        seconds=sum(one.seconds for one in phases),
        cents=sum(one.cents for one in phases),
    )


def look_up(spec: AwsSpotSpec) -> Iterator[str]:
    """Check everything that needs no machine; yield a line about each check.

    Raises:
        PoolError: If a check fails; the later ones are left out.
    """
    clients = Clients(spec)
    try:
        yield f"ok    credentials of {clients.caller()[1]}"
        check_machines(clients, spec)
        yield "ok    the machine types exist, and the image is for their architecture"
        check_account(clients, spec)
        yield "ok    network, image and bucket can be used"
        yield from check_quotas(clients, spec)
    except AwsErrors as exc:
        raise PoolError(reason_of(exc)) from exc


def running_clusters(clients: Clients, spec: AwsSpotSpec) -> list[str]:
    """Return the ids of the pool's clusters that have resources on EC2."""
    home = f"s3://{spec.bucket}/{spec.prefix}"
    found = find_tagged(clients, spec.region)
    return sorted({one.cluster_id for one in found if one.home.startswith(home)})


def launch_of(spec: AwsSpotSpec, cluster_id: str) -> tuple[float, str]:
    """Return when the cluster's first node was launched, and its type; 0.0 if unknown."""
    try:
        found = list_instances(Clients(spec).ec2, cluster_id=cluster_id)
    except AwsErrors:
        return 0.0, ""
    nodes = [one for one in found if one.tags.get("etrain:role") == "node"]
    return (nodes[0].launched_at, nodes[0].type) if nodes else (0.0, "")


def install_phases(spec: AwsSpotSpec, cluster_id: str) -> tuple[BootPhase, ...]:
    """Return the phases of the first node's boot; empty if its image has its own environment."""
    try:
        found = list_instances(Clients(spec).ec2, cluster_id=cluster_id)
        nodes = [one.id for one in found if one.tags.get("etrain:role") == "node"]
        state = ClusterFiles(Clients(spec).bucket, cluster_id).node_state(nodes[0])
    except (*AwsErrors, StoreError, IndexError):
        return ()
    return state.phases if state is not None else ()


def num_gpus(spec: AwsSpotSpec, type: str) -> int:
    """Return the number of NVIDIA GPUs of a machine type; 0 if unknown."""
    if not type:
        return 0
    facts = describe(Clients(spec), [type]).get(type, {})
    gpus = facts.get("GpuInfo", {}).get("Gpus", ())
    return sum(one["Count"] for one in gpus if one["Manufacturer"] == "NVIDIA")


def forget_probe(spec: AwsSpotSpec, *, job_id: str, cluster_id: str) -> str:
    """Delete the objects of the probe's job and cluster; return why that failed, or nothing."""
    bucket, what = Clients(spec).bucket, "the objects of the probe cannot be deleted"
    try:
        for key in (
            *bucket.keys(f"runs/{job_id}", what),
            *bucket.keys(f"clusters/{cluster_id}", what),
            *(one for one in bucket.keys("ledgers", what) if cluster_id in one),
        ):
            bucket.delete(key, what)
    except StoreError as exc:
        return str(exc)
    except AwsErrors as exc:
        return reason_of(exc)
    return ""
