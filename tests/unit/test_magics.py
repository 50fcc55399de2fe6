from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import etrain_jupyter
from etrain_jupyter import launch, magics
from etrain_jupyter.errors import ConfigError, JobFailedError, PoolError
from etrain_jupyter.log.event_log import EventLog
from etrain_jupyter.log.events import (
    Event,
    FaultInjected,
    JobPlanned,
    JobStatusChanged,
    JobSubmitted,
    LogLine,
    RankTimed,
    StepCompleted,
    WorkerLost,
)
from etrain_jupyter.magics import give_empty_body, split_line
from etrain_jupyter.notebook import display
from etrain_jupyter.notebook.commands.subcommands import Subcommand, subcommands
from etrain_jupyter.notebook.dashboard import widget
from etrain_jupyter.notebook.dashboard.link import PanelComm
from etrain_jupyter.notebook.job import open_jobs, plan
from etrain_jupyter.notebook.job.job_record import RunRecord
from etrain_jupyter.notebook.job.plan import Plan
from etrain_jupyter.notebook.job.run_store import RunStore
from etrain_jupyter.notebook.job.training_job import TrainingJob
from tests.unit.log.spent import NOTHING_ELSE, PLAIN_STEP

BODY = """\
model: Net()
data: {train: train_set}
loss: loss
epochs: 2
batch: {global: 8}
workers: {min: 1, max: 2}
"""
NOTEBOOK = """\
class Net:
    def forward(self): ...
    def state_dict(self): ...
def loss(output, target): return 0.0
train_set = [(i, i) for i in range(32)]
x = "expanded"
"""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    monkeypatch.setenv("ETRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setattr("etrain_jupyter.notebook.job.open_jobs._used", {})
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    shell = InteractiveShell(config=config)
    etrain_jupyter.load_ipython_extension(shell)
    yield shell
    etrain_jupyter.unload_ipython_extension(shell)
    shell.restore_sys_module_state()


@pytest.fixture
def run(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[bool, str]]:
    """Run a cell and return whether it succeeded and what it showed."""

    def run(code: str) -> tuple[bool, str]:
        capsys.readouterr()
        result = shell.run_cell(code)
        return bool(result.success), capsys.readouterr().out

    return run


Run = Callable[[str], tuple[bool, str]]
Show = Callable[[str], str]


@pytest.fixture
def passed(run: Run) -> Show:
    """Run a cell that succeeds and return what it showed."""

    def passed(code: str) -> str:
        is_ok, shown = run(code)
        assert is_ok, shown
        return shown

    return passed


@pytest.fixture
def refused(run: Run) -> Show:
    """Run a cell that fails and return what it showed."""

    def refused(code: str) -> str:
        is_ok, shown = run(code)
        assert not is_ok, shown
        return shown

    return refused


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Let nothing be submitted; return what would have been."""
    plans: list[Plan] = []

    def submit(plan: Plan) -> TrainingJob:
        plans.append(plan)
        return make_job(name=plan.config.name or "net")

    monkeypatch.setattr(launch, "submit", submit)
    monkeypatch.setattr(magics, "show", lambda job: print(f"dashboard of {job.name}"))
    return plans


def make_job(
    *events: Event,
    name: str = "digits",
    created: float = 1.0,
    cluster: dict[str, str] | None = None,
) -> TrainingJob:
    """Put a finished job into the run store."""
    values = {"name": name, "created": created, "cluster": cluster or {}}
    record: RunRecord = RunStore().create(values)
    log = EventLog(record.log_path, fsync_every_s=None)
    first = JobSubmitted(job_id=record.job_id, time=1.0, name=name, min_workers=1, max_workers=2)
    last = JobStatusChanged(job_id=record.job_id, time=2.0, status="finished")
    log.append([first, *(events or [last])])
    log.close()
    return TrainingJob(record, None)


def test_load_ext_registers_and_unload_ext_removes(shell: InteractiveShell) -> None:
    assert "etrain" in shell.magics_manager.magics["cell"]

    etrain_jupyter.unload_ipython_extension(shell)

    assert "etrain" not in shell.magics_manager.magics["cell"]
    assert "etrain" not in shell.magics_manager.magics["line"]
    assert give_empty_body not in shell.input_transformers_cleanup


def test_loading_in_a_terminal_opens_no_comm(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = PanelComm()
    monkeypatch.setattr(display, "link", lambda: made)

    etrain_jupyter.load_ipython_extension(shell)

    assert made._comm is None


@pytest.fixture
def posted(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> tuple[PanelComm, list[dict[str, Any]]]:
    """Load into a kernel with a front end; return its link and what the latter hears."""
    made, heard = PanelComm(), list[dict[str, Any]]()
    monkeypatch.setattr(made, "open", lambda: None)
    monkeypatch.setattr(made.panel, "_post", heard.append)
    for module in (display, widget):
        monkeypatch.setattr(module, "link", lambda: made)
    monkeypatch.setattr("etrain_jupyter.notebook.dashboard.browser.has_front_end", lambda: True)
    for module in (launch, magics, display):
        monkeypatch.setattr(module, "has_front_end", lambda: True)
    etrain_jupyter.load_ipython_extension(shell)
    return made, heard


def test_the_side_panel_gets_the_template_that_the_magic_prints(
    posted: tuple[PanelComm, list[dict[str, Any]]], run: Run
) -> None:
    made, heard = posted
    _, printed = run("%etrain template")

    made.panel.receive({"ask": "template", "view": "v"})

    assert heard[-1]["text"].split("\n", 1) == ["%%etrain distributed", printed.rstrip("\n") + "\n"]


def test_job_attached_from_the_side_panel_is_listed_but_not_the_latest(
    posted: tuple[PanelComm, list[dict[str, Any]]], run: Run
) -> None:
    made, heard = posted
    elsewhere, mine = make_job(name="elsewhere"), make_job(name="mine", created=2.0)
    open_jobs.attach("mine")

    made.panel.receive({"ask": "attach", "job_id": elsewhere.id, "view": "v"})
    made.panel.receive({"ask": "attach", "job_id": "nobody", "view": "v"})

    assert heard[0] == {"tell": "answer", "to": "v", "level": "info", "text": ""}
    assert "no job 'nobody'" in heard[1]["text"]
    assert list(made.panel._jobs) == [elsewhere.id]
    assert open_jobs.attach(None).id == mine.id


def test_a_quiet_cell_lists_its_job_and_shows_nothing(
    posted: tuple[PanelComm, list[dict[str, Any]]], run: Run, submitted: list[Plan]
) -> None:
    made, _ = posted
    run(NOTEBOOK)

    assert run(f"%%etrain distributed --quiet\n{BODY}") == (True, "")
    assert len(made.panel._jobs) == 1


@pytest.mark.parametrize("line", ["", " --help", " -h"])
def test_overview_names_every_subcommand(passed: Show, line: str) -> None:
    shown = passed(f"%etrain{line}")

    assert [c.name for c in subcommands() if c.name not in shown] == []
    assert "%%etrain distributed" in shown


@pytest.mark.parametrize("line", ["%etrain show ?", "%%etrain show --help", "%%etrain show?\nx"])
def test_help_of_a_subcommand_has_several_forms_and_starts_nothing(passed: Show, line: str) -> None:
    shown = passed(line)

    assert shown.startswith("usage: %etrain show [-h] [-o VAR] [job]")


@pytest.mark.parametrize("command", [c for c in subcommands() if c.example], ids=lambda c: c.name)
def test_example_in_the_help_of_a_subcommand_is_valid(command: Subcommand) -> None:
    name, *words = command.example.split()
    parser = command.parser("%etrain")

    assert name == command.name
    assert parser.parse_args(words)
    assert f"example: %etrain {command.example}" in " ".join(parser.format_help().split())


@pytest.mark.parametrize(
    "line",
    [
        "%%etrain distributed --help",
        "%%etrain distributed --help\nmodel: Net",
        "%%etrain distributed ?\n" + BODY,
        "%%etrain distributed?\n" + BODY,
        "%%etrain distributed --name x --help\n" + BODY,
        "%etrain distributed --help",
    ],
)
def test_help_of_the_cell_has_flags_keys_and_an_example_and_starts_nothing(
    passed: Show, submitted: list[Plan], line: str
) -> None:
    shown = passed(line)

    assert shown.startswith("usage: %%etrain distributed")
    assert "--dry-run" in shown
    assert "checkpoint.keep          whole number, 1 or more; default 3" in shown
    assert "    %%etrain distributed --name digits -o job\n    model: Net()\n" in shown
    assert submitted == []


def test_a_name_that_ends_in_a_question_mark_is_a_name(run: Run, submitted: list[Plan]) -> None:
    run(NOTEBOOK)

    run("%%etrain distributed --name really?\n" + BODY)

    assert [plan.config.name for plan in submitted] == ["really?"]


@pytest.mark.parametrize("line", ["%etrain?", "%%etrain?"])
def test_a_question_mark_shows_every_subcommand_and_an_example(passed: Show, line: str) -> None:
    shown = passed(line)

    assert [c.name for c in subcommands() if f"  {c.name} " not in shown] == []
    assert "%%etrain distributed --name digits -o job" in shown


def test_unknown_subcommand_suggests_the_nearest_and_fails_the_cell(run: Run) -> None:
    assert run("%etrain stpo") == (
        False,
        "etrain: unknown sub-command: %etrain stpo\n  did you mean %etrain stop?\n",
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%etrain scale four", "argument N: invalid int value: 'four'"),
        ("%etrain stop --nwo", "unrecognized arguments: --nwo"),
        ("%etrain scale", "scale needs a number of workers"),
        ("%etrain scale 2 --max 3", "not both"),
        ("%etrain show 'digits", "No closing quotation"),
        ("%etrain distributed", "needs a body"),
        (
            "%etrain distributed -o job\nmodel: Net()\nloss: F.mse_loss\nepochs: 3 h\n",
            "two percent signs",
        ),
        pytest.param(
            "%etrain search\nmodel: Net()\nepochs: 3 h\n",
            "two percent signs: %%etrain search",
            marks=pytest.mark.plugins,
        ),
        ("%%etrain distributed --worker 4\nmodel: Net\n", "add 'workers: {min: 1, max: 4}'"),
        (
            "%%etrain distributed --batch-size 4\nmodel: Net\n",
            "in the body, use 'batch: {global: N}'",
        ),
        ("%%etrain distributed", "key 'model' is missing"),
        ("%%etrain ls\nmodel: Net\n", "ls does not accept a body"),
        ("%%etrain distribute\nmodel: Net\n", "unknown sub-command: %%etrain distribute"),
        ("%%etrain distributed --nmae a\nmodel: Net\n", "did you mean --name?"),
        ("%%etrain distributed -o 2x\nmodel: Net\n", "not a valid variable name"),
    ],
)
def test_mistyped_line_fails_the_cell_without_frames(refused: Show, line: str, words: str) -> None:
    shown = refused(line)

    assert words in shown
    assert shown.startswith("etrain: ")
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            "preempt --notice -3",
            "--notice -3: a duration is 0 or more\n  write for example --notice 15s",
        ),
        (
            "preempt --notice soon",
            "--notice soon: this is not a duration\n  write for example --notice 15s",
        ),
        (
            "chaos --mtbf 0",
            "--mtbf 0: this duration must be above 0\n  write for example --mtbf 15s",
        ),
        (
            "chaos --duration nan",
            "--duration nan: this is not a duration\n  write for example --duration 15s",
        ),
        (
            "chaos --mtbf 3steps",
            "--mtbf 3steps: this is not a duration\n  write for example --mtbf 15s",
        ),
        (
            "logs -n -4",
            "-n -4: this must be a whole number of 1 or more\n  write for example -n 50",
        ),
        ("ls -n 0", "-n 0: this must be a whole number of 1 or more\n  write for example -n 50"),
        (
            "preempt --notice",
            "%etrain preempt: argument --notice: expected one argument\n"
            "  --notice TIME: time until the worker ends, for example 2min (120s)",
        ),
    ],
)
def test_wrong_value_is_refused_with_a_remedy(run: Run, line: str, shown: str) -> None:
    make_job()

    assert run(f"%etrain {line}") == (False, f"etrain: {shown}\n")


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("preempt w1 --notice 5s", {"notice_s": 5.0}),
        ("preempt w1 --notice 2min", {"notice_s": 120.0}),
        ("preempt w1 --notice 7", {"notice_s": 7.0}),
        ("preempt w1", {"notice_s": 120.0}),
        (
            "chaos --mtbf 15 --duration 5min",
            {"mtbf_s": 15.0, "mode": "mix", "duration_s": 300.0, "seed": None},
        ),
        ("wait --timeout 1.5", {"timeout": 1.5}),
    ],
)
def test_bare_number_is_seconds_and_units_work_everywhere(
    run: Run, monkeypatch: pytest.MonkeyPatch, line: str, call: dict[str, Any]
) -> None:
    calls: list[dict[str, Any]] = []

    def note(job: TrainingJob, *_: Any, **keys: Any) -> str:
        calls.append(keys)
        return "noted"

    make_job()
    for name in ("preempt", "chaos"):
        monkeypatch.setattr(TrainingJob, name, note)
    monkeypatch.setattr(
        "etrain_jupyter.notebook.commands.subcommands.wait_for",
        lambda job, timeout: note(job, timeout=timeout),
    )

    assert run(f"%etrain {line}") == (True, "noted\n")
    assert calls == [call]


def test_wrong_cell_shows_line_and_caret_and_nothing_else(refused: Show) -> None:
    shown = refused("%%etrain distributed\nmodel: Net\noptimiser: {name: adam}\n")

    assert shown == (
        "etrain: line 3, column 1: unknown key 'optimiser'\n"
        "    3 | optimiser: {name: adam}\n"
        "      | ^^^^^^^^^\n"
        "  did you mean 'optimizer'?\n"
    )


def test_error_keeps_its_type_for_programs(shell: InteractiveShell) -> None:
    result = shell.run_cell("%%etrain distributed\nmodle: Net\n", silent=True)

    assert isinstance(result.error_in_exec, etrain_jupyter.CellError)
    assert result.error_in_exec.line == 2


def test_unexpected_exception_keeps_its_traceback(
    refused: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(magics, "attach", fail)

    shown = refused("%etrain show")

    assert "Traceback" in shown
    assert "a mistake of ours" in shown


def test_cell_submits_shows_and_binds(
    run: Run, shell: InteractiveShell, submitted: list[Plan]
) -> None:
    run(NOTEBOOK)

    is_ok, shown = run(f"%%etrain distributed --name digits -o job   # the first try\n{BODY}")

    assert (is_ok, shown) == (True, "dashboard of digits\n")
    assert isinstance(shell.user_ns["job"], TrainingJob)
    assert submitted[0].config.name == "digits"
    assert submitted[0].cell == BODY


def test_cell_without_out_binds_nothing(
    run: Run, shell: InteractiveShell, submitted: list[Plan]
) -> None:
    run(NOTEBOOK)
    run(f"%%etrain distributed --quiet\n{BODY}")

    assert len(submitted) == 1
    assert "job" not in shell.user_ns


def test_line_is_taken_literally(run: Run, submitted: list[Plan]) -> None:
    run(NOTEBOOK)
    run(f"%%etrain distributed --quiet --name '{{x}} $x'\n{BODY}")

    assert submitted[0].config.name == "{x} $x"


def test_dry_run_shows_the_plan_and_submits_nothing(
    run: Run, passed: Show, submitted: list[Plan]
) -> None:
    run(NOTEBOOK)

    shown = passed(f"%%etrain distributed --dry-run\n{BODY}")

    assert "Nothing was submitted" in shown
    assert "2 epochs of batch 8" in shown
    assert "1 to 2 of pool local" in shown
    assert "train_set" in shown
    assert submitted == []
    assert RunStore().records() == []


def test_dry_run_counts_the_parameters_of_a_model_of_the_notebook(run: Run) -> None:
    run(
        f"{NOTEBOOK}from torch import nn\nlayer = nn.Linear(3, 2)\nlayer.bias.requires_grad = False"
    )

    _, shown = run(f"%%etrain distributed --dry-run\n{BODY.replace('Net()', 'layer')}")

    assert "layer, 6 of 8 parameters trained" in shown


def test_dry_run_says_why_fewer_workers_than_asked_for_can_train(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "num_usable_cores", lambda: 2)
    run(NOTEBOOK)

    _, shown = run(f"%%etrain distributed --dry-run\n{BODY.replace('max: 2', 'max: 500')}")

    assert (
        "1 to 8 of pool local (not 500: each needs one of the 8 samples of a step), which share "
        "the 2 cores of this machine\n"
    ) in shown


def test_waiting_cell_of_a_failed_job_shows_the_users_traceback(
    run: Run, refused: Show, submitted: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(job: TrainingJob) -> None:
        raise JobFailedError("job digits failed", traceback="Cell In[1], line 4\nValueError: no")

    monkeypatch.setattr(TrainingJob, "raise_for_status", fail)
    run(NOTEBOOK)

    shown = refused(f"%%etrain distributed --wait --quiet\n{BODY}")

    assert shown == "Cell In[1], line 4\nValueError: no\netrain: job digits failed\n"


def test_ls_lists_the_newest_first(passed: Show) -> None:
    old, new = make_job(name="old", created=1.0), make_job(name="new", created=2.0)

    shown = passed("%etrain ls")

    lines = shown.splitlines()
    assert lines[0].split() == ["JOB", "STATUS", "STEP", "WORKERS", "SUBMITTED"]
    assert [line.split()[0] for line in lines[1:]] == [new.id, old.id]
    assert lines[1].split()[1] == "finished"


def test_ls_shows_when_a_job_of_an_unknown_cluster_was_last_seen(run: Run) -> None:
    foreign = {"cluster_id": "Scheduler-1", "address": "tcp://10.9.9.9:8786"}
    job = make_job(JobStatusChanged(job_id="digits", time=2.0, status="running"), cluster=foreign)
    three_hours_ago = time.time() - 3 * 3600
    os.utime(job.record.log_path, (three_hours_ago, three_hours_ago))

    _, shown = run("%etrain ls")

    assert "running (last seen 3 h ago)" in shown


def test_ls_shows_that_the_cluster_of_a_job_has_ended(run: Run) -> None:
    make_job(JobStatusChanged(job_id="digits", time=2.0, status="running"))

    assert "failed (its cluster has ended)" in run("%etrain ls")[1]


def test_ls_trusts_a_job_that_has_just_written_its_log(run: Run) -> None:
    foreign = {"cluster_id": "Scheduler-1", "address": "tcp://10.9.9.9:8786"}
    make_job(JobStatusChanged(job_id="digits", time=2.0, status="running"), cluster=foreign)

    assert "last seen" not in run("%etrain ls")[1]


def test_empty_store_has_a_plain_message(run: Run) -> None:
    assert run("%etrain ls")[1].startswith("No jobs in ")
    assert "there is no job in" in run("%etrain show")[1]


def test_attach_binds_the_job_and_later_lines_use_it(run: Run, shell: InteractiveShell) -> None:
    old, _ = make_job(name="old", created=1.0), make_job(name="new", created=2.0)

    run("%etrain attach old -o mine")

    assert shell.user_ns["mine"].id == old.id
    assert run("%etrain stop") == (True, f"{old.id} has already finished\n")


@pytest.mark.parametrize("line", ["show old -o mine", "resume old -o mine", "attach old -o mine"])
def test_attach_resume_and_show_bind_the_job_to_a_variable(
    passed: Show, shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setattr(TrainingJob, "resume", lambda self, **values: "resuming")
    old, _ = make_job(name="old", created=1.0), make_job(name="new", created=2.0)

    passed(f"%etrain {line}")

    assert shell.user_ns["mine"].id == old.id


@pytest.mark.parametrize("line", ["show -o 2x", "resume -o 2x", "attach -o 2x"])
def test_a_variable_that_is_not_a_name_is_refused_before_anything_is_done(
    refused: Show, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setattr(TrainingJob, "resume", lambda self, **values: pytest.fail("resumed"))
    make_job()

    assert "-o 2x: this is not a valid variable name" in refused(f"%etrain {line}")


def test_error_for_an_unknown_job_suggests_the_nearest(refused: Show) -> None:
    make_job(name="digits")

    assert "Did you mean digits" in refused("%etrain wait digist")


def test_wait_reports_how_the_job_ended(passed: Show) -> None:
    make_job(name="digits")

    assert ": finished, step 0" in passed("%etrain wait")


def test_wait_for_a_stopped_job_fails_the_cell_with_the_reason(refused: Show) -> None:
    job = make_job(JobStatusChanged(job_id="digits", time=2.0, status="stopped"))

    assert f"etrain: job {job.id} was stopped at step 0." in refused("%etrain wait")


def test_request_to_an_ended_job_fails_the_cell(refused: Show) -> None:
    make_job(name="digits")

    assert "has finished: there is nothing to scale" in refused("%etrain scale 2")


@pytest.mark.parametrize("flag", ["--workers", "--max"])
def test_resume_accepts_both_names_of_the_max_workers_option(
    passed: Show, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(TrainingJob, "resume", lambda self, **values: asked.append(values) or "")
    make_job(name="digits")

    passed(f"%etrain resume digits {flag} 8")

    assert asked[0]["max"] == 8


def test_resume_trusts_a_job_only_with_the_trust_flag(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Review S2."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(TrainingJob, "resume", lambda self, **values: asked.append(values) or "")
    make_job(name="digits")

    for line in ("%etrain resume digits", "%etrain resume digits --trust"):
        is_ok, shown = run(line)
        assert is_ok, shown

    assert [values["trust"] for values in asked] == [False, True]


def test_cell_that_resumes_a_strangers_job_needs_trust(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Review S2."""
    asked: list[tuple[bool, bool]] = []
    monkeypatch.setattr(
        launch,
        "resume",
        lambda job, plan, *, is_forced, is_trusted: asked.append((is_forced, is_trusted)) or "",
    )
    monkeypatch.setattr(magics, "show", lambda job: None)
    make_job(name="digits")
    run(NOTEBOOK)

    for flags in ("", "--trust", "--trust --force"):
        is_ok, shown = run(f"%%etrain distributed --resume digits {flags}\n{BODY}")
        assert is_ok, shown

    assert asked == [(False, False), (False, True), (True, True)]


@pytest.mark.parametrize("flag", ["--force", "--trust"])
def test_flag_without_resume_is_refused_before_the_cell_is_checked(
    refused: Show, flag: str
) -> None:
    assert f"{flag} requires --resume" in refused(f"%%etrain distributed {flag}\nno: cell\n")


@pytest.mark.parametrize(
    ("flags", "body", "name"),
    [
        ("-o mine", "", "mine"),
        ("-o mine --name other", "", "other"),
        ("-o mine", "name: third\n", "third"),
        ("", "", None),
    ],
)
def test_variable_names_a_job_that_has_no_name(
    run: Run, passed: Show, submitted: list[Plan], flags: str, body: str, name: str | None
) -> None:
    run(NOTEBOOK)

    passed(f"%%etrain distributed {flags}\n{BODY}{body}")

    assert submitted[0].config.name == name


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("resume 'digits #2' --max 2 # twice", ["resume", "digits #2", "--max", "2"]),
        ('show "a # b"', ["show", "a # b"]),
        ("show a#b", ["show", "a#b"]),
        ("show # don't", ["show"]),
        ("# nothing", []),
        ("", []),
    ],
)
def test_number_sign_within_quotes_does_not_start_a_comment(line: str, words: list[str]) -> None:
    assert split_line(line) == words


