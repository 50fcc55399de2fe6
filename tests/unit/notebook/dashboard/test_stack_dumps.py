"""A dump of stacks, one log line a frame, is one entry of the event list."""

from __future__ import annotations

from etrain_jupyter.log.events import STACKS_HEADER, LogLine
from etrain_jupyter.notebook.dashboard.job_view import JobView
from tests.unit.notebook.dashboard.scripted_job import JOB_ID

CELL = "/tmp/ipykernel_77/123.py"
FRAMES = f"""\
Thread 0x00007f (most recent call first):
  File "/usr/lib/python3/threading.py", line 331 in wait
  File "/usr/lib/python3/threading.py", line 900 in run

Current thread 0x00007e [main] (most recent call first):
  File "/usr/lib/python3/torch/nn/functional.py", line 519 in linear
  File "{CELL}", line 15 in forward
  File "{CELL}", line 40 in loss
  File "/site-packages/etrain_jupyter/ranks/workload.py", line 60 in forward
""".splitlines()


class Lines:
    """Folds log lines of workers and tells what the event list says."""

    def __init__(self, cell_numbers: dict[str, int] | None = None) -> None:
        self.view = JobView(JOB_ID, cell_numbers=lambda: cell_numbers or {})
        self._seq = 0

    def add(self, worker: str, *texts: str, level: str = "warning") -> None:
        for text in texts:
            self._seq += 1
            common = {"job_id": JOB_ID, "time": float(self._seq), "seq": self._seq}
            self.view.add([LogLine(**common, level=level, worker=worker, text=text)])

    @property
    def listed(self) -> list[tuple[int, str, str]]:
        return [(e.seq, e.level, e.text) for e in self.view.snapshot().events]


def test_a_dump_is_one_entry_that_begins_with_the_notebooks_frame() -> None:
    lines = Lines({CELL: 3})
    lines.add("w0", "loading")
    lines.add("w0", STACKS_HEADER, *FRAMES)
    lines.add("w0", "done")

    assert lines.listed == [
        (1, "warning", "w0: loading"),
        (
            2,
            "warning",
            "w0 was at Cell In[3], line 15 in forward, inside linear of functional.py "
            "(6 frames of 2 threads: %etrain logs)",
        ),
        (12, "warning", "w0: done"),
    ]


def test_interleaved_dumps_of_several_workers_are_one_entry_each() -> None:
    lines = Lines()
    for text in (STACKS_HEADER, *FRAMES):
        lines.add("w0", text)
        lines.add("w1", text)

    assert [text.partition(",")[0] for _, _, text in lines.listed] == [
        "w0 was at a cell",
        "w1 was at a cell",
    ]


def test_a_dump_without_the_notebooks_code_shows_the_innermost_frame() -> None:
    lines = Lines()
    lines.add("w0", STACKS_HEADER)
    assert lines.listed == [(1, "warning", f"w0: {STACKS_HEADER}")]

    lines.add("w0", FRAMES[4], FRAMES[5])

    assert lines.listed == [
        (
            1,
            "warning",
            "w0 was at functional.py, line 519 in linear (1 frame of 1 thread: %etrain logs)",
        )
    ]


def test_a_crash_names_its_signal() -> None:
    lines = Lines({CELL: 3})
    lines.add("w0", "Fatal Python error: Segmentation fault", "", FRAMES[4], FRAMES[6])
    lines.add("w0", "", "Extension modules: numpy._core (total: 1)")

    assert lines.listed == [
        (
            1,
            "error",
            "w0 crashed (Segmentation fault) at Cell In[3], line 15 in forward "
            "(1 frame of 1 thread: %etrain logs)",
        )
    ]


def test_line_that_only_looks_like_a_frame_is_listed() -> None:
    lines = Lines()
    lines.add("w0", FRAMES[0], '  File "a.py", line 3, in f', "")

    assert len(lines.listed) == 3
