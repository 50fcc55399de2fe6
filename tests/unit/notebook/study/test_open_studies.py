"""Submit a study to a scheduler that refuses, or does not answer."""

from __future__ import annotations

from typing import Any

import pytest

from etrain_jupyter import launch
from etrain_jupyter.errors import PoolError
from etrain_jupyter.notebook.job.link import NoAnswerError
from etrain_jupyter.notebook.job.plan import Plan
from etrain_jupyter.notebook.study import open_studies
from etrain_jupyter.process.address import SchedulerAddress
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

    assert len(launch.studies()) == num_kept
