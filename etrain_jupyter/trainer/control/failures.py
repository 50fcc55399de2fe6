"""Reports of failures of a generation or of the notebook's code."""

from __future__ import annotations

from dataclasses import dataclass

from etrain_jupyter.bundle.restore import OpenBundle
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.trainer.control.error_origin import (
    HINT_FOR_HUB,
    HINT_WITHOUT_GPU,
    code_of_pass,
    device_error_in,
    hint_for_device,
    is_hub_unreachable,
    needs_missing_gpu,
)
from etrain_jupyter.trainer.group.backends import GLOO, NCCL
from etrain_jupyter.trainer.group.pending import text_of
from etrain_jupyter.trainer.group.process_group import ABORTED, RankGroup
from etrain_jupyter.trainer.micro_batch import (
    OUT_OF_MEMORY,
    hint_for_memory,
    is_out_of_memory,
)
from etrain_jupyter.trainer.sharding.shard_sync import ShardsLostError
from etrain_jupyter.trainer.trial_checks import UpdateInPassError
from etrain_jupyter.trainer.workload import Workload

DISCONNECTED = "disconnected on purpose"
"""Reason reported for a generation whose connections were closed by an injected fault."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a generation failed, as reported by one of its ranks."""

    error: str = ""
    """The error; empty if another rank reports the cause."""
    backend: str = ""
    is_excused: bool = False


def failure_of(group: RankGroup, exc: BaseException) -> Failure:
    """Return the failure of a generation for this rank's report."""
    # No connection has failed, and the next generation starts from a checkpoint.
    if isinstance(exc, ShardsLostError):
        return Failure(error=str(exc), is_excused=True)
    # This rank ended the generation itself, for a reason other than a failed connection, so the
    # failure must not count towards the budget of failed generations.
    if group.failure in (OUT_OF_MEMORY, DISCONNECTED):
        return Failure(error=group.failure, is_excused=True)
    # The coordinator aborted the generation, and knows the cause.
    if group.failure == ABORTED:
        return Failure()
    error = group.failure or text_of(exc)
    backend = group.failed_backend or (NCCL if "NCCL" in error else GLOO)
    return Failure(error=error, backend=backend)


def describe_user_error(
    exc: BaseException,
    *,
    config: TrainConfig | None,
    bundle: OpenBundle | None,
    workload: Workload | None,
) -> tuple[str, str]:
    """Return the summary and the traceback of an error for the notebook.

    Args:
        exc: The error.
        config: The job; None if it is invalid.
        bundle: The notebook's objects; None if they could not be opened.
        workload: The job's workload; None if it could not be built.
    """
    # Errors that this package raises on purpose explain what to change and need no traceback.
    if type(exc).__module__.startswith(f"{__package__.partition('.')[0]}."):
        if isinstance(exc, UpdateInPassError) and bundle is not None:
            # Show only the call, because the last line would repeat the message.
            return str(exc), bundle.format_user_traceback(exc).rpartition("\n")[0]
        return str(exc), getattr(exc, "user_traceback", "")
    summary = f"{type(exc).__name__}: {exc}".partition("\n")[0].rstrip(": ")
    if is_out_of_memory(exc) and config is not None:
        summary += f"; {hint_for_memory(config)}"
    if needs_missing_gpu(exc):
        summary = f"{summary.rstrip('.')}. {HINT_WITHOUT_GPU}"
    if is_hub_unreachable(exc):
        summary = f"{summary.rstrip('.')}. {HINT_FOR_HUB}"
    text = bundle.format_user_traceback(exc) if bundle is not None else ""
    if device_error_in(exc) is not None:
        summary += f". {hint_for_device(exc)}"
        text = f"{text}\n\n{_describe_gpu_code(bundle, workload)}".strip()
    return summary, text


def _describe_gpu_code(bundle: OpenBundle | None, workload: Workload | None) -> str:
    # The traceback ends where the host synchronized. The failed kernel was queued earlier, by these
    # functions.
    if workload is None or bundle is None:
        return ""
    functions = [*workload.objective.functions, type(workload.model).forward]
    lines = code_of_pass(functions, bundle.cells)
    return f"The GPU was running the pass that begins in\n{lines}" if lines else ""
