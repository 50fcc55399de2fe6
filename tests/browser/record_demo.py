"""Record the README's moving picture from a real JupyterLab.

Run ``python -m tests.browser.record_demo OUT.gif``, best on an otherwise idle machine.

A cell starts a job on two workers, the next one allows four, then one worker is killed, and the
loss curve continues. Frames are screenshots of headless Chromium; nothing is drawn by hand.
Each sample takes 4 ms to load, as a photograph does, so that four workers on a machine with two
cores are faster than two.
"""

from __future__ import annotations

import argparse
import io
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from tests.browser.lab import CHROMIUM_ARGUMENTS, Lab, Notebook
from tests.capabilities import find_chromium

SIZE = {"width": 1000, "height": 1580}
WIDTH_PX = 720
"""Width of the picture."""
TICK_S = 0.5
"""Interval between screenshots."""
FRAME_MS = 250
"""Time for which one frame is shown: the recording runs at twice its real speed."""
LAST_FRAME_MS = 3000
NUM_COLORS = 64
TIMEOUT_S = 120.0

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
class Photos(torch.utils.data.Dataset):
    def __len__(self):
        return 1400
    def __getitem__(self, i):
        time.sleep(0.004)
        return images[i], labels[i]
train_set = Photos()
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
"""
TRAIN = """%%etrain distributed --name digits -o job
model: Net(width=32)
data: {train: train_set}
loss: F.cross_entropy
optimizer: {name: SGD, lr: 0.01}
batch: {global: 64}
epochs: 50
workers: {min: 1, max: 2}
"""
GROW = "job.scale(max=4)"
KILL = "print(job.kill())"
END = "job.stop(); job.wait(timeout=30)\n%etrain down"


class Recorder:
    """Takes a screenshot per tick while it waits for a condition."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self.frames: list[Image.Image] = []

    def record(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Record until a condition holds, and for at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not until():
            self._shoot()
            time.sleep(TICK_S)

    def require(self, condition: Callable[[], bool], what: str) -> None:
        """Record until a condition holds.

        Raises:
            TimeoutError: If it does not hold within two minutes.
        """
        self.record(TIMEOUT_S, until=condition)
        if not condition():
            raise TimeoutError(f"{what} did not happen within {TIMEOUT_S:.0f} s")

    def _shoot(self) -> None:
        picture = Image.open(io.BytesIO(self._page.screenshot()))
        height = round(picture.height * WIDTH_PX / picture.width)
        small = picture.convert("RGB").resize((WIDTH_PX, height), Image.Resampling.LANCZOS)
        if not self.frames or small.tobytes() != self.frames[-1].tobytes():
            self.frames.append(small)

    def save(self, path: Path) -> None:
        """Write an animated GIF with one palette for all frames."""
        palette = self.frames[len(self.frames) // 2].quantize(NUM_COLORS)
        frames = [
            frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in self.frames
        ]
        durations = [FRAME_MS] * (len(frames) - 1) + [LAST_FRAME_MS]
        frames[0].save(
            path,
            save_all=True,
            append_images=frames[1:],
            duration=durations,
            loop=0,
            optimize=True,
        )


def play(notebook: Notebook, recorder: Recorder) -> None:
    """Run the cells of the story, and record what the screen shows."""

    def shows(num_workers: int, limit: int) -> Callable[[], bool]:
        tiles = notebook.job(1).locator(".etrain-tiles")
        return lambda: f"{num_workers} of {limit}" in (tiles.text_content() or "")

    notebook.hide_side_bars()
    notebook.run(0)
    notebook.page.evaluate(
        """() => {
            const notebook = window.jupyterapp.shell.currentWidget.content;
            notebook.activeCellIndex = 1;
        }"""
    )
    show_train_cell(notebook)
    recorder.record(2)
    notebook.run(1)
    notebook.job(1).wait_for()
    show_train_cell(notebook)
    recorder.require(shows(2, 2), "a world of two workers")
    recorder.record(5)
    notebook.run(2, wait=False)
    recorder.require(shows(4, 4), "a world of four workers")
    recorder.record(5)
    notebook.run(3, wait=False)
    recorder.require(shows(3, 4), "the loss of a worker")
    recorder.require(shows(4, 4), "the replacement of the killed worker")
    recorder.record(5)


def show_train_cell(notebook: Notebook) -> None:
    """Scroll the training cell to the top of the screen."""
    notebook.page.locator(".jp-Notebook .jp-CodeCell").nth(1).evaluate(
        "cell => cell.scrollIntoView()"
    )


def main() -> None:
    """Record and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        lab = Lab(folder / "lab")
        try:
            cluster = {"state": str(folder / "state"), "runs": str(folder / "runs")}
            os.makedirs(cluster["state"], mode=0o700)
            lab.write_notebook("digits.ipynb", SET_UP.format(**cluster), TRAIN, GROW, KILL, END)
            browser = playwright.chromium.launch(
                executable_path=find_chromium(), headless=True, args=list(CHROMIUM_ARGUMENTS)
            )
            page = browser.new_page(viewport=SIZE)
            notebook = Notebook(lab, page, "digits.ipynb").open()
            recorder = Recorder(page)
            try:
                play(notebook, recorder)
            finally:
                notebook.run(4)
            recorder.save(out)
            browser.close()
        finally:
            lab.close()
    print(f"{out}: {len(recorder.frames)} frames, {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
