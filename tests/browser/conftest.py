from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.capabilities import find_chromium, skip_without

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

    from tests.browser.lab import Lab, Notebook


@pytest.fixture(scope="session")
def ready() -> None:
    """Skip the test if the browser or the front end is missing."""
    skip_without("browser")


@pytest.fixture(scope="session")
def lab(ready: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Provide one JupyterLab server for all browser tests."""
    from tests.browser.lab import Lab

    server = Lab(tmp_path_factory.mktemp("lab"))
    yield server
    server.close()


@pytest.fixture
def lab_without_extension(ready: None, tmp_path: Path) -> Iterator[Lab]:
    """Provide a JupyterLab with anywidget but without our extension, as on some hubs."""
    from tests.browser.lab import Lab

    server = Lab(tmp_path, with_extension=False)
    yield server
    server.close()


@pytest.fixture(scope="module")
def browser(ready: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    """Provide Chromium for one module: while it is open, asyncio tests of others cannot run."""
    from playwright.sync_api import sync_playwright

    from tests.browser.lab import CHROMIUM_ARGUMENTS

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
    """Provide a new page for one test."""
    page = browser.new_page()
    yield page
    page.close()


@pytest.fixture
def open_notebook(lab: Lab, page: Page) -> Callable[..., Notebook]:
    """Provide a function ``(name, *cells)`` that writes a notebook and opens it."""
    from tests.browser.lab import Notebook

    def open_it(name: str, *cells: str) -> Notebook:
        lab.write_notebook(name, *cells)
        return Notebook(lab, page, name).open()

    return open_it
