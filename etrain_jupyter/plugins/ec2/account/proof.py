"""Prove that a pool can launch machines, without launching one: ``%etrain pools check``.

Permissions are proven by the requests of a real cluster, as dry runs: EC2 checks the permissions
of a dry run exactly as those of the request. Requests without a dry run are executed on probe
resources, which are removed at the end.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from etrain_jupyter.errors import PoolError, StoreError
from etrain_jupyter.plugins.ec2.account.machines import check_machines, describe, quota_of
from etrain_jupyter.plugins.ec2.account.site import DENIED, reason_of
from etrain_jupyter.plugins.ec2.aws_messages import AwsErrors
from etrain_jupyter.plugins.ec2.bootstrap import config_of
from etrain_jupyter.plugins.ec2.client.check import check_account
from etrain_jupyter.plugins.ec2.ec2_api import (
    Clients,
    placement_scores,
    read_placement_scores,
    tag_list,
)
from etrain_jupyter.plugins.ec2.environment.manifest import FOLDER as ENVIRONMENTS
from etrain_jupyter.plugins.ec2.launch_context import LaunchContext, set_up, survey
from etrain_jupyter.plugins.ec2.placement_scores import raise_score
from etrain_jupyter.plugins.ec2.reaping import remove
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.plugins.ec2.type_table import similar_types
from etrain_jupyter.process.tls import mint_certificates, write_certificates
from etrain_jupyter.storage.objects.s3_messages import code_of

PROBES = "aws-probe0"
"""Prefix of the clusters that the checks pretend to start. The leftovers of a killed check are
removed by the next one on this machine, by ``remove`` and by ``etrain reap``."""
PROFILE_S = 30.0
"""Time after which EC2 must know a new instance profile: IAM's changes take a few seconds."""
RETRY_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The result of one check."""

    state: str
    """``ok``, ``note`` (works with limitations, or is unknown) or ``wrong``."""
    text: str

    def __str__(self) -> str:
        marks = {"ok": "  ok ", "note": "note ", "wrong": "WRONG"}
        return f"{marks[self.state]} {self.text}"


def new_probe() -> str:
    """Return the id of a cluster that the checks pretend to start."""
    return f"{PROBES}-{secrets.token_hex(3)}"


def prove(
    spec: AwsSpotSpec, *, probe: str = "", pause: Callable[[float], object] = time.sleep
) -> Iterator[Proof]:
    """Yield the result of each check, in order.

    Checks that depend on a failed one are left out.

    Args:
        spec: The pool.
        probe: Id of the cluster to pretend; by default a new one.
        pause: Waits between two attempts.
    """
    clients = Clients(spec)
    probe = probe or new_probe()
    try:
        _, arn = clients.caller()
    except AwsErrors as exc:
        yield Proof(state="wrong", text=f"credentials: {reason_of(exc)}")
        return
    yield Proof(state="ok", text=f"credentials of {arn}")
    yield from _prove(lambda: _fits(clients, spec), "machine types and image")
    yield from _prove(lambda: _objects(clients, probe), f"bucket {spec.bucket}")
    is_usable = True
    for proof in _prove(lambda: _usable(clients, spec), "network"):
        is_usable = is_usable and proof.state != "wrong"
        yield proof
    if is_usable:
        yield from _prove(lambda: _launches(clients, spec, probe, pause), "launching")
    yield from _prove(lambda: _role(clients, spec, probe), "role of the nodes")
    yield from _prove(lambda: _quotas(clients, spec), "quotas")
    yield from _prove(lambda: _scores(clients, spec), "spot placement scores")


def _prove(check: Callable[[], Iterator[Proof]], what: str) -> Iterator[Proof]:
    """Run a check; turn its error into a result."""
    try:
        yield from check()
    except (PoolError, StoreError) as exc:
        yield Proof(state="wrong", text=f"{what}: {exc}")
    except AwsErrors as exc:
        yield Proof(state="wrong", text=f"{what}: {reason_of(exc)}")


def _fits(clients: Clients, spec: AwsSpotSpec) -> Iterator[Proof]:
    check_machines(clients, spec)
    names = ", ".join(spec.capacity.types) if spec.capacity.gpu is None else "types with such GPUs"
    yield Proof(state="ok", text=f"{names} exist, and the image is for their architecture")


def _objects(clients: Clients, probe: str) -> Iterator[Proof]:
    bucket, key, data = clients.bucket, f"clusters/{probe}/probe", b"etrain"
    bucket.put(key, data, "storing a probe object")
    if bucket.get(key, "reading the probe object") != data:
        raise PoolError("the probe object was read with other contents than were stored")
    if key not in bucket.keys(f"clusters/{probe}", "listing the probe object"):
        raise PoolError("the probe object was stored, but is not listed")
    bucket.delete(key, "deleting the probe object")
    yield Proof(state="ok", text="bucket: a probe object was stored, read, listed and deleted")


def _usable(clients: Clients, spec: AwsSpotSpec) -> Iterator[Proof]:
    check_account(clients, spec)
    yield Proof(state="ok", text="network, image and bucket can be looked up")


def _launches(
    clients: Clients, spec: AwsSpotSpec, probe: str, pause: Callable[[float], object]
) -> Iterator[Proof]:
    """Prove the permissions of a launch with a cluster's own launch template."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            tls = Path(folder) / "tls"
            write_certificates(tls, mint_certificates(probe))
            frame = set_up(clients, spec, probe, tls, config_of(spec, probe))
        yield Proof(state="ok", text="a launch template was created")
        wrong = _dry_run(clients, frame, spec, pause)
        if wrong:
            yield Proof(state="wrong", text=f"launching: {wrong}")
        else:
            yield Proof(
                state="ok",
                text="RunInstances and CreateFleet, with the nodes' role: dry runs succeeded",
            )
    finally:
        # Also after an interrupt: the probe costs nothing, but `ls --all` would show it.
        left = remove(clients, spec.region, probe, home=spec.home(probe), pause=pause)
    yield (
        Proof(state="wrong", text=f"the probe cannot be removed: {left}")
        if left
        else Proof(state="ok", text="the launch template and the probe's objects were deleted")
    )


