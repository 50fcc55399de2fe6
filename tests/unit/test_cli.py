from __future__ import annotations

import json
from pathlib import Path

import pytest

from etrain_jupyter.cli import main
from etrain_jupyter.log.event_log import EventLog
from etrain_jupyter.log.events import ExhibitStored, JobStatusChanged, JobSubmitted, StepCompleted
from etrain_jupyter.log.exhibits import digest_of, write_exhibit
from etrain_jupyter.notebook.commands.subcommands import subcommands
from etrain_jupyter.notebook.job.run_store import RunStore
from tests.unit.log.spent import PLAIN_STEP
from tests.unit.plugins.planner.planning.measured_jobs import CPU, measured_job


@pytest.fixture(autouse=True)
def _no_jobs_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etrain_jupyter.notebook.job.open_jobs._used", {})


@pytest.fixture
def runs(tmp_path: Path) -> str:
    """Create a run store with one finished job, ``digits-1``, which has an exhibit."""
    record = RunStore(tmp_path).create({"name": "digits", "created": 1.0}, job_id="digits-1")
    log = EventLog(record.log_path, fsync_every_s=None)
    common = {"job_id": "digits-1", "time": 1.0}
    log.append(
        [
            JobSubmitted(**common, name="digits", min_workers=1, max_workers=2),  # type: ignore[arg-type]
            StepCompleted(
                **common,  # type: ignore[arg-type]
                step=1,
                epoch=0,
                first=0,
                samples=4,
                sample_checksum=1,
                loss=0.5,
                lr=0.1,
                world_size=2,
                samples_per_s=10.0,
                **PLAIN_STEP | {"compute_s": 0.4},
            ),
            ExhibitStored(
                **common,  # type: ignore[arg-type]
                step=1,
                name="report",
                format="text",
                size_bytes=4,
                digest=digest_of(b"fine"),
            ),
            JobStatusChanged(**common, status="finished"),  # type: ignore[arg-type]
        ]
    )
    log.close()
    write_exhibit(record.folder, "exhibits/step_00000001/report.txt", b"fine")
    return str(tmp_path)