@pytest.mark.parametrize("command", ["kill", "preempt"])
def test_error_explains_a_job_given_in_place_of_a_worker(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def refuse(job: TrainingJob, worker: str | None = None, **_: Any) -> str:
        raise PoolError(f"no worker {worker!r} in this job; there are: w0, w1")

    monkeypatch.setattr(TrainingJob, command, refuse)
    make_job(name="digits")

    is_ok, shown = run(f"%etrain {command} digits")
    _, other = run(f"%etrain {command} w7")

    assert not is_ok
    assert shown == (
        "etrain: no worker 'digits' in this job; there are: w0, w1. 'digits' is a job: "
        f"%etrain {command} --job digits\n"
    )
    assert other == "etrain: no worker 'w7' in this job; there are: w0, w1\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("chaos", "has finished: there is no worker left to disturb"),
        ("kill", "has finished: there is no worker left to kill"),
        ("kill --how stop", "has finished: there is no worker left to disturb"),
        ("preempt", "has finished: there is no worker left to preempt"),
    ],
)
def test_fault_of_an_ended_job_is_refused_in_plain_words(
    refused: Show, line: str, words: str
) -> None:
    make_job()

    assert words in refused(f"%etrain {line}")


def test_logs_show_the_last_lines(run: Run) -> None:
    lines: list[Event] = [
        LogLine(job_id="j", time=1.0, level="info", worker="w1", text=f"line {n}") for n in range(3)
    ]
    make_job(*lines, JobStatusChanged(job_id="j", time=1.0, status="finished"))

    _, shown = run("%etrain logs -n 2")

    assert [line.split(": ")[1] for line in shown.splitlines()] == ["line 1", "line 2"]


