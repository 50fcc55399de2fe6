"""A simulated trainer: two threads, two channels, and collectives that need all members.

Its main thread waits in collectives, its control thread takes orders in the order in which they
were sent, and what it says arrives in order. Weights are a number that every execution of a step
changes in another way: two ranks hold the same one only if they share their whole history.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.lineage import is_of_job
from etrain_jupyter.rules.samples import ledger
from tests.unit.rules.simulated import promises

if TYPE_CHECKING:
    from tests.unit.rules.simulated.job import Job

NUM_SAMPLES, BATCH, SEED, TOTAL_STEPS, EVAL_EVERY = 20, 8, 3, 7, 3
KEEP_RECORDS = 2
"""Records of the last steps that a checkpoint keeps."""

Message = dict[str, Any]
Copy = tuple[s.Progress, int, tuple[Message, ...], int]
"""A checkpoint: progress, weights, the last steps' records, and the generation that wrote it."""

Act = Callable[[], None]


def _step_facts() -> list[dict[str, Any]]:
    """Return what each step's record says of its samples."""
    facts = []
    for step in range(1, TOTAL_STEPS + 1):
        span = ledger.cursor_at(step - 1, NUM_SAMPLES, BATCH)
        order = ledger.epoch_order(seed=SEED, epoch=span.epoch, num_samples=NUM_SAMPLES)
        trained = order[span.first : span.first + span.samples]
        told = {"epoch": span.epoch, "first": span.first, "samples": span.samples}
        facts.append({"step": step, **told, "sample_checksum": ledger.checksum_of(trained)})
    return facts


STEP_FACTS = _step_facts()


@dataclass
class Group:
    """A generation's process group, as all its members together see it."""

    number: int
    names: tuple[str, ...]
    behind: tuple[int, ...]
    restore: bool
    logged_step: int
    log_end: int
    """The newest step in the log."""
    starts: tuple[int, ...]
    """Where each of the generations before began."""
    entered: dict[str, int] = field(default_factory=dict)
    """Collectives that each member has entered."""
    closed: set[str] = field(default_factory=set)
    """Members whose connections are closed: dead, or out of the generation."""
    pending_at: set[int] = field(default_factory=set)
    """Collectives in which some rank's header told of a pending change."""
    nan_at: set[int] = field(default_factory=set)
    """Collectives of which the mean loss is no finite number."""
    state: tuple[s.Progress, int, tuple[Message, ...]] = (s.NO_PROGRESS, 0, ())
    """What rank 0 sends to those behind: progress, weights, records that the log may lack."""
    is_faulty: bool = False
    """Whether anything went wrong in it that may undo a step."""

    def is_whole(self, name: str) -> bool:
        """Whether all have entered the collective in which ``name`` waits."""
        place = self.entered[name]
        return all(self.entered.get(other, 0) >= place for other in self.names)


