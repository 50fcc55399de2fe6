"""Remedy for each cause: a line for the cell, and the throughput that it should give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import yaml

from etrain_jupyter.config.fields import Interval
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.insight.diagnosis.rules import (
    Finding,
    StepParts,
    saved_s,
    split_stragglers,
    step_s,
    transfer_s,
)
from etrain_jupyter.rules.small_sums import num_rounds, num_sent

FACTOR = 4
"""Factor for batches, passes and intervals."""
MAX_LOADERS = 16
"""Maximum number of data-loading processes per worker in a remedy."""
SLOW_LINK_S_PER_BYTE = 8 / 1e9
"""A link of 1 Gbit/s. The part of an exchange that even this link does not explain is latency."""
SAVE_EVERY_S = 1800.0
"""Interval of checkpoints in a remedy if the cell has none."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change, and its predicted effect."""

    text: str
    """Description of the change."""
    line: str = ""
    """Line to paste into the cell in place of the same key, or a command; empty if the change is
    in the notebook's code."""
    gain: float | None = None
    """Predicted gain in throughput: 0.38 for +38 %; None if it cannot be predicted."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about the job that determine a remedy."""

    config: TrainConfig
    workers: Sequence[StepParts]
    """The mean parts of a step on each worker."""
    fixed_s: float | None
    """Part of the passes that does not depend on the number of samples, if measured."""
    running_job: str = ""
    """Id of the job if it can be changed while it runs; otherwise empty."""
    steps_between_saves: float = math.nan
    """Mean number of steps from one checkpoint to the next one; NaN if unknown."""
    cores: float = math.inf
    """Cores that all workers, including added ones, share; infinite if each has its own."""
    gradient_bytes: float | None = None
    """Bytes of one worker's gradients as they are sent; None if unknown."""

    @property
    def step_s(self) -> float:
        """Mean time from one step to the next one."""
        return step_s(self.workers)


def remedy_of(finding: Finding, facts: Facts) -> Remedy:
    """Return the remedy for a cause."""
    saved = saved_s(facts.workers, fixed_s=facts.fixed_s)[finding.cause]
    match finding.cause:
        case "input":
            return _load_in_parallel(facts, saved)
        case "communication" | "optimizer":
            return _update_less_often(facts)
        case "overhead":
            return _enlarge_batch(facts)
        case "straggler":
            return _leave_out(facts, saved)
        case "metrics":
            return _remove_metrics(facts, saved)
        case "evaluation":
            return _evaluate_less_often(facts, saved)
        case "checkpoint":
            return _save_less_often(facts, saved)
        case "compute":
            return _add_workers(facts)


def _gain(before_s: float, after_s: float) -> float | None:
    return before_s / after_s - 1 if after_s > 0 else None


def _load_in_parallel(facts: Facts, saved: float) -> Remedy:
    # With L seconds of loading for a step and k processes:
    #
    #     step = max(step without waiting, L / k)
    #
    # | k now | L                                       |
    # |-------|-----------------------------------------|
    # | 0     | the wait: the trainer itself loads      |
    # | > 0   | k * step: the processes are the limit   |
    rest_s, now = facts.step_s - saved, facts.config.data.num_workers
    load_s = now * facts.step_s if now else max(one.data_s for one in facts.workers)
    count = max(2, 2 * now)
    while count < MAX_LOADERS and load_s / count > rest_s:
        count *= 2
    return Remedy(
        text=f"load samples in {count} processes per worker, ahead of the step"
        + (f" (now {now})" if now else ""),
        line=_line("data", _group(facts.config.data) | {"num_workers": count}),
        gain=_gain(facts.step_s, max(rest_s, load_s / count)),
    )


def _batch(facts: Facts, **more: int) -> str:
    batch = _group(facts.config.batch)
    for key in ("global", "per_worker"):
        if batch.get(key) is not None:
            batch[key] *= FACTOR
    return _line("batch", batch | more)


def _update_less_often(facts: Facts) -> Remedy:
    # Four times as many samples per step, in four times as many passes, with one exchange and one
    # update.
    once_s = transfer_s(facts.workers) + fmean(one.optimizer_s for one in facts.workers)
    passes = facts.config.batch.aggregation_frequency * FACTOR
    return Remedy(
        text=f"accumulate gradients over {passes} passes before each exchange and update; the batch"
        f" grows by {FACTOR}, so the learning rate may need to change",
        line=_batch(facts, aggregation_frequency=passes),
        gain=_gain(FACTOR * facts.step_s, FACTOR * (facts.step_s - once_s) + once_s),
    )


