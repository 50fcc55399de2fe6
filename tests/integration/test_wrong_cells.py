"""Error messages of wrong cells in a real kernel with a real cluster: place, cause and remedy.

Every wrong cell fails within seconds, so that "Run All" stops, and leaves nothing behind. Worker
names differ from run to run and are not part of the expected messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.integration.conftest import processes_of, until
from tests.integration.notebook import Notebook, Shown

PATIENCE_S = 60.0

pytestmark = pytest.mark.slow

SETUP = """\
import ctypes, os, pathlib, sys, tempfile, threading, time
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset
%load_ext etrain_jupyter
class Net(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 2))
    def forward(self, x):
        return self.layers(x)
x = torch.randn(64, 4)
y = (x.sum(1) > 0).long()
train_set = TensorDataset(x, y)
"""
GOOD = {
    "model": "Net()",
    "data": "{train: train_set}",
    "loss": "F.cross_entropy",
    "batch": "{global: 8}",
    "workers": "{min: 1, max: 1}",
}
TWO = {"workers": "{min: 2, max: 2}"}


@dataclass(frozen=True)
class Case:
    """A cell body that differs from a valid one in some keys, and its expected message."""

    name: str
    keys: dict[str, str]
    shows: list[str]
    """Expected fragments, in this order."""
    code: str = ""
    """Code of a cell that runs first."""
    without: list[str] = field(default_factory=list)
    """Keys to leave out."""

    @property
    def cell(self) -> str:
        """Source of the cell."""
        body = {key: value for key, value in GOOD.items() if key not in self.without}
        lines = [f"{key}: {value}" for key, value in (body | self.keys).items()]
        return "\n".join(["%%etrain distributed --quiet --wait", *lines])


# Each kind of check has one case here; tests/unit/config/wrong_cells.txt has all messages.
REFUSED = [
    Case(
        "misspelled key",
        {"modle": "Net()"},
        ["line 6, column 1: unknown key 'modle'", "^^^^^", "did you mean 'model'?"],
        without=["model"],
    ),
    Case(
        "misspelled name",
        {"data": "{train: train_sett}"},
        ["line 3, column 15", "'train_sett' is not defined in this notebook", "'train_set'?"],
    ),
    Case(
        "open file",
        {"model": "LoggingNet()"},
        [
            "'LoggingNet' (defined in Cell In[",
            "'log', which LoggingNet.forward uses, is an open file ('log.txt')",
            "Nothing was",
        ],
        code="""\
log = open("log.txt", "w")
class LoggingNet(Net):
    def forward(self, x):
        log.write("x")
        return self.layers(x)""",
    ),
    Case(
        "lock",
        {"loss": "locked_loss"},
        ["'locked_loss' (defined in Cell In[", "'lock', which it uses, is a lock", "Nothing was"],
        code="""\
lock = threading.Lock()
def locked_loss(output, target):
    with lock:
        return F.cross_entropy(output, target)""",
    ),
    Case(
        "generator in a closure",
        {"loss": "generator_loss"},
        ["'rows', which it encloses, is a running generator", "Pass the function that creates it"],
        code="""\
def make_loss():
    rows = (i for i in range(3))
    def loss(output, target):
        next(rows)
        return F.cross_entropy(output, target)
    return loss
generator_loss = make_loss()""",
    ),
    Case(
        "more workers than the pool allows",
        {"workers": "{min: 30, max: 30}", "batch": "{global: 64}"},
        ["workers.min=30 exceeds this pool's limit of 8", "Nothing was submitted", "to 8 or less"],
    ),
]

NEVER_BEGUN = "failed before its first step on w"
SUBMITTED = [
    Case(
        "loss that raises",
        {"loss": "raising_loss"} | TWO,
        ["Cell In[", "line 3, in raising_loss", "KeyError: 'b'", NEVER_BEGUN, "Nothing was saved."],
        code="""\