class Trainer:
    """A trainer process: its two threads and its two channels."""

    def __init__(self, job: Job, name: str, worker: str, pid: int) -> None:
        self.job, self.name, self.worker, self.pid = job, name, worker, pid
        self.orders: deque[Message] = deque()
        self.said: deque[Message] = deque()
        self.inbox: deque[Message] = deque()
        self.place = "starting"
        self.hung = ""
        """``stopped``: none of its code runs, or one thread holds the GIL. ``stuck``: the main
        thread waits for ever, the others run."""
        self.hung_at = 0.0
        self.beats = 0
        self.is_alive = True
        self.is_aborted = self.is_pending = self.in_step = False
        self.is_spoilt = False
        """Whether its share of the loss of the next step, or of the present one, is NaN."""
        self.group: Group | None = None
        self.progress = s.NO_PROGRESS
        self.weights = 0
        self.kept: list[Message] = []
        self.unsent: list[Message] = []
        self.is_rank_0 = False
        self.page = (0, 0)
        """Generation and collectives, as its supervisor reads them."""
        self.told = ((0, 0), 0)
        """Page and beats that its supervisor told last."""
        self.copy: Copy | None = None
        """A checkpoint that is being written."""
        self.is_asked_to_save = False
        self.ends_at = 0.0
        """When its supervisor kills it after its release; 0 before that."""

    # --- what may happen next ---

    def acts(self) -> Iterator[Act]:
        """Yield what this process can do now."""
        if not self.is_alive or self.hung == "stopped":
            return
        if self.orders:
            yield self.read_order
        if self.copy is not None:
            yield self.finish_copy
        if self.unsent:
            yield self.flush
        if self.hung != "stuck":
            yield from self._main_acts()

    def _main_acts(self) -> Iterator[Act]:
        if self.place == "starting":
            yield self.send_hello
        elif self.place == "idle":
            if self.inbox:
                yield self.take_order
        elif self.place == "looping":
            yield self.begin_next
        else:
            assert self.group is not None
            if self.group.is_whole(self.name):
                yield self.complete
            if self.is_aborted or self.group.closed - {self.name}:
                yield self.fail

    # --- its control thread ---

    def read_order(self) -> None:
        message = self.orders.popleft()
        op, group = message["op"], self.group
        is_present = group is not None and message.get("generation") == group.number
        if op == "form":
            self.group = message["group"]
            self.is_pending = self.is_aborted = False
            self.inbox.append(message)
        elif op == "release" and self.place != "idle":
            self.die(is_news=False)
        elif op in ("save", "release"):
            self.inbox.append(message)
        elif op == "checkpoint":
            self.is_asked_to_save = True
        elif op == "change" and is_present:
            self.is_pending = True
        elif op == "abort" and is_present:
            self.is_aborted = True

    # --- its main thread ---

    def send_hello(self) -> None:
        self.place = "idle"
        self.say("hello")

    def take_order(self) -> None:
        message = self.inbox.popleft()
        if message["op"] == "release":
            self.die(is_news=False)
        elif message["op"] == "save":
            self.unsent = [r for r in self.kept if r["step"] > message["logged_step"]]
            self.copy = self._copy(message["generation"])
            self.finish_copy()
        else:
            self.in_step = False
            self.page = (message["generation"], 0)
            self.enter("connecting")

    def enter(self, place: str) -> None:
        """Start the next collective and wait in it."""
        assert self.group is not None
        self.place = place
        self.group.entered[self.name] = self.group.entered.get(self.name, 0) + 1
        self.page = (self.group.number, self.group.entered[self.name])

    def complete(self) -> None:
        """Leave the collective in which it waits."""
        self.beats += 1
        {
            "connecting": self._connected,
            "syncing": self._synced,
            "stepping": self._commit,
            "evaluating": self._evaluated,
        }[self.place]()

    @property
    def rank(self) -> int:
        assert self.group is not None
        return self.group.names.index(self.name)

    def _connected(self) -> None:
        assert self.group is not None
        if self.group.restore:
            self.kept, self.unsent = [], []
            if self.rank == 0:
                self._restore()
        if not self.group.behind:
            self._formed()
            return
        if self.rank == 0:
            owed = tuple(r for r in self.kept if r["step"] > self.group.logged_step)
            progress = self.progress if self.progress != s.NO_PROGRESS else (0, 0)
            self.group.state = (progress, self.weights, owed)
        elif self.rank in self.group.behind:
            self.progress = s.NO_PROGRESS  # until the last tensor is here
        self.enter("syncing")

    def _restore(self) -> None:
        trusted = [step for step, copy in self.job.store.items() if self._is_trusted(step, copy)]
        step = max(trusted, default=0)
        self.progress, self.weights, records, _ = self.job.store.get(step, ((0, 0), 0, (), 0))
        self.kept = list(records)

    def _is_trusted(self, step: int, copy: Copy) -> bool:
        """Whether the job has come through this state, and its log can be told of all steps."""
        assert self.group is not None
        _, _, records, generation = copy
        missing = set(range(self.group.log_end + 1, step + 1)) - {r["step"] for r in records}
        starts = self.group.starts
        return not missing and is_of_job(generation=generation, step=step, starts=starts)

    def _synced(self) -> None:
        assert self.group is not None
        if self.rank in self.group.behind:
            self.progress, self.weights, records = self.group.state
            self.kept = list(records)
        self._formed()

    def _formed(self) -> None:
        assert self.group is not None
        if self.progress == s.NO_PROGRESS:
            self.progress = (0, 0)
        self.unsent = []
        # Whichever rank is heard first tells where the generation begins.
        self.say("formed", step=self.progress[0])
        self.is_rank_0 = self.rank == 0
        if self.is_rank_0:
            self.unsent = [r for r in self.kept if r["step"] > self.group.logged_step]
        self.place = "looping"

    def begin_next(self) -> None:
        """Go on from a step boundary."""
        self.beats += 1
        assert self.group is not None
        step, evals = self.progress
        if evals < step // EVAL_EVERY:
            self.enter("evaluating")
        elif step >= TOTAL_STEPS:
            self.leave("done")
        else:
            self.in_step = True
            self.enter("stepping")
            if self.is_pending:
                self.group.pending_at.add(self.group.entered[self.name])
            if self.is_spoilt:
                self.group.nan_at.add(self.group.entered[self.name])

    def _evaluated(self) -> None:
        step, evals = self.progress
        self.progress = (step, evals + 1)
        if self.rank == 0:
            record = {"step": step, "epoch": 0, "samples": 5, "loss": 1.0, "duration_s": 0.1}
            self.say("eval", record=record)
        self.place = "looping"

    def _commit(self) -> None:
        group = self.group
        assert group is not None
        if group.entered[self.name] in group.nan_at:
            self._undo_nan()
            return
        promises.check_commit(self)
        step = self.progress[0] + 1
        self.progress = (step, self.progress[1])
        self.weights = hash((self.weights, group.number, step))
        self.in_step, self.place = False, "looping"
        record = {
            **STEP_FACTS[step - 1],
            "generation": group.number,
            "world_size": len(group.names),
            "time": self.job.cluster.now,
        }
        self.kept.append(record)
        if self.is_rank_0:
            self.unsent.append(record)
        if step in (3, 6, TOTAL_STEPS):
            self.say("weights", step=step, rank=self.rank, digest=f"{self.weights:x}")
        if self.is_asked_to_save and self.is_rank_0 and self.copy is None:
            self.copy, self.is_asked_to_save = self._copy(group.number), False
        if group.entered[self.name] in group.pending_at:
            self.leave("planned")

    def _undo_nan(self) -> None:
        """Leave the generation at the step before, as all others do."""
        self._close()
        is_source, self.is_spoilt = self.is_spoilt, False
        self.in_step, self.place = False, "idle"
        self.say("nan", progress=self.progress, rank=self.rank, is_source=is_source)

    def fail(self) -> None:
        """Leave the collective in which it waits because a peer or its own abort broke it."""
        self.leave("failed")

    def raise_user_error(self) -> None:
        """The notebook's code raises: while it warms up, or in the step that is being computed."""
        number = self.group.number if self.group is not None else 0
        self._close()
        self.place, self.in_step = "idle", False
        self.say("user_error", progress=self.progress, generation=number)

    def leave(self, why: str) -> None:
        self._close()
        undone, self.in_step = self.in_step, False
        self.place = "idle"
        self.say("report", progress=self.progress, why=why, undone=undone)

    def _close(self) -> None:
        if self.group is not None:
            self.group.closed.add(self.name)

    # --- its checkpoints and messages ---

    def _copy(self, generation: int) -> Copy:
        return self.progress, self.weights, tuple(self.kept[-KEEP_RECORDS:]), generation

    def finish_copy(self) -> None:
        """The manifest is written, or cannot be; the news of it may still be lost."""
        assert self.copy is not None
        copy, self.copy = self.copy, None
        (step, _), _, _, generation = copy
        store = self.job.store
        writers = [writer for *_, writer in store.values()]
        if self.job.saves_fail or max(writers, default=0) > generation:
            self.say("checkpoint_failed", step=step, error="no space")
            return
        if step in store and not is_of_job(
            generation=store[step][3], step=step, starts=self.job.record.starts
        ):
            del store[step]
        store.setdefault(step, copy)
        self.say("checkpoint_committed", step=step, generation=generation)

    def say(self, op: str, **values: Any) -> None:
        self.flush()
        number = self.group.number if self.group is not None else 0
        self.said.append({"op": op, "generation": number, **values})

    def flush(self) -> None:
        records, self.unsent = self.unsent, []
        if records:
            assert self.group is not None
            number = self.group.number
            self.said.append({"op": "steps", "generation": number, "records": records})

    # --- its end ---

    def die(self, *, is_news: bool) -> None:
        """End the process; its supervisor tells of it, if that is news."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.place = "dead"
        if self.group is not None and self.name in self.group.names:
            self.group.closed.add(self.name)
            self.group.is_faulty = True
        if is_news:
            self.said.append({"op": "exited", "cause": "SIGKILL"})
