"""Connect the next generation: by which backend, and when to retry or give up."""

from __future__ import annotations

from collections.abc import Sequence

from etrain_jupyter.rules.membership.adoption import RESTARTED
from etrain_jupyter.rules.membership.failed_forms import MAX_FAILED_FORMS, FailedForms
from etrain_jupyter.rules.membership.membership import JobState, Member, UserError
from etrain_jupyter.rules.membership.turn import Turn
from etrain_jupyter.rules.policy.backend import (
    AUTO,
    GLOO,
    NCCL,
    choose_backend,
    nccl_words,
    remedy_for,
    why_no_nccl,
)

_GLOO_REMEDY = (
    "Check that the workers reach each other on every TCP port (firewall, security group)"
)
_STRANGER_REMEDY = (
    "Stop that process, or keep other users and machines away from the workers' ports; then resume "
    "the job with %etrain resume"
)


def count_failed_form(turn: Turn) -> None:
    """Count the generation that has just been aborted, if no lost worker explains it."""
    state = turn.state
    if state.phase != "collecting" or state.outcome:
        return
    if state.has_lost or len(state.in_phase("reported")) < state.world_size:
        turn.set(failed_forms=state.failed_forms.after_loss())
        return
    if RESTARTED in state.whys or any(told.is_excused for told in state.breaks):
        return
    failed = state.failed_forms.after_failure(
        state.breaks,
        backend=state.used_backend,
        has_stepped=state.step > state.first_step,
        stepped_s=turn.now - state.ready_at if state.is_ready else 0.0,
    )
    if state.is_ready and "stalled" in state.whys:
        # A step that stalls has a budget of its own, and the long wait lies behind it.
        turn.set(failed_forms=failed)
        return
    turn.set(failed_forms=failed, form_at=turn.now + failed.wait_s)
    turn.log(f"{_what(state)}{_because(failed)}")
    if failed.is_final:
        _give_up(turn, failed)


def backend_for(turn: Turn, members: Sequence[Member]) -> str:
    """Return the backend that sums the gradients of a generation of these members."""
    state = turn.state
    if state.backend == GLOO or choose_backend([(m.device, m.gpu) for m in members]) == GLOO:
        return GLOO
    is_avoided = state.failed_forms.avoids_nccl([m.worker for m in members])
    return GLOO if state.backend == AUTO and is_avoided else NCCL


def why_gloo(state: JobState) -> str:
    """Explain why ranks with GPUs use gloo now; empty if NCCL has not failed among them.

    The state is that of the generation that has just been formed.
    """
    ranked = state.in_phase("ranked")
    could = choose_backend([(m.device, m.gpu) for m in ranked]) == NCCL
    failed = state.failed_forms
    if state.used_backend == NCCL or state.backend != AUTO or not could or not failed.num_nccl:
        return ""
    said = f" ({nccl_words(failed.nccl_error)})" if failed.nccl_error else ""
    return (
        f"NCCL failed {failed.num_nccl} times in a row{said}; gradients now travel by gloo through "
        f"host memory, which is slower. To use NCCL again: {remedy_for(failed.nccl_error)}; then "
        "restart the workers"
    )


def why_retrying(state: JobState) -> str:
    """Explain why the job waits before it forms the next generation."""
    failed = state.failed_forms
    attempt = f"attempt {failed.num + 1} of {MAX_FAILED_FORMS} follows"
    return f"{_what(state)}{_because(failed)}; {attempt}"


def why_not_with_nccl(state: JobState) -> str:
    """Explain why ``backend: nccl`` cannot hold for the workers that are here; empty if it can."""
    if state.backend != NCCL:
        return ""
    here = state.in_phase("warm", "ranked", "reported")
    why = why_no_nccl([(m.worker, m.device, m.gpu) for m in here])
    if not why:
        return ""
    return (
        f"backend: nccl needs a GPU of its own for every worker, but {why}. "
        "Write backend: auto, or use workers with one GPU each"
    )


def _give_up(turn: Turn, failed: FailedForms) -> None:
    state = turn.state
    what = (
        f"{failed.num} generations in a row did not form or broke before their first step, "
        "although no worker was lost and the workers stayed the same"
    )
    if state.used_backend == NCCL:
        remedy = f"To fix NCCL: {remedy_for(failed.nccl_error)}"
        if state.backend == NCCL:
            remedy += "; or write backend: auto, which continues with gloo"
    else:
        remedy = _STRANGER_REMEDY if "unknown process" in failed.error else _GLOO_REMEDY
    error = f"{what}; the last failed with {failed.error}. {remedy}" if failed.error else what
    workers = tuple(sorted(failed.workers))
    error_of_all = UserError(error=error, traceback="", workers=workers, step=state.step)
    turn.set(user_error=error_of_all, outcome="failed")


def _what(state: JobState) -> str:
    did = f"broke at step {state.step + 1}" if state.is_ready else "did not form"
    return f"generation {state.generation} {did} although no worker was lost"


def _because(failed: FailedForms) -> str:
    return f" ({failed.error})" if failed.error else ""
