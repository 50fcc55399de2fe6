"""Enumerate the options of a plan, with time, cost and efficiency, and mark the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from etrain_jupyter.plugins.ec2.deadline import USUAL_LOSSES_PER_NODE_HOUR, derate_of
from etrain_jupyter.plugins.ec2.type_table import MACHINE_TYPES, MachineType
from etrain_jupyter.plugins.planner.planning.measured import Hardware, MeasuredJob, most_measured
from etrain_jupyter.plugins.planner.planning.offers import MachineOffer, Market
from etrain_jupyter.rules.sizing.step_time import (
    NOISE,
    Placement,
    StepPoint,
    StepTimeModel,
    fit_step_times,
)

Lifecycle = Literal["on-demand", "spot", ""]
"""Purchase option of the machines; empty if they have no price."""

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of machines that a plan considers, in addition to the largest allowed one."""
STALL_S = 1.0
"""Time without training when the number of workers changes."""
DEVICE_ERROR = 0.3
"""Relative standard error of the time per sample on a GPU that has not run the job."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to run the job."""

    machine: str
    workers: int
    machines: int
    lifecycle: Lifecycle
    batch: int
    """Samples per step."""
    step_s: float
    samples_per_s: float
    """Without interruptions, evaluations and checkpoints."""
    efficiency: float
    """Throughput divided by N times that of one worker of the same type, for N workers."""
    statistical_efficiency: float
    """Progress per sample, relative to a step of one worker; NaN if unknown."""
    hours: float
    """From submission to the last step."""
    error: float
    """Relative standard error of ``step_s``, and so roughly of ``hours`` and ``usd``."""
    usd: float
    """NaN without a price."""
    is_measured: bool
    """True if the job has run on this type with this number of workers."""
    is_on_front: bool = False
    """True if no other option is both faster and cheaper."""

    @property
    def worker_hours(self) -> float:
        """Hours of all workers together: the cost if the price is unknown."""
        return self.hours * self.workers

    @property
    def cost(self) -> float:
        """US dollars, or worker hours if the price is unknown."""
        return self.worker_hours if math.isnan(self.usd) else self.usd

    @property
    def late_hours(self) -> float:
        """Hours if the step takes one standard error longer than predicted."""
        return self.hours * (1 + self.error)

    def describe(self) -> str:
        """Return the option in a few words, for a sentence."""
        workers = f"{self.workers} worker" + ("" if self.workers == 1 else "s")
        spot = f" {self.lifecycle.replace('-', ' ')}" if self.lifecycle else ""
        if self.machines == self.workers or not self.lifecycle:
            return f"{workers} on {self.machine}{spot}"
        return f"{workers} on {self.machines} x {self.machine}{spot}"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Step times of a machine type."""

    offer: MachineOffer
    model: StepTimeModel
    points: tuple[StepPoint, ...]
    """Measured step times on this type."""
    notes: tuple[str, ...]
    """Sentences about guessed values."""

    def step_time(self, workers: int, batch: float) -> tuple[float, float]:
        """Return the duration of a step, measured if possible, and its relative standard error.

        ``batch`` is the number of samples per worker.
        """
        for point in self.points:
            if point.workers == workers and math.isclose(point.batch, batch, rel_tol=0.01):
                return point.step_s, math.hypot(NOISE, point.spread)
        predicted = self.model.predict(workers, batch)
        return predicted.step_s, predicted.error


def estimates_of(
    measured: MeasuredJob, market: Market, *, cores: float
) -> tuple[list[Estimate], list[str]]:
    """Fit the step times of each machine type; also return notes on the types that have none.

    ``cores`` is the number of cores of the job's machine, if its workers have no GPU of their own.
    """
    models = {
        hardware: fit_step_times(
            points, _placement_of(hardware, cores), measured.exchange(_s_per_byte_of(hardware))
        )
        for hardware, points in measured.points.items()
    }
    found, skipped = [], []
    for offer in market.offers:
        own = [one for one in models if one.machine == offer.machine]
        if own:
            model = models[own[0]]
            found.append(
                Estimate(
                    offer=offer, model=model, points=measured.points[own[0]],
                    notes=tuple(_notes_on_fit(offer.machine, model, measured)),
                )
            )  # fmt: skip
            continue
        moved = _moved(measured, models, offer)
        if isinstance(moved, Estimate):
            found.append(moved)
        else:
            skipped.append(moved)
    return found, skipped


def _placement_of(hardware: Hardware, cores: float) -> Placement:
    has_own_device = hardware.workers_per_machine or not hardware.machine.startswith("cpu")
    return Placement(
        cores=math.inf if has_own_device else cores,
        workers_per_machine=hardware.workers_per_machine,
    )


def _s_per_byte_of(hardware: Hardware) -> float | None:
    known = MACHINE_TYPES.get(hardware.machine)
    return 1 / known.bytes_per_s if known else None


def _notes_on_fit(machine: str, model: StepTimeModel, measured: MeasuredJob) -> list[str]:
    notes = []
    if "exchange" in model.unknown:
        known = MACHINE_TYPES.get(machine)
        source = f"{known.bytes_per_s * 8 / 1e9:g} Gbit/s" if known else "a usual bandwidth"
        notes.append(
            f"Guessed: the job never ran on two workers of {machine}, so the time to exchange "
            f"gradients is computed from their size and {source}."
        )
    if "batch" in model.unknown:
        notes.append(
            f"Guessed: the job ran on {machine} with only one number of samples per worker, so "
            "half of the step is assumed to be independent of it."
        )
    if measured.compression == "powersgd":
        notes.append("Guessed: PowerSGD sends 5 % of the gradients.")
    return notes


def _moved(
    measured: MeasuredJob, models: Mapping[Hardware, StepTimeModel], offer: MachineOffer
) -> Estimate | str:
    """Scale a measured type to one that has not run the job, or say why that is not possible."""
    there = MACHINE_TYPES.get(offer.machine)
    source = most_measured(measured, list(MACHINE_TYPES))
    here = MACHINE_TYPES.get(source.machine)
    if there is None or here is None:
        return (
            f"{offer.machine} is left out: the job has only run on {source.machine}, from which "
            "its speed cannot be predicted. Run it there for 30 s, on one and on two workers."
        )
    speed = _peak_of(there, measured) / _peak_of(here, measured)
    placement = Placement(workers_per_machine=offer.workers)
    exchange = measured.exchange(1 / there.bytes_per_s)
    model = models[source].moved_to(placement, exchange, speed=speed)
    covariance = model.covariance.copy()
    if there.gpu != here.gpu:
        covariance[1, 1] += DEVICE_ERROR**2
    note = (
        f"Guessed: {offer.machine} has not run the job. A sample takes {1 / speed:.2g} times as "
        f"long as on {source.machine} (peak of {there.gpu.name} and {here.gpu.name} in "
        f"{measured.precision}), and the exchange runs at {there.bytes_per_s * 8 / 1e9:g} Gbit/s"
        f"{', also between the GPUs of a machine' if offer.workers > 1 else ''}."
    )
    return Estimate(
        offer=offer,
        model=replace(model, covariance=covariance),
        points=(),
        notes=(note,),
    )


def _peak_of(machine: MachineType, measured: MeasuredJob) -> float:
    is_full = measured.precision == "fp32"
    return machine.gpu.fp32_tflops if is_full else machine.gpu.half_tflops


# --- options --------------------------------------------------------------------------------------


def options_of(
    measured: MeasuredJob,
    estimates: Iterable[Estimate],
    *,
    max_workers: int,
    head_usd: float = 0.0,
) -> list[Option]:
    """Return the options, sorted by time, with the Pareto front marked.

    ``head_usd`` is the hourly price of the scheduler's machine.
    """
    found = []
    for estimate in estimates:
        for machines in counts_up_to(max_workers // estimate.offer.workers):
            workers = machines * estimate.offer.workers
            if workers > measured.plan.batch_size_of(workers):
                break  # a worker would have no sample
            found += _options_at(measured, estimate, machines, workers, head_usd)
    return mark_front(found)


def counts_up_to(most: int) -> list[int]:
    """Return the numbers of machines to consider.

    >>> counts_up_to(10)
    [1, 2, 3, 4, 6, 8, 10]
    """
    return [one for one in COUNTS if one < most] + ([most] if most >= 1 else [])


def _options_at(
    measured: MeasuredJob, estimate: Estimate, machines: int, workers: int, head_usd: float
) -> list[Option]:
    offer = estimate.offer
    step_s, error = estimate.step_time(workers, measured.batch_at(workers))
    samples = measured.plan.batch_size_of(workers)
    rate = samples / step_s
    alone = measured.plan.batch_size_of(1) / estimate.step_time(1, measured.batch_at(1))[0]
    train_h = measured.samples_left / rate / 3600 * (1 + measured.outside_share)
    lifecycles: list[tuple[Lifecycle, float]] = [
        ("on-demand", offer.on_demand_usd), ("spot", offer.spot_usd)
    ]  # fmt: skip
    priced = [one for one in lifecycles if not math.isnan(one[1])] or [("", math.nan)]
    found = []
    for lifecycle, usd in priced:
        share = 1 - derate_on_spot(measured, machines, offer.boot_s) if lifecycle == "spot" else 1
        hours = train_h / share + offer.boot_s / 3600
        found.append(
            Option(
                machine=offer.machine,
                workers=workers,
                machines=machines,
                lifecycle=lifecycle,
                batch=samples,
                step_s=step_s,
                samples_per_s=rate,
                efficiency=rate / (workers * alone),
                statistical_efficiency=measured.statistical_efficiency(workers),
                hours=hours,
                error=error,
                usd=(machines * usd + head_usd) * hours,
                is_measured=workers in {point.workers for point in estimate.points},
            )
        )
    return found


def derate_on_spot(measured: MeasuredJob, machines: int, boot_s: float) -> float:
    """Return the share of its rate that a fleet of spot machines loses to interruptions."""
    losses = measured.losses_per_node_hour
    if math.isnan(losses):
        losses = USUAL_LOSSES_PER_NODE_HOUR
    return derate_of(
        boot_s=boot_s,
        stall_s=STALL_S,
        losses_per_node_hour=losses,
        # Each loss changes the number of workers twice: at the loss and at the replacement.
        changes_per_hour=2 * losses * machines,
    )


def mark_front(options: Sequence[Option]) -> list[Option]:
    """Sort by time, and mark those that no other option beats in both time and cost."""
    ordered = sorted(options, key=lambda one: (one.hours, one.cost))
    marked, cheapest = [], math.inf
    # If only some options have a price, dollars and worker hours cannot be compared.
    has_prices = any(not math.isnan(one.usd) for one in ordered)
    for one in ordered:
        is_comparable = not (has_prices and math.isnan(one.usd))
        is_on_front = is_comparable and one.cost < cheapest
        if is_on_front:
            cheapest = one.cost
        marked.append(replace(one, is_on_front=is_on_front))
    return marked