def test_logs_include_faults_and_losses(run: Run) -> None:
    make_job(
        LogLine(job_id="j", time=1.0, level="info", worker="w1", text="hello"),
        FaultInjected(job_id="j", time=2.0, worker="w1", fault="kill", step=3),
        WorkerLost(job_id="j", time=3.0, worker="w1", cause="ended by SIGKILL"),
        LogLine(job_id="j", time=4.0, level="info", worker="w0", text="I go on"),
        JobStatusChanged(job_id="j", time=5.0, status="finished"),
    )

    _, shown = run("%etrain logs")

    assert [line[9:] for line in shown.splitlines()] == [
        "info    w1: hello",
        "warning Fault kill injected into w1",
        "error   w1 lost (ended by SIGKILL)",
        "info    w0: I go on",
    ]


def test_logs_show_the_time_split_of_each_worker(run: Run) -> None:
    times = {"data_s": 0.1, "compute_s": 7.0, "communication_s": 2.0, "optimizer_s": 0.5}
    make_job(
        RankTimed(
            **{"job_id": "j", "time": 1.0, "worker": "w1", "rank": 0, "world_size": 2},
            **{"step": 1200, "num_steps": 400, "samples": 3200, "elapsed_s": 10.0, **times},
            **{**NOTHING_ELSE, "evaluation_s": 1.5},
        ),
        RankTimed(
            **{"job_id": "j", "time": 2.0, "worker": "w1", "rank": 0, "world_size": 2},
            **{"step": 1200, "num_steps": 0, "samples": 0, "elapsed_s": 0.0},
            **dict.fromkeys(times, 0.0),
            **{**NOTHING_ELSE, "evaluation_s": 0.25},
        ),
        JobStatusChanged(job_id="j", time=5.0, status="finished"),
    )

    _, shown = run("%etrain logs")

    assert [line[9:] for line in shown.splitlines()] == [
        "info    w1: 400 steps to 1,200 at 320 samples/s: data 1%, forward and backward 70%, "
        "communication 20%, optimizer 5%; evaluation 1.5 s",
        "info    w1: after step 1,200: evaluation 250 ms",
    ]


