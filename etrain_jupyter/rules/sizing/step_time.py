"""Model the duration of a step by the number of workers and samples per worker.

A step of ``W`` workers with ``m`` samples each takes ``compute(W, m) + exposed(W, m)``::

    compute    c(W) (a + b m)              a: fixed time of a step, b: time of a sample
    c(W)       max(1, threads of the workers on a machine / its cores)
    exchange   n(W) buckets latency + v(W) bytes seconds_per_byte
    n(W)       2 (W - 1)                   messages of a ring; ceil(log2 W) for small gradients
    v(W)       2 (W - 1) / W               the ring, over links between machines; else ceil(log2 W)
               ... max(1, r W threads / cores)     on one machine: the exchange needs its cores
    exposed    max(last bucket's share of the exchange, exchange - hidden)
    hidden     f 2/3 c(W) b m              f: overlap of the exchange with a backward pass

The five parameters are fitted to measured steps by least squares of the logarithms, with weak
priors. A parameter that the points do not determine keeps its prior and a large variance, so that
each prediction has a standard error.

Pollux (Qiao et al., OSDI 2021) models the time of an exchange as a line over the number of workers.
Here, the formulas of the ring and of the contention for cores are given instead. If they are fitted
at one and two workers, they predict three and four, which the line cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etrain_jupyter.rules.small_sums import num_rounds, num_sent

Floats: TypeAlias = NDArray[np.float64]
Unknown = Literal["batch", "exchange"]
"""Properties that the measured points do not determine: the dependence on the samples per worker,
and the time of the exchange."""

BACKWARD_SHARE = 2 / 3
"""Fraction of a sample's time that its backward pass takes."""
LAST_BUCKET_SHARE = 0.25
"""Fraction of the exchange that begins only after the backward pass has ended."""
LOOPBACK_CPU_SHARE = 0.75
"""Processor time of an exchange between two workers on one machine, relative to its duration."""
NOISE = 0.05
"""Relative standard deviation of a measured duration, including the error of the model."""
MIN_COMPUTE_SHARE = 0.01
BUCKET_BYTES = 25e6
"""Gradients are sent in buckets of about this size."""
BYTES_PER_PARAMETER = {"none": 4.0, "bf16": 2.0, "fp16": 2.0}
"""Bytes sent per parameter, by ``compression``."""
POWERSGD_SHARE = 0.05
"""Rough share of the gradients that PowerSGD sends; it depends on the shapes of the matrices."""
LATENCY_S = 2e-4
LOOPBACK_S_PER_BYTE = 1 / 1.5e9
LOG_MAX = 5.0


@dataclass(frozen=True, kw_only=True)
class StepPoint:
    """Measured duration of steps with one number of workers and samples; medians in seconds."""

    workers: int
    batch: float
    """Samples per worker and step."""
    step_s: float
    exposed_s: float
    """Part of ``step_s``: communication that no backward pass hides."""
    spread: float = 0.0
    """Half the distance between the quartiles of the durations, relative to ``step_s``."""


def step_point(
    *, workers: int, samples: int, durations: Iterable[float], exposed: Iterable[float]
) -> StepPoint:
    """Return the point of measured steps with the same number of workers and samples.

    Args:
        workers: Number of workers.
        samples: Samples per step, across all workers.
        durations: Durations of the steps, in seconds; at least one.
        exposed: ``exposed_s`` of the steps, in the same order.
    """
    low, median, high = np.quantile(np.asarray([*durations]), (0.25, 0.5, 0.75)).tolist()
    return StepPoint(
        workers=workers,
        batch=samples / workers,
        step_s=median,
        exposed_s=float(np.median([*exposed])),
        spread=(high - low) / 2 / median,
    )


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the workers run."""

    cores: float = math.inf
    """Cores of a machine that the workers share; infinite if each worker has its own GPU."""
    workers_per_machine: int = 0
    """0 if all workers run on one machine."""
    threads: int = 1
    """Threads of a worker."""

    def contention(self, workers: int) -> float:
        """Return the factor by which workers that share cores slow each other down."""
        return max(1.0, self._busy_cores(workers) / self.cores)

    def sending_contention(self, workers: int) -> float:
        """Return the factor by which workers that share cores slow down their exchange."""
        waiting = LOOPBACK_CPU_SHARE * workers * self.threads / self.cores
        return 1.0 if self.workers_per_machine else max(1.0, waiting)

    def has_idle_cores(self, workers: int) -> bool:
        """Return True if an exchange can run while all workers compute."""
        return bool(self.workers_per_machine) or self._busy_cores(workers) < self.cores

    def _busy_cores(self, workers: int) -> int:
        return min(workers, self.workers_per_machine or workers) * self.threads


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The gradients that the workers sum in each step."""

    num_bytes: float
    """Bytes of one worker's gradients as they are sent."""
    num_buckets: int = 1
    passes: int = 1
    """Forward and backward passes per step, of which only the last overlaps with the exchange."""
    s_per_byte: float = LOOPBACK_S_PER_BYTE
    """Expected seconds per byte: the inverse of the bandwidth in bytes per second."""
    is_known: bool = False
    """True if ``s_per_byte`` is the bandwidth of a known network rather than a first guess."""