def raising_loss(output, target):
    scale = {"a": 1}
    return F.cross_entropy(output, target) * scale["b"]""",
    ),
    Case(
        "loss that is a float",
        {"loss": "float_loss"},
        [NEVER_BEGUN, "loss returned 0.", "a float. Return a tensor: the mean over the batch"],
        code="def float_loss(output, target): return F.cross_entropy(output, target).item()",
    ),
    Case(
        "loss that is detached",
        {"loss": "detached_loss"},
        [NEVER_BEGUN, "the loss does not depend on the model's parameters", ".detach()"],
        code="def detached_loss(output, target): return F.cross_entropy(output.detach(), target)",
    ),
    Case(
        "no loss anywhere",
        {"model": "Pairs()"},
        [NEVER_BEGUN, "key 'loss' is missing, and the model's output, a Tensor, has no .loss"],
        code="class Pairs(Net):\n    def forward(self, x, y): return self.layers(x)",
        without=["loss"],
    ),
    Case(
        "step that returns no loss",
        {"step": "lossless"},
        [NEVER_BEGUN, "step returned a dict with the keys 'accuracy' but without 'loss'"],
        code="def lossless(model, batch): return {'accuracy': model(batch[0]).mean()}",
        without=["loss"],
    ),
    Case(
        "dict batch without a target",
        {"data": "{train: dicts}"},
        [NEVER_BEGUN, "a batch has no target: its keys are 'x', 'y'", "labels, label, target"],
        code="dicts = {'x': x, 'y': y}",
    ),
    Case(
        "weight below 0",
        {"weight": "minus"},
        [NEVER_BEGUN, "weight returned -8, a int, for a batch of 8 samples. Return one number"],
        code="def minus(batch): return -len(batch[1])",
    ),
    Case(
        "torchmetrics without data.eval",
        {"metrics": "{f1: MulticlassF1Score(2)}"},
        [NEVER_BEGUN, "metric 'f1' is from torchmetrics", "data.eval, which is missing"],
        code="from torchmetrics.classification import MulticlassF1Score",
    ),
    Case(
        "data set that is empty on the worker",
        {"data": "{train: empty_there}"},
        [NEVER_BEGUN, "data.train is empty (0 samples)"],
        code="def empty_there(): return TensorDataset(x[:0], y[:0])",
    ),
    Case(
        "tensors of different lengths on the worker",
        {"data": "{train: uneven_there}"},
        [NEVER_BEGUN, "data.train has tensors of different lengths [60, 64]"],
        code="def uneven_there(): return x, y[:60]",
    ),
    Case(
        "one sample of another shape, met in step 8",
        {"data": "{train: Ragged()}"} | TWO,
        [
            "stack expects each tensor to be equal size",
            "while collating samples [",
            "failed after step 7 on w",
            "The weights of step 7 are saved in",
            "job.load_into(model) loads them",
        ],
        code="""\