def steps(job_id: str, workers: int) -> list[Event]:
    """Return two steps of 8 samples that take 1 s each, and the end of the job."""
    common: dict[str, Any] = {"job_id": job_id}
    return [
        *(
            StepCompleted(
                **common, time=10.0 + number, step=number, epoch=0, first=0, samples=8 * workers,
                sample_checksum=0, loss=1.0, lr=0.1, world_size=workers,
                **PLAIN_STEP | {"compute_s": 1.0},
                samples_per_s=8.0 * workers,
            )
            for number in (1, 2)
        ),
        JobStatusChanged(**common, time=13.0, status="finished"),
    ]  # fmt: skip


def test_compare_displays_a_table_and_writes_a_page(passed: Show, tmp_path: Path) -> None:
    one = make_job(*steps("one", 1), name="one")
    make_job(*steps("four", 4), name="four", created=2.0)
    page = tmp_path / "report.html"

    shown = passed(f"%etrain compare {one.id} four --html {shlex.quote(str(page))}")

    assert "one   1        8      8          1.0x      1.00" in shown
    assert "four  4        32     32         4.0x      1.00" in shown
    assert shown.endswith(f"The page is in {page}\n")
    assert "Comparison of 2 jobs" in page.read_text(encoding="utf-8")


def test_compare_without_names_takes_the_newest_jobs_with_the_latest_name(passed: Show) -> None:
    make_job(*steps("a", 1), name="other", created=1.0)
    old = make_job(*steps("b", 1), name="net", created=2.0)
    new = make_job(*steps("c", 2), name="net", created=3.0)

    shown = passed("%etrain compare")

    assert shown.index(old.id) < shown.index(new.id)
    assert "other" not in shown


