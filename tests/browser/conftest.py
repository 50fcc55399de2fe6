from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

    from tests.browser.lab import Lab, Notebook

REPOSITORY = Path(__file__).parents[2]
BUILT = REPOSITORY / "etrain_jupyter" / "labextension" / "package.json"


def missing() -> str:
    """Return what this machine lacks for the tests of this folder, or an empty string."""
    for module in ("playwright", "jupyterlab"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed: pip install 'etrain-jupyter[test]'"
    from tests.browser.lab import find_chromium

    if find_chromium() is None:
        return "Chromium is not installed: apt-get install chromium, or set ETRAIN_CHROMIUM"
    return "" if BUILT.exists() else "the front end is not built: pip install -e . with Node.js"


@pytest.fixture(scope="session")
def ready() -> None:
    """Skip where something is missing."""
    reason = missing()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def lab(ready: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A JupyterLab server for all browser tests."""
    from tests.browser.lab import Lab

    server = Lab(tmp_path_factory.mktemp("lab"))
    yield server
    server.close()


@pytest.fixture
def lab_without_extension(ready: None, tmp_path: Path) -> Iterator[Lab]:
    """A JupyterLab that has anywidget but not our extension, as on many a hub."""
    from tests.browser.lab import Lab

    server = Lab(tmp_path, with_extension=False)
    yield server
    server.close()


@pytest.fixture(scope="module")
def browser(ready: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    """Chromium for one module: while it is open, asyncio tests elsewhere could not run."""
    from playwright.sync_api import sync_playwright

    from tests.browser.lab import CHROMIUM_ARGUMENTS, find_chromium

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("chromium"),
            executable_path=find_chromium(),
            headless=True,
            args=list(CHROMIUM_ARGUMENTS),
            viewport={"width": 1300, "height": 1000},
        )
        yield context
        context.close()


@pytest.fixture
def page(browser: BrowserContext) -> Iterator[Page]:
    """A page of its own for one test."""
    page = browser.new_page()
    yield page
    page.close()


@pytest.fixture
def open_notebook(lab: Lab, page: Page) -> Callable[..., Notebook]:
    """Return a function ``(name, *cells)`` that writes a notebook and opens it."""
    from tests.browser.lab import Notebook

    def open_it(name: str, *cells: str) -> Notebook:
        lab.write_notebook(name, *cells)
        return Notebook(lab, page, name).open()

    return open_it
