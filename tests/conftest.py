"""Shared configuration: the Hypothesis profile, reruns and timeouts, and the S3 fixtures."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings

from etrain_jupyter import plugin
from etrain_jupyter.testing.s3_server import S3Server

PLUGINS = re.compile(
    r"etrain_jupyter\.plugins|testing\.fakeaws|"
    r"tests\.(chaos\.spot|contract\.fleets|integration\.(aws_head|node_machine))|"
    r"benchmarks(\.advice|\.models)?(\.| import )"
    r"(__main__|policies|search\b|search_simulated|sizing)"
)
"""Modules that only the tests of plug-ins import."""
FOLDER = Path(__file__).parent / "unit" / "plugins"
HAS_PLUGINS = bool(plugin.installed())
"""False in the run of the core's tests, which hides the plug-ins, see ``core_only``."""
if HAS_PLUGINS:
    from etrain_jupyter.plugins.ec2.simulator.fixtures import *  # noqa: F403

settings.register_profile("random", deadline=None)  # a shared machine is sometimes slow
# The same examples in each run: a change must not fail for a defect that it has not made.
# `make endurance` searches with new examples.
settings.register_profile("etrain", settings.get_profile("random"), derandomize=True)
settings.load_profile("etrain")

pytest_plugins = ("pytester", "tests.plugins.run_report")

_numbers = itertools.count(1)

PROCESSES = ("notebooks", "browser", "chaos", "integration", "contract")
"""Folders with tests that wait for real processes, on a machine that may be busy. The folder with
the longest files is the first."""
TIMEOUT_S = 300
"""Default timeout of such a test: a minute of work can take several minutes on a busy machine."""
CONCURRENT = ("asyncio", "multiprocessing", "psutil", "subprocess", "threading")
"""Modules whose importers among the unit tests run threads or processes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that leaves out the tests of the core, which have a run of their own."""
    parser.addoption(
        "--only-plugins", action="store_true", help="run only tests that need plug-ins"
    )


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Ignore the files that import plug-ins where these are hidden."""
    is_of_plugins = collection_path == FOLDER or _imports_plugins(collection_path)
    return True if not HAS_PLUGINS and is_of_plugins else None


@functools.cache
def _imports_plugins(path: Path) -> bool:
    is_test = path.suffix == ".py" and path.name.startswith("test_")
    return is_test and PLUGINS.search(path.read_text(encoding="utf-8")) is not None


def _needs_plugins(item: pytest.Item) -> bool:
    return item.get_closest_marker("plugins") is not None or _imports_plugins(item.path)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select and sort the tests, and let some of them be rerun."""
    is_other_run = config.getoption("--only-plugins") or not HAS_PLUGINS
    kept = [item for item in items if not is_other_run or _needs_plugins(item) == HAS_PLUGINS]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept
    _sort_and_mark(items)


def _sort_and_mark(items: list[pytest.Item]) -> None:
    """Rerun a failed test once if it depends on how processes and threads are scheduled.

    These are the tests of the folders above, and unit tests that run threads or processes. The end
    of the run lists each rerun, and the run fails above five. Tests of pure logic are never rerun.
    ``make endurance``, which looks for rare failures, disables reruns.

    The slowest folders run first, so that no process of the run is left alone with a long file at
    the end.
    """
    last = len(PROCESSES)
    items.sort(
        key=lambda item: (
            PROCESSES.index(folder) if (folder := _folder_of(item)) in PROCESSES else last
        )
    )
    for item in items:
        if _folder_of(item) in PROCESSES:
            item.add_marker(pytest.mark.flaky(reruns=1))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_S))
        elif isinstance(item, pytest.Function) and not vars(item.module).keys().isdisjoint(
            CONCURRENT
        ):
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_collection_finish() -> None:
    """Exclude the collected tests from garbage collections.

    They are hundreds of thousands of objects that live until the end. With them, each full
    collection takes about a second, and some tests and much of the product's code make several.
    """
    gc.collect()
    gc.freeze()


def _folder_of(node: pytest.Item | pytest.Collector) -> str:
    return node.path.relative_to(Path(__file__).parent).parts[0]


@pytest.fixture(scope="session", autouse=True)
def _test_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tests' keys and clusters out of the developer's own state directory."""
    with pytest.MonkeyPatch.context() as patch:
        if "ETRAIN_STATE" not in os.environ:
            patch.setenv("ETRAIN_STATE", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module", autouse=True)
def _forgotten_sockets(request: pytest.FixtureRequest) -> Iterator[None]:
    """Collect garbage after each test file, so that its warnings do not fail another file's test.

    Dask leaves closing plain sockets to the garbage collector. The ResourceWarning would fail the
    test that happens to run then. The tests themselves assert that our processes leak nothing.
    """
    yield
    if _folder_of(request.node) in PROCESSES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


@pytest.fixture(scope="session")
def s3_process() -> Iterator[S3Server]:
    """Provide one S3 server for the session."""
    with S3Server() as server:
        yield server


@pytest.fixture
def s3_server(s3_process: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> S3Server:
    """Provide the S3 server without faults, as boto3's default endpoint."""
    s3_process.set_faults()
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws_config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "aws_credentials"))
    for name, value in s3_process.environment.items():
        monkeypatch.setenv(name, value)
    return s3_process


@pytest.fixture
def s3_bucket(s3_server: S3Server) -> str:
    """Provide the name of a new bucket."""
    name = f"bucket-{next(_numbers)}"
    s3_server.make_bucket(name)
    return name


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the pauses between retries."""
    clock = SimpleNamespace(sleep=lambda _: None, time=time.time, monotonic=time.monotonic)
    monkeypatch.setattr("botocore.endpoint.time", clock)
    monkeypatch.setattr("etrain_jupyter.storage.objects.s3_requests.time", clock)