def test_compare_does_not_change_the_latest_job(run: Run) -> None:
    old = make_job(*steps("a", 1), name="old", created=1.0)
    make_job(*steps("b", 1), name="new", created=2.0)
    run("%etrain show new")

    run(f"%etrain compare {old.id}")

    assert "new" in run("%etrain cost")[1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%etrain compare digts", "no job 'digts'"),
        ("%etrain compare digits --html report.txt", "report.txt does not end in .html"),
        ("%etrain compare digits --html missing/x.html", "missing/x.html cannot be written"),
    ],
)
def test_compare_refuses_what_it_cannot_do(refused: Show, line: str, message: str) -> None:
    make_job(*steps("digits", 1))

    assert message in refused(line)


@pytest.mark.parametrize("wrong", [[], [3], 3])
def test_compare_from_python_takes_jobs_and_names(run: Run, wrong: Any) -> None:
    job = make_job(*steps("digits", 1))

    comparison = etrain_jupyter.compare([job, job.id])
    assert [row["id"] for row in comparison.rows] == [job.id]
    assert str(etrain_jupyter.compare("digits")) == str(etrain_jupyter.compare(job))

    with pytest.raises(ConfigError, match=r"compare\(\) received"):
        etrain_jupyter.compare(wrong)


@pytest.mark.plugins
def test_plan_displays_its_options(passed: Show) -> None:
    make_job(planned("net"), *steps("net", 2), name="net")

    shown = passed("%etrain plan net --deadline 1h")

    assert "Plan for " in shown
    assert "Recommended: " in shown


