"""A job's history as a Matplotlib figure."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from IPython.core.formatters import DisplayFormatter

from etrain_jupyter.errors import ConfigError
from etrain_jupyter.insight import figures
from etrain_jupyter.insight.comparison import compare_jobs
from etrain_jupyter.insight.figures import worker_marks
from etrain_jupyter.log.events import (
    EvalCompleted,
    Event,
    GenerationFormed,
    PreemptionNoticed,
    StepCompleted,
    WorkerLost,
)
from tests.unit.insight.logged_jobs import logged_job
from tests.unit.log.spent import PLAIN_STEP
from tests.unit.notebook.job.fakes import new_job, status

matplotlib = pytest.importorskip("matplotlib", reason="platform: matplotlib is not installed")
matplotlib.use("Agg")

PNG = b"\x89PNG"
JOB = {"job_id": "digits-1", "time": 1.0}


def step(number: int, world_size: int = 2) -> Event:
    return StepCompleted(
        **JOB,
        step=number,
        epoch=0,
        first=0,
        samples=8,
        sample_checksum=0,
        loss=1.0 / number,
        lr=0.1,
        world_size=world_size,
        samples_per_s=80.0,
        **PLAIN_STEP,
    )


def formed(number: int) -> Event:
    return GenerationFormed(
        **JOB,
        generation=2,
        why="lost",
        world_size=2,
        ranks=["w1", "w2"],
        step=number,
        backend="gloo",
    )


LOST = WorkerLost(**JOB, worker="w3", cause="SIGKILL")
NOTICED = PreemptionNoticed(**JOB, worker="w1", deadline=2.0)
HISTORY = [
    step(1, 3),
    EvalCompleted(**JOB, step=1, epoch=0, loss=0.9, samples=8, duration_s=0.1),
    LOST,
    formed(1),
    step(2),
    NOTICED,
    WorkerLost(**JOB, worker="w1", cause="vanished"),
    step(3, 1),
    status("finished"),
]


def test_a_figure_has_loss_rate_and_workers_by_step(tmp_path: Path) -> None:
    figure = new_job(tmp_path, None, *HISTORY).plot()

    loss, rate, workers = figure.axes
    assert [axis.get_ylabel() for axis in figure.axes] == ["loss", "learning rate", "workers"]
    training, evaluation = loss.lines[:2]
    assert list(training.get_xdata()) == [1, 2, 3]
    assert list(training.get_ydata()) == pytest.approx([1.0, 0.5, 1 / 3])
    assert list(evaluation.get_ydata()) == [0.9]
    assert list(rate.lines[0].get_ydata()) == [0.1, 0.1, 0.1]
    assert list(workers.lines[0].get_ydata()) == [3, 2, 1]


def test_a_figure_marks_lost_and_preempted_workers(tmp_path: Path) -> None:
    figure = new_job(tmp_path, None, *HISTORY).plot()

    assert [text.get_text() for text in figure.axes[0].texts] == ["w3 lost", "w1 preempted"]
    _, labels = figure.axes[0].get_legend_handles_labels()
    assert labels == ["training", "evaluation", "worker lost", "worker preempted"]


def test_a_figure_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / "digits.png"

    new_job(tmp_path, None, *HISTORY).plot().savefig(path)

    assert path.read_bytes().startswith(PNG)


def test_a_notebook_displays_a_figure_once(tmp_path: Path) -> None:
    figure = new_job(tmp_path, None, *HISTORY).plot()

    shown, _ = DisplayFormatter().format(figure)

    assert shown["image/png"].startswith(PNG)
    assert figure.canvas.manager is None, "pyplot would display it a second time"


def test_a_job_without_steps_is_an_empty_figure(tmp_path: Path) -> None:
    figure = new_job(tmp_path, None, status("finished")).plot()

    assert list(figure.axes[0].lines[0].get_xdata()) == []


def test_a_worker_that_vanishes_after_its_notice_is_marked_once() -> None:
    assert worker_marks(HISTORY) == [(1, "w3", "lost"), (2, "w1", "preempted")]


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures.figure_class.cache_clear()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(ConfigError, match="needs the package matplotlib") as caught:
        new_job(tmp_path, None, status("finished")).plot()

    assert caught.value.hint.startswith("pip install matplotlib")


@pytest.mark.parametrize(
    ("over", "label", "positions"),
    [
        ("steps", "step", [1, 2, 3]),
        ("samples", "samples", [50, 100, 150]),
        ("time", "seconds", [0.5, 1.0, 1.5]),
        ("usd", "US dollars", [0.5, 1.0, 1.5]),
    ],
)
def test_a_job_is_drawn_over_any_axis(over: str, label: str, positions: list[float]) -> None:
    job = logged_job("a", num_steps=3, scores={"f1": 0.8}, usd_per_worker_h=3600.0)

    figure = figures.plot_job(job, over)

    assert [axis.get_ylabel() for axis in figure.axes] == ["loss", "f1", "learning rate", "workers"]
    assert figure.axes[-1].get_xlabel() == label
    assert list(figure.axes[0].lines[0].get_xdata())[1:] == pytest.approx(positions[1:])
    assert list(figure.axes[1].lines[0].get_ydata()) == [0.8]


@pytest.mark.parametrize(
    ("over", "message"), [("dollars", "unknown axis"), ("usd", "have no prices")]
)
def test_an_axis_that_does_not_exist_is_refused(over: str, message: str) -> None:
    jobs = [logged_job("a"), logged_job("b")]

    with pytest.raises(ConfigError, match=message):
        figures.plot_job(jobs[0], over)
    with pytest.raises(ConfigError, match=message):
        compare_jobs(jobs).plot(over)


def test_jobs_are_drawn_in_the_same_axes_with_their_scaling() -> None:
    jobs = [
        logged_job("one", samples_per_s=100, scores={"$f1$": 0.8}),
        logged_job("four", workers=4, samples_per_s=300, scores={"$f1$": 0.7}),
        logged_job("waiting", num_steps=0),
    ]

    figure = compare_jobs(jobs).plot("time")

    labels = [axis.get_ylabel() for axis in figure.axes]
    assert labels == [
        "loss",
        "loss (evaluation)",
        r"\$f1\$ (evaluation)",
        "workers",
        "samples/s",
        "",
    ]
    assert [line.get_label() for line in figure.axes[0].lines] == ["one", "four"]
    ideal, *measured = figure.axes[4].lines
    assert (list(ideal.get_xdata()), list(ideal.get_ydata())) == ([1, 4], [100, 400])
    assert [line.get_ydata()[0] for line in measured] == pytest.approx([100, 300])
    assert [text.get_text() for text in figure.legends[0].texts] == [
        "one",
        "four",
        "linear scaling",
    ]
    figure.canvas.draw()


def test_chosen_columns_are_drawn() -> None:
    comparison = compare_jobs([logged_job("a"), logged_job("b")])

    figure = comparison.plot(columns=["lr"])

    assert [axis.get_ylabel() for axis in figure.axes] == ["learning rate"]
    with pytest.raises(ConfigError, match="no job has a column 'acuracy'") as caught:
        comparison.plot(columns=["acuracy"])
    assert "loss" in caught.value.hint
