"""Headless Chromium for benchmarks. Only this module needs Playwright and JupyterLab."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.browser.lab import Lab


def missing() -> str:
    """Return why this machine cannot run a browser, or an empty string if it can."""
    from tests.capabilities import why_missing

    return why_missing("browser")


@contextlib.contextmanager
def open_page() -> Iterator[Page]:
    """Open an empty page in headless Chromium."""
    from playwright.sync_api import sync_playwright

    from tests.browser.lab import CHROMIUM_ARGUMENTS
    from tests.capabilities import find_chromium

    with tempfile.TemporaryDirectory() as profile, sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=find_chromium(),
            headless=True,
            args=[*CHROMIUM_ARGUMENTS, "--enable-precise-memory-info"],
            viewport={"width": 1300, "height": 1000},
        )
        try:
            yield context.new_page()
        finally:
            context.close()


@contextlib.contextmanager
def open_lab() -> Iterator[Lab]:
    """Start JupyterLab from this checkout, in a temporary folder."""
    from tests.browser.lab import Lab

    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder))
        try:
            yield lab
        finally:
            lab.close()


def heap_mb(page: Page) -> float:
    """Return the size in MB of the page's JavaScript heap after a garbage collection."""
    session = page.context.new_cdp_session(page)
    try:
        session.send("HeapProfiler.collectGarbage")
        used = session.send("Runtime.getHeapUsage")
    finally:
        session.detach()
    return float(used["usedSize"] + used.get("backingStorageSize", 0)) / 1e6