def planned(job_id: str) -> Event:
    """Return the plan of a job of 1,600 samples."""
    return JobPlanned(
        job_id=job_id, time=1.0, num_train_samples=160, num_eval_samples=0, global_batch_size=16,
        steps_per_epoch=10, total_steps=100, num_parameters=1000,
        num_trained_parameters=1000, total_samples=1600,
    )  # fmt: skip


@pytest.mark.plugins
def test_plan_of_a_cell_refuses_the_name_of_a_job(refused: Show) -> None:
    assert "%%etrain plan digits: the body and the name are two jobs" in refused(
        "%%etrain plan digits --deadline 1h\nmodel: Net\n"
    )


@pytest.mark.plugins
def test_plan_of_a_cell_checks_its_body_first(refused: Show) -> None:
    assert "'model'" in refused("%%etrain plan --deadline 1h\nmodle: Net\n")


@pytest.mark.plugins
def test_plan_of_a_cell_is_for_the_whole_job(
    run: Run, passed: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiled = make_job(planned("net"), *steps("net", 1), name="net-profile")
    seen = []

    def submit_and_measure(plan: Plan) -> TrainingJob:
        seen.append(plan.config.model)
        return profiled

    monkeypatch.setattr(launch, "profile", submit_and_measure)
    run("import torch; Net = torch.nn.Linear(2, 2); xs = torch.zeros(4, 2)")

    shown = passed(
        "%%etrain plan --deadline 1h --workers 2\nmodel: Net\ndata: {train: xs}\nloss: mse\n"
        "epochs: 1\n".replace("mse", "torch.nn.functional.mse_loss")
    )

    assert seen == ["Net"]
    assert "profiling the cell on pool local for at most a minute" in shown
    assert "1,600 samples, predicted from 2 steps" in shown


def test_plan_does_not_change_the_latest_job(run: Run) -> None:
    old = make_job(planned("a"), *steps("a", 1), name="old", created=1.0)
    make_job(*steps("b", 1), name="new", created=2.0)
    run("%etrain show new")

    run(f"%etrain plan {old.id}")

    assert "new" in run("%etrain cost")[1]


@pytest.mark.plugins
def test_plan_from_python_takes_a_job_or_its_name(run: Run) -> None:
    job = make_job(planned("net"), *steps("net", 1), name="net")

    assert str(etrain_jupyter.plan(job)) == str(etrain_jupyter.plan("net"))
    assert {o.machine for o in etrain_jupyter.plan(job).options} == {"unknown"}
    with pytest.raises(ConfigError, match=r"plan\(\) received 'int'"):
        etrain_jupyter.plan(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="on any of g5"):
        etrain_jupyter.plan(job, types="g5.xlarge,g6.xlarge")


@pytest.mark.plugins
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%etrain plan digts", "no job 'digts'"),
        ("%etrain plan digits", "has 0 completed steps"),
        ("%etrain plan digits --budget -3", "US dollars above 0"),
        ("%etrain plan digits --deadline soon", "not a duration"),
        ("%etrain plan digits --pool moon", "has 0 completed steps"),
    ],
)
def test_plan_refuses_what_it_cannot_do(refused: Show, line: str, message: str) -> None:
    make_job(planned("digits"), name="digits")

    assert message in refused(line)


