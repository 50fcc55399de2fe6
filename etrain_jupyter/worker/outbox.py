"""What a supervisor has said and no coordinator has taken in: kept, and said again to the next one.

A coordinator that dies may have taken in what it could not acknowledge any more; the next one knows
from its predecessor's notes how far that was. So nothing is lost, and nothing counts twice.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from etrain_jupyter.wire.channel import Message

MOST_UNHEARD = 20_000
"""Messages that are kept. Beyond that nobody reads what trainers say, so that they wait."""

MOST_RECORDS = 100_000
"""Step records in them that are kept: a message of a fast job has many."""


class Outbox:
    """Numbers messages and keeps them until they are acknowledged."""

    def __init__(self, most: int = MOST_UNHEARD, most_records: int = MOST_RECORDS) -> None:
        self._most = most
        self._most_records = most_records
        self._num_records = 0
        self._newest = 0
        self._unheard: deque[Message] = deque()

    @property
    def newest(self) -> int:
        """The number of the newest message; 0 before the first."""
        return self._newest

    @property
    def is_full(self) -> bool:
        """Whether no more should be said for now; what is said all the same is kept, too."""
        return len(self._unheard) >= self._most or self._num_records >= self._most_records

    def put(self, message: Message) -> Message:
        """Return the message with its number, and keep it."""
        self._newest += 1
        numbered = {**message, "n": self._newest}
        self._unheard.append(numbered)
        self._num_records += len(message.get("records", ()))
        return numbered

    def acknowledge(self, number: int) -> None:
        """Forget what was taken in: all messages up to this one."""
        while self._unheard and self._unheard[0]["n"] <= number:
            self._num_records -= len(self._unheard.popleft().get("records", ()))

    def unheard(self) -> list[Message]:
        """Return what nobody has acknowledged, in order."""
        return list(self._unheard)


@dataclass
class TrainerReport:
    """What the next coordinator has to know of a trainer, from what it was told and has said."""

    started_at: float
    """In seconds since the epoch: another process may read it."""
    pid: int = 0
    generation: int = 0
    """The newest that it was told to form; 0 if none."""
    hello: Message | None = None
    """What it said when it was warm."""
    left: Message | None = None
    """What it said when it left that generation, or why the notebook's code failed in it."""
    progress: tuple[int, int] = (-1, 0)
    """As it said then."""
    ended_with: int = 0
    """The number of the message that it has ended; 0 while it lives."""

    def hear_order(self, message: Message) -> None:
        """Take note of what it is told."""
        if message["op"] == "form":
            self.generation, self.left = message["generation"], None

    def hear_report(self, message: Message) -> None:
        """Take note of what it says."""
        op = message["op"]
        if op == "hello":
            self.hello = message
        elif op == "report" or (op == "user_error" and message["generation"]):
            self.left = message
            self.progress = tuple(message["progress"])
        elif op == "user_error":
            self.left = message

    def to_dict(self) -> dict[str, Any]:
        """Return it as a message has it."""
        return asdict(self)
