"""Steps in one process: equal to a plain loop, undone on errors, with exact counts."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.errors import ConfigError
from etrain_jupyter.rules.samples.ledger import checksum_of, epoch_order
from etrain_jupyter.trainer.boundary import BoundaryHooks
from etrain_jupyter.trainer.control.faults import NO_FAULTS, FaultInjector, InjectedError
from etrain_jupyter.trainer.gradients.averaged import AveragedGradients
from etrain_jupyter.trainer.group.process_group import BroadcastStore, CommunicationError, RankGroup
from etrain_jupyter.trainer.loop.train_loop import TrainLoop
from etrain_jupyter.trainer.references import WorkloadError
from etrain_jupyter.trainer.state import background_digest
from etrain_jupyter.trainer.state.capture import digest_of, put_state, take_state
from etrain_jupyter.trainer.state.train_state import TrainState, WorkPlan
from etrain_jupyter.trainer.workload import build_workload
from etrain_jupyter.wire import messages
from etrain_jupyter.wire.progress_page import ProgressPage
from tests.unit.trainer.plain_loop import PlainJob, train_plainly

NUM_SAMPLES, BATCH = 50, 16


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(NUM_SAMPLES, 4, generator=generator), torch.arange(NUM_SAMPLES) % 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(-1) == target).float()


class Names:
    """An opened bundle."""

    def __init__(self, **names) -> None:
        self.names = {
            "model": Net,
            "data.train": make_data(),
            "data.eval": make_data(),
            "loss": F.cross_entropy,
            "metrics.accuracy": accuracy,
            **names,
        }

    def evaluate(self, key: str):
        return self.names[key]


def make_loop(
    *, micro: int | None = None, names: Names | None = None, is_first: bool = False, **keys
):
    config = TrainConfig.model_validate(
        {
            "model": "Net",
            "data": {"train": "d", "eval": "d"},
            "loss": "f",
            "metrics": {"accuracy": "a"},
            "optimizer": {"name": "AdamW", "lr": 0.01},
            "batch": {"global": BATCH} | ({"micro": micro} if micro else {}),
            "epochs": None if "steps" in keys else 2,
            **keys,
        }
    )
    sent: list[dict] = []
    workload = build_workload(config, names or Names(), torch.device("cpu"))
    state = TrainState(workload, config, WorkPlan.of(config, workload))
    loop = TrainLoop(state, sent.append)
    loop.warm_up(is_first=is_first)
    return loop, sent


def alone(generation: int = 1) -> RankGroup:
    store = BroadcastStore(lambda key, value: None)
    return RankGroup(generation=generation, rank=0, world_size=1, store=store, host="")


class Watch(BoundaryHooks):
    """Calls a function after each step, and another one after each evaluation."""

    def __init__(self, after_step, after_eval) -> None:
        self._after_step, self._after_eval = after_step, after_eval

    def after_step(self, boundary) -> None:
        self._after_step()

    def after_eval(self, group) -> None:
        self._after_eval()


def run(loop: TrainLoop, *, after_step=lambda: None, after_eval=lambda: None) -> str:
    group = alone()
    return loop.run(group, loop.wrap(group), Watch(after_step, after_eval))


PLAIN = PlainJob(model=Net, data=make_data(), batch_size=BATCH, num_steps=8)
"""The same job of two epochs for the plain loop."""


def test_one_rank_equals_the_plain_loop_bit_for_bit():
    loop, _ = make_loop()
    assert run(loop) == "done"
    assert digest_of(loop.workload.model) == digest_of(train_plainly(PLAIN).model)


def test_micro_steps_change_nothing_but_rounding():
    whole, _ = make_loop(names=Names(model=lambda: nn.Linear(4, 3)))
    parts, _ = make_loop(names=Names(model=lambda: nn.Linear(4, 3)), micro=5)
    run(whole)
    run(parts)
    for a, b in zip(
        whole.workload.model.parameters(), parts.workload.model.parameters(), strict=True
    ):
        assert torch.allclose(a, b, atol=1e-6)


def test_records_prove_which_samples_were_trained():
    loop, sent = make_loop()
    run(loop)
    records = [m for m in sent if isinstance(m, dict)]
    assert [r["samples"] for r in records] == [16, 16, 16, 2] * 2
    assert [(r["epoch"], r["first"]) for r in records[3:5]] == [(0, 48), (1, 0)]
    whole = checksum_of(epoch_order(seed=0, epoch=0, num_samples=NUM_SAMPLES))
    assert sum(r["sample_checksum"] for r in records[:4]) == whole
    evals = [m.record for m in sent if isinstance(m, messages.EvalFinished)]
    assert [(e["step"], e["samples"]) for e in evals] == [(4, 50), (8, 50)]
    digests = [m for m in sent if isinstance(m, messages.WeightsFingerprinted)]
    assert [m.step for m in digests] == [4, 8]


def test_digest_at_the_end_of_an_epoch_is_reported_while_the_next_one_trains(monkeypatch):
    """Review R5: training does not wait for it, and it is of the weights at that boundary."""
    is_trained = threading.Event()
    hash_now = background_digest.digest_of_tensors

    def hash_later(named, progress):
        assert is_trained.wait(30), "training waits for the digest"
        return hash_now(named, progress)

    monkeypatch.setattr(background_digest, "digest_of_tensors", hash_later)
    loop, sent = make_loop()
    at_boundaries = []

    def look():
        if loop.step in (4, 8):
            at_boundaries.append(digest_of(loop.workload.model))
        if loop.step == 6:
            is_trained.set()

    assert run(loop, after_step=look) == "done"
    digests = [m for m in sent if isinstance(m, messages.WeightsFingerprinted)]
    assert [m.step for m in digests] == [4, 8]
    assert [m.digest for m in digests] == at_boundaries
    told_first = [m["step"] for m in sent[: sent.index(digests[0])] if isinstance(m, dict)]
    assert told_first[-1] >= 6


def test_evaluation_is_the_mean_over_all_samples_for_any_batch_size():
    loop, sent = make_loop(epochs=1)
    run(loop)
    [told] = [m.record for m in sent if isinstance(m, messages.EvalFinished)]
    x, y = make_data()
    model = loop.workload.model.eval()
    with torch.no_grad():
        expected = F.cross_entropy(model(x), y).item()
        correct = accuracy(model(x), y).mean().item()
    assert told["loss"] == pytest.approx(expected, abs=1e-6)
    assert told["metrics"]["accuracy"] == pytest.approx(correct)


def test_pending_change_ends_the_run_after_the_step():
    loop, _ = make_loop()
    loop.change_pending.set()
    assert run(loop) == "planned"
    assert loop.progress == (1, 0)


class AtPlaces(FaultInjector):
    """Records the places that the loop reaches, and calls a function at one of them."""

    def __init__(self, place: str = "", act=lambda: None) -> None:
        super().__init__([], lambda _: None)
        self.places: list[tuple[str, int]] = []
        self.place, self.act = place, act

    def at(self, place: str, *, rank: int, step: int) -> None:
        self.places.append((place, step))
        if place == self.place:
            self.act()


def test_pending_change_interrupts_an_evaluation_which_is_then_repeated():
    loop, sent = make_loop(micro=8, epochs=1)
    loop.places.faults = AtPlaces("eval", loop.change_pending.set)
    assert run(loop) == "planned"
    assert loop.progress == (4, 0)
    # Set in the first of 7 batches, sent with the second, and read before the third.
    assert [p for p in loop.places.faults.places if p[0] == "eval"] == [("eval", 4)] * 2
    loop.change_pending.clear()
    loop.places.faults = NO_FAULTS
    assert run(loop) == "done"
    assert [m.record["samples"] for m in sent if isinstance(m, messages.EvalFinished)] == [
        NUM_SAMPLES
    ]


def test_loop_reaches_each_place_with_the_number_of_the_step_in_progress():
    loop, _ = make_loop(steps=2, micro=8)
    loop.places.faults = AtPlaces()
    run(loop)
    passes = ["forward", "forward", "all_reduce", "commit"]
    assert loop.places.faults.places[:8] == [(p, 1) for p in passes] + [(p, 2) for p in passes]
    assert {p for p in loop.places.faults.places[8:]} == {("eval", 2), ("evaluated", 2)}


def test_each_place_sends_a_heartbeat():
    loop, _ = make_loop(steps=2)
    loop.places.page = ProgressPage.create()
    loop.places.faults = AtPlaces()
    run(loop)
    told = loop.places.page.read()
    loop.places.page.close()
    assert (told.step, told.phase) == (2, "evaluating")
    assert told.beats >= len(loop.places.faults.places)


@pytest.mark.parametrize(
    ("kind", "samples"), [("lose_sample", [16, 15, 16]), ("repeat_sample", [16, 16, 16])]
)
def test_planted_defect_of_the_ledger_shows_in_the_record(kind, samples):
    loop, sent = make_loop(steps=3)
    fault = {"id": 1, "kind": kind, "rank": 0, "step": 2, "at": "forward"}
    loop.places.faults = FaultInjector([fault], lambda _: None)
    run(loop)
    records = [m for m in sent if isinstance(m, dict)]
    assert [r["samples"] for r in records] == samples
    order = epoch_order(seed=0, epoch=0, num_samples=NUM_SAMPLES)
    due = [checksum_of(order[first : first + BATCH]) for first in (0, 16, 32)]
    agrees = [r["sample_checksum"] == d for r, d in zip(records, due, strict=True)]
    assert agrees == [True, False, True]


def test_error_between_the_gradient_and_the_update_undoes_the_step():
    def fail():
        raise InjectedError("injected")

    loop, _ = make_loop(names=Names(), steps=2)
    before = digest_of(loop.workload.model)
    loop.places.faults = AtPlaces("commit", fail)
    with pytest.raises(InjectedError):
        run(loop)
    assert digest_of(loop.workload.model) == before
    assert all(p.grad is None for p in loop.workload.model.parameters())


def test_parameters_outside_of_the_optimizer_do_not_accumulate_gradients():
    def head_only(parameters):
        return torch.optim.SGD(list(parameters)[-1:], lr=0.1)

    names = Names(optimizer=head_only)
    loop, _ = make_loop(names=names, steps=2, optimizer="head_only")
    run(loop)
    assert all(p.grad is None for p in loop.workload.model.parameters())


@pytest.fixture
def torch_settings() -> Iterator[None]:
    """Restore the process-wide settings that ``reproducible`` changes."""
    threads = torch.get_num_threads()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn


@pytest.mark.usefixtures("torch_settings")
def test_reproducible_job_computes_with_one_thread_and_deterministic_kernels():
    loop, _ = make_loop(steps=2, reproducible=True)
    assert torch.get_num_threads() == 1
    assert torch.are_deterministic_algorithms_enabled()
    assert run(loop) == "done"


@pytest.mark.usefixtures("torch_settings")
def test_sparse_gradients_are_refused_by_a_reproducible_job():
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(60, 3, sparse=True)

        def forward(self, x):
            return self.table(x)

    data = (torch.arange(NUM_SAMPLES), torch.arange(NUM_SAMPLES) % 3)
    names = Names(model=Sparse, **{"data.train": data, "data.eval": data})
    with pytest.raises(WorkloadError, match=r"'table.weight' has a sparse gradient.*sparse=False"):
        make_loop(names=names, optimizer={"name": "SGD", "lr": 0.1}, reproducible=True)


@pytest.mark.usefixtures("torch_settings")
def test_more_ranks_than_shards_are_refused():
    loop, _ = make_loop(reproducible={"shards": 2})
    store = BroadcastStore(lambda key, value: None)
    group = RankGroup(generation=1, rank=0, world_size=3, store=store, host="")
    with pytest.raises(ConfigError, match="2 shards leave 1 of 3 workers without work"):
        loop.wrap(group)


def test_step_that_breaks_is_undone():
    calls = []

    def fragile(output, target):
        calls.append(1)
        if len(calls) == 4:  # the warm-up pass is the first
            raise CommunicationError("a peer is lost")
        return F.cross_entropy(output, target)

    loop, _ = make_loop(names=Names(loss=fragile))
    before: list[str] = []
    with pytest.raises(CommunicationError):
        run(loop, after_step=lambda: before.append(digest_of(loop.workload.model)))
    assert loop.progress == (2, 0)
    assert loop.steps.in_step
    assert digest_of(loop.workload.model) == before[-1]  # BatchNorm's statistics too
    assert all(p.grad is None for p in loop.workload.model.parameters())
    loop.steps.in_step = False
    assert run(loop) == "done"
    assert digest_of(loop.workload.model) == digest_of(train_plainly(PLAIN).model)


def test_records_show_a_loader_that_delivers_other_samples():
    loop, sent = make_loop(epochs=1)
    deliver = loop.workload.train.batches

    def shifted(shares):
        return deliver(s._replace(indices=(s.indices + 1) % NUM_SAMPLES) for s in shares)

    loop.workload.train.batches = shifted
    run(loop)
    first = next(m for m in sent if isinstance(m, dict))
    due = epoch_order(seed=0, epoch=0, num_samples=NUM_SAMPLES)[:BATCH]
    assert first["sample_checksum"] == checksum_of((due + 1) % NUM_SAMPLES)
    assert first["sample_checksum"] != checksum_of(due)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ({"loss": lambda o, t: 3.5}, "loss returned 3.5, a float"),
        ({"loss": lambda o, t: o}, r"shape \(16, 3\) for 16 samples"),
        ({"loss": lambda o, t: F.cross_entropy(o.detach(), t)}, "does not depend on the model"),
        ({"model": lambda: None}, "model gave None, a NoneType"),
        ({"model": nn.Flatten}, "nothing to train"),
        ({"metrics.accuracy": lambda o, t: o[:2]}, r"metric 'accuracy' returned shape \(2, 3\)"),
    ],
)
def test_objects_that_do_not_fit_are_named_before_training(names, text):
    with pytest.raises(WorkloadError, match=text):
        make_loop(names=Names(**names))


def test_optimizer_value_that_torch_refuses_is_named():
    options = {"betas": [2.0, 0.9]}
    with pytest.raises(WorkloadError, match=r"AdamW does not take .*\[2.0, 0.9\].*Invalid beta"):
        make_loop(optimizer={"name": "AdamW", "lr": 0.01, "options": options})


def test_frozen_modules_stay_frozen_after_an_evaluation():
    loop, _ = make_loop()
    norm = loop.workload.model.layers[1]
    norm.eval()
    run(loop)
    assert not norm.training
    assert loop.workload.model.training


class Plain(nn.Module):
    """Neither dropout nor BatchNorm: the result does not depend on the passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_aggregation_splits_a_step_into_several_passes_with_one_exchange(monkeypatch):
    quiet_passes: list[int] = []
    no_sync = AveragedGradients._no_sync

    def counted(self):
        quiet_passes.append(1)
        return no_sync(self)

    monkeypatch.setattr(AveragedGradients, "_no_sync", counted)
    losses = {}
    for frequency in (1, 4):
        quiet_passes.clear()
        batch = {"global": BATCH, "aggregation_frequency": frequency}
        loop, sent = make_loop(names=Names(model=Plain), batch=batch, steps=3)
        assert run(loop) == "done"
        losses[frequency] = [m["loss"] for m in sent if isinstance(m, dict)]
        assert len(quiet_passes) == (frequency - 1) * 3
    assert losses[4] == pytest.approx(losses[1], rel=1e-5)