def test_ls_lists_the_jobs_of_the_given_store(
    runs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--runs", runs, "ls"]) == 0

    assert "digits-1  finished" in capsys.readouterr().out


def test_compare_prints_a_table_and_writes_a_page(
    runs: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "report.html"

    assert main(["--runs", runs, "compare", "digits-1", "--html", str(page)]) == 0

    said = capsys.readouterr().out
    assert said.startswith("JOB     STATUS    WORKERS")
    assert "Name other jobs too: etrain compare JOB JOB" in said
    assert page.exists()


@pytest.mark.plugins
def test_plan_prints_options_and_a_recommendation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = RunStore(tmp_path).create({"name": "net", "created": 1.0}, job_id="net-1")
    log = EventLog(record.log_path, fsync_every_s=None)
    log.append([*measured_job(CPU, [(1, 64), (2, 64)]).events()])
    log.close()

    assert main(["--runs", str(tmp_path), "plan", "net", "--deadline", "1h", "--workers", "4"]) == 0

    said = capsys.readouterr().out
    assert said.startswith("Plan for net-1: 997,440 samples left of 1,000,000")
    assert "Recommended: 1 worker on cpu" in said
    assert "no price is known" in said


def test_diagnose_reports_a_job_without_times_with_what_to_do(
    runs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--runs", runs, "diagnose", "digits-1"]) == 2

    said = capsys.readouterr().err
    assert "no worker has reported its times yet" in said
    assert "try again later" in said


def test_tensorboard_writes_files_for_a_finished_job_and_prints_the_command(
    runs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")

    assert main(["--runs", runs, "tensorboard"]) == 0

    folder = Path(runs) / "digits-1" / "tensorboard"
    said = capsys.readouterr().out
    assert f"In a terminal: tensorboard --logdir {folder}" in said
    assert "The files show the job up to now" in said
    [file] = (folder / "digits-1").iterdir()
    assert b"texts/report" in file.read_bytes()


def test_track_writes_a_finished_job_to_a_logger(
    runs: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    folder = tmp_path / "boards"

    line = ["track", "digits-1", "--to", "tensorboard", "--options", f"folder={folder}"]
    assert main(["--runs", runs, *line]) == 0

    assert f"digits-1 (finished) is in tensorboard (folder: {folder})" in capsys.readouterr().out
    [file] = (folder / "digits-1").iterdir()
    assert b"train/loss" in file.read_bytes()


def test_track_with_an_invalid_option_says_how_to_write_it(
    runs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--runs", runs, "track", "--to", "tensorboard", "--options", "boards"]) != 0

    said = capsys.readouterr().err
    assert "--options boards: this is not a new KEY=VALUE" in said
    assert "write for example --options experiment=digits" in said


def test_runs_option_is_accepted_after_the_subcommand(
    runs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", f"--runs={runs}"]) == 0

    shown = capsys.readouterr().out
    assert "finished" in shown
    assert "0.5" in shown
    assert str(Path(runs) / "digits-1") in shown


def test_store_defaults_to_the_environment_variable(
    runs: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ETRAIN_RUNS", runs)

    assert main(["wait"]) == 0
    assert "digits-1: finished" in capsys.readouterr().out


def test_failure_is_printed_on_stderr_with_exit_status_1(
    runs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--runs", runs, "stop", "mnist"]) == 1

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("etrain: no job 'mnist'")


def test_messages_in_the_terminal_name_terminal_commands(
    runs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--runs", runs, "scale", "2"]) == 1
    assert main(["--runs", runs, "stop", "mnist"]) == 1
    assert main(["--runs", str(tmp_path / "empty"), "stop"]) == 1

    shown = capsys.readouterr().err
    assert "etrain ls lists the running jobs." in shown
    assert "etrain ls lists the jobs." in shown
    assert "%etrain ls" not in shown
    assert "Run a %%etrain distributed cell first" in shown, "only a notebook can do this"
    assert "(1 job there)" in shown


@pytest.mark.plugins
def test_simulate_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, written = tmp_path / "market.csv", tmp_path / "runs.json"
    trace.write_text("seconds,capacity\n0,2\n3600,1\n7200,2\n36000,2\n")
    line = (
        f"simulate --trace {trace} --workers 2 --work 1h --deadline 2h --starts 2 --json {written}"
    )

    assert main([*line.split(), "--policy", "deadline,uniform-gang"]) == 0

    shown = capsys.readouterr().out
    assert "deadline      " in shown
    assert "uniform-gang  " in shown
    assert "a spot machine costs 30% of one on demand" in shown
    assert len(json.loads(written.read_text())["runs"]) == 4


@pytest.mark.plugins
def test_simulate_without_the_trace_has_exit_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--trace", str(tmp_path / "none.csv")]) == 1

    assert "none.csv does not exist" in capsys.readouterr().err


def test_unknown_word_without_a_similar_command_has_no_suggestion(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["foo"]) == 2

    assert capsys.readouterr().err == (
        "etrain: unknown sub-command: etrain foo\n  etrain --help lists all sub-commands\n"
    )


def test_failed_audit_has_exit_status_1(runs: str, capsys: pytest.CaptureFixture[str]) -> None:
    # The only step of this log contains samples that do not start an epoch.
    assert main(["--runs", runs, "audit"]) == 1

    assert "audit FAILED" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["stpo"],
        ["stop", "--nwo"],
        ["--runs"],
        ["distributed"],
        ["attach", "digits"],
        ["plan", "--deadline", "soon"],
        ["plan", "--workers", "0"],
        ["simulate"],
        ["simulate", "--trace", "x.csv", "--gaps", "guess"],
        ["simulate", "--trace", "x.csv", "--policy", "best"],
        ["simulate", "--trace", "x.csv", "--workers", "0"],
    ],
)
def test_usage_error_has_exit_status_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2

    assert capsys.readouterr().err.startswith("etrain: ")


@pytest.mark.parametrize("name", [c.name for c in subcommands() if not c.is_for_notebooks_only])
def test_each_subcommand_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0

    assert capsys.readouterr().out.startswith(f"usage: etrain {name}")


def test_overview_omits_commands_that_need_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0

    shown = capsys.readouterr().out
    assert "attach" not in shown
    assert "%" not in shown


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0

    assert capsys.readouterr().out.startswith("etrain 0.")
