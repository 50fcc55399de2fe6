"""Jobs survive the kernel: its death, its interrupts and the end of its cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

from etrain_jupyter.log.event_log import read_events
from etrain_jupyter.log.events import (
    CheckpointCommitted,
    Event,
    GenerationFormed,
    JobStatusChanged,
    StepCompleted,
)
from tests.capabilities import long
from tests.integration.conftest import processes_of, until
from tests.integration.notebook import Notebook, Shown

pytestmark = pytest.mark.slow

SETUP = """\
import json, os, time
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from etrain_jupyter.notebook.job import feed, followed_job, link
%load_ext etrain_jupyter
# Disable the kernel's timeouts, so that a cell that relies on one blocks and fails the test.
link.CONNECT_S = feed.POLL_S = followed_job.CATCH_UP_S = followed_job.GLANCE_S = 600.0
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
y = (x.sum(1) > 0).long()
train_set = TensorDataset(x, y)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Linear(4, 2)
    def forward(self, x):
        return self.layers(x)
def slow_loss(output, target):
    time.sleep(0.02)  # steps are slow but use no CPU time
    return F.cross_entropy(output, target)
"""
CELL = """\
%%etrain distributed --quiet --name survivor -o job
model: Net()
data: {{train: train_set}}
loss: slow_loss
optimizer: {{name: AdamW, lr: 0.02}}
batch: {{global: 16}}
epochs: {epochs}
checkpoint: {{every: 10 steps}}
workers: {{min: 1, max: 2}}
"""
AT_TWO = """\
while (job.step < 20 or job.world_size < 2) and job.status in ("submitted", "waiting", "running"):
    time.sleep(0.05)
