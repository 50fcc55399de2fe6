from __future__ import annotations

import subprocess
from pathlib import Path

from tests.capabilities import skip_without

FRONT_END = Path(__file__).parents[4] / "labextension"


def test_front_end_passes_its_node_tests() -> None:
    skip_without("node")

    run = subprocess.run(
        ["node", "--test", "test/"], cwd=FRONT_END, capture_output=True, text=True, check=False
    )

    assert run.returncode == 0, run.stdout[-4000:]
