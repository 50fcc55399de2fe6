"""Cost of a job: spent, saved compared with on-demand prices, and wasted by preemptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from etrain_jupyter.display.numbers import dollars
from etrain_jupyter.notebook.job.history import LatestValues


@dataclass(frozen=True, kw_only=True)
class JobCost:
    """Cost of a job so far in US dollars, from its durable log."""

    spent_usd: float = 0.0
    on_demand_usd: float = 0.0
    """Cost of the same machine hours at on-demand prices."""
    wasted_usd: float = 0.0
    """The part of ``spent_usd`` for booting, warming up or draining after the first step."""
    num_interruptions: int = 0
    """Number of workers that were preempted or lost, with or without notice."""
    num_samples: int = 0
    """Number of samples trained on."""
    usd_by_type: Mapping[str, float] = field(default_factory=dict)
    """``spent_usd`` by machine type, where it is known."""
    samples_by_type: Mapping[str, float] = field(default_factory=dict)
    """Samples that the workers on each machine type trained on."""
    is_known: bool = True
    """True if the job's pool has prices."""

    @property
    def saved_usd(self) -> float:
        """Savings compared with on-demand prices; never negative."""
        return max(0.0, self.on_demand_usd - self.spent_usd)

    @property
    def wasted_usd_per_interruption(self) -> float:
        """Average waste per interruption; 0.0 if there were none."""
        return self.wasted_usd / self.num_interruptions if self.num_interruptions else 0.0

    @property
    def usd_per_1k_samples(self) -> float:
        """Cost of a thousand samples; 0.0 before the first sample."""
        return 1000 * self.spent_usd / self.num_samples if self.num_samples else 0.0

    @property
    def usd_per_1k_samples_by_type(self) -> dict[str, float]:
        """Cost of a thousand samples by machine type, including boots and idle time."""
        return {
            type: 1000 * usd / self.samples_by_type[type]
            for type, usd in sorted(self.usd_by_type.items())
            if self.samples_by_type.get(type)
        }

    def __str__(self) -> str:
        if not self.is_known:
            return "no cost: the machines of this job's pool have no prices"
        share = self.saved_usd / self.on_demand_usd if self.on_demand_usd else 0.0
        each = ""
        if self.num_interruptions:
            words = "interruption" if self.num_interruptions == 1 else "interruptions"
            mean = dollars(self.wasted_usd_per_interruption)
            each = f", {mean} on average over {self.num_interruptions} {words}"
        lines = {
            "spent": dollars(self.spent_usd),
            "saved": f"{dollars(self.saved_usd)} of {dollars(self.on_demand_usd)} on demand "
            f"({share:.0%})",
            "wasted": f"{dollars(self.wasted_usd)}{each}",
            "samples": f"{dollars(self.usd_per_1k_samples)} per 1,000",
        }
        text = "\n".join(f"{name:<9}{text}" for name, text in lines.items())
        # With one type, its cost is that of the job.
        return "\n".join([text, *self._lines_by_type()]) if len(self.usd_by_type) > 1 else text

    def _lines_by_type(self) -> list[str]:
        width = max(map(len, self.usd_by_type)) + 2
        return [
            f"{type:<{width}}{dollars(usd)}, {self.samples_by_type.get(type, 0.0):,.0f} samples"
            + (f", {dollars(each)} per 1,000" if each is not None else "")
            for type, usd in sorted(self.usd_by_type.items())
            for each in [self.usd_per_1k_samples_by_type.get(type)]
        ]


def cost_of(view: LatestValues) -> JobCost:
    """Compute the cost of a job from its folded events."""
    cost = view.cost
    return JobCost(
        spent_usd=cost.spent_usd if cost else 0.0,
        on_demand_usd=cost.on_demand_usd if cost else 0.0,
        wasted_usd=cost.wasted_usd if cost else 0.0,
        num_interruptions=view.num_preempted + view.num_lost,
        num_samples=view.samples,
        usd_by_type=cost.usd_by_type if cost else {},
        samples_by_type=cost.samples_by_type if cost else {},
        is_known=cost is not None,
    )
