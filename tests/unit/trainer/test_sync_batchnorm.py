"""BatchNorm over all ranks equals torch's BatchNorm over the concatenated batch."""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from etrain_jupyter.trainer.references import WorkloadError
from etrain_jupyter.trainer.sync_batchnorm import SyncedNorms
from tests.unit.trainer.rank_processes import Generation, Job, RankProcesses
from tests.unit.trainer.reproducible_jobs import keys, make_data

CHANNELS = 3


class _Done:
    def wait(self) -> None:
        """Do nothing: the work is complete."""


class _Arriving:
    def __init__(self, box: queue.Queue[torch.Tensor], into: torch.Tensor) -> None:
        self._box, self._into = box, into

    def wait(self) -> None:
        row = self._box.get(timeout=30)
        self._into[: row.numel()] = row


class ThreadPeers:
    """A rank in a thread of its own."""

    def __init__(self, rank: int, world_size: int, boxes: dict[Any, Any]) -> None:
        self.rank, self.world_size, self._boxes = rank, world_size, boxes

    def start(self, work: Callable[[], None]) -> _Done:
        work()
        return _Done()

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> _Done:
        self._boxes[self.rank, dst].put(tensor.clone())
        return _Done()

    def irecv(self, tensor: torch.Tensor, src: int, tag: int) -> _Arriving:
        return _Arriving(self._boxes[src, self.rank], tensor)


def on_ranks(world_size: int, work: Callable[[ThreadPeers], Any]) -> list[Any]:
    """Run ``work`` on each rank, and return the results."""
    pairs = [(a, b) for a in range(world_size) for b in range(world_size)]
    boxes: dict[Any, Any] = {pair: queue.Queue() for pair in pairs}
    with ThreadPoolExecutor(world_size) as pool:
        peers = [ThreadPeers(rank, world_size, boxes) for rank in range(world_size)]
        return list(pool.map(work, peers))


def cut(x: torch.Tensor, shares: Sequence[int]) -> list[torch.Tensor]:
    """Return each rank's samples; a rank without samples borrows those of the first one."""
    parts = list(torch.split(x, list(shares)))
    first = next(part for part in parts if len(part))
    return [part if len(part) else first for part in parts]


def train_on_ranks(
    norm: nn.Module, x: torch.Tensor, factors: torch.Tensor, shares: Sequence[int]
) -> list[dict[str, Any]]:
    """Make one forward and backward pass of a layer; the loss is the sum of factors * output."""
    parts = zip(cut(x, shares), cut(factors, shares), shares, strict=True)
    jobs = [(copy.deepcopy(norm), part.clone(), c, bool(n)) for part, c, n in parts]

    def work(peers: ThreadPeers) -> dict[str, Any]:
        layer, part, c, counts = jobs[peers.rank]
        part.requires_grad_()
        norms = SyncedNorms(layer)
        with norms.over(peers):
            norms.counts = counts
            y = layer(part)
            loss = (y * c).sum() * (1.0 if counts else 0.0)
            loss.backward()
        gradients = [p.grad for p in layer.parameters()]
        return {"y": y.detach(), "dx": part.grad, "dp": gradients, "buffers": layer.state_dict()}

    return on_ranks(len(shares), work)


shapes = st.sampled_from([(), (2,), (3, 2), (2, 1, 2)])
KINDS = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


