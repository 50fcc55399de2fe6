"""``compare`` and ``plan`` give the numbers of three published articles.

Every number of the articles' tables that follows from a throughput, a price or a size is in
``NUMBERS``, with the tool that computes it. The articles are those of Determined AI on fine-tuning
ALBERT on SQuAD 2.0 with spot instances (2021) and BERT on SQuAD with K80 GPUs (2020), and of AWS on
pretraining ALBERT in SageMaker (2020, with the README of its scripts). Two entries of the table by
AWS contradict themselves, see ``CONTRADICTIONS``.

To see what computes a number, read its line: ``compare`` and ``plan`` have the value of each tool.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etrain_jupyter.config.schema import BatchConfig
from etrain_jupyter.insight.comparison import compare_jobs
from etrain_jupyter.insight.curves import curves_of
from etrain_jupyter.plugins.planner.planning.line import plan_job
from etrain_jupyter.plugins.planner.planning.measured import read_measured
from etrain_jupyter.plugins.planner.planning.offers import MachineOffer, Market
from etrain_jupyter.plugins.planner.planning.options import Option, estimates_of, options_of
from etrain_jupyter.rules.learning_rate import LrSchedule
from tests.unit.insight.logged_jobs import LoggedJob, logged_job
from tests.unit.plugins.planner.planning.measured_jobs import measured_job

Row = dict[str, Any]
Rows = dict[str, Row]

REFERENCE = Path(__file__).parents[4] / "shared/reference/scripts/seed_tables_check.py"
"""A script with the arithmetic of the same numbers, where it exists."""
V100 = "p3.2xlarge"
V100_USD = 24.48 / 8  # one of the eight GPUs of a p3.16xlarge, on demand, per hour
SPOT_DISCOUNT = 0.70
SQUAD2_RECORDS = 264_396  # two epochs of 132,198 features
PRETRAINING_STEPS = 125_000


# --- jobs that ran at the published throughputs ---------------------------------------------------


def rows_of(*jobs: LoggedJob) -> Rows:
    """Return the rows of a comparison by the name of the job."""
    return {row["job"]: row for row in compare_jobs(jobs).rows}


def lasting(name: str, hours: float, *, workers: int, **fields: Any) -> LoggedJob:
    """Return a job of 1,000 steps that takes a number of hours."""
    return logged_job(
        name, workers=workers, num_steps=1000, batch=100,
        samples_per_s=1000 * 100 / (hours * 3600), **fields,
    )  # fmt: skip


def pretraining(name: str, steps_per_s: float, **fields: Any) -> LoggedJob:
    """Return the pretraining of ALBERT on 64 GPUs."""
    return logged_job(
        name, workers=64, num_steps=PRETRAINING_STEPS, batch=4096,
        samples_per_s=4096 * steps_per_s, **fields,
    )  # fmt: skip


def job_at(
    rates: Sequence[tuple[int, float]],
    *,
    samples: int,
    batch: int,
    num_steps: int = 20,
    between_s: float = 0.0,
) -> LoggedJob:
    """Return a job that ran some steps at each of these numbers of workers and samples/s."""
    step_s = {workers: batch / rate for workers, rate in rates}
    model: Any = SimpleNamespace(
        predict=lambda workers, _: SimpleNamespace(step_s=step_s[workers], exposed_s=0.0)
    )
    return measured_job(
        model, [(workers, batch) for workers in step_s], machine=V100, device="cuda",
        lifecycle="spot", usd_per_h=0.918, total_samples=samples, num_parameters=11_700_000,
        status="finished", num_steps=num_steps, between_s=between_s,
    )  # fmt: skip


def options_at(
    *rates: tuple[int, float], samples: int, batch: int, usd_per_h: float = V100_USD
) -> dict[int, Option]:
    """Plan a whole job, and return its options on demand by number of workers."""
    measured = read_measured(job_at(rates, samples=samples, batch=batch))
    # Machines that already run, because the articles do not count their boot.
    offer = MachineOffer(machine=V100, on_demand_usd=usd_per_h, boot_s=0.0)
    estimates, skipped = estimates_of(measured, Market(offers=(offer,)), cores=2)
    assert skipped == []
    options = options_of(measured, estimates, max_workers=max(workers for workers, _ in rates))
    return {one.workers: one for one in options}


# --- Determined AI: ALBERT on SQuAD 2.0 -----------------------------------------------------------


def albert(name: str, gpus: int, samples_per_s: float, usd: float, em: float, f1: float) -> Any:
    return logged_job(
        name, workers=gpus, samples_per_s=samples_per_s, num_steps=SQUAD2_RECORDS // 12, batch=12,
        usd_per_worker_h=usd, on_demand_usd_per_worker_h=V100_USD,
        scores={"exact": em, "f1": f1}, num_train_samples=SQUAD2_RECORDS // 2,
    )  # fmt: skip


@cache
def squad() -> Rows:
    spot = V100_USD * (1 - SPOT_DISCOUNT)
    return rows_of(
        albert("1", 1, 2, V100_USD, 85.76, 88.87),
        # The README of the project has 36.67 h, the article rounds it to 36.7 h.
        albert("1 in 36.67 h", 1, SQUAD2_RECORDS / 36.67 / 3600, V100_USD, 85.76, 88.87),
        albert("8", 8, 15.8, V100_USD, 85.76, 88.87),
        albert("64", 64, 92.75, spot, 86.24, 89.06),
        albert("64 at 91.43", 64, 91.43, spot, 86.24, 89.06),
        albert("64 in 48 min", 64, SQUAD2_RECORDS / 2880, spot, 86.24, 89.06),
    )


@cache
def squad_options() -> dict[int, Option]:
    return options_at((1, 2), (8, 15.8), (64, 92.75), samples=SQUAD2_RECORDS, batch=3072)


@cache
def squad_options_as_rounded() -> dict[int, Option]:
    """Return options from the published times, where ``squad_options`` uses the throughputs."""
    rates = [(1, SQUAD2_RECORDS / 36.67 / 3600), (64, SQUAD2_RECORDS / 2880)]
    return options_at(*rates, samples=SQUAD2_RECORDS, batch=3072)


def squad_at_91_43() -> float:
    options = options_at((64, 91.43), samples=SQUAD2_RECORDS, batch=3072)
    return options[64].hours * 60


def saved(row: Row) -> float:
    return float(1 - row["usd"] / row["on_demand_usd"])


# --- Determined AI: BERT on SQuAD with K80 GPUs, and the price of XLNet ---------------------------

K80_MINUTES = {1: 399, 2: 214, 4: 118, 8: 61, 16: 30}


@cache
def k80() -> Rows:
    return rows_of(
        *(lasting(str(gpus), minutes / 60, workers=gpus) for gpus, minutes in K80_MINUTES.items())
    )


@cache
def k80_options() -> dict[int, Option]:
    rates = [(gpus, 1e6 / (60 * minutes)) for gpus, minutes in K80_MINUTES.items()]
    return options_at(*rates, samples=1_000_000, batch=1000)


def xlnet_usd() -> float:
    return float(rows_of(lasting("xlnet", 132, workers=512, usd_per_worker_h=8))["xlnet"]["usd"])


def planned_xlnet_usd() -> float:
    rate = 1e6 / (132 * 3600)
    return options_at((512, rate), samples=1_000_000, batch=1000, usd_per_h=8)[512].usd


# --- AWS: pretraining ALBERT ----------------------------------------------------------------------


def batch_of(nodes: int, gpus_per_node: int, per_gpu: int, accumulated: int) -> float:
    gpus = nodes * gpus_per_node
    config = BatchConfig(per_worker=per_gpu * accumulated, aggregation_frequency=accumulated)
    return float(rows_of(logged_job("job", workers=gpus, batch=config.size(gpus)))["job"]["batch"])


def hours_at(steps_per_s: float) -> float:
    return float(rows_of(pretraining("albert", steps_per_s))["albert"]["hours"])


def planned_hours_at(steps_per_s: float) -> float:
    samples = PRETRAINING_STEPS * 4096
    return options_at((64, 4096 * steps_per_s), samples=samples, batch=4096)[64].hours


def efficiency_of(one_node: float, eight_nodes: float) -> float:
    rows = rows_of(
        logged_job("one", workers=8, samples_per_s=one_node),
        logged_job("eight", workers=64, samples_per_s=eight_nodes),
    )
    return float(rows["eight"]["efficiency"])


def base_steps_per_s() -> float:
    rows = rows_of(logged_job("base", workers=64, samples_per_s=7045, batch=4096))
    return float(rows["base"]["steps_per_s"])


@cache
def fine_tuning() -> Row:
    job = logged_job(
        "squad", workers=8, num_steps=8144, batch=48, samples_per_s=8144 * 48 / 1200,
        num_train_samples=130_319,
    )  # fmt: skip
    return rows_of(job)["squad"]


def warm_up_share(warmup: int, num_steps: int) -> float:
    """Return where the curve of the learning rate peaks, as a share of the steps."""
    schedule = LrSchedule(warmup=warmup, decay="linear", end=num_steps)
    lr = [schedule.factor(step, 1) for step in range(num_steps)]
    comparison = compare_jobs([logged_job("a", num_steps=num_steps, batch=1, lr=lr)])
    [curve] = curves_of(comparison.labels, comparison.runs, "lr", "steps")
    return float(curve.x[curve.y.argmax()] / num_steps)


def bert_workers() -> float:
    return float(rows_of(lasting("bert", 62 / 60, workers=256 * 8))["bert"]["workers"])


# --- the numbers ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Number:
    """A published number, and the tools that compute it."""

    what: str
    published: float
    within: float
    """Rounding of the published number."""
    compare: Callable[[], float] | None = None
    plan: Callable[[], float] | None = None

    @property
    def tools(self) -> dict[str, Callable[[], float]]:
        """The value by name of the tool."""
        both = {"compare": self.compare, "plan": self.plan}
        return {name: value for name, value in both.items() if value is not None}


def pretraining_hours(what: str, steps_per_s: float, hours: float) -> Number:
    return Number(
        what=f"ALBERT pretraining, {what}: hours", published=hours, within=1.0,
        compare=lambda: hours_at(steps_per_s), plan=lambda: planned_hours_at(steps_per_s),
    )  # fmt: skip


def k80_efficiency(gpus: int, efficiency: float) -> Number:
    return Number(
        what=f"BERT, {gpus} K80: efficiency", published=efficiency, within=0.005,
        compare=lambda: k80()[str(gpus)]["efficiency"],
        plan=lambda: k80_options()[gpus].efficiency,
    )  # fmt: skip


def node_efficiency(what: str, one: float, eight: float, efficiency: float) -> Number:
    return Number(
        what=f"ALBERT {what}, 8 nodes: efficiency", published=efficiency, within=0.006,
        compare=lambda: efficiency_of(one, eight),
    )  # fmt: skip


# fmt: off
NUMBERS = (
    # Determined AI: ALBERT on SQuAD 2.0
    Number(what="SQuAD, $ per V100 and hour", published=3.06, within=1e-9,
           compare=lambda: squad()["1"]["usd_per_worker_h"],
           plan=lambda: squad_options()[1].usd / squad_options()[1].hours),
    Number(what="SQuAD, 1 GPU: hours", published=36.7, within=0.05,
           compare=lambda: squad()["1"]["hours"],
           plan=lambda: squad_options()[1].hours),
    Number(what="SQuAD, 1 GPU: $", published=112.21, within=0.01,
           compare=lambda: squad()["1 in 36.67 h"]["usd"],
           plan=lambda: squad_options_as_rounded()[1].usd),
    Number(what="SQuAD, 1 GPU: $ from the throughput", published=112.21, within=0.25,
           compare=lambda: squad()["1"]["usd"],
           plan=lambda: squad_options()[1].usd),
    Number(what="SQuAD, 1 GPU: $ in the summary", published=112, within=0.5,
           compare=lambda: squad()["1 in 36.67 h"]["usd"],
           plan=lambda: squad_options_as_rounded()[1].usd),
    Number(what="SQuAD, 8 GPUs: hours", published=4.7, within=0.06,
           compare=lambda: squad()["8"]["hours"],
           plan=lambda: squad_options()[8].hours),
    Number(what="SQuAD, 64 GPUs: minutes", published=48, within=0.6,
           compare=lambda: squad()["64"]["hours"] * 60,
           plan=lambda: squad_options()[64].hours * 60),
    Number(what="SQuAD, 64 GPUs: minutes at the README's throughput", published=48, within=0.6,
           compare=lambda: squad()["64 at 91.43"]["hours"] * 60,
           plan=squad_at_91_43),
    Number(what="SQuAD, 64 spot GPUs: $", published=47, within=0.05,
           compare=lambda: squad()["64 in 48 min"]["usd"]),
    Number(what="SQuAD, $ per spot GPU and hour", published=0.918, within=0.001,
           compare=lambda: squad()["64 in 48 min"]["usd_per_worker_h"]),
    Number(what="SQuAD, spot discount", published=0.70, within=0.002,
           compare=lambda: saved(squad()["64 in 48 min"])),
    Number(what="SQuAD, 64 GPUs on demand: $", published=156.67, within=0.01,
           compare=lambda: squad()["64 in 48 min"]["on_demand_usd"],
           plan=lambda: squad_options_as_rounded()[64].usd),
    Number(what="SQuAD, 64 spot GPUs: cost reduction", published=0.58, within=0.005,
           compare=lambda: 1 - squad()["64 in 48 min"]["usd"] / squad()["1 in 36.67 h"]["usd"]),
    Number(what="SQuAD, 64 GPUs: speed-up of the throughput", published=46, within=0.5,
           compare=lambda: squad()["64"]["speedup"],
           plan=lambda: squad_options()[64].samples_per_s / squad_options()[1].samples_per_s),
    Number(what="SQuAD, 64 GPUs: speed-up of the time", published=46, within=0.5,
           compare=lambda: squad()["1 in 36.67 h"]["hours"] / squad()["64 in 48 min"]["hours"],
           plan=lambda: squad_options_as_rounded()[1].hours / squad_options_as_rounded()[64].hours),
    Number(what="SQuAD, 64 GPUs: efficiency", published=0.7246, within=1e-4,
           compare=lambda: squad()["64"]["efficiency"],
           plan=lambda: squad_options()[64].efficiency),
    Number(what="SQuAD, 8 GPUs: efficiency", published=0.9875, within=1e-4,
           compare=lambda: squad()["8"]["efficiency"],
           plan=lambda: squad_options()[8].efficiency),
    # Determined AI: BERT on SQuAD with K80 GPUs
    k80_efficiency(2, 0.93),
    k80_efficiency(4, 0.85),
    k80_efficiency(8, 0.82),
    k80_efficiency(16, 0.83),
    Number(what="XLNet, 132 h on 512 TPUs: $", published=540_672, within=0.5,
           compare=xlnet_usd, plan=planned_xlnet_usd),
    # AWS: pretraining ALBERT
    Number(what="ALBERT on 8 p3dn: batch", published=4096, within=0,
           compare=lambda: batch_of(8, 8, 32, 2)),
    pretraining_hours("8 p3dn", 1.72, 20),
    Number(what="ALBERT on 8 p3.16xlarge: batch", published=4096, within=0,
           compare=lambda: batch_of(8, 8, 16, 4)),
    Number(what="ALBERT on 16 g4dn: batch", published=4096, within=0,
           compare=lambda: batch_of(16, 4, 16, 4)),
    Number(what="ALBERT base: steps per second", published=1.72, within=0.005,
           compare=base_steps_per_s),
    node_efficiency("base, 2 passes", 931, 7045, 0.95),
    node_efficiency("large, 4 passes", 322, 2457, 0.95),
    node_efficiency("base", 888, 6438, 0.91),
    node_efficiency("large", 311, 2109, 0.85),
    Number(what="ALBERT large: hours", published=59, within=1.2,
           compare=lambda: hours_at(2457 / 4096), plan=lambda: planned_hours_at(2457 / 4096)),
    Number(what="ALBERT fine-tuning: epochs", published=3, within=0.001,
           compare=lambda: fine_tuning()["epochs"]),
    Number(what="ALBERT fine-tuning: steps per second", published=6.79, within=0.01,
           compare=lambda: fine_tuning()["steps_per_s"]),
    # The curve has 400 points, each of which is the mean of its neighbors.
    Number(what="ALBERT fine-tuning: share of the warm-up", published=0.1, within=0.003,
           compare=lambda: warm_up_share(814, 8144)),
    Number(what="ALBERT pretraining: share of the warm-up", published=0.025, within=0.003,
           compare=lambda: warm_up_share(3125, 125_000)),
    pretraining_hours("1 node", 0.24, 144),
    pretraining_hours("2 nodes", 0.46, 75),
    pretraining_hours("4 nodes", 0.90, 38),
    pretraining_hours("8 nodes", 1.73, 20),
    Number(what="BERT in 62 minutes: GPUs", published=2048, within=0, compare=bert_workers),
)
# fmt: on

CONTRADICTIONS = {"p3.16": (39.0, 1.01), "g4dn.12": (78.0, 0.51)}
"""Published hours and steps per second of 125,000 steps, by instance type: the steps take less."""


@pytest.mark.parametrize(
    ("number", "tool"),
    [
        pytest.param(number, tool, id=f"{number.what} ({tool})")
        for number in NUMBERS
        for tool in number.tools
    ],
)
def test_tool_computes_the_published_number(number: Number, tool: str) -> None:
    assert number.tools[tool]() == pytest.approx(number.published, abs=number.within or 1e-9)


@pytest.mark.parametrize("instance", CONTRADICTIONS)
def test_tools_explain_the_entry_that_contradicts_itself(instance: str) -> None:
    hours, steps_per_s = CONTRADICTIONS[instance]
    steps_h = PRETRAINING_STEPS / steps_per_s / 3600
    between_s = (hours - steps_h) * 3600 / (PRETRAINING_STEPS - 1)
    other = f"The other {1 - steps_h / hours:.0%} are"

    comparison = compare_jobs([pretraining("table", steps_per_s, between_s=between_s)])
    job = job_at(
        [(64, 4096 * steps_per_s)], samples=PRETRAINING_STEPS * 4096, batch=4096,
        num_steps=PRETRAINING_STEPS, between_s=between_s,
    )  # fmt: skip
    plan = plan_job(job, types=(V100,), pool="local", cores=2)

    # The entry is possible only if the job idles between its steps; both tools report by how much.
    [row] = comparison.rows
    assert row["hours"] == pytest.approx(hours)
    assert row["steps_per_s"] == pytest.approx(steps_per_s)
    assert row["step_hours"] == pytest.approx(planned_hours_at(steps_per_s))
    assert row["step_hours"] < hours - 1.0
    explained = f"table: its steps take {steps_h:.1f} h of {hours:.1f} h. {other} evaluations"
    assert any(explained in note for note in comparison.notes)
    [planned] = [note for note in plan.notes if note.startswith("The steps take")]
    assert f"take {steps_h:.1f} h of the {hours:.1f} h in the log" in planned
    assert f"{other} waiting and recovery" in planned


def test_tools_do_not_note_a_consistent_entry() -> None:
    [note] = compare_jobs([pretraining("p3dn", 1.72)]).notes
    job = job_at([(64, 4096 * 1.72)], samples=PRETRAINING_STEPS * 4096, batch=4096)
    plan = plan_job(job, types=(V100,), pool="local", cores=2)

    assert "only job" in note
    assert not any(one.startswith("The steps take") for one in plan.notes)


def test_albert_table_has_the_published_columns() -> None:
    rows = squad().values()

    assert [(row["best_exact"], row["best_f1"]) for row in rows] == (
        [(85.76, 88.87)] * 3 + [(86.24, 89.06)] * 3
    )
    assert [row["workers"] for row in rows] == [1, 1, 8, 64, 64, 64]
    assert [row["samples_per_s"] for row in rows][::2] == [
        pytest.approx(rate) for rate in (2, 15.8, 91.43)
    ]
    assert {row["epochs"] for row in rows} == {2.0}


@pytest.mark.skipif(not REFERENCE.exists(), reason=f"{REFERENCE} does not exist")
def test_numbers_are_those_of_the_reference() -> None:
    text = subprocess.run(
        [sys.executable, str(REFERENCE)], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    found = re.findall(r"^(ok |OFF) (.*?) +seed (\S+) +model", text, re.MULTILINE)

    assert [float(seed) for mark, _, seed in found if mark == "ok "] == [
        number.published for number in NUMBERS
    ]
    assert {what.partition(":")[0]: float(seed) for mark, what, seed in found if mark == "OFF"} == {
        instance: hours for instance, (hours, _) in CONTRADICTIONS.items()
    }
