from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

FRONT_END = Path(__file__).parents[3] / "labextension"


def test_the_deciding_parts_of_the_front_end_pass_their_own_tests() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    if not (FRONT_END / "node_modules" / "esbuild").exists():
        pytest.skip("the front end's packages are not installed: jlpm install in labextension/")

    run = subprocess.run(
        [node, "--test", "test/"], cwd=FRONT_END, capture_output=True, text=True, check=False
    )

    assert run.returncode == 0, run.stdout[-4000:]