def nan_at(number: int, bad: float):
    """Return a loss that is not finite in one pass; the warm-up is the first pass."""
    calls = []

    def loss(output, target):
        calls.append(1)
        return F.cross_entropy(output, target) * (bad if len(calls) == number else 1.0)

    return loss


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.usefixtures("torch_settings")
def test_step_with_a_non_finite_loss_is_undone_and_can_be_repeated(bad, reproducible):
    shards = {"shards": 1} if reproducible else None
    loop, _ = make_loop(names=Names(loss=nan_at(4, bad)), reproducible=shards)
    before: list[str] = []
    assert run(loop, after_step=lambda: before.append(digest_of(loop.workload.model))) == "nan"
    assert loop.progress == (2, 0)
    assert not loop.steps.in_step
    assert loop.undone_loss.is_source
    assert not math.isfinite(loop.undone_loss.loss)
    assert digest_of(loop.workload.model) == before[-1]  # BatchNorm's statistics too
    assert all(p.grad is None for p in loop.workload.model.parameters())
    assert run(loop) == "done"
    assert digest_of(loop.workload.model) == digest_of(train_plainly(PLAIN).model)


def test_nan_metric_does_not_end_the_job():
    names = Names(**{"metrics.accuracy": lambda o, t: torch.full((len(t),), math.nan)})
    loop, sent = make_loop(names=names)
    assert run(loop) == "done"
    assert all(math.isnan(m["metrics"]["accuracy"]) for m in sent if isinstance(m, dict))


