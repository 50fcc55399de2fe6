"""A validated search that is ready to submit, with the plan of its trials."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from etrain_jupyter.display.numbers import dollars, seconds, size
from etrain_jupyter.notebook.job.plan import Plan
from etrain_jupyter.plugins.search.cell import ParsedSearch
from etrain_jupyter.plugins.search.rules import place_rungs
from etrain_jupyter.plugins.search.schema import Budget


@dataclass(frozen=True, kw_only=True)
class StudyPlan:
    """A validated search. ``str(plan)`` is the output of ``--dry-run``."""

    parsed: ParsedSearch
    trial: Plan
    """Plan of the example trial."""
    num_samples: int | None = None
    """Size of the training set; None if only the workers know it."""

    def print_warnings(self) -> None:
        """Print the warnings about the search and its trials."""
        for warning in self.parsed.warnings:
            print(f"etrain: {warning}")
        self.trial.print_warnings()

    def __str__(self) -> str:
        search, config = self.parsed.search, self.trial.config
        space = self.parsed.space
        sizes = self.trial.bundle.sizes
        length = f"{config.steps} steps" if config.steps else f"{config.epochs:g} epochs"
        lines = {
            "space": "; ".join(f"{name}: {parameter}" for name, parameter in space.items()),
            "trials": f"{self.parsed.num_trials}, each of {length}, method {search.method}",
            "metric": f"{search.metric} of the evaluations, {search.mode}",
            "rungs": self._rungs(),
            "budget": _describe_budget(search.budget),
            "workers": f"{config.workers.min} to {config.max_workers()} per trial, "
            f"of pool {config.pool}",
            "captured": f"{size(sum(sizes.values()))}, sent once for all trials",
            "at most": self._worst_case(),
            "price": self._price(),
        }
        table = [f"  {name:<10}{text}" for name, text in lines.items()]
        warnings = (*self.parsed.warnings, *self.trial.warnings)
        notes = [f"  note: {warning}" for warning in warnings]
        title = "The cell is a valid search. Nothing was submitted (--dry-run)."
        return "\n".join([title, *table, *notes])

    def _rungs(self) -> str:
        search = self.parsed.search
        if not search.prunes:
            return "none: every trial runs to its end"
        total, first = self._samples_per_trial(), self._samples_to_evaluation()
        if total is None or first is None:
            return f"at the length of a trial divided by {search.divisor}, again and again"
        rungs = place_rungs(num_samples=total, divisor=search.divisor, min_samples=first)
        if not rungs:
            return f"none: the first evaluation comes after 1/{search.divisor} of a trial"
        shown = ", ".join(f"{count:,}" for count in rungs)
        return f"{shown} of {total:,} samples; the best 1/{search.divisor} continue at each"

    def _worst_case(self) -> str:
        count, total = self.parsed.num_trials, self._samples_per_trial()
        limit = self.parsed.search.budget.samples
        if total is None:
            return f"{count} whole trials"
        most = count * total
        text = f"{most:,} samples, if all {count} trials run to their end"
        return f"{limit:,} samples, by the budget" if limit is not None and limit < most else text

    def _price(self) -> str:
        # The pool's own maximum limits the workers further.
        num_trials = min(self.parsed.search.concurrent or math.inf, self.parsed.num_trials)
        text = self.trial.max_price(num_jobs=int(num_trials))
        usd = self.parsed.search.budget.usd
        return text if usd is None else f"{text}; the study stops at {dollars(usd)}"

    def _samples_per_trial(self) -> int | None:
        config = self.trial.config
        if config.steps:
            return config.steps * config.batch.size(1)
        assert config.epochs is not None
        return None if self.num_samples is None else int(config.epochs * self.num_samples)

    def _samples_to_evaluation(self) -> int | None:
        every = self.trial.config.eval.every
        if every.unit == "steps":
            return int(every.value * self.trial.config.batch.size(1))
        if every.unit == "epochs" and self.num_samples is not None:
            return int(every.value * self.num_samples)
        return None


def _describe_budget(budget: Budget) -> str:
    limits = [
        None if budget.samples is None else f"{budget.samples:,} samples",
        None if budget.time_s is None else seconds(budget.time_s),
        None if budget.usd is None else dollars(budget.usd),
    ]
    return ", ".join(limit for limit in limits if limit is not None) or "no limit"


def size_of(expression: str, names: Mapping[str, Any]) -> int | None:
    """Return the size of a notebook's data set; None unless it is known without running code."""
    value = names.get(expression)
    # A tuple or a dict has the length of its tensors, and a function builds the data set later.
    if value is None or callable(value) or isinstance(value, tuple | list | dict | str):
        return None
    return len(value) if hasattr(value, "__len__") else None