@settings(max_examples=60, deadline=None)
@given(
    shares=st.lists(st.integers(0, 4), min_size=2, max_size=5).filter(lambda s: sum(s) > 1),
    shape=shapes,
    momentum=st.sampled_from([0.1, 0.7, None]),
    is_affine=st.booleans(),
    tracks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_shares_equal_torch_over_the_concatenated_batch(
    shares, shape, momentum, is_affine, tracks, seed
):
    torch.manual_seed(seed)
    norm = KINDS[len(shape)](
        CHANNELS, momentum=momentum, affine=is_affine, track_running_stats=tracks
    ).double()
    for p in norm.parameters():
        nn.init.normal_(p)
    x = torch.randn(sum(shares), CHANNELS, *shape, dtype=torch.float64) * 3 + 100
    factors = torch.randn_like(x)
    expected, whole = copy.deepcopy(norm), x.clone().requires_grad_()
    y = expected(whole)
    (y * factors).sum().backward()

    ranks = train_on_ranks(norm, x, factors, shares)

    busy = [rank for rank, share in zip(ranks, shares, strict=True) if share]
    torch.testing.assert_close(torch.cat([rank["y"] for rank in busy]), y.detach())
    torch.testing.assert_close(
        torch.cat([rank["dx"] for rank in busy]), whole.grad, atol=1e-9, rtol=1e-7
    )
    # The sum over the ranks, which DDP computes, is the gradient of the whole batch.
    for number, p in enumerate(expected.parameters()):
        total = torch.stack([rank["dp"][number] for rank in ranks]).sum(0)
        torch.testing.assert_close(total, p.grad)
    for rank in ranks:
        torch.testing.assert_close(rank["buffers"], expected.state_dict())
        if tracks:  # the same bits on all ranks, also on those without samples
            assert torch.equal(rank["buffers"]["running_var"], ranks[0]["buffers"]["running_var"])


def test_borrowed_samples_get_no_gradient():
    x = torch.randn(5, CHANNELS)
    ranks = train_on_ranks(nn.BatchNorm1d(CHANNELS), x, torch.randn_like(x), [5, 0])

    assert not ranks[1]["dx"].any()
    assert not any(gradient.any() for gradient in ranks[1]["dp"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_statistics_of_large_means_do_not_cancel(dtype):
    torch.manual_seed(0)
    x = (torch.randn(512, CHANNELS) + 256).to(dtype)
    norm = nn.BatchNorm1d(CHANNELS)
    expected = copy.deepcopy(norm).double()
    y = expected(x.double()).detach()

    ranks = train_on_ranks(norm, x, torch.ones_like(x), [300, 212])

    assert ranks[0]["y"].dtype == dtype
    # A float32 number of this size has an error of 3e-5, and a bfloat16 number below 4 of 8e-3.
    tolerance = {torch.float32: 2e-4, torch.bfloat16: 2e-2}[dtype]
    found = torch.cat([rank["y"] for rank in ranks]).double()
    torch.testing.assert_close(found, y, atol=tolerance, rtol=0)
    for rank in ranks:
        torch.testing.assert_close(
            rank["buffers"]["running_var"].double(), expected.running_var, rtol=1e-5, atol=0
        )


class OneOfTwo:
    """The first of two ranks; the second one's share of the statistics does not change."""

    rank, world_size = 0, 2

    def __init__(self) -> None:
        self._label = 0.0

    def start(self, work: Callable[[], None]) -> _Done:
        work()
        return _Done()

    def irecv(self, tensor: torch.Tensor, src: int, tag: int) -> _Done:
        self._row = tensor
        return _Done()

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> _Done:
        self._row[: tensor.numel()] = 0  # backward: its loss does not depend on this rank
        self._row[0] = tensor[0]
        if not int(tensor[0]) % 2:
            other = torch.tensor([4.0, *(1.0, -2.0, 0.5), *(9.0, 8.0, 7.0)], dtype=torch.float64)
            self._row[1:8] = other
        return _Done()


def test_gradient_passes_gradcheck():
    torch.manual_seed(1)
    layer = nn.BatchNorm2d(CHANNELS, track_running_stats=False).double()
    norms = SyncedNorms(layer)
    x = torch.randn(3, CHANNELS, 2, 2, dtype=torch.float64, requires_grad=True)

    with norms.over(OneOfTwo()):
        assert torch.autograd.gradcheck(
            lambda x, w, b: torch.func.functional_call(layer, {"weight": w, "bias": b}, (x,)),
            (x, layer.weight, layer.bias),
        )


def test_one_sample_in_all_is_refused_on_every_rank():
    x = torch.randn(1, CHANNELS)

    with pytest.raises(ValueError, match="all workers together have 1 in a pass"):
        train_on_ranks(nn.BatchNorm1d(CHANNELS), x, x, [1, 0])


def test_different_layers_are_an_error_on_both_ranks():
    model = nn.ModuleDict({"first": nn.BatchNorm1d(3), "second": nn.BatchNorm1d(5)})

    def work(peers: ThreadPeers) -> str:
        own = copy.deepcopy(model)
        norms = SyncedNorms(own)
        name, size = [("first", 3), ("second", 5)][peers.rank]
        with norms.over(peers), pytest.raises(WorkloadError) as caught:
            own[name](torch.randn(2, size))
        return str(caught.value)

    for message in on_ranks(2, work):
        assert "'first'" in message
        assert "'second'" in message


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_layers_outside_training_use_their_own_samples(kind):
    norm, expected = kind(CHANNELS), nn.BatchNorm1d(CHANNELS)
    x = torch.randn(4, CHANNELS)
    norms = SyncedNorms(norm)

    assert torch.equal(norm(x), expected(x))
    norm.eval()
    with norms.over(OneOfTwo()):
        assert torch.equal(norm(x), expected.eval()(x))


class OwnForward(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(super().forward(x))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2), "a Linear, has no BatchNorm layer. Remove the line."),
        (nn.Sequential(OwnForward(2)), "cannot synchronize layer '0': OwnForward has a forward"),
    ],
)
def test_unsuitable_models_are_refused(model, message):
    with pytest.raises(WorkloadError, match=message):
        SyncedNorms(model)


