"""``compile: true``: everything is compiled in the warm-up, and nothing later."""

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
    """Restore the process-wide settings that compiling changes."""
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
    """Counts its eager calls."""

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
    # One for training and one for evaluation, for all batch sizes.
    assert backend.num_graphs == 2
    assert len(logs(sent, "info")) == 1
    assert "the model was compiled in" in logs(sent, "info")[0]
    backend.calls.clear()
    model = loop.workload.model
    assert model.num_eager == 1  # the first pass, which finds the notebook's own errors
    assert run(loop) == "done"
    # Two epochs: 3 full steps of 4 passes and one of 2 samples, and 10 batches to evaluate.
    assert len(backend.calls) == 2 * (3 * 4 + 1 + 10)
    assert (backend.num_graphs, model.num_eager) == (2, 1)


def test_compiling_is_undone_bit_for_bit_and_changes_no_name(backend):
    loop, _ = make_loop(compile=True)
    plain, _ = make_loop()
    assert digest_of(loop.workload.model) == digest_of(plain.workload.model)
    assert list(loop.workload.model.state_dict()) == list(plain.workload.model.state_dict())
    assert loop._effects.moving.num_values == plain._effects.moving.num_values > 0
    assert all(p.grad is None for p in loop.workload.model.parameters())


def test_compiled_training_computes_the_same_as_eager_training(backend):
    losses = []
    for compiles in (True, False):
        names = Names(model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
        loop, sent = make_loop(names=names, compile=compiles)
        run(loop)
        losses.append([m["loss"] for m in sent if isinstance(m, dict)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_uses_the_compiled_model(backend, precision):
    names = Names(model=Counted)
    loop, _ = make_loop(names=names, compile=True, precision=precision, steps=4)
    assert run(loop) == "done"
    assert (backend.num_graphs, loop.workload.model.num_eager) == (2, 1)


def test_unexpected_shape_runs_eagerly_and_compiles_nothing(backend):
    names = Names(model=Counted)
    loop, _ = make_loop(names=names, compile=True, batch={"global": 7}, steps=8)
    before = backend.num_graphs
    model = loop.workload.model
    with torch.no_grad():
        model.eval()
        model(torch.randn(1, 4))  # single samples are compiled separately
    assert (backend.num_graphs, model.num_eager) == (before, 2)


def test_model_that_cannot_be_compiled_trains_in_eager_mode_with_a_warning(monkeypatch):
    def refuse(graph: Any, inputs: Any) -> Any:
        raise OSError("no space left\nfor anything")

    monkeypatch.setattr(compiled, "BACKEND", refuse)
    names = Names(model=Counted)
    loop, sent = make_loop(names=names, compile=True)
    [told] = logs(sent, "warning")
    assert told.startswith(
        "compile: true: the model trains in eager mode, because BackendCompilerFail"
    )
    assert "no space left" in told
    assert "\n" not in told
    plain, _ = make_loop()
    assert digest_of(loop.workload.model) == digest_of(plain.workload.model)
    assert run(loop) == "done"
    run(plain)
    assert digest_of(loop.workload.model) == digest_of(plain.workload.model)


def test_error_of_the_notebook_is_not_mistaken_for_one_of_the_compiler(backend):
    class Wrong(Net):
        def forward(self, x):
            raise ValueError("the layers do not fit")

    with pytest.raises(ValueError, match="the layers do not fit"):
        make_loop(names=Names(model=Wrong), compile=True)
    assert backend.num_graphs == 0


def test_micro_auto_uses_the_compiled_model(backend):
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


def test_second_batch_makes_other_varying_dimensions_dynamic(backend):
    """Texts of different lengths: collate pads each batch to its longest."""
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


def test_thread_sends_heartbeats_during_a_compilation(monkeypatch):
    monkeypatch.setattr(compiled, "BEAT_S", 0.01)
    beats = threading.Semaphore(0)
    with compiled.heartbeats(beats.release):
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
    # No pool of compiler processes, which would outlive a killed trainer.
    assert inductor_config.compile_threads == 1
    assert set(psutil.Process().children(recursive=True)) == children


def test_job_trains_if_inductor_has_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(inductor_config.cpp, "cxx", ("no-such-compiler",))
    loop, sent = make_loop(compile=True, steps=2)
    [told] = logs(sent, "warning")
    assert "the model trains in eager mode, because" in told
    assert run(loop) == "done"
