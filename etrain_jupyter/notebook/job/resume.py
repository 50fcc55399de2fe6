"""Resume a job after its end, or after the end of its cluster, on any pool."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from etrain_jupyter import __version__
from etrain_jupyter.bundle.code_table import compare_code
from etrain_jupyter.bundle.restore import has_digest, open_bundle
from etrain_jupyter.config.differences import Difference, compare_configs, with_values
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.errors import (
    BundleError,
    ConfigError,
    EtrainError,
    PoolError,
    RunStoreError,
    UntrustedJobError,
)
from etrain_jupyter.log.events import (
    TERMINAL_STATUSES,
    Event,
    JobResumed,
    StepCompleted,
)
from etrain_jupyter.log.job_record import JobRecord
from etrain_jupyter.log.segments import read_log
from etrain_jupyter.notebook.job.followed_job import FollowedJob
from etrain_jupyter.notebook.job.handover import hand_over, spec_of
from etrain_jupyter.notebook.job.job_record import RunRecord
from etrain_jupyter.notebook.job.link import open_link
from etrain_jupyter.notebook.job.run_store import RunStore, absolute_paths
from etrain_jupyter.notebook.job.runs import store_of
from etrain_jupyter.notebook.job.store_link import refresh_log
from etrain_jupyter.pools import Pool, get_pool
from etrain_jupyter.pools.own_clusters import note_scheduler
from etrain_jupyter.rules.samples.ledger import total_steps
from etrain_jupyter.storage.checkpoints import open_store
from etrain_jupyter.untrusted import plain_line

if TYPE_CHECKING:
    from etrain_jupyter.bundle.capture import Bundle
    from etrain_jupyter.process.address import SchedulerAddress


@dataclass(frozen=True, kw_only=True)
class ResumeRequest:
    """The user's changes to a resumed job: individual values, or a whole cell."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """Any of ``pool``, ``min``, ``max``, ``epochs``, ``steps``."""
    config: TrainConfig | None = None
    """The configuration of the cell; None keeps the job's own."""
    bundle: Bundle | None = None
    """The notebook's objects captured with the cell."""
    pool: Pool | None = None
    """The cell's pool if already resolved; None to resolve the pool from its name."""
    cell: str = ""
    """The text of the cell."""
    is_forced: bool = False
    """True to resume even if a changed setting affects the rest of the curve."""
    is_trusted: bool = False
    """True to run a job that another user may have submitted."""


@dataclass(frozen=True, kw_only=True)
class _NextAttempt:
    """The next attempt of a job."""

    record: RunRecord
    config: TrainConfig
    bundle: Bundle | None
    """The cell's objects; None to keep the bundle of the job."""
    differs: list[str]


def resume_job(
    job: FollowedJob, request: ResumeRequest, *, address: SchedulerAddress | None = None
) -> str:
    """Resubmit a job that is not being trained; return a message that names the starting step.

    Args:
        job: The job; afterwards it follows the new attempt.
        request: The changes to make.
        address: The cluster to use; by default the job's pool is brought up.

    Raises:
        UntrustedJobError: If another user may have submitted the job.
        EtrainError: If another cluster or kernel may be training the job.
        ConfigError: If a changed setting affects the results, or no work is left.
        PoolError: If no cluster accepts the job; its record then remains unchanged.
    """
    store = store_of(job.record)
    # Each check precedes the step that would be harmful without the check:
    #   trusted?             before a connection: the record may name another user's host
    #   not being trained?   two coordinators would write one log and one set of checkpoints
    #   lock, read again     another notebook may do the same at this moment
    #   anything to train?   before a pool is started, which takes time and may cost money
    #   write, then submit   see `_submit`
    _check_trusted(store.find(job.id), request)
    _check_not_training(job, request)
    store.check_takeable(job.record)
    with _resume_lock(job.record):
        # Another notebook may have resumed the job before this one got the lock.
        known = store.find(job.id)
        _check_trusted(known, request)
        end = _end_of_log(job)
        attempt = _prepare(store, known, request, job.events())
        # Without `log_end`, the coordinator takes over the log from any other writer, as with
        # --force.
        extra: dict[str, float] = {} if request.is_forced or end is None else {"log_end": end}
        if address is None:
            started_at = time.monotonic()
            pool = request.pool or get_pool(attempt.config.pool)
            _check_reach(attempt, pool.shared_place())
            address = pool.up()
            extra["pool_s"] = time.monotonic() - started_at
        here = replace(attempt.record, cluster=address.to_dict(), host=platform.node())
        attempt = replace(attempt, record=here)
        written = _submit(store, known, attempt, address, is_forced=request.is_forced, extra=extra)
        note_scheduler(address)
        job.follow_again(written, open_link(address))
    start = _describe_start(written)
    return f"resuming job {job.id} on cluster {address.cluster_id}, {start}"


