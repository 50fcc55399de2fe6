"""A study in the kernel: submitted, read from its folder, and displayed.

A folder that another user wrote, or that is damaged, is one clear error, without a wait or a link.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.errors import EtrainError, JobNotFoundError, PoolError
from etrain_jupyter.notebook.job.job_record import RunRecord
from etrain_jupyter.notebook.job.link import NoAnswerError
from etrain_jupyter.notebook.job.plan import Plan
from etrain_jupyter.notebook.job.run_store import json_of
from etrain_jupyter.plugins.search import folder as study_folder
from etrain_jupyter.plugins.search import open_studies
from etrain_jupyter.plugins.search.commands import plan_search
from etrain_jupyter.plugins.search.figures import Importance
from etrain_jupyter.plugins.search.folder import JOURNAL_FILE, STUDY_FILE, StudyLease
from etrain_jupyter.plugins.search.open_studies import attach_study, studies
from etrain_jupyter.plugins.search.optuna_study import OptunaStudy
from etrain_jupyter.plugins.search.report import StudyView, TrialRow, render_html
from etrain_jupyter.plugins.search.screen import MAX_TRIALS, study_row
from etrain_jupyter.plugins.search.study import Study
from etrain_jupyter.process.address import SchedulerAddress
from tests.unit.plugins.search.test_driver import spec_of
from tests.unit.plugins.search.test_study_plan import BODY, NAMES, private_folders

__all__ = ["private_folders"]

pytestmark = [pytest.mark.usefixtures("private_folders"), pytest.mark.timeout(60)]

ID = "hunt-00000001"
CONFIG = {"search": {"metric": "a", "mode": "max"}, "space": {}, "num_trials": 3}


def plant(tmp_path: Path, config: Any = CONFIG) -> Path:
    """Write a study's record, and return the path of its journal."""
    folder = tmp_path / "runs" / ID
    folder.mkdir(parents=True)
    record = RunRecord(job_id=ID, name="hunt", created=1.0, config=config, folder=folder)
    (folder / STUDY_FILE).write_bytes(json_of(record))
    return folder / JOURNAL_FILE


def write_journal(path: Path, **attributes: Any) -> None:
    """Write a journal with one complete trial, and attributes of the study."""
    optuna = study_folder.import_optuna()
    backend = optuna.storages.journal.JournalFileBackend(str(path))
    storage = optuna.storages.JournalStorage(backend)
    study = optuna.create_study(study_name=ID, storage=storage, direction="maximize")
    trial = study.ask({"lr": optuna.distributions.FloatDistribution(0.1, 1.0)})
    trial.report(0.5, 100)
    study.tell(trial, 0.5)
    for name, value in attributes.items():
        study.set_user_attr(name, value)


def read(study: Study) -> str:
    return repr(study) + study._repr_html_()


def test_study_of_another_user_is_read_without_writing_to_its_folder(tmp_path: Path) -> None:
    journal = plant(tmp_path)
    write_journal(journal, status="finished", num_trials=1)
    names = sorted(os.listdir(journal.parent))

    assert "1 of 1 trials" in read(attach_study(ID))
    assert sorted(os.listdir(journal.parent)) == names


def test_line_that_is_being_written_is_read_once_it_is_complete(tmp_path: Path) -> None:
    journal = plant(tmp_path)
    write_journal(journal, status="finished", num_trials=1)
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-20])
    study = attach_study(ID)
    assert study.view().num_trials == 0

    journal.write_bytes(whole)

    assert study.view().num_trials == 1


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def lines(*texts: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        write_journal(path)
        path.write_text(path.read_text() + "\n".join(texts) + "\n")

    return write


@pytest.mark.parametrize(
    "plant_journal",
    [
        pytest.param(os.mkfifo, id="named pipe"),
        pytest.param(link_to("/etc/passwd"), id="link"),
        pytest.param(link_to("/dev/zero"), id="link to a device"),
        pytest.param(lines("[" * 200_000 + "]" * 200_000), id="deep"),
        pytest.param(lines("not json", '{"op_code":0}'), id="junk"),
        pytest.param(lines('{"op_code": 99}'), id="unknown operation"),
        pytest.param(lines("[]"), id="no dict"),
        pytest.param(lines('{"op_code":4,"study_id":0}'), id="fields are missing"),
        pytest.param(lines('"' + "x" * 2_000_000 + '"'), id="long line"),
    ],
)
def test_journal_that_no_scheduler_wrote_is_an_error(
    tmp_path: Path, plant_journal: Callable[[Path], None]
) -> None:
    plant_journal(plant(tmp_path))

    with pytest.raises(EtrainError, match=f"study {ID} cannot be read"):
        read(attach_study(ID))


def test_study_in_another_format_is_refused_with_its_version(tmp_path: Path) -> None:
    path = plant(tmp_path).with_name(STUDY_FILE)
    values = json.loads(path.read_text()) | {"version": "0.1.0"}
    del values["format"]
    path.write_text(json.dumps(values))

    with pytest.raises(JobNotFoundError, match=r"cannot be opened: it is from etrain-jupyter 0\.1"):
        attach_study(ID)
    assert studies() == []


@pytest.mark.parametrize("config", [{}, {"search": 7, "space": {}}, {"search": {"metric": "a"}}])
def test_record_without_the_search_is_an_error(tmp_path: Path, config: Any) -> None:
    write_journal(plant(tmp_path, config))

    with pytest.raises(EtrainError, match=f"study {ID} cannot be read"):
        read(attach_study(ID))


@pytest.mark.parametrize(
    "attributes", [{"num_trials": "<b>"}, {"rungs": ["<b>"]}, {"rungs": 7}, {"num_samples": [1]}]
)
def test_attributes_of_wrong_types_are_an_error(tmp_path: Path, attributes: Any) -> None:
    write_journal(plant(tmp_path), **attributes)

    with pytest.raises(EtrainError, match=f"study {ID} cannot be read"):
        read(attach_study(ID))


def test_control_characters_of_a_study_are_escaped(tmp_path: Path) -> None:
    journal = plant(tmp_path)
    write_journal(journal, status="failed", reason="\x1b]0;pwn\x07 \u202e", num_trials=1)

    shown = read(attach_study(ID))

    assert "pwn" in shown
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)


