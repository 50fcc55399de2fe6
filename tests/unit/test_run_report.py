"""Test the run report: it lists skips and reruns, and fails the run for unacceptable ones."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import capabilities
from tests.plugins.run_report import MAX_RERUNS, VARIABLE, read_required

pytestmark = pytest.mark.plugins  # what is required differs in the run of the core

ROOT = Path(__file__).parents[2]

SKIPS = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_in_a_browser(number):
    pytest.skip("browser: Chromium is not installed")

@pytest.mark.gpu
@pytest.mark.skipif(True, reason="needs 2 CUDA devices, there are 0")
def test_on_a_gpu():
    pass

def test_for_some_reason():
    pytest.skip("today is Sunday: no work")

def test_that_runs():
    pass
"""

UNSTEADY = """
import pytest

@pytest.mark.flaky(reruns=1)
@pytest.mark.parametrize("number", range({}))
def test_unsteady(number, seen=set()):
    is_second = number in seen
    seen.add(number)
    assert is_second, "too early"
"""


CONFTEST = """
from tests import capabilities
known = capabilities.CAPABILITIES
known.update(dict.fromkeys(known, str))  # pretend that every capability is available
pytest_plugins = ["tests.plugins.run_report"]
"""

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Return a function that runs a test file with the plugin, without this project's settings."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(capabilities, "CAPABILITIES", dict(capabilities.CAPABILITIES))
    pytester.makeini("[pytest]\nmarkers =\n    gpu: needs a GPU\n")
    pytester.makeconftest(CONFTEST)
    capabilities.why_missing.cache_clear()

    def run(source: str, *args: str, require: str = "") -> pytest.RunResult:
        monkeypatch.setenv(VARIABLE, require)
        pytester.makepyfile(source)
        plugins = ("no:cacheprovider", "no:asyncio", "no:hypothesispytest")
        return pytester.runpytest(*(word for name in plugins for word in ("-p", name)), *args)

    yield run
    capabilities.why_missing.cache_clear()


def test_skipped_tests_are_counted_by_group_and_reason(run: Run) -> None:
    result = run(SKIPS)

    assert result.ret == pytest.ExitCode.OK
    result.stdout.re_match_lines(
        [
            "=+ skipped: 5 =+",
            r" +3  browser: Chromium is not installed$",
            r" +1  gpu: needs 2 CUDA devices, there are 0$",
            r" +1  other: today is Sunday: no work$",
            "=+ 1 passed, 5 skipped in .* =+",
        ],
        consecutive=True,
    )


def test_skip_of_a_required_capability_fails_the_run(run: Run) -> None:
    result = run(SKIPS, require="node, browser")

    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["FAILED run: 3 tests of 'browser' skipped, which ETRAIN_REQUIRE requires: Chromium is *"]
    )
    assert result.outlines[-1].strip("= ").startswith("1 passed, 5 skipped")


def test_module_skipped_for_a_missing_required_library_fails_the_run(
    run: Run,
) -> None:
    source = "import pytest\npytest.importorskip('no_such_library')\ndef test_it(): pass\n"

    result = run(source, require="libraries")

    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["    1  libraries: could not import 'no_such_library'*"])


def test_skip_of_a_capability_that_is_not_required_passes(run: Run) -> None:
    assert run(SKIPS, require="node,namespaces").ret == pytest.ExitCode.OK


def test_run_without_skips_and_reruns_prints_no_report(run: Run) -> None:
    result = run("def test_it(): pass")

    assert result.ret == pytest.ExitCode.OK
    assert [line for line in result.outlines if "skipped:" in line or "rerun:" in line] == []


def test_five_reruns_are_listed_and_pass(run: Run) -> None:
    result = run(UNSTEADY.format(MAX_RERUNS))

    assert result.ret == pytest.ExitCode.OK
    assert MAX_RERUNS == 5
    assert names_of_reruns(result) == [f"test_unsteady[{number}]" for number in range(5)]
    result.assert_outcomes(passed=5)


def test_more_than_five_reruns_fail_the_run(run: Run) -> None:
    result = run(UNSTEADY.format(MAX_RERUNS + 1))

    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["FAILED run: 6 tests were rerun; at most 5 may be"])
    result.assert_outcomes(passed=6)


def test_xdist_controller_counts_skips_and_reruns_of_all_processes(run: Run) -> None:
    source = UNSTEADY.format(MAX_RERUNS + 1) + SKIPS

    result = run(source, "-n", "2", require="browser")

    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert len(names_of_reruns(result)) == 6
    result.stdout.fnmatch_lines(
        [
            "    3  browser: Chromium is not installed",
            "FAILED run: 3 tests of 'browser' skipped*",
            "FAILED run: 6 tests were rerun; at most 5 may be",
        ]
    )


def names_of_reruns(result: pytest.RunResult) -> list[str]:
    lines = re.findall(
        r"^RERUN (\S+)\n +call: AssertionError: too early", result.stdout.str(), re.M
    )
    return [name.split("::")[1] for name in lines]


def test_missing_required_capability_prevents_the_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest(CONFTEST.replace("str))", "lambda: 'there is no wizard'))"))

    result = run("def test_it(): pass", require="node")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.outlines == []
    result.stderr.fnmatch_lines(["ERROR: ETRAIN_REQUIRE requires *", "  node: there is no wizard"])


def test_unknown_requirement_is_an_error_that_lists_the_capabilities() -> None:
    with pytest.raises(pytest.UsageError, match=r"names wizard\. The capabilities are browser, co"):
        read_required("moto,wizard")
    assert read_required(" node,,moto ,node") == ("node", "moto")
    assert read_required("") == ()


def test_skip_groups_are_unique_and_every_marker_has_one() -> None:
    assert not set(capabilities.CAPABILITIES) & set(capabilities.OTHER_GROUPS)
    known = {*capabilities.CAPABILITIES, *capabilities.OTHER_GROUPS}
    assert set(capabilities.MARKERS.values()) <= known


def start_ci(folder: Path, *tools: str, user: int, require: str | None = None) -> list[str]:
    """Run ``.ci/run`` with stub tools; return target and requirements of each ``make`` call."""
    stubs = {
        "make": f'echo "$1 ${VARIABLE} $ETRAIN_LABEXTENSION"',
        "id": f"echo {user}",
        "python3": "",
        "apt-get": "",
        **dict.fromkeys(tools, ""),
    }
    for name, script in stubs.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    for name in ("awk", "bash", "dirname"):
        (folder / name).symlink_to(str(shutil.which(name)))
    environment = {"PATH": str(folder), **({} if require is None else {VARIABLE: require})}
    run = ["bash", str(ROOT / ".ci" / "run")]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    return [line.strip() for line in done.stdout.splitlines() if not line.startswith(VARIABLE)]


def test_ci_requires_what_it_installs(tmp_path: Path) -> None:
    found = start_ci(tmp_path, "node", user=0)

    status = Path("/proc/self/status").read_text()
    may_unshare = int(re.findall(r"CapEff:\s+(\w+)", status)[0], 16) >> 21 & 1
    required = "libraries,moto,node,browser" + ",namespaces" * may_unshare
    assert found == [f"{target} {required} require" for target in ("lint", "docs", "test")]


def test_ci_does_not_require_a_browser_that_it_cannot_install(tmp_path: Path) -> None:
    found = start_ci(tmp_path, user=1000)

    assert found == [f"{target} libraries,moto" for target in ("lint", "docs", "test")]


def test_environment_variable_overrides_the_requirements_of_ci(tmp_path: Path) -> None:
    assert start_ci(tmp_path, "node", user=0, require="")[-1].split() == ["test", "require"]