def _enlarge_batch(facts: Facts) -> Remedy:
    # Only the parts per sample grow with the batch.
    def per_sample_s(one: StepParts) -> float:
        passes_s = max(0.0, one.passes_s - (facts.fixed_s or 0.0))
        return one.data_s + passes_s + (one.metrics_s or 0.0) + one.evaluation_s + one.checkpoint_s

    more_s = (FACTOR - 1) * max(map(per_sample_s, facts.workers))
    micro = facts.config.batch.micro_batch_size
    return Remedy(
        text=f"train on batches {FACTOR} times as large; the learning rate may need to change",
        line=_batch(facts, **({"micro": micro * FACTOR} if isinstance(micro, int) else {})),
        gain=_gain(FACTOR * facts.step_s, facts.step_s + more_s),
    )


def _leave_out(facts: Facts, saved: float) -> Remedy:
    slow, others = split_stragglers(facts.workers)
    names = ", ".join(one.worker for one in slow)
    # With ``batch.global``, the others take over the samples; with ``per_worker``, the batch
    # shrinks.
    kept = len(others) / len(facts.workers)
    is_global = facts.config.batch.per_worker_batch_size is None

    def new_own_s(one: StepParts) -> float:
        return one.own_s + (_share_s(one) * (1 / kept - 1) if is_global else 0.0)

    between_s = fmean(one.evaluation_s + one.checkpoint_s for one in facts.workers)
    after_s = max(map(new_own_s, others)) + transfer_s(facts.workers) + between_s
    ratio = facts.step_s / after_s * (1.0 if is_global else kept) if after_s > 0 else None
    can_share = facts.config.batch.split == "even" and facts.config.reproducible is None
    if ratio is not None and ratio <= 1:
        if can_share:
            return _share_by_speed(facts, names)
        why = "the others would have more samples each" if is_global else "the batch would shrink"
        return Remedy(
            text=f"replace {names} by a worker as fast as the others; training without it would be "
            f"slower, because {why}",
            gain=_gain(facts.step_s, facts.step_s - saved),
        )
    line = ""
    if facts.running_job:
        line = f"%etrain preempt {slow[0].worker} --job {facts.running_job}"
    or_share = ", give it fewer samples with batch.split: auto" if can_share else ""
    return Remedy(
        text=f"replace {names}{or_share}, or train without it; the prediction is for training "
        "without it",
        line=line,
        gain=None if ratio is None else ratio - 1,
    )


def _share_by_speed(facts: Facts, names: str) -> Remedy:
    # A worker takes f + p * x seconds for x times its even share. With shares for which all W
    # workers take T seconds, and the sum of all x equal to W:
    #
    #     T = (W + sum(f / p)) / sum(1 / p)
    scaled = [(max(0.0, one.own_s - _share_s(one)), _share_s(one)) for one in facts.workers]
    gain = None
    if all(per_share > 0 for _, per_share in scaled):
        total = len(scaled) + sum(fixed / per_share for fixed, per_share in scaled)
        own_s = max(total / sum(1 / p for _, p in scaled), max(fixed for fixed, _ in scaled))
        between_s = fmean(one.evaluation_s + one.checkpoint_s for one in facts.workers)
        gain = _gain(facts.step_s, own_s + transfer_s(facts.workers) + between_s)
    return Remedy(
        text=f"give {names} fewer samples of each step, or replace it by a worker as fast as the "
        "others; training without it would be slower",
        line=_line("batch", _group(facts.config.batch) | {"split": "auto"}),
        gain=gain,
    )


def _share_s(one: StepParts) -> float:
    """Return the part of a step that grows with the worker's number of samples, in seconds."""
    return one.data_s + one.passes_s + (one.metrics_s or 0.0)


def _remove_metrics(facts: Facts, saved: float) -> Remedy:
    names = ", ".join(facts.config.metrics)
    return Remedy(
        text=f"remove or simplify the metrics ({names}), which run in every step; eval.score "
        "computes metrics of evaluations only",
        line="metrics: {}",
        gain=_gain(facts.step_s, facts.step_s - saved),
    )


def _less_often(facts: Facts, saved: float) -> float | None:
    return _gain(facts.step_s, facts.step_s - saved * (1 - 1 / FACTOR))


def _longer(every: Interval) -> str:
    return str(Interval(value=every.value * FACTOR, unit=every.unit))


def _evaluate_less_often(facts: Facts, saved: float) -> Remedy:
    config = facts.config.eval_every
    every = _longer(config.every)
    group = {
        "every": every,
        "predict": config.predict,
        "score": config.score,
        "loss": None if config.loss else False,
    }
    known = {key: value for key, value in group.items() if value is not None}
    return Remedy(
        text=f"evaluate every {every} instead of every {config.every}",
        line=_line("eval", known if len(known) > 1 else every),
        gain=_less_often(facts, saved),
    )