def _dry_run(
    clients: Clients, frame: LaunchContext, spec: AwsSpotSpec, pause: Callable[[float], object]
) -> str:
    """Return why machines cannot be launched; empty if they can."""
    subnet = frame.subnets[sorted(frame.subnets)[0]]
    types = sorted(frame.types) if spec.capacity.gpu is not None else list(spec.capacity.types)
    template = {"LaunchTemplateId": frame.template_id, "Version": "$Latest"}
    tags = tag_list(frame.tags)
    requests: Sequence[tuple[str, dict[str, Any]]] = (
        (
            "run_instances",
            {
                "LaunchTemplate": template,
                "InstanceType": types[0],
                "SubnetId": subnet,
                "MinCount": 1,
                "MaxCount": 1,
                "InstanceMarketOptions": {"MarketType": "spot"},
                "TagSpecifications": [
                    {"ResourceType": kind, "Tags": tags} for kind in ("instance", "volume")
                ],
            },
        ),
        (
            "create_fleet",
            {
                "Type": "instant",
                "LaunchTemplateConfigs": [
                    {
                        "LaunchTemplateSpecification": template,
                        "Overrides": [{"InstanceType": one, "SubnetId": subnet} for one in types],
                    }
                ],
                "TargetCapacitySpecification": {
                    "TotalTargetCapacity": 1,
                    "SpotTargetCapacity": 1,
                    "DefaultTargetCapacityType": "spot",
                },
                "TagSpecifications": [
                    {"ResourceType": kind, "Tags": tags} for kind in ("fleet", "instance", "volume")
                ],
            },
        ),
    )
    deadline = time.monotonic() + PROFILE_S
    for operation, arguments in requests:
        while error := _refusal(clients, operation, arguments):
            # EC2 learns of a new instance profile some seconds after IAM has created it.
            is_new = "iamInstanceProfile" in str(error)
            if not is_new or time.monotonic() > deadline:
                return f"{operation}: {reason_of(error)}"
            pause(RETRY_S)
    return ""


def _refusal(clients: Clients, operation: str, arguments: dict[str, Any]) -> ClientError | None:
    try:
        getattr(clients.launcher, operation)(**arguments, DryRun=True)
    except ClientError as exc:
        return None if code_of(exc) == "DryRunOperation" else exc
    raise PoolError(f"EC2 ignored the dry run of {operation}. Run `%etrain reap --all` now")


