"""Compare a resumed job's configuration with the original one.

A change has one of three effects. It may leave the computation of a step unchanged (workers, pool,
length, checkpoint interval), change the rest of the curve, or make the previous curve useless. The
first kind is allowed; the other two need ``--force``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from etrain_jupyter.config.schema import TrainConfig

FREE = frozenset(
    (
        *("name", "pool", "workers", "log", "eval", "early_stopping", "on_nan_loss", "metrics"),
        *("checkpoint.every", "checkpoint.keep", "checkpoint.best", "data.num_workers", "compile"),
        *("epochs", "steps", "batch.micro", "backend", "shard"),
    )
)
"""Keys that, together with all keys below them, do not affect the computation of a step."""

REASONS = {
    "model": "the saved weights are those of the previous model",
    "data.train": "the rest of the epoch follows a different sample order",
    "data.eval": "earlier and later evaluations are not comparable",
    "ema": "earlier and later evaluations are not comparable",
    "loss": "earlier and later losses are not comparable",
    "step": "earlier and later losses are not comparable",
    "optimizer.name": "the optimizer loses its state",
    "optimizer.reference": "the optimizer loses its state",
    "batch": "the remaining steps differ from those of the original job",
    "seed": "the sample order changes: this epoch may repeat some samples",
    "reproducible": "the weights will differ from those of an uninterrupted run",
    "checkpoint.to": "the checkpoints are in the previous folder: the job would start over",
    "schedule": "the learning rate jumps",
}
"""Effect of a change; the longest matching key prefix applies."""

OTHERWISE = "the rest of the curve will differ from that of an uninterrupted run"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One key with two values."""

    key: str
    """Dotted key, as spelled in the cell."""
    old: Any
    new: Any
    why: str = ""
    """Why the change needs ``--force``; empty if it does not."""

    def __str__(self) -> str:
        """Return ``batch.global: 64 -> 32``."""
        return f"{self.key}: {_in_words(self.old)} -> {_in_words(self.new)}"


def compare_configs(old: TrainConfig, new: TrainConfig) -> list[Difference]:
    """Return the keys whose values differ, in the order of the schema."""
    #   a: {b: 1, c: 2}   ->   a.b: 1    a.c: 2
    before, after = (dict(flat_keys(c.model_dump(mode="json", by_alias=True))) for c in (old, new))
    found = []
    for key in dict.fromkeys([*before, *after]):
        values = before.get(key), after.get(key)
        if values[0] != values[1]:
            why = _why(key, old, new)
            found.append(Difference(key=key, old=values[0], new=values[1], why=why))
    # Without an explicit number, the shards and thus the weights depend on workers.max, so compare
    # the effective numbers, not the keys.
    found = [difference for difference in found if not difference.key.startswith("reproducible")]
    shards = old.num_shards(), new.num_shards()
    if shards[0] != shards[1]:
        why, key = REASONS["reproducible"], "reproducible.shards"
        found.append(Difference(key=key, old=shards[0], new=shards[1], why=why))
    return found


def with_values(config: TrainConfig, changes: Mapping[str, Any]) -> TrainConfig:
    """Return a configuration with some keys changed and all effective values kept.

    ``changes`` has ``pool``, ``min``, ``max``, ``epochs`` or ``steps``; None keeps a value.

    Raises:
        ValidationError: If the changed values are inconsistent.
    """
    given = {key: value for key, value in changes.items() if value is not None}
    if not given:
        return config
    data = config.model_dump(mode="json")
    if config.reproducible is not None:
        # Fix the number of shards; otherwise a new workers.max would change it, and with it the
        # weights.
        data["reproducible"] = {"shards": config.num_shards()}
    data["workers"] |= {key: given[key] for key in ("min", "max") if key in given}
    for key, other in (("epochs", "steps"), ("steps", "epochs")):
        if key in given and other not in given:
            # A new length in epochs replaces one in steps, and vice versa.
            data[other] = None
    data |= {key: given[key] for key in ("epochs", "steps", "pool") if key in given}
    return TrainConfig.model_validate(data)


def _why(key: str, old: TrainConfig, new: TrainConfig) -> str:
    # A new length does not change the curve, unless the learning rate is scheduled to decay over
    # the whole job.
    is_length = key in ("epochs", "steps")
    falls = any(c.schedule is not None and c.schedule.decay != "none" for c in (old, new))
    if is_length and falls:
        return f"schedule.decay ends with the job: {REASONS['schedule']}"
    # The size of a pass changes the order of summation, which matters only if results must be
    # bit-for-bit identical.
    if key == "batch.micro" and new.reproducible is not None:
        return REASONS["reproducible"]
    prefixes = list(_prefixes(key))
    if any(prefix in FREE for prefix in prefixes):
        return ""
    return next((REASONS[prefix] for prefix in prefixes if prefix in REASONS), OTHERWISE)


def _prefixes(key: str) -> Iterator[str]:
    """Yield ``a.b.c``, ``a.b``, ``a``."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def flat_keys(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of nested groups as ``batch.global``, with their values."""
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from flat_keys(value, f"{prefix}{key}.")
        else:
            # An empty group is equivalent to a missing one.
            yield f"{prefix}{key}", None if isinstance(value, Mapping) else value


def _in_words(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
