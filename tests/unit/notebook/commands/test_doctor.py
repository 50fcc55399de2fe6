"""What the doctor finds, and that the guide says more about each of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from etrain_jupyter.notebook.commands import doctor
from etrain_jupyter.notebook.commands.doctor import GUIDE, Finding, examine
from etrain_jupyter.notebook.job.run_store import RunStore

SECTION = "## "


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunStore:
    monkeypatch.setenv("ETRAIN_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("ETRAIN_POOLS", str(tmp_path / "pools.yaml"))
    return RunStore(tmp_path / "runs")


def test_guide_has_a_section_for_each_check_and_none_for_another(store: RunStore) -> None:
    guide = (Path(__file__).parents[4] / GUIDE).read_text(encoding="utf-8")
    sections = [line[len(SECTION) :] for line in guide.splitlines() if line.startswith(SECTION)]
    topics = list(dict.fromkeys(finding.topic for finding in examine(store)))

    assert sections == [*topics, "What a job says"]


def test_finding_that_requires_action_names_its_section(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda name: "" if name == "torch" else "7.0")

    [line] = [str(f) for f in examine(store) if "torch missing" in f.what]

    assert line.startswith("WRONG torch missing")
    assert f"pip install torch ({GUIDE}#packages)" in line
    assert GUIDE not in str(Finding(state="ok", what="fine", topic="packages"))


def test_failing_check_is_a_finding_and_hides_no_other(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> list[Finding]:
        raise OSError("no such driver")

    monkeypatch.setattr(doctor, "_check_gpus", fail)

    found = examine(store)

    [broken] = [finding for finding in found if finding.topic == "gpu"]
    assert (broken.state, broken.what) == ("wrong", "OSError: no such driver")
    assert found[-1].topic == "clusters"
