"""Choose the backend of the next generation, and decide whether to retry after one breaks."""

from __future__ import annotations

from collections.abc import Sequence

from etrain_jupyter.rules.membership.backend import (
    AUTO,
    GLOO,
    NCCL,
    choose_backend,
    remedy_for,
    shorten_message,
    why_no_nccl,
)
from etrain_jupyter.rules.membership.faults import MAX_FAILED_FORMS, FailedForms
from etrain_jupyter.rules.membership.members import Member, replace
from etrain_jupyter.rules.membership.membership import JobState, UserError
from etrain_jupyter.rules.membership.turn import Turn

_GLOO_REMEDY = (
    "Check that the workers can connect to each other on every TCP port (firewall, security group)"
)
_STRANGER_REMEDY = (
    "Stop that process, or keep other users and machines away from the workers' ports; then resume "
    "the job with %etrain resume"
)


def count_failed_form(turn: Turn) -> None:
    """Count the generation that was just aborted, unless a lost worker explains the abort."""
    state, current, faults = turn.state, turn.state.current, turn.state.faults
    if state.phase != "collecting" or state.ending:
        return
    # The cause is a lost rank, or a rank that has been missing since the scheduler's restart.
    if current.has_lost or len(state.in_phase("reported")) < current.world_size:
        turn.update_faults(replace(faults, failed_forms=faults.failed_forms.after_loss()))
        return
    # The scheduler had died, or a rank has an excuse (out of memory, an injected fault), so the
    # connections are not the cause.
    if "restart" in state.next_whys or any(found.is_excused for found in current.breaks):
        return
    failed = faults.failed_forms.after_failure(
        current.breaks,
        backend=current.backend,
        has_stepped=state.step > current.first_step,
        stepped_s=turn.now - current.ready_at if current.ready_at is not None else 0.0,
    )
    # The generation stepped and then stalled. That took long enough to retry without a wait, and
    # stalled steps have a separate budget (``count_step_fault``).
    if current.is_ready and "stalled" in state.next_whys:
        turn.update_faults(replace(faults, failed_forms=failed))
        return
    form_at = turn.now + failed.wait_s  # the wait grows; the last failure fails the job
    turn.update_faults(replace(faults, failed_forms=failed, form_at=form_at))
    turn.log(f"{_describe_break(state)}{_describe_cause(failed)}")
    if failed.is_final:
        _fail(turn, failed)


def backend_for(turn: Turn, members: Sequence[Member]) -> str:
    """Return the backend that sums the gradients in a generation with these members."""
    state = turn.state
    if state.backend == GLOO or choose_backend([(m.device, m.gpu) for m in members]) == GLOO:
        return GLOO
    # ``backend: nccl`` never falls back, because the user prefers an error to slow steps.
    is_avoided = state.faults.failed_forms.avoids_nccl([m.worker for m in members])
    return GLOO if state.backend == AUTO and is_avoided else NCCL


def why_gloo(state: JobState) -> str:
    """Explain why ranks with GPUs use gloo now; empty if NCCL has not failed between them.

    ``state`` must be that of the newly formed generation.
    """
    ranked = state.in_phase("ranked")
    # Gloo needs an explanation only if the devices alone would allow NCCL.
    could = choose_backend([(m.device, m.gpu) for m in ranked]) == NCCL
    failed = state.faults.failed_forms
    if state.current.backend == NCCL or state.backend != AUTO or not could or not failed.num_nccl:
        return ""
    message = f" ({shorten_message(failed.nccl_error)})" if failed.nccl_error else ""
    return (
        f"NCCL failed {failed.num_nccl} times in a row{message}; gradients now use gloo and "
        f"host memory, which is slower. To use NCCL again: {remedy_for(failed.nccl_error)}; then "
        "restart the workers"
    )


def why_retrying(state: JobState) -> str:
    """Explain why the job waits before it forms the next generation."""
    failed = state.faults.failed_forms
    attempt = f"attempt {failed.num + 1} of {MAX_FAILED_FORMS} follows"
    return f"{_describe_break(state)}{_describe_cause(failed)}; {attempt}"


def why_not_with_nccl(state: JobState) -> str:
    """Explain why ``backend: nccl`` cannot work with the available workers; empty if it can."""
    if state.backend != NCCL:
        return ""
    here = state.in_phase("warm", "ranked", "reported")
    why = why_no_nccl([(m.worker, m.device, m.gpu) for m in here])
    if not why:
        return ""
    return (
        f"backend: nccl needs a separate GPU for every worker, but {why}. "
        "Write backend: auto, or use workers with one GPU each"
    )


def _fail(turn: Turn, failed: FailedForms) -> None:
    state = turn.state
    what = (
        f"{failed.num} generations in a row did not form or broke before their first step, "
        "although no worker was lost and the workers stayed the same"
    )
    if state.current.backend == NCCL:
        remedy = f"To fix NCCL: {remedy_for(failed.nccl_error)}"
        if state.backend == NCCL:
            remedy += "; or write backend: auto, which continues with gloo"
    else:
        remedy = _STRANGER_REMEDY if "unknown process" in failed.error else _GLOO_REMEDY
    error = f"{what}; the last failed with {failed.error}. {remedy}" if failed.error else what
    workers = tuple(sorted(failed.workers))
    turn.fail(UserError(error=error, traceback="", workers=workers, step=state.step))


def _describe_break(state: JobState) -> str:
    did = f"broke at step {state.step + 1}" if state.current.is_ready else "did not form"
    return f"generation {state.generation} {did} although no worker was lost"


def _describe_cause(failed: FailedForms) -> str:
    return f" ({failed.error})" if failed.error else ""
