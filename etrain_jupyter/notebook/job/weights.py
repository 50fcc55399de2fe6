"""Find and load a job's checkpoints without its cluster.

Only the parts with the weights are read and verified. A checkpoint also has the optimizer's state,
which with Adam is twice the size of the weights and is needed only to resume the job.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etrain_jupyter.errors import CheckpointError, ConfigError
from etrain_jupyter.notebook.job.job_record import RunRecord
from etrain_jupyter.storage.checkpoints import (
    CheckpointStore,
    ListedCheckpoint,
    Manifest,
    OpenCheckpoint,
    list_checkpoints,
    open_newest,
    open_step,
    open_store,
)

MODEL_PART = "model.safetensors"
STATE_PART = "state.json"
WEIGHTS = ("auto", "averaged", "raw")
MOST_NAMED = 5
"""Maximum number of tensor names in a message."""


Which = str | int
"""``last``, ``best``, or the step of a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint of the job whose parts with the weights were read and verified."""

    step: int
    files: dict[str, Path]
    """Local file of each part that was read, by the part's name."""


def check_which(which: Which) -> None:
    """Check ``which`` before anything is read.

    Raises:
        ConfigError: If it is neither ``last``, ``best`` nor a step.
    """
    # `True` is an int too, but not a step.
    is_step = isinstance(which, int) and not isinstance(which, bool) and which >= 0
    if not is_step and which not in ("last", "best"):
        raise ConfigError(
            f"which={which!r} must be 'last' or 'best', or the step of a checkpoint, for example "
            "which=1200; %etrain checkpoints lists them"
        )


def find_saved(
    record: RunRecord, which: Which, best_evals: Mapping[int, float], weights: str = "auto"
) -> Saved:
    """Return the newest checkpoint, the best one or the one at a step, with its weights.

    Args:
        record: The job.
        which: ``last`` is the newest checkpoint with valid weights.
        best_evals: Values of the evaluations that were the best so far, by step, from the log.
        weights: As in ``load_weights``; the averaged weights are read unless this is ``raw``.

    Raises:
        CheckpointError: If there is none, with the reason for each checkpoint that was refused.
        ConfigError: If ``which`` or ``weights`` is invalid.
    """
    check_which(which)
    check_weights(weights)
    if which == "best":
        return _find_best(record, best_evals, weights)
    if isinstance(which, int):
        return _find_step(record, which, weights)
    newest = _open_newest(record, weights)
    return Saved(step=newest.manifest.step, files=newest.files)


def load_weights(saved: Saved, weights: str = "auto") -> dict[str, Any]:
    """Return the tensors of a checkpoint, by parameter name.

    Args:
        saved: The checkpoint.
        weights: ``averaged``, ``raw``, or ``auto`` for averaged ones if the job has ``ema``.

    Raises:
        CheckpointError: If averaged weights are requested but missing, or do not fit.
    """
    # Import here, because this loads torch, which a kernel that only looks at jobs does not need.
    from etrain_jupyter.trainer.state.capture import load_model_state

    if not uses_average(saved, weights):
        return load_model_state(saved.files[MODEL_PART])
    from etrain_jupyter.trainer.state.weight_average import load_averaged_state

    return load_averaged_state(saved.files)


def check_weights(weights: str) -> None:
    """Check ``weights`` before anything is read.

    Raises:
        ConfigError: If it is invalid.
    """
    if weights not in WEIGHTS:
        known = ", ".join(map(repr, WEIGHTS))
        raise ConfigError(f"weights={weights!r} is not supported", hint=f"use one of {known}")


def uses_average(saved: Saved, weights: str) -> bool:
    """Return True if ``weights`` selects the averaged weights of a checkpoint.

    Raises:
        ConfigError: If ``weights`` is invalid.
        CheckpointError: If averaged weights are requested, but the checkpoint has none.
    """
    check_weights(weights)
    if weights == "raw":
        return False
    from etrain_jupyter.trainer.state.parts import has_average

    found = has_average(saved.files)
    if weights == "averaged" and not found:
        raise CheckpointError(
            f"the checkpoint at step {saved.step} has no averaged weights: the cell does not set "
            "ema. Add for example ema: 0.999 and run it again, or use weights='raw'."
        )
    return found


