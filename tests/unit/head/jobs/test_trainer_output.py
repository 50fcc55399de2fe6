"""A trainer that crashed says what it printed last, and where the notebook's code stood."""

from __future__ import annotations

from pathlib import Path

import etrain_jupyter
from etrain_jupyter.bundle.sources import CellSource
from etrain_jupyter.head.jobs.trainer_output import last_words
from etrain_jupyter.log.events import STACKS_HEADER

CELLS = {"/tmp/cell_1.py": CellSource(label="Cell In[3]", text="")}
OURS = Path(etrain_jupyter.__file__).parent
CRASH = f"""\
loading
Fatal Python error: Segmentation fault

Thread 0x00007f (most recent call first):
  File "/usr/lib/python3/threading.py", line 331 in wait

Current thread 0x00007e (most recent call first):
  File "/usr/lib/python3/ctypes/__init__.py", line 519 in string_at
  File "/tmp/cell_1.py", line 2 in loss
  File "{OURS}/trainer/workload.py", line 60 in forward

Extension modules: numpy._core (total: 1)
""".splitlines()


def test_printed_lines_are_shown_from_the_end():
    lines = [f"line {number}" for number in range(30)]
    shown = last_words("w1", lines, {}).splitlines()
    assert shown[0] == "w1 printed last:"
    assert shown[1:] == [f"  line {number}" for number in range(20, 30)]


def test_crash_is_shown_as_a_traceback_of_the_users_frames():
    assert last_words("w1", CRASH, CELLS).splitlines() == [
        "w1 printed last:",
        "  loading",
        "w1 crashed: Segmentation fault",
        "  Cell In[3], line 2, in loss",
        '  File "/usr/lib/python3/ctypes/__init__.py", line 519, in string_at',
    ]


def test_hang_is_shown_as_a_traceback_of_the_users_frames():
    hang = [STACKS_HEADER if text.startswith("Fatal") else text for text in CRASH]
    assert last_words("w1", hang, CELLS).splitlines() == [
        "w1 printed last:",
        "  loading",
        "w1 was doing:",
        "  Cell In[3], line 2, in loss",
        '  File "/usr/lib/python3/ctypes/__init__.py", line 519, in string_at',
    ]


def test_hang_outside_of_the_users_code_shows_no_traceback():
    hang = [STACKS_HEADER, "Current thread 0x00007e (most recent call first):"]
    hang.append(f'  File "{OURS}/trainer/trainer.py", line 60 in _live')
    assert last_words("w1", hang, CELLS) == ""


def test_trainer_without_output_gives_an_empty_text():
    assert last_words("w1", [], {}) == ""
