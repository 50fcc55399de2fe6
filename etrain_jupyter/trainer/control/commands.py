"""Control thread of a trainer: act on messages at once, even while a step runs.

The main thread does not read its inbox during a generation. So only work between generations goes
to the inbox; anything that must affect a running step happens in the control thread::

    control   JoinGeneration ──▶ inbox         BreakGeneration        ShutDownTrainer ──▶ inbox
    main                 form, train, train ...      X report, wait for the inbox ...   end
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import traceback
from typing import assert_never

from etrain_jupyter.trainer.control.faults import FaultInjector
from etrain_jupyter.trainer.group.process_group import BroadcastStore, RankGroup
from etrain_jupyter.trainer.group.rendezvous import keys_in, message_for_key
from etrain_jupyter.trainer.state.checkpointer import Checkpointer
from etrain_jupyter.wire.channel import Channel
from etrain_jupyter.wire.messages import (
    BreakGeneration,
    InjectFault,
    JoinGeneration,
    LaunchTrainer,
    LeaveGeneration,
    RankKeys,
    RequestCheckpoint,
    SaveState,
    SetPace,
    ShutDownTrainer,
    StoreEntry,
    ToTrainer,
    is_current,
)
from etrain_jupyter.wire.progress_page import ProgressPage

Work = tuple[JoinGeneration, RankGroup] | SaveState | ShutDownTrainer
"""Work of the main thread, between two generations."""


class Commands:
    """The commands that a trainer receives.

    Args:
        host: Address on which the other ranks reach this one.
    """

    def __init__(
        self, channel: Channel, *, host: str, faults: FaultInjector, page: ProgressPage | None
    ) -> None:
        self._channel = channel
        self._host = host
        self._faults = faults
        self._page = page
        self.inbox: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self.change_pending = threading.Event()
        """Set once this rank knows of a planned change."""
        self.checkpointer: Checkpointer | None = None
        """Set by the main thread once the job is built."""
        self.is_busy = True
        """True while the main thread runs user code; reset before it reports that it is done."""
        self.store: BroadcastStore | None = None
        """The rendezvous store of the newest generation."""
        self._group: RankGroup | None = None

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._read, name="etrain-control", daemon=True).start()

    def _read(self) -> None:
        # Read the channel until the supervisor is gone, then exit the process.
        try:
            for message in self._channel.messages():
                self._handle(message)
        except BaseException:
            # Without this thread, no abort or shutdown would ever arrive, and the trainer would
            # hang in the first collective after it loses a peer.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        # The supervisor is gone. Not sys.exit: the main thread may be stuck in gloo or user code.
        os._exit(0)

    def _handle(self, message: ToTrainer) -> None:
        generation = self._group.generation if self._group is not None else 0
        # A message about an earlier generation may arrive late: an abort of generation 4 must not
        # break generation 5.
        if not is_current(message, generation=generation):
            return
        match message:
            case JoinGeneration():
                self.inbox.put((message, self._create_group(message)))
            case ShutDownTrainer():
                # The trainer is released while user code runs. The job was stopped without waiting
                # for this step, and the main thread would not read its inbox until the generation
                # ends.
                if self.is_busy:
                    os._exit(0)
                self.inbox.put(message)
            case SaveState():
                self.inbox.put(message)
            case RequestCheckpoint():
                if self.checkpointer is not None:
                    self.checkpointer.request()
            case SetPace():
                if self.checkpointer is not None:
                    self.checkpointer.pace.adopt(message.pace, now=time.monotonic())
            case StoreEntry():
                if self.store is not None:
                    self.store.put(message.key, message.value)
            case RankKeys():
                if self.store is not None:
                    self.store.put_all(dict(keys_in(message)))
            case LeaveGeneration():
                self.change_pending.set()
            case BreakGeneration():
                if self._group is not None:
                    self._group.abort()
            case InjectFault():
                self._faults.inject(message.kind_of_fault)
            case LaunchTrainer():
                raise ValueError(f"trainer {message.trainer} was launched a second time")
            case _:
                assert_never(message)

    def _create_group(self, message: JoinGeneration) -> RankGroup:
        # This is called in the control thread, because a faster rank may publish its address before
        # this rank's main thread has read its inbox. If no store existed yet, the entry would be
        # lost:
        #
        #     control   JoinGeneration   StoreEntry
        #     main          (leaving the previous generation) ─── form
        generation = message.generation

        def publish(key: str, value: bytes) -> None:
            place = {"generation": generation, "rank": message.rank}
            entry = message_for_key(key, value, **place, world_size=message.world_size)
            self._channel.send(entry)

        # Clear this before the rank reports that it has joined. Afterwards, the next change may be
        # announced at any time, even before the loop runs.
        self.change_pending.clear()
        self.store = BroadcastStore(publish)
        self._group = RankGroup(
            generation=generation,
            rank=message.rank,
            world_size=message.world_size,
            store=self.store,
            host=self._host,
            backend=message.backend,
            secret=message.secret,
            progress=self._page,
        )
        return self._group
