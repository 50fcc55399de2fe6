"""A whole trainer in this process: its orders are typed in, what it says is read."""

from __future__ import annotations

import linecache
import queue
import socket
import threading
from pathlib import Path
from typing import Any

from etrain_jupyter.bundle.capture import capture_bundle
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.ranks.control.channel import Channel, FrameDecoder, Message, encode
from etrain_jupyter.ranks.trainer import Trainer

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
    """The trainer's end, which does not end the process when it is closed."""

    def messages(self):
        yield from super().messages()
        threading.Event().wait()


class TrainerRig:
    """One trainer, its orders and its reports.

    Args:
        folder: Where its checkpoints go.
        cell: The notebook's cell; defines ``Net``, ``loss`` and ``data``.
        keys: Of the ``%%etrain`` cell, besides the usual ones.
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
        self.said: queue.SimpleQueue[Message] = queue.SimpleQueue()
        order = {
            **{"trainer": "j/w1/1", "job_id": "j", "host": "127.0.0.1", "cwd": ""},
            "config": config.model_dump(mode="json", by_alias=True),
            "bundle": capture_bundle(references, names, cell_numbers={name: 3}).data,
            "checkpoints": str(folder),
        }
        self.trainer = Trainer(ScriptedChannel(its), order)
        self.crash: BaseException | None = None
        threading.Thread(target=self._listen, daemon=True).start()
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
            for message in decoder.feed(data):
                self.said.put(message)

    def tell(self, op: str, **values: Any) -> None:
        self._socket.sendall(encode({"op": op, **values}))

    def form(self, generation: int = 1, **values: Any) -> None:
        """Tell it to form a generation; alone unless ``values`` say otherwise."""
        usual = {"rank": 0, "world_size": 1, "behind": [], "restore": False, "logged_step": 0}
        more = {"backend": "gloo", "faults": [], "log_end": 0, "starts": [], "pace": {}}
        self.tell("form", generation=generation, **{**usual, **more, **values})

    def wait_for(self, *ops: str) -> Message:
        """Return its next message of these kinds."""
        while (message := self.said.get(timeout=30))["op"] not in ops:
            pass
        return message

    def has_ended(self) -> bool:
        self._main.join(30)
        return not self._main.is_alive()

    def close(self) -> None:
        if self._main.is_alive():
            self.tell("release")
            self._main.join(30)
