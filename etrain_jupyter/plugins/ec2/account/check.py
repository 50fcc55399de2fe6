"""Prove that a pool works by booting one node: ``%etrain pools check``.

Everything that a check creates is recorded, so that the next check can remove it after a kill::

    check 1                                       check 2
    holds the lock; records that it boots
    records its cluster and its job
    killed: nothing of it is removed
                                                  gets the lock, and finds the record
                                                  removes cluster and job, and begins

A cluster is removed only if all of its jobs belong to checks, because a cell may have joined it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from etrain_jupyter.errors import EtrainError, PoolError, StoreError
from etrain_jupyter.log.events import Event, GenerationReady, LogLine, StepCompleted, WorkerJoined
from etrain_jupyter.notebook.commands.subcommands import Surface
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.plugins.ec2.account.machines import check_machines, check_quotas
from etrain_jupyter.plugins.ec2.account.site import reason_of, running_clusters
from etrain_jupyter.plugins.ec2.aws_messages import AwsErrors
from etrain_jupyter.plugins.ec2.client.check import check_account
from etrain_jupyter.plugins.ec2.ec2_api import Clients, describe_types, list_instances
from etrain_jupyter.plugins.ec2.head.cluster_files import BootPhase, ClusterFiles
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.pools.base import Leftovers
from etrain_jupyter.pools.own_clusters import address_of, find_cluster_dir
from etrain_jupyter.pools.registry import get_pool
from etrain_jupyter.pools.rpc import ask
from etrain_jupyter.process.files import write_private
from etrain_jupyter.process.start_lock import remove_start_lock, start_lock
from etrain_jupyter.process.state_root import open_state_root
from etrain_jupyter.wire.requests import ListJobs

STEPS_S = 300.0
"""Time for warming up and training one step, in addition to ``lifetime.boot``."""
FOLDER = "checks"
DOWN_S = 240.0

E = TypeVar("E", bound=Event)


def check_pool(surface: Surface, name: str, spec: AwsSpotSpec, *, boots: bool) -> str:
    """Look up everything that needs no machine, and then train one step on one node.

    Raises:
        PoolError: If a check fails; the later checks are skipped.
    """
    with open_record(name, spec) as record:
        if record:
            surface.say("removing what a previous check has left, which was killed")
            if left := remove_killed(name, spec, record):
                surface.say(f"note  not removed yet: {left}")
        try:
            for line in look_up(spec):
                surface.say(line)
        except EtrainError as exc:
            raise PoolError(
                f"pool {name} cannot be used: {str(exc).rstrip('.')}. No node was launched. Fix "
                f"it, and run `%etrain pools check {name}` again."
            ) from exc
        if not boots:
            return f"pool {name} can be looked up. Only a check without --no-boot proves it."
        return boot_node(surface, name, spec, record)


def look_up(spec: AwsSpotSpec) -> Iterator[str]:
    """Check everything that needs no machine; yield a line about each check.

    Raises:
        PoolError: If a check fails; the later checks are skipped.
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


# --- booting one node ---


def boot_node(surface: Surface, name: str, spec: AwsSpotSpec, record: CheckRecord) -> str:
    """Train one step on one node, and shut the cluster down; return a table of the phases."""
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
        launched_at, machine, installed = first_boot(spec, cluster_id)
        # Read the log now, because it may be in the bucket, from which it is deleted below.
        events = list(job.events())
        problem = _problem_of(job, status, events, spec, machine)
    finally:
        # Even after an interrupt or an error, because the machine costs money until it ends.
        surface.say("terminating the node")
        ended = time.time()
        left = pool.down(timeout_s=DOWN_S)
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


def _job_name(pool: str) -> str:
    return f"check-{pool}"