def passes_of(config: Mapping[str, Any]) -> int:
    """Return the minimum number of passes of a step, from the configuration in a job's log."""
    batch = config.get("batch")
    passes = batch.get("aggregation_frequency") if isinstance(batch, Mapping) else None
    return passes if isinstance(passes, int) and passes >= 1 else 1


def exchange_of(
    *, num_parameters: int, compression: str, passes: int, s_per_byte: float | None = None
) -> Exchange:
    """Return the exchange of a job's gradients.

    Args:
        num_parameters: Trained parameters of the model: frozen ones have no gradients.
        compression: The key ``compression``; the size is an assumption for PowerSGD.
        passes: See ``Exchange``.
        s_per_byte: Inverse of the bandwidth of a known network; None if it is unknown.
    """
    plain = 4.0 * POWERSGD_SHARE
    num_bytes = num_parameters * BYTES_PER_PARAMETER.get(compression, plain)
    return Exchange(
        num_bytes=max(num_bytes, 1.0),
        num_buckets=max(1, math.ceil(num_bytes / BUCKET_BYTES)),
        passes=passes,
        s_per_byte=LOOPBACK_S_PER_BYTE if s_per_byte is None else s_per_byte,
        is_known=s_per_byte is not None,
    )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted duration of a step."""

    step_s: float
    exposed_s: float
    """Part of ``step_s``: communication that no backward pass hides."""
    error: float
    """Relative standard error; above 1 if the points hardly determine it."""


@dataclass(frozen=True, kw_only=True)
class StepTimeModel:
    """A fitted model, as returned by ``fit_step_times``."""

    placement: Placement
    exchange: Exchange
    values: Floats
    """Parameters: log a, log b, log latency, log seconds per byte, logit f; shape ``(5,)``."""
    covariance: Floats
    """Covariance of ``values``, shape ``(5, 5)``."""
    unknown: frozenset[Unknown] = field(default=frozenset())
    """Properties that were not measured."""

    def predict(self, workers: int, batch: float) -> Prediction:
        """Predict the duration of a step.

        Args:
            workers: Number of workers.
            batch: Samples per worker.
        """
        compute, exposed = self._parts(self.values, workers, batch)
        gradient = _jacobian(
            lambda x: np.array([math.log(sum(self._parts(x, workers, batch)))]), self.values
        )
        variance = float((gradient @ self.covariance @ gradient.T)[0, 0])
        return Prediction(
            step_s=compute + exposed, exposed_s=exposed, error=math.sqrt(variance + NOISE**2)
        )

    def moved_to(self, placement: Placement, exchange: Exchange, *, speed: float) -> StepTimeModel:
        """Return the model for other machines, with the exchange at its expected bandwidth.

        Args:
            placement: Where the workers run there.
            exchange: The exchange there.
            speed: Samples per second of a worker there, relative to this model's machines. It
                changes only the time of a sample, because the fixed time of a step is not spent on
                arithmetic.
        """
        values = self.values.copy()
        values[1] -= math.log(speed)
        values[2:] = _prior_of(exchange, 0.0, 0.0)[2:]
        covariance = np.diag(_prior_deviations(exchange) ** 2)
        covariance[:2, :2] = self.covariance[:2, :2]
        return replace(
            self, placement=placement, exchange=exchange, values=values, covariance=covariance,
            unknown=self.unknown | {"exchange"},
        )  # fmt: skip

    def residuals(self, points: Iterable[StepPoint]) -> list[float]:
        """Return the relative error at each point: predicted / measured duration - 1."""
        return [
            self.predict(point.workers, point.batch).step_s / point.step_s - 1 for point in points
        ]

    def _parts(self, values: Floats, workers: int, batch: float) -> tuple[float, float]:
        return _parts(self.placement, self.exchange, values, workers, batch)


def fit_step_times(
    points: Sequence[StepPoint], placement: Placement, exchange: Exchange
) -> StepTimeModel:
    """Fit the model to measured points.

    Args:
        points: At least one point, with positive durations.
        placement: Where the workers ran.
        exchange: Their gradients.

    Raises:
        ValueError: If ``points`` is empty.
    """
    if not points:
        raise ValueError("no measured step")
    first = min(points, key=lambda point: (point.workers, point.batch))
    prior = _prior_of(exchange, first.step_s / 3, first.step_s / first.batch / 2)
    deviations = _prior_deviations(exchange)

    def residuals(values: Floats) -> Floats:
        found: list[float] = []
        for point in points:
            compute, exposed = _parts(placement, exchange, values, point.workers, point.batch)
            # The load of a shared machine drifts, so the median of many steps is not more certain
            # than the steps themselves.
            noise = math.hypot(NOISE, point.spread)
            found.append(math.log((compute + exposed) / point.step_s) / noise)
            measured = point.step_s - point.exposed_s
            # Use half the weight, because an exchange that a backward pass hides also slows this
            # pass down. Skip a small difference between two measured durations, which is noise.
            if measured > MIN_COMPUTE_SHARE * point.step_s:
                found.append(0.5 * math.log(compute / measured) / noise)
            if point.workers > 1:
                found.append(0.5 * (exposed - point.exposed_s) / point.step_s / noise)
        return np.array([*found, *((values - prior) / deviations)])

    values = _minimize(residuals, prior)
    jacobian = _jacobian(residuals, values)
    unknown: set[Unknown] = set()
    if len({point.batch for point in points}) == 1:
        unknown.add("batch")
    if all(point.workers == 1 for point in points):
        unknown.add("exchange")
    return StepTimeModel(
        placement=placement,
        exchange=exchange,
        values=values,
        covariance=np.linalg.inv(jacobian.T @ jacobian).astype(np.float64),
        unknown=frozenset(unknown),
    )


def _parts(
    placement: Placement, exchange: Exchange, values: Floats, workers: int, batch: float
) -> tuple[float, float]:
    """Return the compute time and the exposed part of the exchange, in seconds."""
    fixed_s, sample_s, latency_s, s_per_byte = np.exp(np.clip(values[:4], -40, LOG_MAX)).tolist()
    overlap = 1 / (1 + math.exp(-min(max(values[4], -40), 40)))
    contention = placement.contention(workers)
    compute: float = contention * (fixed_s + sample_s * batch)
    if workers == 1:
        return compute, 0.0
    bucket_bytes = exchange.num_bytes / exchange.num_buckets
    exchange_s = latency_s * num_rounds(bucket_bytes, workers) * exchange.num_buckets
    volume = num_sent(bucket_bytes, workers) * placement.sending_contention(workers)
    exchange_s += volume * exchange.num_bytes * s_per_byte
    if not placement.has_idle_cores(workers):
        overlap = 0.0
    hidden = overlap * BACKWARD_SHARE * contention * sample_s * batch / exchange.passes
    return compute, max(LAST_BUCKET_SHARE * exchange_s, exchange_s - hidden)


def _prior_of(exchange: Exchange, fixed_s: float, sample_s: float) -> Floats:
    known = (fixed_s or 1.0, sample_s or 1.0, LATENCY_S, exchange.s_per_byte)
    return np.array([*map(math.log, known), 0.0])


def _prior_deviations(exchange: Exchange) -> Floats:
    # The latency is roughly known, but the compute time is not known at all. A known network
    # delivers its bandwidth within a factor of 1.3, an unknown one within a factor of 10.
    return np.array([2.5, 2.5, 0.17, 0.25 if exchange.is_known else 2.5, 0.25])


def _jacobian(function: Callable[[Floats], Floats], at: Floats) -> Floats:
    step = 1e-4
    columns = [(function(at + step * unit) - function(at - step * unit)) / (2 * step)
               for unit in np.eye(len(at))]  # fmt: skip
    return np.stack(columns, axis=1)


def _minimize(residuals: Callable[[Floats], Floats], start: Floats, starts: int = 4) -> Floats:
    """Minimize a sum of squares by Levenberg-Marquardt, from several starts."""
    # Five parameters and a few points: this takes milliseconds. scipy is not a dependency.
    rng = np.random.default_rng(0)
    best, least = start, math.inf
    for number in range(starts):
        values = start + (rng.normal(0, 0.7, len(start)) if number else 0.0)
        current = residuals(values)
        damping = 1.0
        for _ in range(80):
            jacobian = _jacobian(residuals, values)
            normal = jacobian.T @ jacobian + damping * np.eye(len(values))
            change = np.clip(np.linalg.solve(normal, -jacobian.T @ current), -1, 1)
            changed = residuals(values + change)
            gain = current @ current - changed @ changed
            if gain > 0:
                values, current, damping = values + change, changed, max(damping / 3, 1e-6)
                if gain < 1e-9:
                    break
            else:
                damping *= 4
                if damping > 1e10:
                    break
        if current @ current < least:
            best, least = values, float(current @ current)
        # Residuals are in standard deviations, so another start cannot give a much better result.
        if least < len(current):
            break
    return best
