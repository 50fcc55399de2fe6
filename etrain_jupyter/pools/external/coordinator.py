"""The coordinator as a guest in a scheduler that somebody else made, and will go on using.

It costs nothing while no job runs: then nothing ticks, the supervisors are silent and keep no spare
trainer. And whatever goes wrong in it must not take the scheduler's own workers from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

from distributed import Scheduler
from distributed.comm.addressing import get_address_host

from etrain_jupyter import __version__
from etrain_jupyter.head.coordinator import clock
from etrain_jupyter.head.coordinator.coordinator import TICK_S, Coordinator, Handler
from etrain_jupyter.head.coordinator.nodes import NoNodes
from etrain_jupyter.head.coordinator.requests import RequestError
from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.head.jobs.reports import Message
from etrain_jupyter.log.events import LogLine
from etrain_jupyter.pools.external.guest import UNFIT
from etrain_jupyter.rules.membership import stimuli as s

logger = logging.getLogger("etrain.coordinator")

SILENCE_S = 60.0
"""How long a supervisor may be silent here: tasks of others share its process, and some hold the
interpreter's lock for long."""

LOOK_S = 0.1
ANSWER_S = 10.0
"""How long workers may take to say whether they see a job's folder."""


class GuestNodes(NoNodes):
    """Workers that somebody else starts, and that we may only ask to leave."""

    def __init__(self) -> None:
        self.leaving: dict[str, asyncio.Task[Any]] = {}
        """Workers that were asked to, by name."""

    def attach(self, scheduler: Scheduler) -> None:
        """Learn whose workers they are."""
        self._scheduler = scheduler

    def release(self, worker: str, *, drain_s: float) -> None:
        """Retire a worker: Dask moves its results elsewhere and closes it."""
        address = self._address_of(worker)
        if address and worker not in self.leaving:
            retire = self._scheduler.retire_workers(workers=[address], close_workers=True)
            task = asyncio.get_running_loop().create_task(retire)
            self.leaving[worker] = task
            task.add_done_callback(lambda done: self._note_end(worker, done))

    def _address_of(self, worker: str) -> str:
        for address, state in self._scheduler.workers.items():
            if str(state.name) == worker:
                return str(address)
        return ""

    def _note_end(self, worker: str, task: asyncio.Task[Any]) -> None:
        self.leaving.pop(worker, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("worker %s did not retire: %s", worker, error)


class GuestCoordinator(Coordinator):
    """Runs our jobs on the workers that the scheduler has.

    Args:
        cluster_id: The scheduler's own id.
    """

    idempotent = True
    """Dask keeps the one that is there when a second notebook brings its own."""

    def __init__(self, *, cluster_id: str) -> None:
        self._guests = GuestNodes()
        super().__init__(
            self._guests, cluster_id=cluster_id, on_shutdown=lambda: None, silence_s=SILENCE_S
        )
        self._unfit: dict[str, str] = {}
        """Why workers take no part, by name."""
        self._work = asyncio.Event()

    def __reduce__(self) -> tuple[Any, ...]:
        """Be made anew where it is sent: it belongs to that process's event loop."""
        return _make, (self._cluster_id,)

    def register(self, scheduler: Scheduler) -> None:
        """Register it with a scheduler that runs already."""
        super().register(scheduler)
        self._guests.attach(scheduler)

    def _handlers(self) -> dict[str, Handler]:
        return super()._handlers() | {
            "down": self._leave,
            "forget": self._forget,
            "pool_nodes": self._list_nodes,
            "pool_want": self._want,
            "pool_release": self._release,
        }

    # --- nothing to do, nothing to pay ---

    async def _tick_often(self) -> None:
        while True:
            await self._work.wait()
            await asyncio.sleep(TICK_S)
            with self._defects.watch(None, "a tick"):
                self.tick()
            is_behind = any(job.is_log_behind for job in self._jobs.values())
            if not (self._active() or is_behind) and self._acknowledgements.is_empty:
                self._rest()

    def tick(self) -> None:
        """Do what is due; with jobs, the scheduler is not idle although it has no tasks."""
        super().tick()
        if self._active():
            self._scheduler.idle_since = None

    def valid_workers_downscaling(self, scheduler: Scheduler, workers: list[Any]) -> list[Any]:
        """Return whom Dask may close by itself: ranks are no tasks that it could see."""
        return [state for state in workers if not self.is_busy(str(state.name))]

    def _wake(self) -> None:
        if self._work.is_set():
            return
        self._work.set()
        now = clock.now()
        self._workers.tick(now)
        for facts in self._workers:
            self._workers.hear(facts.address, now)  # it had no reason to say anything
            self._tell(facts.name, {"op": "wake"})

    def _rest(self) -> None:
        self._work.clear()
        for facts in self._workers:
            self._tell(facts.name, {"op": "rest"})

    # --- workers ---

    def _greet(self, message: Message, worker: str, now: float) -> None:
        super()._greet(message, worker, now)
        facts = self._workers.hear(worker, now)
        if facts is not None:
            self._unfit.pop(facts.name, None)
            if self._work.is_set():
                self._tell(facts.name, {"op": "wake"})

    def log_event(self, topic: str, msg: Any) -> None:
        """Take in that a worker cannot take part. Called by the scheduler for all events."""
        if topic != UNFIT:
            return
        self._unfit[msg["name"]] = msg["why"]
        for job in self._active():
            _say_unfit(job, msg["name"], msg["why"])

    def remove_worker(self, scheduler: Scheduler, worker: str, **values: Any) -> None:
        """Take in that a worker's connection is gone. Called by the scheduler."""
        present = {str(state.name) for state in scheduler.workers.values()}
        self._unfit = {name: why for name, why in self._unfit.items() if name in present}
        super().remove_worker(scheduler, worker, **values)

    # --- what the kernel may call ---

    async def _submit(self, job: dict[str, Any]) -> dict[str, Any]:
        if not job.get("place"):
            await self._check_folder(str(job["run_dir"]))
        self._wake()
        answer = await super()._submit(job)
        if job["job_id"] not in self._jobs:
            return answer  # its bundle comes first
        for name, why in self._unfit.items():
            _say_unfit(self._jobs[job["job_id"]], name, why)
        return answer

    async def _check_folder(self, folder: str) -> None:
        """Refuse a job whose folder only the notebook's machine has.

        Raises:
            RequestError: If the scheduler or a worker does not see it.
        """
        from os.path import isdir

        import cloudpickle

        blind = [] if isdir(folder) else ["the scheduler"]
        workers = [facts.address for facts in self._workers]
        # An RPC of Dask, as `Client.run` makes it; a worker that just went does not answer.
        asked = {
            "op": "run",
            "function": cloudpickle.dumps(isdir),
            "args": cloudpickle.dumps((folder,)),
        }
        answers: dict[str, Any] = {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                answers = await self._scheduler.broadcast(
                    msg=asked, workers=workers, on_error="ignore"
                )
        blind += [
            facts.name
            for facts in self._workers
            if (answer := answers.get(facts.address)) and not answer.get("result")
        ]
        if blind:
            raise RequestError(
                f"the job's folder {folder} is not there for {', '.join(blind)}: log and "
                "checkpoints would be scattered over machines. Nothing was submitted. Set "
                "ETRAIN_RUNS to a folder that all of them share, or to s3://BUCKET/PREFIX."
            )

    async def _describe(self) -> dict[str, Any]:
        told = await super()._describe()
        return told | {"version": __version__, "unfit": dict(self._unfit)}

    async def _list_nodes(self) -> dict[str, Any]:
        return {"nodes": [self._node_of(state) for state in self._fit()]}

    def _fit(self) -> list[Any]:
        found = self._scheduler.workers.values()
        return [state for state in found if str(state.name) not in self._unfit]

    def _node_of(self, state: Any) -> dict[str, Any]:
        name = str(state.name)
        facts = self._workers.get(name)
        standing = "running" if facts else "starting"
        if name in self._guests.leaving or (facts and facts.leaves_at):
            standing = "draining"
        return {
            "worker": name,
            "state": standing,
            "pid": facts.pid if facts else 0,
            "device": facts.device if facts else "",
            "zone": get_address_host(state.address),
        }

    async def _want(self, count: int, reason: str) -> dict[str, Any]:
        logger.info("%d workers are wanted (%s); who made this cluster starts them", count, reason)
        return {"num_present": len(self._fit())}

    async def _release(self, worker: str, drain_s: float) -> dict[str, Any]:
        facts = self._workers.get(worker)
        jobs = [job for job in self._active() if job.state.of_worker(worker) is not None]
        if jobs:
            # Its job leaves it at a step boundary first.
            self._injector.give_notice(worker, drain_s)
            return {}
        if facts is not None:
            facts.leaves_at = clock.now() + drain_s  # no job gets it any more
        self._guests.release(worker, drain_s=drain_s)
        return {}

    async def _leave(self, drain_s: float = 10.0) -> dict[str, Any]:
        """Stop all jobs, with a checkpoint as long as there is time for one."""
        deadline = time.monotonic() + drain_s
        jobs = self._active()
        for job in jobs:
            job.handle(s.StopAsked(now=False))
        while self._is_ending() and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_S)
        for job in self._active():
            job.handle(s.StopAsked(now=True))
        self._after_change()
        return {"stopped": [job.order.job_id for job in jobs]}

    def _is_ending(self) -> bool:
        return bool(self._active()) or any(job.is_uploading for job in self._jobs.values())

    async def _forget(self) -> dict[str, Any]:
        """Leave the scheduler as it was."""
        scheduler = self._scheduler
        await self.close()
        for name in self._handlers():
            scheduler.handlers.pop(f"etrain_{name}", None)
        # Without any handler, a message that is under way would cost the worker its connection.
        scheduler.stream_handlers["etrain_report"] = _ignore
        scheduler.remove_plugin(self.name)
        return {}


def _make(cluster_id: str) -> GuestCoordinator:
    return GuestCoordinator(cluster_id=cluster_id)


def _say_unfit(job: HostedJob, name: str, why: str) -> None:
    job.log(LogLine, level="warning", worker=name, text=f"worker {name} takes no part: {why}")


def _ignore(**_: Any) -> None:
    """Take a late message of a supervisor that has ended."""
