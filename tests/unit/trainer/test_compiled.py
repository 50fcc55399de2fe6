"""``compile: true``: compiled in the warm-up with all that training needs, and never later."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import config as inductor_config

from etrain_jupyter.trainer import compiled
from etrain_jupyter.trainer.state.capture import digest_of
from etrain_jupyter.wire import messages
from tests.capabilities import needs
from tests.unit.trainer.loop.test_train_loop import Names, Net, make_loop, run

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Put back what compiling changes for the whole process."""
    threads = inductor_config.compile_threads
    yield
    inductor_config.compile_threads = threads
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


class Backend:
    """Compiles nothing, but counts graphs and calls."""

    def __init__(self) -> None:
        self.num_graphs = 0
        self.calls: list[int] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.num_graphs += 1

        def call(*args: Any) -> Any:
            self.calls.append(1)
            return graph.forward(*args)

        return call


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    made = Backend()
    monkeypatch.setattr(compiled, "BACKEND", made)
    return made


class Counted(Net):
    """Counts its calls that are not compiled."""

    num_eager = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.num_eager += 1
        return super().forward(x)


def logs(sent: list[dict], level: str) -> list[str]:
    return [m.text for m in sent if isinstance(m, messages.TextLogged) and m.level == level]


def test_everything_is_compiled_in_the_warm_up_and_every_later_call_goes_through_it(backend):
    loop, sent = make_loop(
        names=Names(model=Counted), compile=True, batch={"global": 16, "micro": 5}
    )
    # One for training and one for evaluating, whatever the size of a batch.
    assert backend.num_graphs == 2
    assert len(logs(sent, "info")) == 1
    assert "the model is compiled, in" in logs(sent, "info")[0]
    backend.calls.clear()
    model = loop.workload.model
    assert model.num_eager == 1  # the first pass, which finds the notebook's own errors
    assert run(loop) == "done"
    # Two epochs: 3 full steps of 4 passes and one of 2 samples, and 10 batches to evaluate.
    assert len(backend.calls) == 2 * (3 * 4 + 1 + 10)
    assert (backend.num_graphs, model.num_eager) == (2, 1)


def test_compiling_is_undone_to_the_last_bit_and_changes_no_name(backend):
    loop, _ = make_loop(compile=True)
    plain, _ = make_loop()
    assert digest_of(loop.workload.model) == digest_of(plain.workload.model)
    assert list(loop.workload.model.state_dict()) == list(plain.workload.model.state_dict())
    assert loop._moving.num_values == plain._moving.num_values > 0
    assert all(p.grad is None for p in loop.workload.model.parameters())