# --- in training ---


class Normed(nn.Module):
    """Layers whose result depends on the batch, but on no random number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 8), nn.BatchNorm1d(8)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


class Pieces(Normed):
    """A single sample has several values per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2), nn.Flatten()
        )


def pieces() -> dict[str, Any]:
    return {**normed(), "model": Pieces}


def normed() -> dict[str, Any]:
    data = make_data()
    return {
        "model": Normed,
        "data.train": data,
        "data.eval": data,
        "loss": F.cross_entropy,
        "metrics.accuracy": lambda output, target: (output.argmax(-1) == target).float(),
    }


def synced(**more: Any) -> dict[str, Any]:
    # Adam would scale up the gradient of a bias before BatchNorm, which consists of rounding.
    optimizer = {"name": "SGD", "lr": 0.1, "momentum": 0.9}
    return keys(reproducible=None, sync_batchnorm=True, optimizer=optimizer, **more)


def train(
    ranks: RankProcesses, history: Sequence[Generation], names: Any = normed, **more: Any
) -> list[Any]:
    return ranks.train(Job(config=synced(**more), names=names, history=history))


HISTORIES = {
    "2 ranks": [Generation(members=(0, 1))],
    "4 ranks, some without samples": [Generation(members=(0, 1, 2, 3))],
    "joins and leaves": [
        Generation(members=(0, 1), until=2),
        Generation(members=(1, 2, 0), until=3),
        Generation(members=(2, 0)),
    ],
    "losses": [
        Generation(members=(0, 1, 2), until=1, lost=1),
        Generation(members=(0, 2), until=4, lost=0),
        Generation(members=(2, 0, 1, 3)),
    ],
}


@pytest.mark.parametrize("name", HISTORIES)
def test_the_result_does_not_depend_on_the_number_of_workers(ranks, name):
    [expected] = train(ranks, [Generation(members=(0,))])

    outcomes = train(ranks, HISTORIES[name])

    assert len({outcome.digest for outcome in outcomes}) == 1
    torch.testing.assert_close(outcomes[0].model, expected.model, rtol=1e-4, atol=1e-6)


def test_ranks_with_fewer_passes_borrow_some(ranks):
    # One sample per pass: the first rank has one pass more than the second.
    batch = {"global": 7, "micro": 1}
    outcomes = train(ranks, [Generation(members=(0, 1, 2))], pieces, batch=batch)

    assert len({outcome.digest for outcome in outcomes}) == 1
    assert [record["step"] for record in outcomes[0].records("step")] == [1, 2, 3, 4, 5, 6]