def _save_less_often(facts: Facts, saved: float) -> Remedy:
    every = facts.config.checkpoint.every
    if every and every.unit == "steps" and facts.steps_between_saves > every.value:
        # A checkpoint that is due while another one is written waits for it, so the job saves less
        # often than the cell says.
        every = every.model_copy(update={"value": float(math.ceil(facts.steps_between_saves))})
    interval = _longer(every) if every else str(Interval(value=SAVE_EVERY_S, unit="s"))
    return Remedy(
        text=f"save a checkpoint every {interval} instead of every {every}"
        if every
        else f"save a checkpoint every {interval} instead of at the automatic interval",
        line=_line("checkpoint", _group(facts.config.checkpoint) | {"every": interval}),
        # The automatic interval is not known here.
        gain=_less_often(facts, saved) if every else None,
    )


def _add_workers(facts: Facts) -> Remedy:
    now = len(facts.workers)
    line = _line("workers", {"min": facts.config.workers.min, "max": 2 * now})
    if facts.running_job:
        line = f"%etrain scale {2 * now} --job {facts.running_job}"
    transfer = transfer_s(facts.workers)
    gain, more_s = None, 0.0
    # With one worker, the transfer between two is unknown.
    if now > 1:
        slowest = max(facts.workers, key=lambda one: one.own_s)
        per_sample_s = slowest.data_s + slowest.passes_s + (slowest.metrics_s or 0.0)
        # With ``batch.global``, a worker has half of the samples; with ``per_worker``, a step has
        # twice as many.
        is_global = facts.config.batch.per_worker_batch_size is None
        sample_share, work = (0.5, 1) if is_global else (1.0, 2)
        after_s = facts.step_s - (1 - sample_share) * per_sample_s
        after_s += _exchange_s(transfer, facts.gradient_bytes, now=now, then=2 * now) - transfer
        more_s = _core_sharing_s(facts, sample_share=sample_share, alone_s=after_s)
        gain = _gain(work * facts.step_s, after_s + more_s)
    shared = f"the {facts.cores:.0f} cores of this machine"
    if gain is not None and gain <= 0:
        why = f"share {shared}" if more_s > 0 else "spend more time in the exchange than they save"
        return Remedy(
            text=f"keep {now} workers: {2 * now} would {why}; on a GPU, precision: bf16 and "
            "compile: true shorten the passes",
            gain=gain,
        )
    where = f"on {shared}" if more_s > 0 else "if they have cores or GPUs of their own"
    return Remedy(
        text=f"train on {2 * now} workers instead of {now}, {where}; on a GPU, precision: bf16 and "
        "compile: true also shorten the passes",
        line=line,
        gain=gain,
    )


def _exchange_s(transfer_s: float, gradient_bytes: float | None, *, now: int, then: int) -> float:
    """Return the time of the exchange among a different number of workers, in seconds.

    A part of the exchange grows with the bytes that a worker sends, and the rest with the number of
    messages; see ``rules.sizing.step_time``.
    """
    size = gradient_bytes if gradient_bytes is not None else math.inf
    volume_s = min(transfer_s, num_sent(size, now) * size * SLOW_LINK_S_PER_BYTE)
    latency_s = transfer_s - volume_s
    volume_s *= num_sent(size, then) / num_sent(size, now)
    return volume_s + latency_s * num_rounds(size, then) / num_rounds(size, now)


def _core_sharing_s(facts: Facts, *, sample_share: float, alone_s: float) -> float:
    """Return by how much a step takes longer because twice as many workers share the cores.

    The workers run in lockstep, so all of them need their cores at the same time. If each of
    ``W`` workers needs ``u`` processor seconds, this part of a step takes, on ``N`` cores,
    ``max(the time of one worker alone, W u / N)``.

    Args:
        facts: The facts about the job.
        sample_share: Samples of a worker, relative to now.
        alone_s: Time of a step if each worker has its own cores.
    """
    if math.isinf(facts.cores):
        return 0.0
    # The loop, the exchange and the update need their core; what remains is for samples.
    fixed = fmean(one.rest_s + one.optimizer_s for one in facts.workers)
    fixed += transfer_s(facts.workers)
    mean, num_workers = fmean(one.cpu_s for one in facts.workers), len(facts.workers)
    needed = min(mean, fixed) + max(0.0, mean - fixed) * sample_share
    # A worker with several threads takes less time than its processor time.
    alone = min(needed, alone_s)
    now, then = (count * needed / facts.cores for count in (num_workers, 2 * num_workers))
    return max(alone, then) - max(alone, now)


def _group(group: Any) -> dict[str, Any]:
    """Return the keys of a group as spelled in a cell, without its defaults."""
    values: dict[str, Any] = group.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return values


def _line(key: str, value: Any) -> str:
    """Return one line of YAML."""
    # A list in flow style keeps any value on one line, and quotes it where YAML requires that.
    text: str = yaml.safe_dump(
        [value], default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True
    )
    return f"{key}: {text.strip()[1:-1]}"