def _role(clients: Clients, spec: AwsSpotSpec, probe: str) -> Iterator[Proof]:
    """Prove what the nodes may do, with IAM's simulator, and what they may not do."""
    iam, profile = clients.iam, spec.iam.instance_profile
    home = f"arn:aws:s3:::{spec.bucket}/{spec.prefix}clusters/{probe}"
    job = f"arn:aws:s3:::{spec.bucket}/{spec.prefix}runs/probe"
    wanted: tuple[tuple[str, str, bool], ...] = (
        ("s3:GetObject", f"{home}/lease.json", True),
        ("s3:PutObject", f"{home}/nodes/probe.json", True),
        ("s3:PutObject", f"{job}/checkpoints/probe", True),
        ("s3:PutObject", f"{home}/lease.json", False),
        ("s3:PutObject", f"{job}/bundle", False),
    )
    if spec.image.is_kernel:
        stored = f"arn:aws:s3:::{spec.bucket}/{spec.prefix}{ENVIRONMENTS}"
        wanted += (
            ("s3:GetObject", f"{stored}/probe.json", True),
            ("s3:PutObject", f"{stored}/probe.json", False),
        )
    try:
        roles = iam.get_instance_profile(InstanceProfileName=profile)["InstanceProfile"]["Roles"]
        if not roles:
            raise PoolError(
                f"the instance profile {profile} has no role. Run `%etrain pools init` again, or "
                "add the role to it"
            )
        found = [
            (
                action,
                resource,
                should,
                iam.simulate_principal_policy(
                    PolicySourceArn=roles[0]["Arn"],
                    ActionNames=[action],
                    ResourceArns=[resource],
                )["EvaluationResults"][0]["EvalDecision"],
            )
            for action, resource, should in wanted
        ]
    except ClientError as exc:
        if code_of(exc) in DENIED:
            yield Proof(
                state="note",
                text="role of the nodes: unknown, since these credentials may not use IAM's policy "
                "simulator. Booting a node proves it",
            )
            return
        raise
    bad = [one for one in found if (one[3] == "allowed") != one[2]]
    for action, resource, should, _ in bad:
        verb = "may not" if should else "may"
        fix = "`%etrain pools policy` prints its policy"
        yield Proof(
            state="wrong" if should else "note",
            text=f"the nodes {verb} {action} on {resource.removeprefix('arn:aws:s3:::')}; {fix}",
        )
    if not bad:
        yield Proof(
            state="ok",
            text=f"the nodes' role may do what nodes do, and nothing to other files "
            f"({len(found)} requests simulated)",
        )


def _quotas(clients: Clients, spec: AwsSpotSpec) -> Iterator[Proof]:
    types = describe(clients, spec.capacity.types) if spec.capacity.gpu is None else {}
    seen: dict[str, list[tuple[str, int]]] = {}
    names: dict[str, str] = {}
    for name, facts in types.items():
        if quota := quota_of(name):
            names[quota[0]] = quota[1]
            vcpus = int(facts.get("VCpuInfo", {}).get("DefaultVCpus", 0))
            seen.setdefault(quota[0], []).append((name, vcpus))
    if not seen:
        yield Proof(state="note", text="quotas: no spot quota is known for these types")
    for code, members in seen.items():
        yield _quota(clients, spec, code, names[code], members)


def _quota(
    clients: Clients, spec: AwsSpotSpec, code: str, title: str, members: list[tuple[str, int]]
) -> Proof:
    request = (
        f"aws service-quotas request-service-quota-increase --region {spec.region} --service-code "
        f"ec2 --quota-code {code} --desired-value"
    )
    try:
        limit = clients.quotas.get_service_quota(ServiceCode="ec2", QuotaCode=code)
    except AwsErrors as exc:
        return Proof(state="note", text=f"quota {title} ({code}): unknown, {reason_of(exc)}")
    value = int(limit["Quota"]["Value"])
    name, smallest = min(members, key=lambda one: one[1])
    need = smallest * -(-spec.workers.max // max(1, spec.workers.per_node))
    if value < smallest:
        return Proof(
            state="wrong",
            text=f"quota {title} ({code}) is {value} vCPUs, and {name} has {smallest}: EC2 will "
            f"refuse every launch. Request more, which takes hours: `{request} {need}`",
        )
    if value < need:
        return Proof(
            state="note",
            text=f"quota {title} ({code}) is {value} vCPUs: enough for "
            f"{value // smallest} {name}, not for workers.max {spec.workers.max}. "
            f"Request more: `{request} {need}`",
        )
    return Proof(state="ok", text=f"quota {title} ({code}): {value} vCPUs")


def _scores(clients: Clients, spec: AwsSpotSpec) -> Iterator[Proof]:
    what = "spot placement scores"
    types, subnets = survey(clients, spec)
    names, count = list(types), spec.workers.max
    try:
        scores = read_placement_scores(clients.ec2, names, count, spec.region)
    except AwsErrors as exc:
        reason = (
            "these credentials may not use ec2:GetSpotPlacementScores"
            if isinstance(exc, ClientError) and code_of(exc) in DENIED
            else reason_of(exc)
        )
        text = f"{what}: unknown, {reason}. Zones are chosen by price alone"
        yield Proof(state="note", text=text)
        return
    own = {zone: score for zone, score in scores.items() if zone in subnets}
    if not own:
        yield Proof(state="note", text=f"{what}: not available")
        return
    others = {zone: score for zone, score in scores.items() if zone not in subnets}
    similar = similar_types(names)
    advice = raise_score(num_types=len(names), own=own, others=others, similar=similar)
    text = f"{what}, 1 to 10: {_by_zone(own)}"
    if advice:
        text += f". {advice}"
        if similar:
            more = placement_scores(clients.ec2, [*names, *similar], count, spec.region)
            better = {zone: score for zone, score in more.items() if zone in subnets}
            text += f". With those types: {_by_zone(better)}" if better else ""
    yield Proof(state="note" if advice else "ok", text=text)


def _by_zone(scores: Mapping[str, int]) -> str:
    return ", ".join(f"{zone} {score}" for zone, score in sorted(scores.items()))