def test_compiled_training_computes_what_plain_training_does(backend):
    losses = []
    for compiles in (True, False):
        names = Names(model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
        loop, sent = make_loop(names=names, compile=compiles)
        run(loop)
        losses.append([m["loss"] for m in sent if isinstance(m, dict)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_goes_through_what_was_compiled(backend, precision):
    names = Names(model=Counted)
    loop, _ = make_loop(names=names, compile=True, precision=precision, steps=4)
    assert run(loop) == "done"
    assert (backend.num_graphs, loop.workload.model.num_eager) == (2, 1)


def test_what_was_not_foreseen_runs_as_it_is_written_and_compiles_nothing(backend):
    names = Names(model=Counted)
    loop, _ = make_loop(names=names, compile=True, batch={"global": 7}, steps=8)
    before = backend.num_graphs
    model = loop.workload.model
    with torch.no_grad():
        model.eval()
        model(torch.randn(1, 4))  # single samples are a shape of their own
    assert (backend.num_graphs, model.num_eager) == (before, 2)


def test_model_that_cannot_be_compiled_trains_as_it_is_with_a_warning(monkeypatch):
    def refuse(graph: Any, inputs: Any) -> Any:
        raise OSError("no space left\nfor anything")

    monkeypatch.setattr(compiled, "BACKEND", refuse)
    names = Names(model=Counted)
    loop, sent = make_loop(names=names, compile=True)
    [told] = logs(sent, "warning")
    assert told.startswith(
        "compile: true: the model trains uncompiled, because BackendCompilerFail"
    )
    assert "no space left" in told
    assert "\n" not in told
    plain, _ = make_loop()
    assert digest_of(loop.workload.model) == digest_of(plain.workload.model)
    assert run(loop) == "done"
    run(plain)
    assert digest_of(loop.workload.model) == digest_of(plain.workload.model)


def test_notebooks_own_error_is_not_taken_for_the_compilers(backend):
    class Wrong(Net):
        def forward(self, x):
            raise ValueError("the layers do not fit")

    with pytest.raises(ValueError, match="the layers do not fit"):
        make_loop(names=Names(model=Wrong), compile=True)
    assert backend.num_graphs == 0


def test_micro_auto_tries_what_is_compiled(backend):
    def loss(output, target):
        if len(target) > 5:
            raise torch.OutOfMemoryError("no memory")
        return F.cross_entropy(output, target)

    names = Names(model=Counted, loss=loss)
    loop, _ = make_loop(names=names, compile=True, batch={"global": 16, "micro": "auto"})
    assert loop.micro.size == 5
    assert loop.workload.model.num_eager == 1
    assert run(loop) == "done"
    assert (backend.num_graphs, loop.workload.model.num_eager) == (2, 1)


def test_second_batch_shows_which_other_dimensions_vary(backend):
    """Texts of other lengths: collate pads each batch to its longest."""
    texts = [(torch.ones(3 + i, 4), i % 3) for i in range(50)]

    def pad(samples):
        x = nn.utils.rnn.pad_sequence([s[0] for s in samples], batch_first=True)
        return x, torch.tensor([s[1] for s in samples])

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.num_eager = 0

        def forward(self, x):
            if not torch.compiler.is_compiling():
                self.num_eager += 1
            return self.layer(x).mean(dim=1)

    names = Names(model=Mean, **{"data.train": texts, "data.eval": texts, "data.collate": pad})
    data = {"train": "d", "eval": "d", "collate": "c"}
    loop, _ = make_loop(names=names, compile=True, data=data, batch={"global": 4}, steps=20)
    graphs = backend.num_graphs
    assert run(loop) == "done"
    assert (backend.num_graphs, loop.workload.model.num_eager) == (graphs, 1)


def test_thread_gives_signs_of_life_while_it_is_compiled(monkeypatch):
    monkeypatch.setattr(compiled, "BEAT_S", 0.01)
    beats = threading.Semaphore(0)
    with compiled.signs_of_life(beats.release):
        for _ in range(3):
            assert beats.acquire(timeout=30)
    assert "etrain-compile" not in {t.name for t in threading.enumerate()}


@needs("compiler")
def test_inductor_compiles_and_trains_to_nearly_the_same_loss():
    torch.manual_seed(0)
    names = Names(model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    children = set(psutil.Process().children(recursive=True))
    ends = []
    for compiles in (True, False):
        loop, sent = make_loop(names=names, compile=compiles)
        assert logs(sent, "warning") == []
        assert run(loop) == "done"
        ends.append([m["loss"] for m in sent if isinstance(m, dict)])
    assert ends[0] == pytest.approx(ends[1], rel=1e-4)
    # No pool of compilers that would outlive a killed trainer; there would be one with a GPU.
    assert inductor_config.compile_threads == 1
    assert set(psutil.Process().children(recursive=True)) == children


def test_without_a_compiler_inductor_gives_up_and_the_job_trains(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(inductor_config.cpp, "cxx", ("no-such-compiler",))
    loop, sent = make_loop(compile=True, steps=2)
    [told] = logs(sent, "warning")
    assert "the model trains uncompiled, because" in told
    assert run(loop) == "done"
