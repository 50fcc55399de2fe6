"""Submit a study to a scheduler that refuses, or does not answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter import launch
from etrain_jupyter.errors import PoolError
from etrain_jupyter.head.studies.optuna_study import OptunaStudy
from etrain_jupyter.notebook.job.job_record import RunRecord
from etrain_jupyter.notebook.job.link import NoAnswerError
from etrain_jupyter.notebook.job.plan import Plan
from etrain_jupyter.notebook.study import open_studies
from etrain_jupyter.notebook.study.open_studies import studies
from etrain_jupyter.notebook.study.study import Study
from etrain_jupyter.process.address import SchedulerAddress
from etrain_jupyter.storage.study_folder import StudyLease
from tests.unit.head.studies.test_driver import spec_of
from tests.unit.notebook.study.test_study_plan import BODY, NAMES, private_folders

__all__ = ["private_folders"]

pytestmark = pytest.mark.usefixtures("private_folders")


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
    plan = launch.plan_search(BODY, NAMES, {}, "%%etrain search")

    with pytest.raises(PoolError, match="no "):
        launch.submit_study(plan)

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
