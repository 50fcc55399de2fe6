"""The help of the benchmarks' command line."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import BENCHMARKS, parse


def test_help_lists_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse(["--help"])

    shown = capsys.readouterr().out
    assert [name for name in BENCHMARKS if f"    {name}" not in shown] == []
