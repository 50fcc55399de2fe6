"""The sub-commands ``reap``, and ``pools init``, ``check``, ``remove`` and ``policy``.

boto3 is imported only when one of them runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from etrain_jupyter.errors import ConfigError, EtrainError, PoolError
from etrain_jupyter.log.events import Event, GenerationReady, LogLine, StepCompleted, WorkerJoined
from etrain_jupyter.notebook.commands.arguments import Spelling, StoreCount, one_of
from etrain_jupyter.notebook.commands.subcommands import Surface
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.plugins.ec2 import clusters
from etrain_jupyter.pools.catalog import read_catalog
from etrain_jupyter.pools.registry import get_pool

if TYPE_CHECKING:
    from etrain_jupyter.plugins.ec2.account.check_record import CheckRecord
    from etrain_jupyter.plugins.ec2.head.cluster_files import BootPhase
    from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec

STEPS_S = 300.0
"""Time for warming up and training one step, in addition to ``lifetime.boot``."""

WORDS = {
    "action": ("check", "init", "policy", "remove"),
    "head": ("notebook", "on-demand"),
}
"""Accepted words by the name of the argument, for completion."""

E = TypeVar("E", bound=Event)

Word = Annotated[str | None, Spelling(metavar="NAME")]
Words = Annotated[str | None, Spelling(metavar="A,B")]
Region = Annotated[str | None, Spelling(metavar="REGION")]
File = Annotated[str | None, Spelling(metavar="FILE")]


def init(
    surface: Surface,
    pool: str,
    *,
    region: Region = None,
    types: Words = None,
    workers: Annotated[int | None, Spelling(metavar="N", action=StoreCount)] = None,
    budget: Annotated[float | None, Spelling(metavar="USD")] = None,
    bucket: Word = None,
    subnet: Words = None,
    security_group: Annotated[str | None, Spelling(metavar="GROUP")] = None,
    role: Annotated[str | None, Spelling(metavar="PROFILE")] = None,
    head: Annotated[str | None, Spelling(metavar="WHERE")] = None,
    ami: Word = None,
    python: Annotated[str | None, Spelling(metavar="PATH")] = None,
    profile: Word = None,
    file: File = None,
    yes: bool = False,
    dry_run: bool = False,
    template: File = None,
) -> str:
    """Create what a pool needs in your AWS account, and its entry in pools.yaml.

    Asks for what the flags do not say, and shows every step and the costs first. The resources are
    one CloudFormation stack. Repeat the command after an interruption: it continues.

    Args:
        pool: Name of the new pool.
        region: AWS region (that of your profile).
        types: Machine types with commas (g5.xlarge,g6.xlarge,g4dn.xlarge).
        workers: Most workers at a time (4).
        budget: Most US dollars per cluster (20).
        bucket: Bucket to create, or one of yours (a name made of pool, account and region).
        subnet: Subnets with commas (those of the default VPC).
        security_group: Use this security group instead of creating one.
        role: Use this instance profile for the nodes, and create no roles and policies.
        head: Where the scheduler runs: notebook (default) or on-demand, for its own machine.
        ami: Image of the nodes, ami-... or ssm:/... (AWS's Deep Learning AMI).
        python: Interpreter in that image, with etrain-jupyter (the nodes install the kernel's
            environment).
        profile: Profile in ~/.aws.
        file: Write the entry to this file (~/.config/etrain/pools.yaml).
        yes: Ask nothing.
        dry_run: Show the steps and the costs only.
        template: Create nothing, and write a CloudFormation template for an administrator.

    Example:
        pools init spot --region us-east-1 --types g5.xlarge,g6.xlarge --budget 20
    """
    _need_boto3()
    from etrain_jupyter.plugins.ec2.account.init import init as run_init
    from etrain_jupyter.plugins.ec2.account.options import InitOptions, split_words

    options = InitOptions(
        region=region,
        types=split_words(types),
        workers=workers,
        budget=_positive(budget),
        bucket=bucket,
        subnets=split_words(subnet),
        security_group=security_group,
        role=role,
        head=None if head is None else one_of("--head", head, ("notebook", "on-demand")),
        ami=ami,
        python=python,
        profile=profile,
        file=None if file is None else Path(file).expanduser().absolute(),
    )
    return run_init(
        pool,
        options,
        ask=_ask,
        say=surface.say,
        is_confirmed=yes or template is not None,
        is_dry_run=dry_run,
        template=None if template is None else Path(template).expanduser(),
    )


def remove(
    surface: Surface,
    pool: str,
    *,
    region: Region = None,
    bucket: Word = None,
    profile: Word = None,
    delete_objects: bool = False,
    yes: bool = False,
    dry_run: bool = False,
) -> str:
    """Remove from your AWS account what pools init has created, and the entry in pools.yaml.

    Args:
        pool: Name of the pool.
        region: Its region, if no pools.yaml defines the pool any more.
        bucket: Its bucket, if no pools.yaml defines the pool any more and the bucket has a name of
            yours.
        profile: Profile in ~/.aws, if no pools.yaml defines the pool any more.
        delete_objects: Also delete a bucket that contains objects, with all checkpoints in it.
        yes: Ask nothing.
        dry_run: Show the steps only.

    Example:
        pools remove spot --dry-run
    """
    _need_boto3()
    from etrain_jupyter.plugins.ec2.account.options import InitOptions
    from etrain_jupyter.plugins.ec2.account.removal import remove_pool

    return remove_pool(
        pool,
        InitOptions(region=region, bucket=bucket, profile=profile),
        ask=_ask,
        say=surface.say,
        is_confirmed=yes,
        is_dry_run=dry_run,
        deletes_objects=delete_objects,
    )


def check(surface: Surface, pool: str, *, no_boot: bool = False) -> str:
    """Prove that a pool works: train one step on one node.

    Args:
        pool: Name of the pool.
        no_boot: Launch nothing, and look up only credentials, types, image, network and quotas.

    Example:
        pools check spot --no-boot
    """
    _need_boto3()
    from etrain_jupyter.plugins.ec2.account.boot import look_up
    from etrain_jupyter.plugins.ec2.account.check_record import open_record, remove_killed

    spec = _spec_of(pool)
    with open_record(pool, spec) as record:
        if record:
            surface.say("removing what a previous check has left, which was killed")
            if left := remove_killed(pool, spec, record):
                surface.say(f"note  not removed yet: {left}")
        try:
            for line in look_up(spec):
                surface.say(line)
        except EtrainError as exc:
            raise PoolError(
                f"pool {pool} cannot be used: {str(exc).rstrip('.')}. No node was launched. Fix "
                f"it, and run `%etrain pools check {pool}` again."
            ) from exc
        if no_boot:
            return f"pool {pool} can be looked up. Only a check without --no-boot proves it."
        return _boot(surface, pool, spec, record)


def reap(
    surface: Surface, cluster: str | None = None, *, all: bool = False, region: str | None = None
) -> str:
    """Remove leftover resources of dead clusters on EC2, found by their tags.

    Args:
        cluster: Id of a cluster; by default all clusters that have expired.
        all: Also clusters that have not expired; their users lose the machines.

    Example:
        reap --all
    """
    return clusters.reap(cluster, all_clusters=all, region=region)


def policy(surface: Surface, pool: str | None = None) -> str:
    """Print the IAM policies that a pool needs.

    Args:
        pool: Name of the pool; by default the only one of kind aws-spot.

    Example:
        pools policy spot
    """
    return clusters.policies(pool)


# --- booting one node ---


def _boot(surface: Surface, name: str, spec: AwsSpotSpec, record: CheckRecord) -> str:
    """Train one step on one node, and shut the cluster down; return a table of the phases."""
    from etrain_jupyter.plugins.ec2.account.boot import (
        forget_probe,
        install_phases,
        launch_of,
        phases_of,
        running_clusters,
        total_of,
    )
    from etrain_jupyter.plugins.ec2.ec2_api import Clients

    if running := running_clusters(Clients(spec), spec):
        raise PoolError(
            f"pool {name} is in use by {', '.join(running)}, so no node was booted for the check. "
            f"Everything else is in order. Wait for its jobs and run `%etrain down {name}`, or use "
            "--no-boot."
        )
    surface.say(f"booting one node, which takes up to {spec.lifetime.boot / 60:.0f} min")
    started_at = time.time()
    pool = get_pool(name)
    record.note(boots=True)
    try:
        cluster_id = pool.up().cluster_id
        record.note(cluster_id=cluster_id)
        job = surface.submit(_body(name))
        record.note(job_id=job.id)
        status = _wait_for_step(job, timeout_s=spec.lifetime.boot + STEPS_S)
        launched_at, machine = launch_of(spec, cluster_id)
        installed = install_phases(spec, cluster_id)
        # Read the log now: it may be in the bucket, from which it is deleted below.
        events = list(job.events())
        problem = _problem_of(job, status, events, spec, machine)
    finally:
        # Also after an interrupt or an error: the machine costs money until it ends.
        surface.say("terminating the node")
        ended = time.time()
        left = pool.down(timeout_s=240.0)
    if left:
        raise PoolError(
            f"the node of the check cannot be removed: {left}. It may still cost money. Run "
            f"`%etrain down {name}`, then `%etrain ls --all`."
        )
    kept = forget_probe(spec, job_id=job.id, cluster_id=cluster_id)
    record.forget()
    if problem:
        raise PoolError(
            f"the check of pool {name} failed: {problem}. All that it launched was terminated. "
            f"Then run `%etrain pools check {name}` again."
        )
    joined, marks = _first(events, WorkerJoined), _marks(events, started_at, launched_at, installed)
    marks += [("save, finish", ended), ("terminate", time.time())]
    phases = phases_of(marks, launched_at=launched_at, usd_per_h=joined.usd_per_h or 0.0)
    price = "unknown" if joined.usd_per_h is None else f"${joined.usd_per_h:.4g} per hour"
    lines = [
        f"pool {name} trained one step on {machine} ({joined.device}), {price}",
        *map(str, (*phases, total_of(phases))),
    ]
    return "\n".join([*lines, f"note: {kept}"] if kept else lines)


def _body(name: str) -> dict[str, Any]:
    """Return the keys of the job: one step of a linear layer."""
    from etrain_jupyter.plugins.ec2.account.check_record import job_name

    return {
        "name": job_name(name),
        "model": "etrain_jupyter.recipes.probe:Probe",
        "data": {"train": "etrain_jupyter.recipes.probe:samples"},
        "loss": "torch.nn.functional:cross_entropy",
        "batch": {"global": 8},
        "steps": 1,
        "workers": {"min": 1, "max": 1},
        "pool": name,
    }


def _wait_for_step(job: TrainingJob, *, timeout_s: float) -> str:
    try:
        return str(job.wait(timeout_s))
    except EtrainError:
        return str(job.status)


def _problem_of(
    job: TrainingJob, status: str, events: Sequence[Event], spec: AwsSpotSpec, machine: str
) -> str:
    """Return why the pool is not ready; empty if a step was trained on the device to use."""
    from etrain_jupyter.plugins.ec2.account.boot import num_gpus

    if status == "finished":
        if _first(events, WorkerJoined).device != "cpu" or not num_gpus(spec, machine):
            return ""
        return (
            f"{machine} has a GPU, but torch on the node sees none: the image {spec.image.ami} has "
            f"no NVIDIA driver, or {_torch_of(spec)}. Choose "
            f"another image.ami{'' if spec.image.is_kernel else ' or image.python'}"
        )
    # Without a worker, the pool's own warnings say why: permissions, quota, capacity, versions.
    warnings = [one.text for one in events if isinstance(one, LogLine) and one.level == "warning"]
    reason = (
        job.reason or (warnings or [f"no step within {spec.lifetime.boot + STEPS_S:.0f} s"])[-1]
    )
    return f"job {job.id} is {status} ({reason.rstrip('.')})"


def _torch_of(spec: AwsSpotSpec) -> str:
    """Return what may be wrong with the torch of a node that sees no GPU."""
    if spec.image.is_kernel:
        return "one that is too old for the installed build of torch (CUDA 13 needs driver 580)"
    return f"the torch of {spec.image.interpreter} was built for CPUs"


def _marks(
    events: Sequence[Event],
    started_at: float,
    launched_at: float,
    installed: Sequence[BootPhase],
) -> list[tuple[str, float]]:
    """Return the ends of the phases, see ``phases_of``."""
    boots = [("boot", installed[0].at - installed[0].seconds)] if installed else []
    return [
        ("", started_at),
        ("start head, launch", launched_at or started_at),
        *boots,
        *((phase.name, phase.at) for phase in installed),
        ("hello" if installed else "boot, connect", _first(events, WorkerJoined).time),
        ("load, warm up", _first(events, GenerationReady).time),
        ("first step", _first(events, StepCompleted).time),
    ]


def _first(events: Sequence[Event], kind: type[E]) -> E:
    return next(event for event in events if isinstance(event, kind))


# --- small helpers ---


def _spec_of(name: str) -> AwsSpotSpec:
    from etrain_jupyter.plugins.ec2.spec import KIND, AwsSpotSpec

    catalog = read_catalog()
    entry = catalog.get(name)
    if entry is None or entry.kind != KIND:
        known = [one.name for one in catalog.values() if one.kind == KIND]
        raise ConfigError(
            f"no pool '{name}' of kind {KIND} is defined. Nothing was checked",
            hint=f"pools init {name} creates it"
            + (f"; defined pools: {', '.join(known)}" if known else ""),
        )
    return entry.read_as(AwsSpotSpec)


def _ask(question: str) -> str:
    """Ask a question in the terminal or below the cell.

    Raises:
        ConfigError: If no user can answer, such as in a script.
    """
    try:
        return input(question)
    except (EOFError, RuntimeError) as exc:
        # A terminal without input raises EOFError. A kernel without input raises
        # StdinNotImplementedError, which is a RuntimeError.
        raise ConfigError(
            f"'{question.strip()}' cannot be answered here. Nothing was changed",
            hint="add --yes, and flags for the values: %etrain pools init --help",
        ) from exc


def _positive(budget: float | None) -> float | None:
    if budget is not None and not 0 < budget < 1e9:
        raise ConfigError(
            f"--budget {budget:g}: this must be a number of US dollars above 0",
            hint="write for example --budget 20",
        )
    return budget


def _need_boto3() -> None:
    try:
        import etrain_jupyter.plugins.ec2.ec2_api  # noqa: F401
    except ModuleNotFoundError as exc:
        raise EtrainError(
            f"pools on AWS need boto3 ({exc}). Nothing was done. Run %pip install "
            "'etrain-jupyter[aws]', and restart the kernel."
        ) from exc
