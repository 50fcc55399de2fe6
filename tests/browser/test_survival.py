"""One run survives the loss of its kernel, its scheduler and all workers, with one curve."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

import etrain_jupyter
from tests.browser.lab import Notebook
from tests.browser.test_dashboard import shoot, step_of, wait_for_step
from tests.browser.test_training import SET_UP, cluster
from tests.capabilities import LONG
from tests.integration.conftest import processes_of

pytestmark = [pytest.mark.browser, *LONG, pytest.mark.timeout(400)]

__all__ = ["cluster"]

PATIENT_LOSS = """
def patient_loss(output, target):
    time.sleep(0.02)  # steps are slow but use no CPU time
    return F.cross_entropy(output, target)
"""
TRAIN = """%%etrain distributed --name survivor -o job
model: Net(width=16)
data: {train: train_set, eval: test_set}
loss: patient_loss
metrics: {accuracy: accuracy}
optimizer: {name: AdamW, lr: 5e-4}
schedule: {decay: cosine}
batch: {global: 64}
epochs: 80
checkpoint: {every: 20 steps}
workers: {min: 1, max: 2}
"""
STEPS = 80 * 22


def kill(folder: Path, module: str) -> int:
    """Kill every process of the cluster that runs this module; return their number."""
    found = [p for p in processes_of(folder) if f"etrain_jupyter.{module}" in p.cmdline()]
    for process in found:
        os.kill(process.pid, signal.SIGKILL)
    return len(found)


def test_run_survives_its_kernel_its_scheduler_and_all_its_workers(
    open_notebook: Callable[..., Notebook],
    page: Page,
    cluster: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ETRAIN_RUNS", cluster["runs"])
    set_up = SET_UP.format(**cluster) + PATIENT_LOSS
    attach = "%etrain attach survivor"
    cells = [set_up, TRAIN, "print(os.getpid())", set_up, attach, "%etrain wait", "%etrain audit"]
    notebook = open_notebook("survival.ipynb", *cells, "%etrain down")
    for cell in (0, 1, 2):
        notebook.run(cell)
    wait_for_step(notebook, 1, 60)
    kernel = int(re.findall(r"\d+", notebook.output(2).inner_text())[0])

    os.kill(kernel, signal.SIGKILL)
    # JupyterLab shows a dialog that the kernel restarts.
    page.locator(".jp-Dialog").get_by_text("Ok").click(timeout=60_000)
    notebook.wait_until_idle()
    notebook.run(3)
    notebook.run(4)
    expect(notebook.job(4)).to_have_attribute("data-phase", "live")
    wait_for_step(notebook, 4, step_of(notebook, 4) + 20)
    shoot(page, "survival-another-kernel")

    assert kill(tmp_path, "head.main") == 1
    wait_for_step(notebook, 4, step_of(notebook, 4) + 40)
    shoot(page, "survival-another-scheduler")

    assert kill(tmp_path, "worker.main") == 2
    job = etrain_jupyter.attach("survivor")
    before = job.step
    wait_for_step(notebook, 4, before + 20)
    notebook.run(5)
    expect(notebook.job(4)).to_have_attribute("data-status", "finished")
    notebook.run(6)
    expect(notebook.output(6)).to_contain_text("audit ok")
    notebook.job(4).scroll_into_view_if_needed()
    shoot(page, "survival-one-curve")

    assert job.history()["step"] == list(range(1, STEPS + 1))
    kinds = [event.kind for event in job.events()]
    assert kinds.count("SchedulerRestarted") == 1
    assert kinds.count("JobRestored") == 1
    assert job.audit().ok
    notebook.run(7)
    assert processes_of(tmp_path) == []
