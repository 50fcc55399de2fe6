"""Real jobs on a real cluster in a real JupyterLab: a killed worker, and several jobs at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from etrain_jupyter.pools.local import LocalPool
from tests.browser.lab import Notebook
from tests.browser.test_dashboard import shoot, step_of, stop, wait_for_step
from tests.browser.test_side_panel import row, show_panel, wait_for_rows_to_move
from tests.capabilities import long

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

SET_UP = """
import os
os.environ.update(ETRAIN_STATE={state!r}, ETRAIN_RUNS={runs!r}, CUDA_VISIBLE_DEVICES="")
%load_ext etrain_jupyter
import time, torch, torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
pixels, digits = load_digits(return_X_y=True)
images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
labels = torch.tensor(digits)
train_set, test_set = (images[:1400], labels[:1400]), (images[1400:], labels[1400:])
class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Flatten(),
            nn.Linear(16 * width, 10),
        )
    def forward(self, images):
        return self.layers(images)
def accuracy(output, target):
    return (output.argmax(-1) == target).float()
"""
TRAIN = """%%etrain distributed --name digits -o job
model: Net(width=32)
data: {train: train_set, eval: test_set}
loss: F.cross_entropy
metrics: {accuracy: accuracy}
optimizer: {name: AdamW, lr: 1e-3}
batch: {global: 64}
epochs: 400
workers: {min: 1, max: 4}
"""
BUSY = """
end = time.time() + 120
while not os.path.exists({flag!r}) and time.time() < end: sum(range(1000))
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Provide the folders of a cluster for the test; shut the cluster down at the end."""
    folders = {"state": str(tmp_path / "state"), "runs": str(tmp_path / "runs")}
    monkeypatch.setenv("ETRAIN_STATE", folders["state"])
    yield folders
    assert not LocalPool().down(timeout_s=10).processes


def wait_for_world(notebook: Notebook, cell: int, world_size: int) -> None:
    """Wait until the dashboard shows this number of workers."""
    tiles = notebook.job(cell).locator(".etrain-tiles")
    expect(tiles).to_contain_text(f"{world_size} of 4", timeout=90_000)


def test_dashboard_shows_a_killed_worker_and_training_continues(
    open_notebook: Callable[..., Notebook], page: Page, cluster: dict[str, str], tmp_path: Path
) -> None:
    flag = tmp_path / "end-of-the-busy-cell"
    cells = [
        SET_UP.format(**cluster),
        TRAIN,
        BUSY.format(flag=str(flag)),
        "print(job.kill())",
        "job.stop()",
        "%etrain wait",
    ]
    notebook = open_notebook("training.ipynb", *cells, "%etrain audit", "%etrain down")
    notebook.run(0)
    notebook.run(1)
    wait_for_world(notebook, 1, 4)
    wait_for_step(notebook, 1, step_of(notebook, 1) + 40)
    notebook.job(1).scroll_into_view_if_needed()
    shoot(page, "training-before-the-kill")

    notebook.run(2, wait=False)
    step = step_of(notebook, 1)
    wait_for_step(notebook, 1, step + 20)
    busy = notebook.page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status"
    )
    assert busy == "busy", "the dashboard must update while another cell runs"

    flag.touch()
    notebook.run(3)
    expect(notebook.output(3)).to_contain_text("was killed")
    wait_for_world(notebook, 1, 3)
    shoot(page, "training-during-the-kill")
    step = step_of(notebook, 1)
    wait_for_step(notebook, 1, step + 20)
    wait_for_world(notebook, 1, 4)
    wait_for_step(notebook, 1, step_of(notebook, 1) + 20)
    shoot(page, "training-after-the-kill")
    if folder := os.environ.get("ETRAIN_SHOTS"):
        # The picture of the README, for `make screenshots`, on a page that is tall enough.
        page.set_viewport_size({"width": 1300, "height": 1500})
        notebook.job(1).screenshot(path=Path(folder) / "dashboard.png")

    notebook.run(4)
    notebook.run(5)
    expect(notebook.job(1)).to_have_attribute("data-status", "stopped")

    stopped_at = step_of(notebook, 1)
    notebook.job(1).get_by_role("button", name="Resume").click()
    shoot(page, "training-resume-asked")
    notebook.job(1).locator(".etrain-box").get_by_role("button", name="Resume").click()
    expect(notebook.job(1).locator(".etrain-answer")).to_contain_text("on cluster")
    wait_for_step(notebook, 1, stopped_at + 40)
    shoot(page, "training-resumed")
    notebook.run(4)
    notebook.run(5)
    expect(notebook.job(1)).to_have_attribute("data-status", "stopped")
    notebook.run(6)
    expect(notebook.output(6)).to_contain_text("audit ok")
    shoot(page, "training-stopped")
    notebook.run(7)


THREE = """%%etrain distributed --name {name} -o {name}
model: Net(width=8)
data: {{train: train_set}}
loss: patient_loss
optimizer: {{name: SGD, lr: 0.05}}
batch: {{global: 64}}
epochs: 400
workers: {{min: 1, max: 1}}
"""
PATIENT_LOSS = """
def patient_loss(output, target):
    time.sleep(0.03)  # steps are slow but use no CPU time
    return F.cross_entropy(output, target)
"""


@long
def test_three_jobs_train_at_once_and_buttons_scale_preempt_and_stop_them(
    open_notebook: Callable[..., Notebook], page: Page, cluster: dict[str, str]
) -> None:
    names = ("alpha", "beta", "gamma")
    notebook = open_notebook(
        "three.ipynb",
        SET_UP.format(**cluster) + PATIENT_LOSS,
        *(THREE.format(name=name) for name in names),
        "ids = [job.id for job in (alpha, beta, gamma)]; print(*ids)",
        "[job.wait(60) for job in (alpha, beta, gamma)]",
        "print([job.audit().ok for job in (alpha, beta, gamma)])\n%etrain down",
    )
    for cell in range(5):
        notebook.run(cell)
    ids = notebook.output(4).inner_text().split()
    for cell in (1, 2, 3):
        wait_for_step(notebook, cell, 10)
    panel = show_panel(page)
    expect(panel.locator(".etrain-row")).to_have_count(3)
    wait_for_rows_to_move(page, ids)
    shoot(page, "training-three")

    alpha, beta = notebook.job(1), notebook.job(2)
    alpha.locator(".etrain-scale").click()
    alpha.locator(".etrain-box").get_by_label("at most").fill("2")
    alpha.locator(".etrain-box").get_by_role("button", name="Scale").click()
    expect(alpha.locator(".etrain-tiles")).to_contain_text("2 of 2", timeout=90_000)

    worker = beta.locator(".etrain-preempt").first
    name = worker.get_attribute("aria-label") or worker.inner_text()
    worker.click()
    beta.locator(".etrain-box").get_by_role("button", name=name).click()
    expect(beta.locator(".etrain-answer")).to_contain_text("120 s")
    # Its only worker leaves when another one has taken over its state; nothing is lost.
    expect(beta.locator(".etrain-events")).to_contain_text("left", timeout=90_000)
    wait_for_step(notebook, 2, step_of(notebook, 2) + 10)
    shoot(page, "training-three-preempted")

    for cell in (1, 2, 3):
        stop(notebook, cell)
    notebook.run(5)
    for job_id in ids:
        expect(row(panel, job_id).locator(".etrain-status")).to_have_text("stopped")
    notebook.run(6)
    expect(notebook.output(6)).to_contain_text("[True, True, True]")
