"""Quality of the block order of ``Shards``: final loss of a small language model, by window.

The corpus consists of 128 blocks of 512 sequences, either in the order of its books or with rows in
random order, as ``write_shards`` writes them. Each run trains a byte-level model for two epochs
with another order and is compared with a full shuffle. Everything but the order depends only on the
seed.
"""

from __future__ import annotations

import argparse
import gzip
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.common import report
from etrain_jupyter.rules.samples.block_order import BlockLayout, BlockOrder
from etrain_jupyter.rules.samples.ledger import epoch_order

LENGTH = 32
"""Bytes of a sequence."""
ROWS, BATCH, EPOCHS = 512, 256, 2
NUM_BOOKS = 100
FULL = 0
"""In place of a window: a full shuffle."""
WINDOWS = (1, 4, 16, 64, FULL)
LEARNING_RATE = 2e-3

Order = NDArray[np.int64]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--seeds", type=int, help="runs of each kind (default 5; quick: 2)")
    parser.add_argument("--blocks", type=int, help="blocks of 512 rows (default 128; quick: 32)")
    parser.add_argument(
        "--text",
        type=Path,
        help="text file, also .gz; by default, a hundred sources of random text, each with its "
        "own frequencies of letters",
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train with each window and seed, over both arrangements of the rows."""
    num_seeds = options.seeds or (2 if options.quick else 5)
    num_blocks = options.blocks or (32 if options.quick else 128)
    torch.set_num_threads(1)
    train_NL, test_NL = sequences(options.text, num_blocks * ROWS)
    mixed = np.random.default_rng(0).permutation(len(train_NL))
    disks = {"by book": train_NL, "random": train_NL[torch.from_numpy(mixed)]}
    windows = [window for window in WINDOWS if window < num_blocks]
    rows = []
    for window in windows:
        orders = [list(orders_of(window, num_blocks, seed)) for seed in range(num_seeds)]
        losses = {
            disk: [train(data, test_NL, orders[seed], seed) for seed in range(num_seeds)]
            for disk, data in disks.items()
        }
        row = {
            "window": window,
            "neighbor_correlation": statistics.mean(
                neighbor_correlation(order) for epochs in orders for order in epochs
            ),
            "batch_variance": statistics.mean(
                batch_variance(order) for epochs in orders for order in epochs
            ),
            "losses": losses,
        }
        rows.append(row)
        means = ", ".join(f"{disk} {statistics.mean(found):.4f}" for disk, found in losses.items())
        print(f"shuffle, {name_of(window)}: loss {means}", flush=True)
    return {
        "benchmark": "shuffle",
        "text": options.text.name if options.text else "generated",
        "blocks": num_blocks,
        "seeds": num_seeds,
        "rows": rows,
    }


def name_of(window: int) -> str:
    """Return the name of a row of the table."""
    return "full shuffle" if window == FULL else f"{window} block{'s' * (window > 1)}"


# --- data ---


def sequences(text: Path | None, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequences of bytes, book after book: shapes ``(num_rows, LENGTH)``, ``(T, LENGTH)``.

    The last tenth of each book is held out for the test.
    """
    per_book = -(-num_rows // NUM_BOOKS)
    train, test = [], []
    for book_L in books(text, (per_book + per_book // 10) * LENGTH):
        book_NL = book_L[: len(book_L) // LENGTH * LENGTH].reshape(-1, LENGTH)
        train.append(book_NL[:per_book])
        test.append(book_NL[per_book:])
    return (
        torch.from_numpy(np.concatenate(train)[:num_rows]),
        torch.from_numpy(np.concatenate(test)),
    )


def books(text: Path | None, num_bytes: int) -> Iterator[NDArray[np.uint8]]:
    """Yield the bytes of each book."""
    if text is None:
        rng = np.random.default_rng(1)
        shared = rng.dirichlet(np.full(48, 0.3), size=48)
        for _ in range(NUM_BOOKS):
            own = rng.dirichlet(np.full(48, 0.3), size=48)
            yield markov_text(0.6 * shared + 0.4 * own, num_bytes)
        return
    data = text.read_bytes()
    if text.suffix == ".gz":
        data = gzip.decompress(data)
    # Equal pieces from everywhere in the file, so that neighbors are of the same book.
    if len(data) < NUM_BOOKS * num_bytes:
        raise SystemExit(f"{text} has {len(data):,} bytes; {NUM_BOOKS * num_bytes:,} are needed")
    everything = np.frombuffer(data, np.uint8)
    for number in range(NUM_BOOKS):
        first = number * (len(data) // NUM_BOOKS)
        yield everything[first : first + num_bytes]


def markov_text(chances: NDArray[np.float64], num_bytes: int) -> NDArray[np.uint8]:
    """Return random text in which each letter depends on the previous one."""
    rng = np.random.default_rng(2)
    limits, draws = np.cumsum(chances, axis=1), rng.random(num_bytes)
    letters = np.empty(num_bytes, np.uint8)
    letter = 0
    for place, draw in enumerate(draws):
        letter = min(int(np.searchsorted(limits[letter], draw)), len(chances) - 1)
        letters[place] = letter + ord("0")
    return letters


# --- orders ---


def orders_of(window: int, num_blocks: int, seed: int) -> Iterator[Order]:
    """Yield the order of each epoch: row numbers, shape ``(num_blocks * ROWS,)``."""
    num_rows = num_blocks * ROWS
    for epoch in range(EPOCHS):
        if window == FULL:
            yield epoch_order(seed=seed, epoch=epoch, num_samples=num_rows)
            continue
        layout = BlockLayout((ROWS,) * num_blocks, window)
        yield BlockOrder(layout, seed=seed, epoch=epoch).samples(0, num_rows)


def neighbor_correlation(order: Order) -> float:
    """Return the correlation between the places on disk of consecutive samples.

    >>> round(neighbor_correlation(np.arange(1000)), 3)
    1.0
    """
    return float(np.corrcoef(order[:-1], order[1:])[0, 1])


def batch_variance(order: Order) -> float:
    """Return the variance of batch means of a property of the block, relative to a full shuffle.

    >>> batch_variance(np.arange(16 * ROWS)) > 100
    True
    """
    values = np.random.default_rng(0).normal(size=len(order) // ROWS)[order // ROWS]
    means = values[: len(values) // BATCH * BATCH].reshape(-1, BATCH).mean(axis=1)
    return float(means.var() / (values.var() / BATCH))


# --- training ---


class ByteModel(nn.Module):
    """Predicts each byte from the eight bytes before it, with two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.look_back = nn.Conv1d(32, 64, 8)
        self.mix = nn.Conv1d(64, 64, 1)
        self.out = nn.Linear(64, 256)

    def forward(self, bytes_BL: torch.Tensor) -> torch.Tensor:
        """Return the logits of each next byte, shape ``(B, L - 8, 256)``."""
        x_BCL = self.embed(bytes_BL[:, :-1].long()).transpose(1, 2)
        x_BCL = torch.relu(self.mix(torch.relu(self.look_back(x_BCL))))
        logits_BLK: torch.Tensor = self.out(x_BCL.transpose(1, 2))
        return logits_BLK


def loss_of(model: nn.Module, bytes_BL: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy, in nats per byte."""
    logits_BLK = model(bytes_BL)
    targets_BL = bytes_BL[:, -logits_BLK.shape[1] :].long()
    return nn.functional.cross_entropy(logits_BLK.flatten(0, 1), targets_BL.flatten())


def train(data_NL: torch.Tensor, test_NL: torch.Tensor, orders: list[Order], seed: int) -> float:
    """Train from the seed's initial weights, and return the loss on the test set."""
    torch.manual_seed(seed)
    model = ByteModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for order in orders:
        for batch in torch.split(torch.from_numpy(order), BATCH):
            optimizer.zero_grad()
            loss_of(model, data_NL[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    with torch.no_grad():
        parts = [float(loss_of(model, part)) * len(part) for part in torch.split(test_NL, BATCH)]
    return sum(parts) / len(test_NL)


def table_of(result: dict[str, Any]) -> str:
    """Return the figures as a Markdown table."""
    head = ("window", "correlation", "batch variance", "loss, by book", "loss, random order")
    rows = [
        (
            name_of(row["window"]),
            f"{row['neighbor_correlation']:.3f}",
            f"{row['batch_variance']:.1f}",
            *(loss_text(row["losses"][disk]) for disk in ("by book", "random")),
        )
        for row in result["rows"]
    ]
    text = f"{result['blocks']} blocks of {ROWS} rows, {result['seeds']} seeds, {result['text']}"
    return f"{report.table(head, rows)}\n\n{text}"


def loss_text(losses: list[float]) -> str:
    """Return the mean and the standard deviation."""
    deviation = statistics.stdev(losses) if len(losses) > 1 else 0.0
    return f"{statistics.mean(losses):.3f} ({deviation:.3f})"