def _check_trusted(record: RunRecord, request: ResumeRequest) -> None:
    """Refuse to run code that this user did not submit, unless the user trusts it."""
    if record.is_own or request.is_trusted:
        return
    host = f" (its record names {plain_line(record.host, 60)})" if record.host else ""
    raise UntrustedJobError(
        f"job {record.job_id} in {store_of(record)} was not submitted by you on this machine"
        f"{host}, or its record was changed afterwards. Resuming it would run its stored code as "
        f"you, on pool {plain_line(record.pool, 60)}. Nothing was run, and no connection was "
        "made. If you submitted it on another machine, or if you trust every user with write "
        f"access to that run store, type %etrain resume {record.job_id} --trust. Afterwards, it "
        "counts as yours on this machine."
    )


def _check_reach(attempt: _NextAttempt, shared_url: str) -> None:
    """Refuse a pool that would restart at step 0 because it cannot read the job's checkpoints.

    ``shared_url`` is a URL that the pool's workers can read; empty if they can read local folders.
    """
    record = attempt.record
    # A job in a bucket has its checkpoints there too, unless `checkpoint.to` names another store.
    if shared_url and not record.place and attempt.config.checkpoint.to is None:
        raise ConfigError(
            f"the checkpoints of job {record.job_id} are in {record.checkpoints}, a folder of this "
            f"machine that the machines of pool {record.pool} cannot read. Nothing was done",
            hint=f"resume it on pool local; to move a job between pools, submit it with "
            f"checkpoint: {{to: {shared_url}}}",
        )


def _check_not_training(job: FollowedJob, request: ResumeRequest) -> None:
    is_reachable = job.is_reachable  # first, because it waits for history and response
    status, reason = job.status, job.reason
    # The cases, in this order:
    #   lost or ended                               -> not being trained
    #   in a folder, cluster unreachable from here  -> unknown: only with --force
    #   its scheduler does not respond              -> unknown: only with --force
    #   its scheduler responds                      -> being trained: refuse
    # A job in a bucket has a heartbeat there, so its link can respond without the cluster.
    if job.lost or status in TERMINAL_STATUSES:
        return
    if job.note and not job.record.place:
        if request.is_forced:
            return
        raise EtrainError(
            f"job {job.id} was {status} at step {job.step} when its log was last written, and may "
            f"still be training: {job.note} Two clusters that train one job corrupt its log and "
            "checkpoints, so nothing was done. If you know that its cluster has ended, add --force."
        )
    if not is_reachable:
        if request.is_forced:
            return
        raise EtrainError(
            f"job {job.id} was {status} at step {job.step}, and its scheduler does not respond "
            f"({reason}). It may still be training, and two clusters that train one job corrupt "
            "its log and checkpoints, so nothing was done. Shut that cluster down first, or add "
            "--force if you know that it has ended."
        )
    raise EtrainError(
        f"job {job.id} is {status} at step {job.step}: there is nothing to resume. %etrain attach "
        "follows it; %etrain stop ends it with a checkpoint, and then it can be resumed."
    )


def _end_of_log(job: FollowedJob) -> int | None:
    """Return the sequence number of the newest event of a job in a bucket; None for a folder.

    Raises:
        EtrainError: If the job was resumed elsewhere since this process last read the log.
        RunStoreError: If the bucket cannot be read.
    """
    # A lock on this machine does not stop a notebook on another one. Instead, the new coordinator
    # appends only if the log still ends at the event that was the newest here:
    #   A: end is 812 -> submit(log_end=812) -> appends 813
    #   B: end is 812 -> submit(log_end=812) -> refused: the log ends at 813
    if not job.record.place:
        return None
    refresh_log(job.record)
    seen = job.events()
    added = read_log(job.record.log_path, since=seen[-1].seq if seen else 0)
    # Other events may be late uploads of the previous coordinator; these two show that a new one
    # has started.
    if any(isinstance(event, JobResumed | StepCompleted) for event in added):
        raise EtrainError(
            f"job {job.id} was resumed elsewhere after this notebook had read its log. Nothing was "
            f"done. To follow it, type %etrain attach {job.id}."
        )
    return (added or seen)[-1].seq if added or seen else 0


