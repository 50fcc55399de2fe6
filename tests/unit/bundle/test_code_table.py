"""Code fingerprints are equal for equal code, wherever and whenever it was typed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.bundle.code_table import CodeTable, compare_code
from etrain_jupyter.bundle.restore import open_bundle

SCRIPT = """\
import linecache, sys
from etrain_jupyter.bundle.capture import capture_bundle
import __main__
names = vars(__main__)
for number, text in enumerate({cells!r}, start=1):
    file = f"/tmp/ipykernel_{{__import__('os').getpid()}}/{{number}}.py"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), names)
numbers = {{f: i for i, f in enumerate(sorted(f for f in linecache.cache if "ipykernel" in f), 1)}}
references = {{"model": "Net(SIZE)", "loss": "loss", "data.train": "data"}}
bundle = capture_bundle(references, names, cell_numbers=numbers)
sys.stdout.buffer.write(bundle.data)
"""
CELL = """\
import torch
from torch import nn
SIZE = 4
EPSILON = 0.1
WORDS = {"a", "b", "c", "d"}
data = torch.arange(6.0)
class Net(nn.Module):
    width = 3
    def __init__(self, size):
        super().__init__()
        self.layer = nn.Linear(size, 2)
    def forward(self, x):
        return self.layer(x)
def loss(output, target):
    assert "a" in WORDS
    return (output - target).abs().mean() + EPSILON
"""


def capture(folder: Path, *cells: str) -> Any:
    """Capture cells in a separate process, as another kernel would."""
    script = folder / "capture.py"
    script.write_text(SCRIPT.format(cells=list(cells)))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return open_bundle(done.stdout)


def changes(old: Any, new: Any) -> list[tuple[str, str, str]]:
    found = compare_code(old.code, new.code, (old.cells, new.cells))
    return [(change.name, change.old, change.new) for change in found]


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return capture(tmp_path_factory.mktemp("first"), CELL)


def test_same_code_in_another_kernel_and_in_other_cells_is_the_same(
    captured: Any, tmp_path: Path
) -> None:
    head, tail = CELL.split("class Net", 1)
    moved = "class Net" + tail.replace(
        "return self.layer(x)", "# a remark\n        return self.layer(x)"
    )

    again = capture(tmp_path, "unused = 1\n", head, moved)

    assert changes(captured, again) == []
    assert again.code.digest == captured.code.digest
    assert again.digest != captured.digest, "which is why that cannot be compared"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "return self.layer(x)",
            "return self.layer(x) * 2",
            ("Net.forward", "return self.layer(x)", "return self.layer(x) * 2"),
        ),
        ("EPSILON = 0.1", "EPSILON = 0.2", ("EPSILON", "0.1", "0.2")),
        ("SIZE = 4", "SIZE = 5", ("SIZE", "4", "5")),
        ("width = 3", "width = 7", ("Net.width", "3", "7")),
        ('"d"}', '"e"}', ("WORDS", "set('a', 'b', 'c', 'd')", "set('a', 'b', 'c', 'e')")),
    ],
)
def test_difference_shows_name_and_both_values(
    captured: Any, tmp_path: Path, old: str, new: str, expected: tuple[str, str, str]
) -> None:
    assert changes(captured, capture(tmp_path, CELL.replace(old, new))) == [expected]


def test_changed_data_is_found(captured: Any, tmp_path: Path) -> None:
    [(name, _, _)] = changes(captured, capture(tmp_path, CELL.replace("arange(6.0)", "ones(6)")))

    assert name == "data"


def test_difference_names_its_cell(captured: Any, tmp_path: Path) -> None:
    other = capture(tmp_path, CELL.replace("self.layer(x)", "self.layer(x).relu()"))

    [change] = compare_code(captured.code, other.code, (captured.cells, other.cells))

    assert change.where == "Cell In[1]"


def test_added_or_removed_function_is_reported() -> None:
    one = CodeTable(functions={"f": {"digest": "1", "file": "x", "line": 1}}, values={}, data={})
    none = CodeTable(functions={}, values={}, data={})

    assert [(c.old, c.new) for c in compare_code(none, one, ({}, {}))] == [
        ("(missing)", "current code")
    ]
