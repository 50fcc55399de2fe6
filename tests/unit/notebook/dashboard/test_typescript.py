from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from etrain_jupyter.notebook.dashboard.snapshot import (
    ChartList,
    LatestCheckpoint,
    Snapshot,
)
from etrain_jupyter.notebook.dashboard.typescript import comment_of, generate, type_of
from tests.capabilities import skip_without

GENERATED = Path(__file__).parents[4] / "labextension" / "src" / "snapshot.ts"


def test_snapshot_ts_is_the_one_generated_from_the_dataclasses() -> None:
    assert GENERATED.read_text(encoding="utf-8") == generate(), "run make snapshot"


def test_every_type_of_a_snapshot_is_exported() -> None:
    text = generate()

    assert "export interface ISnapshot {" in text
    assert "  split: ITimeSplit | null;" in text
    assert "  workers: IWorkerRow[];" in text


def test_type_without_counterpart_is_refused() -> None:
    with pytest.raises(TypeError, match="has no TypeScript type"):
        type_of(set[int])


def test_long_comment_is_wrapped_as_prettier_leaves_it() -> None:
    lines = list(comment_of("word " * 40, "  "))

    assert (lines[0], lines[-1]) == ("  /**", "   */")
    assert max(map(len, lines)) <= 100


def test_snapshot_has_the_json_form_that_saved_notebooks_and_the_front_end_expect() -> None:
    snapshot = Snapshot(
        job_id="digits-7f3a",
        name="digits",
        loss=float("nan"),
        charts=ChartList(metrics=("accuracy",), has_eval=True),
        checkpoint=LatestCheckpoint(step=3, time=1.5, size_bytes=9, count=1),
    )

    found = snapshot.to_json(without=("workers", "events", "markers"))

    assert list(found)[:4] == ["job_id", "name", "status", "reason"]
    assert list(found)[-3:] == ["samples_per_s", "checkpoint_due", "controls"]
    assert (found["loss"], found["lr"]) == ("NaN", None)
    assert found["charts"] == {"metrics": ["accuracy"], "has_eval": True}
    assert found["checkpoint"] == {"step": 3, "time": 1.5, "size_bytes": 9, "count": 1}
    assert found["checkpoint_due"] == {"since": None, "limit_s": None, "failed": ""}


FRONT_END = Path(__file__).parents[4] / "labextension"


def test_front_end_passes_its_node_tests() -> None:
    skip_without("node")

    run = subprocess.run(
        ["node", "--test", "test/"], cwd=FRONT_END, capture_output=True, text=True, check=False
    )

    assert run.returncode == 0, run.stdout[-4000:]