@contextlib.contextmanager
def _resume_lock(record: RunRecord) -> Iterator[None]:
    """Prevent concurrent resumes of the same job by other notebooks on this machine."""
    # The operating system releases the lock even if this process is killed.
    handle = os.open(record.folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise EtrainError(
                f"job {record.job_id} is being resumed by another notebook. Nothing was done. To "
                f"follow it, type %etrain attach {record.job_id}."
            ) from exc
        except OSError:
            pass  # the file system has no locks; the coordinator still locks the log
        yield
    finally:
        os.close(handle)


def _prepare(
    store: RunStore, known: RunRecord, request: ResumeRequest, log: Sequence[Event]
) -> _NextAttempt:
    """Build the next attempt of a job; refuse differences that would change its results."""
    try:
        # The job's own configuration may be from another version, so it may be invalid as well.
        old = TrainConfig.model_validate(known.config)
        new = with_values(request.config or old, request.values)
    except ValidationError as exc:
        first = exc.errors()[0]
        message = str((first.get("ctx") or {}).get("message") or first["msg"])
        raise ConfigError(
            f"job {known.job_id} cannot be resumed with these settings: "
            + message.replace("{key}", ".".join(map(str, first["loc"])) or "the cell"),
            hint=f"it was submitted by etrain-jupyter {known.version or 'of unknown version'}",
        ) from exc
    new = TrainConfig.model_validate(absolute_paths(new.model_dump(mode="json")))
    stored = _stored_bundle(store, known, is_needed=request.bundle is None)
    # Only differences with a reason change the results; other differences are only logged.
    found = compare_configs(old, new)
    if request.bundle is not None:
        found += _compare_bundles(stored, request.bundle)
    matters = [difference for difference in found if difference.why]
    if matters and not request.is_forced:
        lines = "".join(f"\n  {one}\n      {one.why}" for one in matters)
        raise ConfigError(
            f"job {known.job_id} was trained differently. Nothing was done. Differences:{lines}",
            hint="change it back, or add --force to resume anyway",
        )
    _check_work_is_left(known, old, new, log)
    record = replace(
        known,
        pool=new.pool,
        config=new.model_dump(mode="json"),
        version=__version__,
        cell=request.cell or known.cell,
        bundle_digest=request.bundle.digest if request.bundle is not None else known.bundle_digest,
    )
    differs = [str(one) for one in found]
    return _NextAttempt(record=record, config=new, bundle=request.bundle, differs=differs)


def _stored_bundle(store: RunStore, record: RunRecord, *, is_needed: bool) -> Path | None:
    """Return the path of the bundle that the job was submitted with."""
    # If a cell resumes the job, it has its own bundle, and the stored one is only used for
    # comparison.
    try:
        path = store.fetch_bundle(record)
    except (OSError, RunStoreError) as exc:
        if not is_needed:
            return None
        raise BundleError(
            f"the captured objects of job {record.job_id} cannot be read ({exc}). Nothing was "
            f"done. Run its cell with %%etrain distributed --resume {record.job_id}, which "
            "captures them again."
        ) from exc
    if is_needed and not has_digest(path, record.bundle_digest):
        raise BundleError(
            f"{record.bundle_path} has changed since job {record.job_id} was submitted. Nothing "
            f"was done. Run its cell with %%etrain distributed --resume {record.job_id} --force."
        )
    return path


def _compare_bundles(old: Path | None, new: Bundle) -> list[Difference]:
    # Only headers are read; no notebook code runs.
    later = open_bundle(new.header)
    try:
        earlier = open_bundle(b"" if old is None else old)
    except BundleError as exc:
        return [Difference(key="code", old="not readable", new="this code", why=str(exc))]
    found = []
    for change in compare_code(earlier.code, later.code, (earlier.cells, later.cells)):
        where = f" in {change.where}" if change.where else ""
        why = f"the notebook's {'data differ' if change.kind == 'data' else 'code differs'}"
        key = f"{change.kind} of {change.name}{where}"
        found.append(Difference(key=key, old=change.old, new=change.new, why=why))
    versions = zip(earlier.packages.items(), later.packages.values(), strict=False)
    for (name, was), is_now in versions:
        if was != is_now:
            found.append(Difference(key=name, old=was, new=is_now))
    return found


def _check_work_is_left(
    known: RunRecord, old: TrainConfig, new: TrainConfig, log: Sequence[Event]
) -> None:
    """Refuse to resume a job that would end immediately."""
    # Only a finished job is complete; a stopped, failed or lost job has steps left.
    done = JobRecord().apply_all(log)
    if done.plan is None or done.status != "finished":
        return
    early = done.early_stop
    # An earlier generation's decision to stop early is void if a later generation continued
    # training.
    if early is not None and early.generation == done.generation:
        if old.early_stopping == new.early_stopping:
            raise ConfigError(
                f"job {known.job_id} has finished early: {early.reason}. It would finish again at "
                "once. Nothing was done.",
                hint=f"change early_stopping in its cell: %%etrain distributed --resume "
                f"{known.job_id}",
            )
        return
    plan = done.plan
    # The global size of a per-worker batch depends on the number of ranks, so use the size in the
    # logged plan, to which its number of steps refers.
    size = plan.global_batch_size if plan.per_worker_batch_size else new.batch.size(1)
    steps = total_steps(new.epochs, new.steps, plan.num_train_samples, size)
    if steps <= plan.total_steps and new.batch == old.batch:
        length = f"{new.steps} steps" if new.steps else f"{new.epochs:g} epochs"
        had = f"{old.steps} steps" if old.steps else f"{old.epochs:g} epochs"
        more = f"--steps {2 * old.steps}" if old.steps else f"--epochs {2 * (old.epochs or 1):g}"
        raise ConfigError(
            f"job {known.job_id} has finished all of its {had}: with {length} there is nothing "
            "left to train. Nothing was done.",
            hint=f"%etrain resume {known.job_id} {more}",
        )


def _submit(
    store: RunStore,
    known: RunRecord,
    attempt: _NextAttempt,
    address: SchedulerAddress,
    *,
    is_forced: bool,
    extra: Mapping[str, float],
) -> RunRecord:
    """Write the new record and submit the job; restore the old record if it is refused.

    Returns:
        The record as written.
    """
    # The record is written first. The outcomes:
    #   killed before the submit   the record names a cluster without the job, so the job counts as
    #                              lost and can be resumed again
    #   PoolError                  refused: the old record is restored
    #   JobLostError               the job may have started there: the new record stays
    #   killed after the submit    the record names the cluster that trains the job
    written = store.rewrite(attempt.record, bundle=attempt.bundle)
    # Relative paths in the notebook's code count from the original folder, if it exists.
    cwd = written.cwd if written.cwd and Path(written.cwd).is_dir() else os.getcwd()
    spec = {
        **spec_of(written, attempt.config, cwd=cwd),
        "resumes": True,
        "differs": attempt.differs,
        "is_forced": is_forced,
        **extra,
    }
    link = open_link(address)
    try:
        hand_over(link, spec, written.bundle_path)
    except PoolError:
        # Keep the old signature, because after signing, a job that was trusted once would count as
        # the user's own.
        store.rewrite(known, is_signed=False)
        if written.bundle_file != known.bundle_file:
            store.remove_bundle(written)
        raise
    finally:
        link.release()
    # The record no longer names the old bundle, and the coordinator has accepted the new one.
    if written.bundle_file != known.bundle_file:
        store.remove_bundle(known)
    return written


def _describe_start(record: RunRecord) -> str:
    # The newest checkpoint by its manifest; the trainers verify it and may fall back to an older
    # one.
    steps = open_store(record.checkpoints).list_steps()
    if not steps:
        return f"from the beginning: {record.checkpoints} has no checkpoint yet"
    return f"from the checkpoint at step {steps[-1]}"
