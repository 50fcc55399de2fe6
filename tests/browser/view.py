"""The view of a job on a blank page, fed by the real JobView and ViewFeed, without a kernel."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page

from etrain_jupyter.errors import RunStoreError
from etrain_jupyter.log import events as t
from etrain_jupyter.log.exhibits import Content
from etrain_jupyter.notebook.dashboard.browser import WIDGET_SCRIPT
from etrain_jupyter.notebook.dashboard.feed import ViewFeed
from etrain_jupyter.notebook.dashboard.job_view import JobView
from etrain_jupyter.notebook.dashboard.saved_exhibits import answer_request

# Mount our module like anywidget, and record sent messages and layout shifts for the tests.
MOUNT = """
async ([script, saved]) => {
    const address = URL.createObjectURL(new Blob([script], {type: 'text/javascript'}));
    const {default: widget} = await import(address);
    const hearers = [];
    const model = {
        get: () => saved,
        on: (name, hear) => name === 'msg:custom' && hearers.push(hear),
        off: () => undefined,
        send: content => window.sent.push(content),
    };
    window.bring = (content, buffers) => {
        const views = buffers.map(text => {
            const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
            return new DataView(bytes.buffer);
        });
        hearers.forEach(hear => hear(content, views));
    };
    window.sent = [];
    window.shifts = [];
    new PerformanceObserver(list => {
        for (const entry of list.getEntries()) {
            // Inside scrolling boxes, new events shift older ones and ranks change their order.
            const moved = entry.sources.map(({node}) => node?.closest ? node : node?.parentElement);
            const names = moved.filter(node => !node?.closest('.etrain-scroll'))
                .map(node => node?.className || node?.nodeName);
            if (names.length) window.shifts.push(`${names}`);
        }
    }).observe({type: 'layout-shift', buffered: false});
    window.unmount = widget.render({model, el: document.querySelector('#host')});
}
"""
# The view draws at most every 80 ms; two animation frames later the drawing is on the screen.
SETTLED = """
() => new Promise(done => setTimeout(
    () => requestAnimationFrame(() => requestAnimationFrame(done)), 120))
"""


class View:
    """One mounted view, its job, and the channel between them.

    Args:
        page: Page to mount the view on.
        saved: Saved output of the job, as in a notebook.
    """

    def __init__(self, page: Page, saved: Any = None) -> None:
        self.page = page
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.set_content("<!doctype html><div id='host'></div>")
        page.evaluate(MOUNT, [Path(WIDGET_SCRIPT).read_text(encoding="utf-8"), saved or {}])
        self.job = JobView("digits-7f3a")
        self.feed = ViewFeed(self.bring)
        self.name = str(self.sent("hello")[0]["view"])
        self.root = page.locator(".etrain-job")

    def add(self, events: Iterable[t.Event]) -> None:
        """Add events to the job and show them."""
        self.job.add(events)
        if self.feed.is_open:
            self.feed.flush(self.job)
        else:
            self.feed.greet(self.job, self.name)
        self.settle()

    def answer(self, request: str, text: str, level: str = "info") -> None:
        """Answer a request as the kernel does."""
        notice = {"kind": "notice", "request": request, "to": self.name}
        self.feed.post(notice | {"level": level, "text": text})
        self.settle()

    def answer_detail(self) -> dict[str, Any]:
        """Answer the newest request for the steps of a zoom; return the request."""
        self.page.wait_for_function("() => window.sent.some(m => m.kind === 'detail')")
        asked = self.sent("detail")[-1]
        self.feed.detail(self.job, self.name, asked["first"], asked["last"])
        self.settle()
        return asked

    def answer_exhibit(self, contents: Mapping[tuple[str, int], Content]) -> dict[str, Any]:
        """Answer the newest request for an exhibit; return the request."""
        self.page.wait_for_function("() => window.sent.some(message => message.kind === 'exhibit')")
        asked = self.sent("exhibit")[-1]

        def read(name: str, step: int) -> Content:
            if (name, step) not in contents:
                raise RunStoreError(f"{name} of step {step} does not exist")
            return contents[name, step]

        self.feed.post(*answer_request(read, asked))
        self.settle()
        return asked

    def bring(self, content: dict[str, Any], buffers: list[bytes]) -> None:
        """Deliver a message, even an invalid one, to the view."""
        texts = [base64.b64encode(buffer).decode() for buffer in buffers]
        self.page.evaluate("([content, texts]) => window.bring(content, texts)", [content, texts])

    def sent(self, kind: str) -> list[dict[str, Any]]:
        """Return the messages of one kind that the view has sent."""
        found: list[dict[str, Any]] = self.page.evaluate(
            "kind => window.sent.filter(message => message.kind === kind)", kind
        )
        return found

    def settle(self) -> None:
        """Wait until the newest message is drawn."""
        self.page.evaluate(SETTLED)

    def plot(self, number: int) -> Locator:
        """Return the drawing area of the chart with this index."""
        return self.root.locator(".etrain-chart .u-over").nth(number)

    def tile(self, name: str) -> Locator:
        """Return one of the figures in the header."""
        return self.root.locator(f".etrain-tiles [data-tile='{name}']")