def list_saved(
    record: RunRecord, best_evals: Mapping[int, float], *, verify: bool = False
) -> tuple[str, list[ListedCheckpoint], int | None]:
    """Return the store, its checkpoints (newest first), and the step of the best checkpoint.

    The best checkpoint is the first one that ``which="best"`` tries; None if there is none.
    """
    store = _store_of(record)
    listed = list_checkpoints(store, job_id=record.job_id, verify=verify)
    sound = [row for row in listed if row.manifest is not None and not row.problem]
    best = None
    if sound and _best_rule(record):
        # Values from the log take precedence over those in the checkpoint, which may be older.
        values = {**_best_evals_in(store, sound[0].manifest), **best_evals}
        steps = {row.step for row in sound}
        best = next((s for s in _best_first(record, values) if s in steps), None)
    return str(store), listed, best


def _best_evals_in(store: CheckpointStore, manifest: Manifest | None) -> dict[int, float]:
    """Return the best evaluations recorded in a checkpoint; empty if it is unreadable."""
    try:
        part = manifest.parts[STATE_PART] if manifest is not None else None
        return _read_best_evals(store.get_part(part)) if part is not None else {}
    except (CheckpointError, KeyError, ValueError):
        return {}


def _read_best_evals(state_file: Path) -> dict[int, float]:
    try:
        state = json.loads(state_file.read_text())
        best = (state["extras"].get("evaluations") or {"best": []})["best"]
        return {operator.index(step): float(value) for step, value in best}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as exc:
        raise CheckpointError(f"{STATE_PART} is invalid ({exc})") from exc


def _best_rule(record: RunRecord) -> dict[str, Any]:
    return (record.config.get("checkpoint") or {}).get("best") or {}


def _best_first(record: RunRecord, values: Mapping[int, float]) -> list[int]:
    sign = -1 if _best_rule(record)["mode"] == "max" else 1
    return sorted(values, key=lambda step: (sign * values[step], step))


def _find_best(record: RunRecord, best_evals: Mapping[int, float], weights: str) -> Saved:
    # Candidates, where the log takes precedence for a step that is in both:
    #   state of the newest checkpoint   also has runners-up, in case the best one was not saved
    #   evaluations in the log           may be newer than that state
    if not _best_rule(record):
        raise CheckpointError(
            f"job {record.job_id} keeps no best checkpoint: its cell does not set checkpoint.best. "
            "Add checkpoint: {best: {metric: loss}} and run it again, or use which='last'."
        )
    newest = _open_newest(record, "raw", with_model=False)
    values = {**_read_best_evals(newest.files[STATE_PART]), **best_evals}
    store, refused = _store_of(record), []
    # The best checkpoint may have been deleted, be damaged, or not be durable yet, because
    # checkpoints are written in the background. Fall back to the next best one.
    for step in _best_first(record, values):
        try:
            return _open_step(store, step, record, weights)
        except CheckpointError as exc:
            refused.append(f"step {step}: {exc}")
    why = "; ".join(refused) or "no evaluation ran before its newest checkpoint"
    raise CheckpointError(
        f"job {record.job_id} has no best weights to load: {why}. which='last' loads the newest "
        "weights."
    )


def _find_step(record: RunRecord, step: int, weights: str) -> Saved:
    store = _store_of(record)
    steps = store.list_steps()
    if not steps:
        _open_newest(record, weights)  # raises an error that says when the first is written
    if step not in steps:
        near = sorted(sorted(steps, key=lambda other: abs(other - step))[:2])
        raise CheckpointError(
            f"job {record.job_id} has no checkpoint at step {step}; the nearest "
            f"{'is at step' if len(near) == 1 else 'are at steps'} "
            f"{' and '.join(map(str, near))}. %etrain checkpoints lists all of them."
        )
    try:
        return _open_step(store, step, record, weights)
    except CheckpointError as exc:
        raise CheckpointError(
            f"the checkpoint at step {step} of job {record.job_id} cannot be used: {exc}. "
            "which='last' loads the newest valid one; %etrain checkpoints --verify checks all."
        ) from exc


