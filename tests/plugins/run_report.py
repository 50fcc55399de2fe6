"""Pytest plugin: report skips and reruns at the end, and fail the run if there are too many.

- Skips are counted by group and reason. ``ETRAIN_REQUIRE`` names capabilities of
  ``tests/capabilities.py``, separated by commas. The run fails if a test of such a group was
  skipped, and before its first test if this machine lacks the capability.
- Each rerun test is listed with the error of its first attempt. The run fails if more than
  ``MAX_RERUNS`` tests were rerun.

With xdist, only the controller prints and decides: it receives the reports of all workers.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from etrain_jupyter import plugin
from tests.capabilities import CAPABILITIES, MARKERS, OTHER_GROUPS, why_missing

VARIABLE = "ETRAIN_REQUIRE"
OF_PLUGINS = ("libraries", "moto", "namespaces")
"""Capabilities that only the second run of ``make test`` needs, see ``tests/core_only``."""
MAX_RERUNS = 5
UNKNOWN = "other"
"""Group of a skip that names no group."""

Report = pytest.TestReport | pytest.CollectReport


def pytest_configure(config: pytest.Config) -> None:
    """Check the required capabilities once, then register the collector of reports."""
    if hasattr(config, "workerinput"):
        return
    required = read_required(os.environ.get(VARIABLE, ""))
    if not plugin.installed():
        required = tuple(name for name in required if name not in OF_PLUGINS)
    if missing := [f"{name}: {why}" for name in required if (why := why_missing(name))]:
        raise pytest.UsageError(
            f"{VARIABLE} requires what this machine lacks, so no test was run. Install it, or "
            f"leave it out of {VARIABLE} to skip its tests:\n  " + "\n  ".join(missing)
        )
    config.pluginmanager.register(RunReport(required), "etrain-run-report")


def read_required(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of capabilities.

    Raises:
        pytest.UsageError: If it names an unknown capability.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if unknown := [name for name in names if name not in CAPABILITIES]:
        raise pytest.UsageError(
            f"{VARIABLE}={text!r} names {', '.join(unknown)}. "
            f"The capabilities are {', '.join(sorted(CAPABILITIES))}."
        )
    return names


@dataclass(eq=False)  # pluggy needs a hash
class RunReport:
    """Count the skips and reruns of a session, and decide whether it may pass."""

    required: tuple[str, ...]
    skipped: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of skipped tests by group and reason."""
    rerun: dict[str, str] = field(default_factory=dict)
    """Error of the first attempt, by test."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one test's report."""
        outcome: str = report.outcome  # "rerun" is pytest-rerunfailures'
        if outcome == "rerun":
            self.rerun.setdefault(report.nodeid, error_of(report))
        elif report.skipped and not hasattr(report, "wasxfail"):
            self.skipped[group_and_reason(report)] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a module that was skipped as a whole as one test."""
        if report.skipped:
            self.skipped[group_and_reason(report)] += 1

    @property
    def complaints(self) -> list[str]:
        """Reasons why the run fails even if all its tests have passed."""
        found = [
            f"{count} test{'s' * (count != 1)} of {group!r} skipped, which {VARIABLE} requires: "
            f"{reason}"
            for (group, reason), count in sorted(self.skipped.items())
            if group in self.required
        ]
        if len(self.rerun) > MAX_RERUNS:
            found.append(f"{len(self.rerun)} tests were rerun; at most {MAX_RERUNS} may be")
        return found

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        """Fail the run if there are complaints. Wraps the terminal's hook, which prints them."""
        if self.complaints and session.exitstatus in (
            pytest.ExitCode.OK,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return (yield)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print skips, reruns and complaints, in this order."""
        write = terminalreporter.write_line
        if self.skipped:
            terminalreporter.write_sep("=", f"skipped: {self.skipped.total()}")
            for (group, reason), count in sorted(self.skipped.items()):
                write(f"{count:5}  {group}: {reason}")
        if self.rerun:
            title = f"rerun: {len(self.rerun)} (the run fails above {MAX_RERUNS})"
            terminalreporter.write_sep("=", title)
            for nodeid, error in sorted(self.rerun.items()):
                write(f"RERUN {nodeid}")
                write(f"      {error}")
        for complaint in self.complaints:
            write(f"FAILED run: {complaint}", red=True)


def group_and_reason(report: Report) -> tuple[str, str]:
    """Return the group and the reason of a skip; the reason or a marker determines the group."""
    text = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
    text = text.removeprefix("Skipped: ").strip()
    if text.startswith("could not import"):  # by pytest.importorskip
        return "libraries", text
    named, colon, reason = text.partition(": ")
    if colon and (named in CAPABILITIES or named in OTHER_GROUPS):
        return named, reason
    by_marker = (group for marker, group in MARKERS.items() if marker in report.keywords)
    return next(by_marker, UNKNOWN), text


def error_of(report: pytest.TestReport) -> str:
    """Return the first line of an attempt's error."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash else report.longrepr).strip()
    return f"{report.when}: {text.splitlines()[0][:200]}" if text else f"{report.when}: no message"
