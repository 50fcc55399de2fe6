"""A complete trainer in this process, controlled by messages."""

from __future__ import annotations

import contextlib
import functools
import linecache
import queue
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from etrain_jupyter.bundle.capture import capture_bundle, write_bundle
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.trainer.group.process_group import BroadcastStore, RankGroup
from etrain_jupyter.trainer.group.rendezvous import keys_in
from etrain_jupyter.trainer.trainer import Trainer
from etrain_jupyter.wire import messages as m
from etrain_jupyter.wire.channel import Channel, FrameDecoder, frame
from etrain_jupyter.wire.codec import encode
from etrain_jupyter.wire.rank_values import pack_values

CELL = """\
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x)

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

torch.manual_seed(0)
data = (torch.randn(32, 4), torch.randint(0, 3, (32,)))
"""


class ScriptedChannel(Channel):
    """The trainer's end of the channel; closing it does not end the process."""

    def messages(self):
        yield from super().messages()
        threading.Event().wait()


class TrainerRig:
    """One trainer with its messages.

    Args:
        folder: Folder for its checkpoints.
        cell: The notebook's cell; defines ``Net``, ``loss`` and ``data``.
        keys: Additional keys of the ``%%etrain`` cell.
    """

    def __init__(self, folder: Path, cell: str = CELL, **keys: Any) -> None:
        name = "<cell-3>"
        linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(cell, name, "exec"), names)
        references = {"model": "Net()", "data.train": "data", "loss": "loss"}
        config = TrainConfig.model_validate(
            {
                **{"model": "Net()", "data": {"train": "data"}, "loss": "loss", "steps": 4},
                **{"batch": {"global": 8}, "optimizer": {"name": "Adam", "lr": 0.01}, **keys},
            }
        )
        ours, its = socket.socketpair()
        self._socket = ours
        self.said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        bundle = capture_bundle(references, names, cell_numbers={name: 3})
        folder.mkdir(parents=True, exist_ok=True)
        write_bundle(folder / "bundle", bundle)
        launch = m.LaunchTrainer(
            trainer="j/w1/1",
            host="127.0.0.1",
            cwd="",
            config=config.model_dump(mode="json", by_alias=True),
            bundle=m.BundleRef(path=str(folder / "bundle"), digest=bundle.digest, size=0),
            checkpoints=str(folder),
        )
        self.trainer = Trainer(ScriptedChannel(its), launch)
        self.crash: BaseException | None = None
        self.stores: list[BroadcastStore] = []
        """Stores of the other ranks in the generation that is being formed."""
        threading.Thread(target=self._listen, daemon=True).start()
        self._place = 0, 1  # its rank and the world size
        self._main = threading.Thread(target=self._run, daemon=True)

    def start(self) -> TrainerRig:
        self._main.start()
        return self

    def _run(self) -> None:
        try:
            self.trainer.run()
        except BaseException as exc:
            self.crash = exc

    def _listen(self) -> None:
        decoder = FrameDecoder()
        while data := self._socket.recv(1 << 20):
            for encoded in decoder.feed(data):
                message = m.FROM_TRAINER.decode(encoded)
                if isinstance(message, m.StoreEntry):
                    for store in self.stores:
                        store.put(message.key, message.value)
                elif isinstance(message, m.RankKey):
                    self._share_key(message)
                self.said.put(message)

    def _share_key(self, message: m.RankKey) -> None:
        # The other ranks set their keys one by one, so give them the trainer's alone.
        rank, world_size = self._place
        packed = pack_values([message.value] * world_size)
        key, value = list(keys_in(m.RankKeys(topic=message.topic, values=packed)))[rank]
        for store in self.stores:
            store.put(key, value)

    def send(self, message: m.ToTrainer) -> None:
        self._socket.sendall(frame(encode(message)))

    def form(self, generation: int = 1, **values: Any) -> None:
        """Send a form message; by default for a single rank."""
        usual = {"rank": 0, "world_size": 1, "behind": (), "restore": False, "logged_step": 0}
        more = {"backend": "gloo", "log_end": 0}
        self.send(m.JoinGeneration(generation=generation, **{**usual, **more, **values}))

    @contextlib.contextmanager
    def peers(
        self, generation: int, world_size: int, *, rank: int = 1, **values: Any
    ) -> Iterator[list[RankGroup]]:
        """Make the trainer form as ``rank``; yield the connected groups of the other ranks."""

        def publish(key: str, value: bytes) -> None:
            self.send(m.StoreEntry(generation=generation, key=key, value=value))

        def share(at: int, key: str, value: bytes) -> None:
            publish(key, value)
            for other, store in enumerate(self.stores):
                if other != at:
                    store.put(key, value)

        self.stores = [BroadcastStore(functools.partial(share, i)) for i in range(world_size - 1)]
        self._place = rank, world_size
        self.form(generation, rank=rank, world_size=world_size, **values)
        ranks = [other for other in range(world_size) if other != rank]
        groups = [
            RankGroup(
                generation=generation, rank=r, world_size=world_size, store=store, host="127.0.0.1"
            )
            for r, store in zip(ranks, self.stores, strict=True)
        ]
        with ThreadPoolExecutor(len(groups)) as threads:
            list(threads.map(lambda group: group.connect(), groups))
        try:
            yield groups
        finally:
            for group in groups:
                group.close()

    def wait_for(self, *kinds: type[m.Message]) -> Any:
        """Return the next message of these kinds."""
        while not isinstance(message := self.said.get(timeout=30), kinds):
            pass
        return message

    def has_ended(self) -> bool:
        self._main.join(30)
        return not self._main.is_alive()

    def _is_working(self) -> bool:
        return self._main.is_alive() and self.trainer.commands.is_busy

    def close(self) -> None:
        deadline = time.monotonic() + 10
        while self._is_working() and time.monotonic() < deadline:
            time.sleep(0.01)
        # Releasing a busy trainer would end its process, which is this one.
        if self._main.is_alive() and not self._is_working():
            self.send(m.ShutDownTrainer())
            self._main.join(30)
        if dist.is_initialized():
            dist.destroy_process_group()  # left by a trainer whose process would have exited