def _open_newest(record: RunRecord, weights: str, *, with_model: bool = True) -> OpenCheckpoint:
    """Open the newest checkpoint, with its weights or only with its ``state.json``."""
    from etrain_jupyter.trainer.state.parts import check_parts

    # A running job with `checkpoint.keep: 1` replaces the checkpoint that is being opened:
    #   here: list steps: 100              open 100: missing     list steps: 200 -> retry
    #   job:                write 200, delete 100
    # Each further attempt requires another new checkpoint, so the loop ends.
    store = _store_of(record)
    needed = (MODEL_PART, STATE_PART) if with_model else (STATE_PART,)
    while True:
        steps = store.list_steps()
        try:
            return open_newest(
                store,
                job_id=record.job_id,
                choose=_choose_parts(store, weights) if with_model else _choose_state,
                check=lambda manifest, files: check_parts(manifest, files, needed),
            )
        except CheckpointError as exc:
            if store.list_steps() == steps:
                raise CheckpointError(
                    f"job {record.job_id} has no weights to load: {exc} Checkpoints are written "
                    "at the interval checkpoint.every, at the end of the job, and by %etrain "
                    "checkpoint."
                ) from exc


def _store_of(record: RunRecord) -> CheckpointStore:
    return open_store(record.checkpoints)


def _open_step(store: CheckpointStore, step: int, record: RunRecord, weights: str) -> Saved:
    from etrain_jupyter.trainer.state.parts import check_parts

    choose = _choose_parts(store, weights)
    manifest, files = open_step(store, step, job_id=record.job_id, choose=choose)
    check_parts(manifest, files)
    return Saved(step=step, files=files)


def _choose_state(manifest: Manifest) -> list[str]:
    return [STATE_PART] if STATE_PART in manifest.parts else []


def _choose_parts(store: CheckpointStore, weights: str) -> Callable[[Manifest], list[str]]:
    """Return a function that names the parts of a checkpoint with the weights."""
    from etrain_jupyter.trainer.state.parts import EXTRA_PART, lists_average, weight_parts

    # A store in a bucket deletes its local copy of a part when the path is garbage-collected.
    # Keep state.json, so that it is downloaded once.
    states: dict[int, Path] = {}

    def choose(manifest: Manifest) -> list[str]:
        parts, has_average = manifest.parts, False
        # The extra part has the size of the weights only if it contains their averages, which
        # state.json lists.
        if weights != "raw" and EXTRA_PART in parts and STATE_PART in parts:
            states[manifest.step] = store.get_part(parts[STATE_PART])
            has_average = lists_average(states[manifest.step])
        return weight_parts(parts, has_average=has_average)

    return choose


def put_weights(state: dict[str, Any], model: Any, record: RunRecord) -> None:
    """Load ``state`` into ``model``.

    Raises:
        CheckpointError: If the model does not fit; the message lists the names and shapes.
    """
    try:
        model.load_state_dict(state)
    except RuntimeError as exc:
        differs = "; ".join(differences(state, model.state_dict())) or str(exc)
        raise CheckpointError(
            f"the checkpoint of {record.job_id} does not fit {type(model).__name__}: {differs}. "
            f"The job trained {record.config.get('model', 'another model')}."
        ) from exc


def differences(state: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Describe how saved tensors differ from those of a model, by name and shape."""
    lacking, unknown = [n for n in own if n not in state], [n for n in state if n not in own]
    other = [
        f"{name} ({_shape(state[name])} in the checkpoint, {_shape(own[name])} in the model)"
        for name in state
        if name in own and _shape(state[name]) != _shape(own[name])
    ]
    found = [("different shape", other), ("not in the checkpoint", lacking)]
    found.append(("not in the model", unknown))
    return [
        f"{what}: {', '.join(names[:MOST_NAMED])}"
        + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")
        for what, names in found
        if names
    ]


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))