print(job.id)"""


class Desk:
    """A folder of notebooks that share a cluster and a run store."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.environment = {
            "ETRAIN_STATE": str(folder / "state"),
            "ETRAIN_RUNS": str(folder / "runs"),
            "CUDA_VISIBLE_DEVICES": "",
            **environment,
        }
        self._open: list[Notebook] = []

    def notebook(self) -> Notebook:
        notebook = Notebook(self.folder, self.environment)
        self._open.append(notebook)
        assert notebook.run(SETUP).status == "ok"
        return notebook

    def begin(self, notebook: Notebook, *, epochs: int = 10_000) -> str:
        """Submit a job, wait until two workers train, and return its id."""
        assert notebook.run(CELL.format(epochs=epochs)).status == "ok"
        return notebook.run(AT_TWO).text

    def terminal(self, *words: str) -> subprocess.CompletedProcess[str]:
        code = "from etrain_jupyter.cli import main; raise SystemExit(main())"
        return subprocess.run(
            [sys.executable, "-c", code, *words],
            cwd=self.folder,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def events(self, job_id: str) -> list[Event]:
        return read_events(self.folder / "runs" / job_id / "events.jsonl")

    def cluster(self) -> list[psutil.Process]:
        """Return the processes of the folder without the kernels."""
        kernels = {notebook.pid for notebook in self._open if notebook.is_alive}
        return [p for p in processes_of(self.folder) if p.pid not in kernels]

    def keeper(self) -> psutil.Process:
        [keeper] = [p for p in self.cluster() if "etrain_jupyter.head.keeper" in p.cmdline()]
        return keeper

    def close(self) -> None:
        for notebook in self._open:
            notebook.close()
        self.terminal("down", "--all")
        assert processes_of(self.folder) == []


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """Provide one desk for all tests: each must work whatever the previous one did."""
    desk = Desk(tmp_path_factory.mktemp("desk"))
    yield desk
    desk.close()


def steps_of(events: list[Event]) -> list[int]:
    return [event.step for event in events if isinstance(event, StepCompleted)]


def trainers_of(events: list[Event]) -> dict[str, int]:
    """Return the trainers' process ids in the newest generation, by worker."""
    formed = [event for event in events if isinstance(event, GenerationFormed)][-1]
    return dict(zip(formed.ranks, formed.trainer_pids, strict=True))


def value(notebook: Notebook, expression: str) -> Any:
    shown = notebook.run(f"print(json.dumps({expression}))")
    assert shown.status == "ok", shown.text
    return json.loads(shown.text)


def test_training_survives_a_killed_kernel_and_a_new_kernel_sees_all_events(desk: Desk) -> None:
    first = desk.notebook()
    job_id = desk.begin(first, epochs=200)
    before = desk.events(job_id)

    first.kill()

    until(lambda: len(steps_of(desk.events(job_id))) > len(steps_of(before)) + 20, "20 more steps")
    assert trainers_of(desk.events(job_id)) == trainers_of(before)
    assert all(psutil.pid_exists(pid) for pid in trainers_of(before).values())
    shown = desk.terminal("show")
    assert shown.returncode == 0
    assert f"job             {job_id}\nstatus          running\n" in shown.stdout

    second = desk.notebook()
    attached = second.run("%etrain attach survivor -o job")
    assert attached.status == "ok"
    assert "survivor" in attached.text
    assert value(second, "job.id") == job_id
    assert value(second, "job.status") == "running", "attach must not wait for the end of the job"
    numbers = value(second, "[event.seq for event in job.events()]")
    assert numbers == list(range(1, len(numbers) + 1))
    steps = value(second, "job.history()['step']")
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > len(steps_of(before)) + 20
    live = "first = job.step\nwhile job.step < first + 10: time.sleep(0.02)"
    assert second.run(live).status == "ok", "the new kernel must see new steps"

    waited = second.run("%etrain wait")
    assert (waited.status, "finished, step 800/800" in waited.text) == ("ok", True), waited.text
    assert value(second, "job.history()['step']") == list(range(1, 801))
    loaded = second.run("model = job.load_into(Net())")
    assert loaded.status == "ok", loaded.text
    assert value(second, "(model(x).argmax(1) == y).float().mean().item()") > 0.9
    assert "audit ok" in second.run("%etrain audit").text
    assert trainers_of(desk.events(job_id)) == trainers_of(before)


@long
def test_interrupt_stops_only_the_job_that_the_cell_waits_for(desk: Desk) -> None:
    notebook = desk.notebook()
    job_id = desk.begin(notebook)
    before = desk.events(job_id)

    busy = notebook.send("time.sleep(60)")
    time.sleep(0.3)  # inside the cell's code, which cannot be observed from outside
    notebook.interrupt()
    assert "KeyboardInterrupt" in notebook.finish(busy).text
    done = len(steps_of(desk.events(job_id)))
    until(lambda: len(steps_of(desk.events(job_id))) > done + 20, "20 more steps")
    assert trainers_of(desk.events(job_id)) == trainers_of(before)

    waiting = notebook.send("%etrain wait")
    time.sleep(0.5)  # inside the wait
    notebook.interrupt()
    shown = notebook.finish(waiting)  # without the stop, the job would run for many minutes

    assert shown.status == "error", '"Run All" stops'
    assert f"etrain: stopping {job_id} after this step, with a checkpoint." in shown.text
    assert f"etrain: job {job_id} was stopped by the interrupt at step " in shown.text
    assert value(notebook, "job.status") == "stopped"
    saved = [e.step for e in desk.events(job_id) if e.kind == "CheckpointCommitted"]
    assert saved[-1] == steps_of(desk.events(job_id))[-1]
    assert notebook.run("job.load_into(Net())").status == "ok"


@long
def test_job_continues_after_an_executed_notebook_has_ended(desk: Desk) -> None:
    cells = [SETUP, CELL.format(epochs=10_000), AT_TWO]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(notebook, timeout=120, kernel_name="python3")
    client.execute(cwd=str(desk.folder), env={**os.environ, **desk.environment})
    [output] = notebook.cells[2].outputs
    job_id = output.text.strip()
    assert client.km is None, "the kernel is gone, as after papermill"
    before = desk.events(job_id)

    until(lambda: len(steps_of(desk.events(job_id))) > len(steps_of(before)) + 20, "20 more steps")

    assert trainers_of(desk.events(job_id)) == trainers_of(before)
    stopped = desk.terminal("stop", job_id)
    assert stopped.returncode == 0, stopped.stderr
    until(lambda: desk.terminal("wait", job_id).returncode == 1, "the end")


def assert_says_that_it_is_lost(desk: Desk, notebook: Notebook, asked: Shown, job_id: str) -> None:
    lost = f"etrain: job {job_id} is lost at step "
    assert asked.status == "error"
    assert lost in asked.text
    assert ": its cluster has ended. The weights of step " in asked.text
    advice = f"job.load_into(model) loads them. To continue it, type %etrain resume {job_id}."
    assert advice in asked.text
    for line in ("%etrain show", "job", "%etrain ls"):
        shown = notebook.run(line)
        assert (shown.status, "failed" in shown.text) == ("ok", True), shown.text
        assert "failed (its cluster has ended)" in shown.text
    waited = notebook.run("job.wait()")
    assert (waited.status, f"job {job_id} is lost at step" in waited.text) == ("error", True)
    assert "failed (its cluster has ended)" in desk.terminal("show").stdout
    assert "scale cannot reach" in notebook.run("%etrain scale 3").text
    assert notebook.run("job.load_into(Net())").status == "ok"


def test_down_keeps_the_job_of_another_notebook_and_saves_it_with_all(desk: Desk) -> None:
    notebook, other = desk.notebook(), desk.notebook()
    job_id = desk.begin(notebook)

    kept = other.run("%etrain down")

    assert kept.status == "ok"
    assert f" was kept: it has running jobs.\n  {job_id}: running, step " in kept.text
    steps = len(steps_of(desk.events(job_id)))
    until(lambda: len(steps_of(desk.events(job_id))) > steps + 20, "20 more steps")

    waiting = notebook.send("%etrain wait")
    down = other.run("%etrain down --all")

    assert down.status == "ok", down.text
    assert desk.cluster() == []
    events = desk.events(job_id)
    [*_, saved] = [event.step for event in events if isinstance(event, CheckpointCommitted)]
    assert saved == steps_of(events)[-1], "no step is lost"
    end = events[-1]
    assert isinstance(end, JobStatusChanged)
    assert end.reason.startswith("the cluster was shut down by ")
    assert f" in a notebook (process {other.pid} on " in end.reason
    shown = notebook.finish(waiting)
    assert shown.status == "error"  # "Run All" must not continue with an untrained model
    assert f"job {job_id} was stopped at step " in shown.text
    assert "stopped" in notebook.run("%etrain show").text
    refused = notebook.run("%etrain scale 3")
    assert f"job {job_id} has been stopped: there is nothing to scale." in refused.text


def test_idle_cluster_shuts_down_and_its_jobs_remain_readable(tmp_path: Path) -> None:
    desk = Desk(tmp_path, ETRAIN_IDLE_S="2")
    notebook = desk.notebook()
    assert notebook.run(CELL.format(epochs=2).replace("--quiet", "--quiet --wait")).status == "ok"

    until(lambda: desk.cluster() == [], "the end of the idle cluster")

    assert "survivor" in notebook.run("%etrain show").text
    assert "finished, step 8/8" in notebook.run("%etrain wait").text
    assert value(notebook, "job.history()['step']") == list(range(1, 9))
    # The key that signs job records belongs to the user, not to a cluster.
    assert os.listdir(tmp_path / "state") == ["signing.key"]
    desk.close()


def test_killed_keeper_is_reported_and_resume_continues_the_same_curve(desk: Desk) -> None:
    """The scheduler and all workers die; a new cluster continues in the same log."""
    notebook = desk.notebook()
    begun = notebook.run(CELL.format(epochs=60))
    assert begun.status == "ok", begun.text
    job_id = notebook.run(AT_TWO).text
    until(lambda: "CheckpointCommitted" in {e.kind for e in desk.events(job_id)}, "a checkpoint")
    running = notebook.run(f"%etrain resume {job_id} --max 1")
    assert "there is nothing to resume" in running.text

    waiting = notebook.send("%etrain wait")
    desk.keeper().kill()
    assert_says_that_it_is_lost(desk, notebook, notebook.finish(waiting), job_id)
    until(lambda: desk.cluster() == [], "the end of every process")
    assert_says_that_it_is_lost(desk, notebook, notebook.run("%etrain wait"), job_id)
    before = desk.events(job_id)
    other = desk.notebook()
    resumed = other.run(f"%etrain resume {job_id} --max 1")

    assert (resumed.status, "from the checkpoint at step" in resumed.text) == ("ok", True)
    waited = notebook.run("%etrain wait survivor")
    assert (waited.status, "finished, step 240/240" in waited.text) == ("ok", True), waited.text
    assert value(notebook, "job.id") == job_id
    assert value(notebook, "job.history()['step']") == list(range(1, 241))
    after = desk.events(job_id)
    assert after[: len(before)] == before, "resume must append to the same log"
    assert [event.seq for event in after] == list(range(1, len(after) + 1))
    assert "audit ok" in other.run("%etrain audit survivor").text


def test_cell_with_resume_lists_differences_and_continues_when_they_are_reverted(
    desk: Desk,
) -> None:
    first = desk.notebook()
    job_id = desk.begin(first, epochs=10_000)
    assert first.run("%etrain stop\n%etrain wait").status == "error"
    stopped_at = value(first, "job.step")
    first.close()
    second = desk.notebook()  # the same code in another kernel counts as unchanged
    cell = CELL.replace("--name survivor", f"--resume {job_id}").format(epochs=10_000)

    mended = "def slow_loss(output, target):\n    return F.cross_entropy(output, target) * 2"
    assert second.run(mended).status == "ok"
    refused = second.run(cell)
    assert refused.status == "error"
    assert "code of slow_loss in Cell In[" in refused.text
    assert "--force" in refused.text
    assert second.run(SETUP).status == "ok"
    went_on = second.run(cell.replace("epochs: 10000", f"steps: {stopped_at + 40}"))

    assert went_on.status == "ok", went_on.text
    waited = second.run("%etrain wait")
    assert "finished" in waited.text, waited.text
    assert value(second, "job.step") == stopped_at + 40
    assert "audit ok" in second.run("%etrain audit").text