def slow_data(num_steps: int = 100) -> list[Event]:
    """Return a step and the times of a worker that waits for samples half of the time."""
    common: dict[str, Any] = {"job_id": "j", "time": 1.0, "world_size": 1, "step": num_steps}
    times = {"data_s": 5.0, "compute_s": 5.0, "communication_s": 0.0, "optimizer_s": 0.0}
    report = RankTimed(
        **common, worker="w0", rank=0, num_steps=num_steps, samples=800, elapsed_s=10.0,
        **times, **NOTHING_ELSE,
    )  # fmt: skip
    return [report, JobStatusChanged(job_id="j", time=5.0, status="finished")]


def test_diagnose_displays_the_verdict_and_the_same_from_python(passed: Show) -> None:
    job = make_job(*slow_data())

    shown = passed("%etrain diagnose digits")

    assert "input-bound (medium confidence)" in shown
    assert str(etrain_jupyter.diagnose(job)) in shown
    assert str(etrain_jupyter.diagnose("digits")) == str(etrain_jupyter.diagnose())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%etrain diagnose digts", "no job 'digts'"),
        ("%etrain diagnose digits", "has no steps (status finished)"),
    ],
)
def test_diagnose_refuses_what_it_cannot_do(refused: Show, line: str, message: str) -> None:
    make_job(JobStatusChanged(job_id="j", time=5.0, status="finished"))

    assert message in refused(line)