def scripted_metric(values: list[float]):
    """Return a metric with the next value for each evaluation, which is a pass of 50."""
    left = list(values)

    def metric(output, target):
        value = left.pop(0) if len(target) == NUM_SAMPLES else 0.0
        return torch.full((len(target),), value)

    return metric


WATCHED = {"metric": "accuracy", "mode": "max"}


def make_watching_loop(values: list[float], **keys):
    names = Names(**{"metrics.accuracy": scripted_metric(values)})
    return make_loop(names=names, steps=12, batch={"global": 16}, eval={"every": "1 step"}, **keys)


def whole_evaluations(loop: TrainLoop) -> TrainLoop:
    """Make an evaluation a single batch."""
    loop.evaluations._evaluation._most = NUM_SAMPLES
    return loop


def test_loop_is_done_when_evaluations_have_not_improved_for_long_enough():
    loop, sent = make_watching_loop(
        [0.5, 0.7, 0.7, math.nan, 0.6, 0.9], early_stopping={**WATCHED, "patience": 3}
    )
    assert run(whole_evaluations(loop)) == "done"
    assert loop.progress == (5, 5)
    assert loop.state.best_tracker.end_record() == {
        "metric": "accuracy",
        "step": 5,
        "best": pytest.approx(0.7),
        "best_step": 2,
        "num_evals": 3,
        "reason": "early stopping: accuracy has not improved in 3 evaluations since its best, "
        "0.7 at step 2",
    }
    fingerprints = [m for m in sent if isinstance(m, messages.WeightsFingerprinted)]
    assert fingerprints[-1].step == 5  # the job's last state
    assert run(loop) == "done"  # the next generation decides the same
    assert loop.progress == (5, 5)


