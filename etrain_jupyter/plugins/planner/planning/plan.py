"""The plan of a job: options, the recommendation, and their text, HTML, table and chart."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from etrain_jupyter.display.charts import COLORS, Curve, dot, image, line_chart
from etrain_jupyter.display.numbers import dollars, duration, number, seconds
from etrain_jupyter.display.tables import (
    Column,
    Html,
    align_columns,
    data_frame,
    html_list,
    html_of,
    html_table,
)
from etrain_jupyter.insight.figures import figure_class
from etrain_jupyter.plugins.planner.planning.advice import Advice, Goal
from etrain_jupyter.plugins.planner.planning.measured import MeasuredJob
from etrain_jupyter.plugins.planner.planning.on_trace import TracedOption
from etrain_jupyter.plugins.planner.planning.options import Option
from etrain_jupyter.untrusted import plain_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

MAX_ROWS = 16
"""Options in the text and the HTML; ``to_frame`` has all."""

COLUMNS = (
    Column(key="mark", heading="", about="> recommended, * no option is both faster and cheaper"),
    Column(key="machine", heading="machine"),
    Column(key="workers", heading="workers"),
    Column(key="lifecycle", heading="paid"),
    Column(key="batch", heading="batch", about="samples per step"),
    Column(key="step_s", heading="step", show=seconds),
    Column(key="samples_per_s", heading="samples/s"),
    Column(
        key="efficiency",
        heading="efficiency",
        about="throughput by that of one worker times the number of workers",
        show="{:.2f}".format,
    ),
    Column(
        key="statistical_efficiency",
        heading="progress",
        about="progress of a sample, relative to a step of one worker",
        show="{:.2f}".format,
    ),
    Column(key="hours", heading="time", show=duration),
    Column(key="usd", heading="cost", show=dollars),
    Column(
        key="error", heading="+-", about="standard error of time and cost", show="{:.0%}".format
    ),
    Column(key="basis", heading="basis", about="whether the job ran with this number of workers"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Options to run a job, and a recommendation. A notebook displays it as HTML.

    Attributes:
        job: The job as its log describes it.
        options: All options, the fastest first.
        goal: Deadline and budget.
        advice: The recommendation.
        traced: Options simulated on a spot trace; empty without ``--trace``.
        notes: Sources of the prices, guesses, and machine types without a prediction.
        is_profile: True if the job is the profile of a cell.
    """

    job: MeasuredJob
    options: tuple[Option, ...]
    goal: Goal
    advice: Advice
    traced: tuple[TracedOption, ...] = ()
    notes: tuple[str, ...] = ()
    is_profile: bool = False

    @property
    def recommended(self) -> Option | None:
        """The recommended option; None if none meets the deadline and the budget."""
        return self.advice.option

    def to_frame(self) -> DataFrame:
        """Return all options as a ``pandas.DataFrame``.

        The columns are ``machine``, ``workers``, ``machines``, ``lifecycle``, ``batch`` (samples
        per step), ``step_s``, ``samples_per_s``, ``efficiency``,
        ``statistical_efficiency`` (NaN if unknown), ``hours``, ``error`` (relative
        standard error), ``usd`` (NaN without a price), ``is_measured``, ``is_on_front`` and
        ``is_recommended``.

        Raises:
            ConfigError: If pandas is not installed.
        """
        rows = (
            {**dataclasses.asdict(one), "is_recommended": one == self.recommended}
            for one in self.options
        )
        return data_frame(rows, otherwise="plan.options has the same values")

    def plot(self) -> Figure:
        """Return a Matplotlib figure of cost over time; without prices, of throughput by workers.

        Raises:
            ConfigError: If matplotlib is not installed.
        """
        figure = figure_class()(figsize=(8.0, 4.0), layout="constrained")
        axis = figure.subplots()
        x_label, y_label = self._labels()
        for curve in self._curves():
            color = COLORS[curve.index % len(COLORS)]
            axis.plot(curve.x, curve.y, marker="o", color=color, label=curve.label)
        for curve in self._front():
            axis.plot(curve.x, curve.y, color="gray", linestyle=":", label=curve.label)
        if self.recommended is not None:
            x, y = self._point(self.recommended)
            axis.plot([x], [y], marker="o", markersize=12, fillstyle="none", color="black",
                      linestyle="", label="recommended")  # fmt: skip
        axis.set_xlabel(x_label)
        axis.set_ylabel(y_label.replace("$", r"\$"))
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend()
        return figure

    def __str__(self) -> str:
        parts = [
            self._head(),
            self._table(),
            align_columns(self._trace_lines()) if self.traced else "",
        ]
        parts.append("\n".join(f"Note: {note}" for note in self.notes))
        return plain_text("\n\n".join(part for part in parts if part))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<p>{html_of(line)}</p>" for line in self._head().splitlines())
        notes = html_list(self.notes)
        chart = image(self._svg())
        heads, *rows = self._trace_lines()
        traced = html_table(heads, rows, has_row_heads=True) if self.traced else ""
        legend = "; ".join([*self._legend(), "the dots have the colors of the chart"])
        table = self._html_options()
        return f"<div>{head}{table}<p>{html_of(legend)}</p>{traced}{chart}{notes}</div>"

    def _html_options(self) -> str:
        heads, *lines = self._lines()
        indices = {label: index for index, label in enumerate(self._groups())}
        rows = []
        for option, (mark, *row) in zip(self._shown(), lines, strict=True):
            index = indices.get(_label_of(option))
            rows.append([Html(f"{'' if index is None else dot(index)} {html_of(mark)}"), *row])
        return html_table(heads, rows, has_row_heads=True)

    # --- text ---

    def _head(self) -> str:
        job = self.job
        whole = job.samples_left == job.total_samples
        amount = f"{number(job.samples_left)} samples"
        if not whole:
            amount += f" left of {number(job.total_samples)}"
        elif job.is_over and not self.is_profile:
            amount += " of another run"
        measured = sum(map(len, job.points.values()))
        points = "1 combination" if measured == 1 else f"{measured} combinations"
        lines = [
            f"Plan for {job.job_id}: {amount}, predicted from {number(job.num_steps)} steps with "
            f"{points} of workers and batch.",
            *([f"The model has {size}."] if (size := job.plan.model_size) else []),
            self._recommendation(),
        ]
        return "\n".join(lines)

    def _recommendation(self) -> str:
        option, reason = self.advice.option, self.advice.reason
        if option is None:
            return f"Recommended: none; {reason}."
        cost = "" if math.isnan(option.usd) else f" and {dollars(option.usd)}"
        return (
            f"Recommended: {option.describe()}, {duration(option.hours)}{cost} "
            f"(+-{option.error:.0%}): {reason}."
        )

    def _shown(self) -> list[Option]:
        if len(self.options) <= MAX_ROWS:
            return list(self.options)
        chosen = [one for one in self.options if one.is_on_front or one == self.recommended]
        others = [one for one in self.options if one.is_measured and one not in chosen]
        others += [one for one in self.options if one not in chosen and one not in others]
        kept = [*chosen, *others[: max(0, MAX_ROWS - len(chosen))]]
        return [one for one in self.options if one in kept]

    def _lines(self) -> list[list[str]]:
        rows = [self._row(option) for option in self._shown()]
        columns = [c for c in COLUMNS if any(_is_known(row[c.key]) for row in rows)]
        return [
            [column.heading.upper() for column in columns],
            *([column.cell(row) if _is_known(row[column.key]) else "" for column in columns]
              for row in rows),
        ]  # fmt: skip

    def _table(self) -> str:
        recommended, front, *hidden = self._legend()
        return "\n".join(
            [
                align_columns(self._lines()),
                f"{recommended}   {front}",
                *(f"{one}." for one in hidden),
            ]
        )

    def _legend(self) -> list[str]:
        hidden = len(self.options) - len(self._shown())
        more = [f"{hidden} more options are in plan.to_frame()"] if hidden else []
        cheaper = "cheaper" if self._has_prices else "of fewer worker hours"
        return ["> recommended", f"* no option is both faster and {cheaper}", *more]

    def _row(self, option: Option) -> dict[str, Any]:
        mark = ">" if option == self.recommended else "*" if option.is_on_front else ""
        basis = "measured" if option.is_measured else "predicted"
        lifecycle = option.lifecycle.replace("-", " ")
        row = {**dataclasses.asdict(option), "mark": mark, "basis": basis, "lifecycle": lifecycle}
        # The efficiency is the same for all options if the batch does not depend on the workers.
        return row if self.job.grows else {**row, "statistical_efficiency": math.nan}

    def _trace_lines(self) -> list[list[str]]:
        heads = ["SIMULATED", "WORKERS", "POLICY", "COST", "TIME (MEDIAN)", "TIME (P95)", "LATE"]
        return [heads, *(one.cells() for one in self.traced)]

    # --- chart ---

    @property
    def _has_prices(self) -> bool:
        return any(not math.isnan(one.usd) for one in self.options)

    def _labels(self) -> tuple[str, str]:
        return ("hours", "cost in US dollars") if self._has_prices else ("workers", "samples/s")

    def _point(self, option: Option) -> tuple[float, float]:
        if self._has_prices:
            return option.hours, option.usd
        return float(option.workers), option.samples_per_s

    def _groups(self) -> dict[str, list[Option]]:
        """Return the options of each curve, by its label."""
        groups: dict[str, list[Option]] = {}
        for one in self.options:
            if not (self._has_prices and math.isnan(one.usd)):
                groups.setdefault(_label_of(one), []).append(one)
        return groups

    def _curves(self) -> Iterator[Curve]:
        for index, (label, members) in enumerate(self._groups().items()):
            yield _curve(index, label, [self._point(one) for one in members])

    def _front(self) -> Iterator[Curve]:
        if self._has_prices:
            front = [self._point(one) for one in self.options if one.is_on_front]
            yield _curve(0, "not beaten in time and cost", front)
            return
        for curve in self._curves():
            at = int(np.argmin(curve.x))
            rate = float(curve.y[at] / curve.x[at])
            ends = [(float(x), float(x) * rate) for x in (curve.x.min(), curve.x.max())]
            yield _curve(curve.index, "linear scaling", ends)

    def _svg(self) -> str:
        x_label, y_label = self._labels()
        return line_chart(
            y_label, list(self._curves()), x_label=x_label, starts_at_zero=True,
            ideal=list(self._front()),
        )  # fmt: skip


def _curve(index: int, label: str, points: Sequence[tuple[float, float]]) -> Curve:
    x, y = np.array(sorted(points)).T
    return Curve(index=index, label=label, x=x, y=y)


def _label_of(option: Option) -> str:
    return f"{option.machine} {option.lifecycle.replace('-', ' ')}".strip()


def _is_known(value: Any) -> bool:
    return value != "" and not (isinstance(value, float) and math.isnan(value))