def test_diagnose_from_python_refuses_another_object(run: Run) -> None:
    with pytest.raises(ConfigError, match=r"diagnose\(\) received 'int'"):
        etrain_jupyter.diagnose(3)  # type: ignore[arg-type]


def test_audit_prints_its_report(passed: Show) -> None:
    make_job()

    shown = passed("%etrain audit")

    assert shown.startswith("audit")


def test_doctor_checks_every_component(passed: Show) -> None:
    shown = passed("%etrain doctor")

    for word in ("Python", "torch", "distributed", "jupyterlab", "TLS", "run store", "cluster"):
        assert word in shown


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Let requests go nowhere; return what would have been asked for."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def request(job: TrainingJob, request: str, **args: Any) -> str:
        asked.append((request, args))
        return "done"

    monkeypatch.setattr(TrainingJob, "request", request)
    make_job(name="digits")
    return asked


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("kill", ("kill", {"worker": None})),
        ("kill w2 --how worker", ("kill", {"worker": "w2"})),
        ("kill w2 --how hold_gil", ("fault", {"worker": "w2", "kind": "hold_gil"})),
        (
            "chaos",
            ("chaos", {"mtbf_s": 15.0, "mode": "mix", "duration_s": None, "seed": None}),
        ),
        (
            "chaos digits --mtbf 2.5s --mode stop --duration 5min --seed 3",
            ("chaos", {"mtbf_s": 2.5, "mode": "stop", "duration_s": 300.0, "seed": 3}),
        ),
        ("chaos --off", ("chaos", {"off": True})),
    ],
)
def test_fault_commands_are_sent_to_the_job(
    run: Run,
    requests: list[tuple[str, dict[str, Any]]],
    line: str,
    expected: tuple[str, dict[str, Any]],
) -> None:
    assert run(f"%etrain {line}") == (True, "done\n")
    assert requests == [expected]


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("kill --how sigstop", "did you mean stop?"),
        ("kill --how fire", "known values: worker, kill, segfault, exit, stop, hold_gil, hang"),
        ("chaos --mode hagn", "did you mean hang?"),
        ("chaos --mtbf 15m5", "write for example --mtbf 15s"),
        ("chaos --mtbf soon", "write for example --mtbf 15s"),
        ("chaos --duration '3 steps'", "write for example --duration 15s"),
        ("chaos --seeed 3", "did you mean --seed?"),
    ],
)
def test_mistyped_fault_commands_are_refused_with_a_suggestion(
    refused: Show, requests: list[tuple[str, dict[str, Any]]], line: str, hint: str
) -> None:
    assert hint in refused(f"%etrain {line}")
    assert requests == []


def test_tensorboard_opens_under_the_cell(
    shell: InteractiveShell, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    folder = make_job().record.folder / "tensorboard"
    called: list[tuple[str, str]] = []
    whole = shell.run_line_magic

    def call(name: str, line: str, *rest: Any) -> Any:
        called.append((name, line))
        return whole(name, line, *rest) if name == "etrain" else None

    monkeypatch.setattr(shell, "run_line_magic", call)
    opened: list[str] = []
    shell.register_magic_function(opened.append, "line", "tensorboard")

    _, said = run("%etrain tensorboard")

    assert called[1:] == [("load_ext", "tensorboard")]
    line = f"--logdir {folder} --samples_per_plugin images=200,text=200"
    assert opened == [line]
    assert f"tensorboard {line}" in said


def test_expressions_in_a_tensorboard_folder_are_not_evaluated(
    shell: InteractiveShell, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Review S2: IPython evaluates {expressions} in the line of a magic."""
    pytest.importorskip("tensorboard")
    evil = "x{open('ran', 'w').write('x')}$HOME"
    RunStore().create({"name": "digits", "created": 1.0, "config": {"log": {"tensorboard": evil}}})
    monkeypatch.setattr(shell.extension_manager, "load_extension", lambda name: None)
    opened: list[str] = []
    shell.register_magic_function(opened.append, "line", "tensorboard")
    monkeypatch.chdir(tmp_path)

    run("%etrain tensorboard digits")

    assert not (tmp_path / "ran").exists()
    assert evil in shlex.split(opened[0])[1]