class Ragged(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return torch.zeros(5 if i == 37 else 4), torch.tensor(0)""",
    ),
    Case(
        "loss that raises on one of two ranks, in step 3",
        {"data": "{train: rare}", "loss": "sometimes"} | TWO,
        ["Cell In[", "line 3, in sometimes", "no class 7", "failed after step 2 on w"],
        code="""\
def sometimes(output, target):
    if (target == 7).any():
        raise RuntimeError("no class 7")
    return F.cross_entropy(output, target)
y7 = y.clone(); y7[5] = 7
rare = TensorDataset(x, y7)""",
    ),
    Case(
        "factory that returns None",
        {"model": "no_model"},
        [NEVER_BEGUN, "model gave None, a NoneType, which is not an nn.Module"],
        code="def no_model(): return None",
    ),
    Case(
        "metric of the wrong shape",
        {"metrics": "{accuracy: three}"},
        [NEVER_BEGUN, "metric 'accuracy' returned shape (3, 2) for 8 samples", "shape (8,)"],
        code="def three(output, target): return output[:3]",
    ),
    Case(
        "data set function that raises",
        {"data": "{train: missing}"},
        ["Cell In[", "line 2, in missing", "FileNotFoundError", "missing.csv", NEVER_BEGUN],
        code="def missing():\n    with open('missing.csv') as file: return file.read()",
    ),
    Case(
        "sys.exit on the worker",
        {"data": "{train: leaves}"},
        ["Cell In[", "line 1, in leaves", "SystemExit: no more", NEVER_BEGUN],
        code="def leaves(): sys.exit('no more')",
    ),
    Case(
        "os._exit on the worker",
        {"data": "{train: leaves_at_once}"},
        [
            "printed last:",
            "no licence found",
            "3 trainers in a row exited before they were ready to train",
            "exited with code 3",
        ],
        code="def leaves_at_once():\n    print('no licence found')\n    os._exit(3)",
    ),
    Case(
        "segmentation fault on the worker",
        {"data": "{train: crashes}"},
        ["crashed: Segmentation fault", "Cell In[", "line 1, in crashes", "killed by SIGSEGV"],
        code="def crashes(): ctypes.string_at(0)",
    ),
    Case(
        "module that only the notebook can import",
        {"model": "far_models.far()"},
        [NEVER_BEGUN, "needs the module 'far_models', which is not installed", "Install it"],
        code="""\
elsewhere = pathlib.Path(tempfile.mkdtemp())
(elsewhere / "far_models.py").write_text("import torch\\ndef far(): return torch.nn.Linear(4, 2)")
sys.path.insert(0, str(elsewhere))
import far_models""",
    ),
    Case(
        "path to a module that only the notebook can import",
        {"model": '"far_models:far"'},
        [NEVER_BEGUN, "this worker has no module 'far_models', which far_models:far needs."],
    ),
    Case(
        "option that the optimizer itself refuses",
        {"optimizer": "{name: AdamW, betas: 3}"},
        [NEVER_BEGUN, "optimizer AdamW does not take {'lr': 0.001, 'betas': 3}"],
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wrong")


@pytest.fixture(scope="module")
def notebook(folder: Path) -> Iterator[Notebook]:
    """Provide one kernel and one cluster for all cases; assert that no process is left."""
    environment = {
        "ETRAIN_STATE": str(folder / "state"),
        "ETRAIN_RUNS": str(folder / "runs"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    notebook = Notebook(folder, environment)
    try:
        assert notebook.run(SETUP).status == "ok"
        yield notebook
        ended = notebook.run("%etrain down")
        assert ended.status == "ok"
    finally:
        notebook.close()
    assert processes_of(folder) == []


def run(notebook: Notebook, case: Case, folder: Path) -> Shown:
    """Run a case, append its output to ``transcript.txt`` for readers, and return it."""
    if case.code:
        assert notebook.run(case.code).status == "ok"
    shown = notebook.run(case.cell, timeout=PATIENCE_S)
    keys = ", ".join(f"{key}: {value}" for key, value in case.keys.items())
    with (folder / "transcript.txt").open("a") as file:
        heading = f"## {case.name}: {keys!r} -> {shown.status} in {shown.took_s:.1f} s"
        print(heading, *shown.text.splitlines(), sep="\n    ", end="\n\n", file=file)
    return shown


def assert_shows(shown: Shown, fragments: list[str]) -> None:
    """Assert that the cell failed and shows all fragments in this order."""
    assert shown.status == "error", shown.text
    rest = shown.text
    for fragment in fragments:
        assert fragment in rest, f"{fragment!r} is not in its place in:\n{shown.text}"
        rest = rest.partition(fragment)[2]


def assert_shows_no_frame_of_ours(shown: Shown) -> None:
    assert "etrain_jupyter/" not in shown.text
    assert "etrain_jupyter." not in shown.text
    assert shown.text.count("Traceback (most recent call last)") <= 1
    assert ".. " not in shown.text


@pytest.mark.parametrize("case", REFUSED, ids=[case.name for case in REFUSED])
def test_wrong_cell_is_refused_before_anything_starts(
    notebook: Notebook, folder: Path, case: Case
) -> None:
    before = processes_of(folder)
    shown = run(notebook, case, folder)
    assert_shows(shown, ["etrain: ", *case.shows])
    assert_shows_no_frame_of_ours(shown)
    assert "Traceback" not in shown.text
    if "pool" not in case.name:
        assert processes_of(folder) == before, "a refused cell must not start a process"
    assert not list((folder / "runs").glob("*")), "a refused cell must not create a run folder"


@pytest.mark.parametrize("case", SUBMITTED, ids=[case.name for case in SUBMITTED])
def test_wrong_cell_fails_on_the_worker(notebook: Notebook, folder: Path, case: Case) -> None:
    shown = run(notebook, case, folder)
    assert_shows(shown, case.shows)
    assert shown.text.count("etrain: job ") == 1
    assert "%etrain logs shows the workers' output." in shown.text
    assert_shows_no_frame_of_ours(shown)


def test_result_shows_the_calling_line_and_the_users_traceback(notebook: Notebook) -> None:
    submit = """\
import etrain_jupyter
failing = etrain_jupyter.distributed(
    model=Net, data={"train": train_set}, loss=lambda output, target: 1 / 0, workers={"max": 1}
)"""
    assert notebook.run(submit).status == "ok"
    shown = notebook.run("# wait here\nfailing.result()", timeout=PATIENCE_S)
    assert_shows(
        shown,
        ["Cell In[", "line 2: failing.result()", "Cell In[", "ZeroDivisionError", NEVER_BEGUN],
    )
    assert_shows_no_frame_of_ours(shown)


def test_job_that_hangs_in_user_code_can_be_stopped_immediately(
    notebook: Notebook, folder: Path
) -> None:
    asleep = folder / "asleep"
    sleepy = f"""\
def sleepy():
    pathlib.Path({str(asleep)!r}).write_text(f"{{os.getpid()}}.")
    time.sleep(3600)  # longer than any test may take
    return train_set"""
    assert notebook.run(sleepy).status == "ok"
    case = Case("", {"data": "{train: sleepy}"}, [])
    submitted = notebook.run(case.cell.replace("--wait", "-o sleeping"))
    assert submitted.status == "ok"
    until(lambda: asleep.exists() and asleep.read_text().endswith("."), "the sleep")
    trainer = psutil.Process(int(asleep.read_text().strip(".")))
    stopped = notebook.run("%etrain stop --now")
    assert (stopped.status, stopped.text) == ("ok", "stopped")
    waited = notebook.run("%etrain wait")
    assert_shows(waited, ["was stopped at step 0"])
    until(lambda: not trainer.is_running(), "the end of the trainer")
    lost = notebook.run("print('WorkerLost' in [event.kind for event in sleeping.events()])")
    assert lost.text == "False", "the stop must not wait for the hang timeout"


def test_same_cell_run_twice_submits_two_jobs_on_one_pool(notebook: Notebook) -> None:
    cell = Case("", {"name": "twin", "epochs": "4"}, []).cell
    for name in ("first", "second"):
        assert notebook.run(cell.replace("--wait", f"-o {name}")).status == "ok"
    shown = notebook.run("print(first.wait(60), second.wait(60), first.id == second.id)")
    assert shown.text == "finished finished False"
