"""Node source for a local cluster: worker processes in this machine's slots."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict

from etrain_jupyter.head.coordinator.nodes import NodeCost
from etrain_jupyter.head.interfaces import HeadFacts
from etrain_jupyter.head.local_workers import LocalNodes
from etrain_jupyter.head.slots import Slot, make_slots
from etrain_jupyter.process.cluster_dir import ClusterDir
from etrain_jupyter.process.files import write_private
from etrain_jupyter.process.fork_server import ForkServerProcess
from etrain_jupyter.process.gpus import GPU_QUERY_S, finish_gpu_query, start_gpu_query
from etrain_jupyter.process.survivors import WorkerRecords


class LocalHeadNodes(LocalNodes):
    """Adopt the previous scheduler's workers, and start new ones that exit when the keeper does."""

    def __init__(self, facts: HeadFacts) -> None:
        self._facts = facts
        self._records = WorkerRecords(facts.cluster)
        self._scheduler_address = ""
        slots = open_slots(facts.cluster)
        first, *others = (set(slot.environment.items()) for slot in slots)
        self._fork_server = ForkServerProcess(
            parent_pipe=facts.parent_pipe,
            log=facts.cluster.log("forks"),
            environment=dict(first.intersection(*others)),  # what all slots have in common
        )
        super().__init__(
            slots,
            self._spawn_worker,
            is_connected=facts.is_connected,
            is_busy=facts.is_busy,
            linger_s=facts.settings.linger_s,
            on_end=self._records.remove,
        )
        # The processes belong to the keeper, and their records on disk outlive the scheduler. Adopt
        # them before any worker is started, because a survivor's slot must not receive a second
        # one.
        self.adopt(
            self._records.survivors(),
            num_named=self._records.num_named(),
            num_held=self._records.num_held(),
        )

    async def start(self, scheduler_address: str) -> None:
        """Store the scheduler's address, to which new workers connect."""
        self._scheduler_address = scheduler_address

    def hold(self, count: int, *, reason: str) -> None:
        """Keep at least ``count`` workers, even if jobs want fewer or the scheduler restarts."""
        self._records.note_held(count)
        super().hold(count, reason=reason)

    def costs(self) -> Sequence[NodeCost]:
        """Return no costs, because the user's own machine is free."""
        return ()

    async def close(self, *, grace_s: float) -> None:
        """Stop all workers, by force after ``grace_s`` seconds; wait until they have exited."""
        await super().close(grace_s=grace_s)
        self._fork_server.close()

    def _spawn_worker(self, name: str, slot: Slot) -> subprocess.Popen[bytes]:
        cluster = self._facts.cluster
        # As in this process, files in the notebook's folder must not shadow modules.
        flags = ["-P"] if sys.flags.safe_path else []
        command = [sys.executable, *flags, "-m", "etrain_jupyter.worker.main"]
        options = {
            "scheduler": self._scheduler_address,
            "name": name,
            "device": slot.device,
            "supervisor": self._facts.settings.supervisor,
            "num-lives": str(self._facts.incarnation),
        }
        connection = self._fork_server.connect()
        if connection is not None:
            options["fork-server"] = str(connection.fileno())
        arguments = [word for key, value in options.items() for word in (f"--{key}", value)]
        log = os.open(cluster.log(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            worker = subprocess.Popen(
                [*command, str(cluster.path), *arguments],
                stdin=self._facts.parent_pipe,
                stdout=log,
                stderr=log,
                env=os.environ | slot.environment,
                pass_fds=[connection.fileno()] if connection is not None else [],
                # Use a separate process group, so that leftover children can be killed with the
                # worker.
                process_group=0,
            )
        finally:
            os.close(log)
            if connection is not None:
                connection.close()
        self._records.add(name, slot=slot.index, pid=worker.pid)
        return worker


def open_slots(cluster: ClusterDir) -> list[Slot]:
    """Return this machine's slots, which the cluster's first scheduler detects.

    Later schedulers read the file, because a worker that they adopt must keep its slot.
    """
    path = cluster.path / "slots.json"
    if path.exists():
        return [Slot(**facts) for facts in json.loads(path.read_text())]
    gpus = finish_gpu_query(start_gpu_query(), timeout_s=GPU_QUERY_S)
    settings = cluster.settings()
    slots = make_slots(
        gpus, max_cpu_slots=settings.max_cpu_slots, workers_per_gpu=settings.workers_per_gpu
    )
    write_private(path, json.dumps([asdict(slot) for slot in slots]))
    return slots