def test_trainer_that_adopts_the_state_continues_its_counts():
    keys = {"early_stopping": {**WATCHED, "patience": 3}, "checkpoint": {"best": WATCHED}}
    first, _ = make_watching_loop([0.5, 0.7, 0.6], **keys)
    whole_evaluations(first)

    def stop_at_3() -> None:
        if first.step == 3:
            first.change_pending.set()

    assert run(first, after_eval=stop_at_3) == "planned"
    second, sent = make_watching_loop([0.65, 0.2], **keys)
    whole_evaluations(second)
    header, tensors = take_state(
        first.workload.model, first.workload.optimizer, first.workload.extras
    )
    put_state(
        second.workload.model,
        second.workload.optimizer,
        json.loads(json.dumps(header)),
        tensors,
        second.workload.extras,
    )
    second.state.set_counters(first.state.counters())
    assert run(second) == "done"
    assert second.state.best_tracker.end_record()["best_step"] == 2
    told = [m.record for m in sent if isinstance(m, messages.BestFound)]
    assert told[0] == {"metric": "accuracy", "step": 2, "value": pytest.approx(0.7)}


def test_best_is_reported_after_each_evaluation_and_again_in_the_next_generation():
    loop, sent = make_watching_loop([0.5, 0.7, 0.6], checkpoint={"best": WATCHED})
    whole_evaluations(loop)

    def stop_at_3() -> None:
        if loop.step >= 3:
            loop.change_pending.set()

    run(loop, after_eval=stop_at_3)
    told = [
        (m.record["step"], round(m.record["value"], 3))
        for m in sent
        if isinstance(m, messages.BestFound)
    ]
    assert told[:3] == [(1, 0.5), (2, 0.7), (2, 0.7)]
    sent.clear()
    loop.evaluations.report(2)
    assert [type(m) for m in sent] == [messages.BestFound]