def _body(name: str) -> dict[str, Any]:
    """Return the keys of the job: one step of a linear layer."""
    return {
        "name": _job_name(name),
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


def first_boot(spec: AwsSpotSpec, cluster_id: str) -> tuple[float, str, Sequence[BootPhase]]:
    """Return launch time, type and installed phases of the cluster's first node.

    The time is 0.0 if unknown. An image with its own environment installs nothing.
    """
    clients = Clients(spec)
    try:
        found = list_instances(clients.ec2, cluster_id=cluster_id)
        node = next(one for one in found if one.tags.get("etrain:role") == "node")
    except (*AwsErrors, StopIteration):
        return 0.0, "", ()
    try:
        state = ClusterFiles(clients.bucket, cluster_id).node_state(node.id)
    except (*AwsErrors, StoreError):
        state = None
    return node.launched_at, node.type, state.phases if state is not None else ()


def _problem_of(
    job: TrainingJob, status: str, events: Sequence[Event], spec: AwsSpotSpec, machine: str
) -> str:
    """Return why the pool is not ready; empty if a step was trained on the intended device."""
    if status == "finished":
        if _first(events, WorkerJoined).device != "cpu" or not num_gpus(spec, machine):
            return ""
        torch = (
            "one that is too old for the installed build of torch (CUDA 13 needs driver 580)"
            if spec.image.is_kernel
            else f"the torch of {spec.image.interpreter} was built for CPUs"
        )
        return (
            f"{machine} has a GPU, but torch on the node sees none: the image {spec.image.ami} has "
            f"no NVIDIA driver, or {torch}. Choose "
            f"another image.ami{'' if spec.image.is_kernel else ' or image.python'}"
        )
    # Without a worker, the pool's own warnings say why: permissions, quota, capacity, versions.
    warnings = [one.text for one in events if isinstance(one, LogLine) and one.level == "warning"]
    reason = (
        job.reason or (warnings or [f"no step within {spec.lifetime.boot + STEPS_S:.0f} s"])[-1]
    )
    return f"job {job.id} is {status} ({reason.rstrip('.')})"


def num_gpus(spec: AwsSpotSpec, type: str) -> int:
    """Return the number of NVIDIA GPUs of a machine type; 0 if unknown."""
    found = describe_types(Clients(spec).ec2, [type]) if type else {}
    return found[type].gpus if type in found else 0


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


# --- phases ---


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
    seconds, cents = sum(one.seconds for one in phases), sum(one.cents for one in phases)
    return Phase(name="total", seconds=seconds, cents=cents)


def _marks(
    events: Sequence[Event],
    started_at: float,
    launched_at: float,
    installed: Sequence[BootPhase],
) -> list[tuple[str, float]]:
    """Return the ends of the phases; see ``phases_of``."""
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


# --- the record of a check ---


class CheckRecord:
    """Everything that a check has created so far, in the state folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            self._known = dict(json.loads(path.read_text(encoding="utf-8")))

    def __bool__(self) -> bool:
        return bool(self._known)

    @property
    def cluster_id(self) -> str:
        """Id of the started cluster; empty if it is not known yet."""
        return str(self._known.get("cluster_id", ""))

    @property
    def job_id(self) -> str:
        """Id of the submitted job; empty if it is not known yet."""
        return str(self._known.get("job_id", ""))

    def note(self, **facts: Any) -> None:
        """Add facts; call this before creating what they describe."""
        self._known |= facts
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(self._path, json.dumps(self._known))

    def forget(self) -> None:
        """Delete the record, because nothing of the check is left."""
        self._known = {}
        self._path.unlink(missing_ok=True)


@contextlib.contextmanager
def open_record(name: str, spec: AwsSpotSpec) -> Iterator[CheckRecord]:
    """Provide the record of a pool's check, and lock it against other checks on this machine.

    Raises:
        PoolError: If another check of the pool is running.
    """
    root, key = open_state_root(), f"check-{name}-{spec.region}"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(start_lock(root, key, timeout_s=0.0))
        except TimeoutError as exc:
            raise PoolError(
                f"another check of pool {name} runs on this machine. Nothing was done. Wait until "
                "it has ended."
            ) from exc
        try:
            yield CheckRecord(root / FOLDER / f"{name}@{spec.region}.json")
        finally:
            remove_start_lock(root, key)


def remove_killed(name: str, spec: AwsSpotSpec, record: CheckRecord) -> Leftovers:
    """Remove what a killed check has created, according to its record; return what remains."""
    left = []
    jobs = [(record.job_id, record.cluster_id)] if record.job_id else []
    for cluster_id in running_clusters(Clients(spec), spec):
        ids = _jobs_of_checks(cluster_id, name)
        if ids is not None:
            left.append(get_pool(name).down(timeout_s=DOWN_S))
            jobs += [(one, cluster_id) for one in ids]
    for job_id, cluster_id in dict.fromkeys(jobs):
        forget_probe(spec, job_id=job_id, cluster_id=cluster_id)
    found = Leftovers.of_all(left)
    if not found:
        record.forget()
    return found


def _jobs_of_checks(cluster_id: str, pool: str) -> list[str] | None:
    """Return the ids of a cluster's jobs; None if one of them does not belong to a check."""
    cluster = find_cluster_dir(cluster_id)
    address = address_of(cluster) if cluster is not None else None
    if address is None:
        return None  # started on another machine, or its head has died
    try:
        jobs = ask(address, ListJobs()).jobs
    except PoolError:
        return None  # the caller reports the running cluster
    is_check = all(one.get("name") == _job_name(pool) for one in jobs)
    return [str(one["job_id"]) for one in jobs] if is_check else None
