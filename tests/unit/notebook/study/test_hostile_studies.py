"""Study folders that another user wrote, or that are damaged: one clear error, no wait, no link."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.errors import EtrainError, JobNotFoundError
from etrain_jupyter.notebook.job.job_record import RunRecord
from etrain_jupyter.notebook.job.run_store import json_of
from etrain_jupyter.notebook.study.open_studies import attach_study, studies
from etrain_jupyter.notebook.study.study import Study
from etrain_jupyter.storage import study_folder
from etrain_jupyter.storage.study_folder import JOURNAL_FILE, STUDY_FILE
from tests.unit.notebook.study.test_study_plan import private_folders

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