# --- a scheduler that refuses, or does not answer ---


@pytest.mark.parametrize(
    ("error", "num_kept"),
    [(PoolError("no capacity"), 0), (NoAnswerError("no answer within 120 s"), 1)],
)
def test_folder_is_removed_only_if_the_study_cannot_be_running(
    error: PoolError, num_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    here = SchedulerAddress(address="tls://127.0.0.1:1", cluster_id="c")
    monkeypatch.setattr(Plan, "start_pool", lambda _: here)
    monkeypatch.setattr(open_studies, "_submit", fail)
    plan = plan_search(BODY, NAMES, {}, "%%etrain search")

    with pytest.raises(PoolError, match="no "):
        open_studies.submit_study(plan)

    assert len(studies()) == num_kept


def test_study_that_cannot_write_its_journal_says_so_in_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(tmp_path)
    OptunaStudy(spec)
    lease = StudyLease(spec.folder)
    lease.show("optuna.journal cannot be written: No space left on device")
    config = {"search": spec.config.model_dump(mode="json"), "space": {}}
    record = RunRecord(
        job_id=spec.study_id, name="study", created=0.0, folder=spec.folder, config=config
    )
    monkeypatch.setattr(Study, "_is_gone", lambda _: False)
    study = Study(record, None, lambda *_: None)  # type: ignore[arg-type, return-value]

    assert (study.view().status, study.view().reason) == (
        "running", "optuna.journal cannot be written: No space left on device"
    )  # fmt: skip
    lease.show("")
    assert study.view().reason == ""
    lease.release()


# --- the display ---


def trial(number: int, value: float, *, state: str = "COMPLETE", **params: Any) -> TrialRow:
    return TrialRow(
        number=number,
        state=state,
        params={"width": 16, "depth": 2, "lr": 1e-2} | params,
        value=value,
        samples=100,
        reason="",
        job_id=f"net-0a1b2c3d-{number:03d}",
        curve=((100, value),),
    )


def view_of(*trials: TrialRow) -> StudyView:
    return StudyView(
        name="net",
        study_id="net-0a1b2c3d",
        status="running",
        reason="",
        num_trials=len(trials),
        num_samples=100,
        trials=trials,
        metric="accuracy",
        mode="max",
    )


def test_importance_is_text_and_names_are_escaped() -> None:
    importance = Importance(shares=(("lr", 0.75), ("<b>", 0.25)), num_trials=12, rung=1024)

    html = render_html(view_of(trial(0, 0.5), trial(1, 0.6)), importance)

    assert "parameters: lr 75%, &lt;b&gt; 25% (from 12 trials compared at 1,024 samples)" in html


def test_display_says_why_the_importance_is_unknown() -> None:
    reason = "it needs 10 complete trials, and there are 2"

    html = render_html(view_of(trial(0, 0.5), trial(1, 0.6)), Importance(reason=reason))

    assert f"importance of the parameters: unknown, {reason}" in html
    assert html.count("<table>") == 1


def test_row_of_the_panel_has_the_best_trials_first() -> None:
    trials = (trial(0, 0.5), trial(1, math.nan, state="RUNNING"), trial(2, 0.9, state="PRUNED"))

    row = study_row(view_of(*trials), created=5.0)

    assert (row["study_id"], row["best"], row["num_begun"], row["created"]) == (
        *("net-0a1b2c3d", 0.5),
        *(3, 5.0),
    )
    assert row["trials"][0]["params"] == "width=16, depth=2, lr=0.01"
    assert [(t["number"], t["state"], t["value"]) for t in row["trials"]] == [
        (0, "complete", 0.5),
        (1, "running", None),
        (2, "pruned", 0.9),
    ]


def test_row_of_the_panel_is_limited() -> None:
    row = study_row(view_of(*(trial(i, i / 1000) for i in range(300))), created=0.0)

    assert len(row["trials"]) == MAX_TRIALS
    assert (row["num_begun"], row["trials"][0]["number"]) == (300, 299)
