"""Run every tutorial notebook from the first cell to the last, including its own assertions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.config.cell import parse_cell
from tests.capabilities import LONG, skip_without

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LIMIT_S = 600

# Each notebook takes half a minute to five minutes of both cores. Tests of tests/integration and
# tests/chaos show what the others show, more cheaply.
IN_SUITE = "01_quickstart.ipynb"
TESTED = [
    pytest.param(path, id=path.name, marks=() if path.name == IN_SUITE else LONG)
    for path in NOTEBOOKS
]
pytestmark = pytest.mark.plugins  # a notebook may use any of them


def warnings_in(executed: Path) -> list[str]:
    """Return the stderr output of all cells: a tutorial must not show warnings."""
    cells = json.loads(executed.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return ["".join(o["text"]) for o in outputs if o.get("name") == "stderr"]


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("path", TESTED)
def test_notebook_runs_to_its_end_and_its_file_is_unchanged(path: Path, tmp_path: Path) -> None:
    others = {"05": "encoder", "08": "torchvision"}
    for capability in ("libraries", "moto", others.get(path.name[:2], "libraries")):
        skip_without(capability)
    before = path.read_bytes()
    run = [sys.executable, str(ROOT / "notebooks" / "run.py"), str(path), "--output", str(tmp_path)]

    done = subprocess.run(
        [*run, "--timeout", str(LIMIT_S)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert (tmp_path / f"{path.stem}.executed.ipynb").exists()
    assert path.read_bytes() == before
    assert warnings_in(tmp_path / f"{path.stem}.executed.ipynb") == []


def cells_at_full_size() -> list[Any]:
    """Return the raw cells of all notebooks: they are ready, but not run."""
    return [
        pytest.param("".join(cell["source"]), id=path.name)
        for path in NOTEBOOKS
        for cell in json.loads(path.read_text())["cells"]
        if cell["cell_type"] == "raw"
    ]


@pytest.mark.parametrize("source", cells_at_full_size())
def test_cell_at_full_size_is_valid(source: str) -> None:
    first_line, _, body = source.partition("\n")

    config = parse_cell(body, namespace={}).config

    assert first_line.startswith("%%etrain distributed --name ")
    assert "--pool spot" in first_line
    assert (config.workers.max, config.checkpoint.to.split("://")[0]) == (64, "s3")


def test_notebooks_with_a_published_experiment_have_its_cell() -> None:
    assert [cell.id for cell in cells_at_full_size()] == [
        "05_albert_on_squad.ipynb",
        "06_pretrain_then_fine_tune.ipynb",
    ]
