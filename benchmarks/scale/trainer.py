"""A simulated trainer: it sends what a trainer sends, and sleeps instead of computing."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from etrain_jupyter.wire import messages as m
from etrain_jupyter.wire.codec import Encoded, encode
from etrain_jupyter.wire.progress_page import TrainerProgress
from etrain_jupyter.wire.rank_values import (
    CONNECTIONS,
    DIGEST_BYTES,
    WHOLE,
    pack_digest,
    unpack_values,
)

PLAN = {
    **{"num_train_samples": 10**8, "num_eval_samples": 0, "global_batch_size": 4096},
    **{"steps_per_epoch": 20_000, "total_steps": 10**7, "total_samples": 4096 * 10**7},
    **{"num_parameters": 10**6, "num_trained_parameters": 10**6},
}
WARM_S, CONNECT_S = 0.2, 0.0
GLOO_KEY_BYTES = 154
"""Length of the key that gloo publishes for a rank, without 8 bytes for each rank."""

_pids = itertools.count(10_000)


@dataclass
class Steps:
    """The steps of a job, and when its trainers of this process got which message last."""

    rate: float
    """Steps per second."""
    records: int = 1
    """Step records per message; more than one only to make many steps fast."""
    has_keys: bool = True
    """True if the ranks exchange keys to connect."""
    num_beats: int = 0
    generation: int = 0
    last: dict[str, float] = field(default_factory=dict)
    """Newest time of each kind of message, in seconds since the epoch."""

    def note(self, kind: str) -> None:
        """Note that a trainer has got or sent a message of this kind now."""
        self.last[kind] = time.time()


class SleepingTrainer:
    """Stand-in for ``TrainerProcess`` and the trainer behind it."""

    def __init__(
        self,
        name: str,
        on_message: Callable[[Any, Encoded], None],
        on_exit: Callable[[Any, str], None],
        steps: Steps,
    ) -> None:
        self.name = name
        self.pid = next(_pids)
        self._on_message, self._on_exit, self._steps = on_message, on_exit, steps
        self._step = self._generation = self._rank = self._world_size = 0
        self._joined_at = 0.0
        self._stepping: asyncio.Task[None] | None = None

    # --- what a supervisor calls ---

    async def start(self) -> None:
        """Start at once."""

    async def wait(self) -> None:
        """Return at once."""

    def kill(self, why: str = "") -> None:
        """End."""
        self._leave()

    def progress(self) -> TrainerProgress | None:
        """Return what its progress page would show."""
        self._steps.num_beats += 1
        step = self._now()
        return TrainerProgress(
            generation=self._generation,
            step=step,
            collectives=3 * step,
            beats=step,
            phase="computing",
            alive_age_s=0.1,
        )

    def send(self, message: Encoded) -> None:
        """Take a message from the supervisor."""
        kind = message["kind"]
        match kind:
            case m.LaunchTrainer.__name__:
                asyncio.get_running_loop().call_later(WARM_S, self._greet)
            case m.JoinGeneration.__name__:
                self._join(message)
            case m.BreakGeneration.__name__ | m.LeaveGeneration.__name__:
                if message["generation"] == self._generation:
                    self._report_leaving("failed" if kind == "BreakGeneration" else "planned")
            case m.RankKeys.__name__:
                if message["generation"] == self._generation:
                    self._take_keys(message["topic"], message["values"])
        self._steps.note(kind)

    # --- what a trainer does ---

    def _say(self, kind: type[m.TrainerReport], **values: Any) -> None:
        report = kind(trainer=self.name, generation=self._generation, **values)
        self._on_message(self, encode(report))
        self._steps.note(kind.__name__)

    def _greet(self) -> None:
        self._say(m.TrainerHello, pid=self.pid, warm_s=WARM_S, device="cpu", plan=PLAN)

    def _join(self, message: Encoded) -> None:
        self._leave()
        self._generation, self._rank = message["generation"], message["rank"]
        self._world_size = message["world_size"]
        self._step = max(self._step, message["logged_step"])
        self._steps.generation = self._generation
        if self._steps.has_keys:
            self._publish(GLOO)
        else:
            self._train()

    def _publish(self, topic: str) -> None:
        self._say(m.RankKey, topic=topic, value=VALUES[topic](self._world_size))

    def _take_keys(self, topic: str, values: bytes) -> None:
        assert num_values(values) == self._world_size
        if topic == GLOO:  # gloo connects, and the connections are authenticated
            self._publish(CONNECTIONS)
        else:
            self._train()

    def _train(self) -> None:
        self._joined_at = time.monotonic()
        self._say(m.GenerationJoined, step=self._step, connect_s=0.01, wrap_s=0.001)
        if self._rank == 0:
            self._stepping = asyncio.create_task(self._report_steps())

    async def _report_steps(self) -> None:
        while True:
            num, rate = self._steps.records, self._steps.rate
            await asyncio.sleep(num / rate)
            records = tuple(self._record(self._step + 1 + index) for index in range(num))
            self._step += num
            self._say(m.StepsTrained, records=records)

    def _record(self, step: int) -> dict[str, Any]:
        return {
            **{"generation": self._generation, "time": time.time(), "step": step, "epoch": 0},
            **{"first": step * 4096 % 10**8, "samples": 4096, "sample_checksum": 123456789012},
            **{"loss": 2.345678901, "lr": 0.001, "world_size": self._world_size},
            **{"samples_per_s": 40960.0, "metrics": {"accuracy": 0.512345}, "data_s": 0.001},
            **{"compute_s": 0.08, "communication_s": 0.015, "optimizer_s": 0.004},
            **{"ranks_agree": True, "skipped": False},
        }

    def _now(self) -> int:
        # All ranks are at about the same step; only rank 0 counts.
        if self._rank and self._joined_at:
            return self._step + int((time.monotonic() - self._joined_at) * self._steps.rate)
        return self._step

    def _report_leaving(self, why: m.Why) -> None:
        self._step = self._now()
        self._leave()
        self._say(m.GenerationLeft, progress=(self._step, 0), why=why, undone=why == "failed")

    def _leave(self) -> None:
        self._joined_at = 0.0
        if self._stepping is not None:
            self._stepping.cancel()
            self._stepping = None


@functools.lru_cache(maxsize=2)
def num_values(values: bytes) -> int:
    """Return the number of packed values. In a cluster, the ranks unpack them at the same time."""
    return len(unpack_values(values))


def gloo_key(world_size: int) -> bytes:
    """Return a key like gloo's, as a rank publishes it: an address in uninitialized memory."""
    return b"\x01" + bytes(64) + os.urandom(40) + bytes(GLOO_KEY_BYTES - 104)


def digest(world_size: int) -> bytes:
    """Return a digest of connections like that of ``trainer.group.authentication``."""
    num = int.from_bytes(os.urandom(DIGEST_BYTES), "little")
    return WHOLE + pack_digest(num=world_size - 1, digest=num)


GLOO = "0"
VALUES: dict[str, Callable[[int], bytes]] = {GLOO: gloo_key, CONNECTIONS: digest}
