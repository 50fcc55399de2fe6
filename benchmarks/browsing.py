"""Headless Chromium for benchmarks; Playwright and JupyterLab are needed only here."""

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
    """Return what this machine lacks for a browser, or an empty string."""
    from tests.capabilities import why_missing

    return why_missing("browser")


@contextlib.contextmanager
def open_page() -> Iterator[Page]:
    """Yield an empty page."""
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
    """Yield a JupyterLab of this checkout, in a folder of its own."""
    from tests.browser.lab import Lab

    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder))
        try:
            yield lab
        finally:
            lab.close()


def heap_mb(page: Page) -> float:
    """Return what the page's scripts hold after a garbage collection."""
    session = page.context.new_cdp_session(page)
    try:
        session.send("HeapProfiler.collectGarbage")
        used = session.send("Runtime.getHeapUsage")
    finally:
        session.detach()
    return float(used["usedSize"] + used.get("backingStorageSize", 0)) / 1e6
