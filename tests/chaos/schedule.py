"""Random schedules from a seed: planned faults, and the requests of users and machines."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field

from etrain_jupyter.log.events import LogLine
from etrain_jupyter.testing import FaultPlan
from etrain_jupyter.testing.fault_plan import AT_A_PLACE, BY_COORDINATOR
from etrain_jupyter.wire.requests import RefusedRequestError
from tests.chaos.rig import Rig, RigJob

SLOTS = 4


@dataclass(frozen=True)
class Act:
    """A request that is sent when a step is in the log."""

    step: int
    request: str
    args: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Schedule:
    """All faults and requests for one job. Its string is the code that recreates it."""

    slots: int
    plan: FaultPlan = field(default_factory=FaultPlan)
    acts: tuple[Act, ...] = ()

    def __str__(self) -> str:
        acts = "".join(f"\n    {act}," for act in self.acts)
        return f"Schedule(slots={self.slots}, plan={self.plan}, acts=({acts}))"

    @classmethod
    def random(cls, seed: int, *, num_steps: int) -> Schedule:
        """Create the schedule of a seed."""
        chance = random.Random(f"schedule {seed}")
        slots = chance.choice((1, 2, 3, 3, 4, 4))
        # With one rank no other rank waits for a hung one, so it is not evicted; see ``_rescue``.
        kinds = [kind for kind in KINDS if slots > 1 or kind != "hang"]
        plan = FaultPlan.random(seed, num_steps=num_steps, num_ranks=slots, kinds=kinds)
        acts: list[Act] = []
        for _ in range(chance.randint(0, 3)):
            acts += _random_act(chance, chance.randint(1, num_steps - 1), slots)
        return cls(slots, plan, tuple(sorted(acts, key=lambda act: act.step)))


KINDS = (*AT_A_PLACE, *BY_COORDINATOR)


def _random_act(chance: random.Random, step: int, slots: int) -> list[Act]:
    kind = chance.choice(["pause", "scale", "checkpoint", "preempt"])
    if kind == "pause":
        return [Act(step, "pause"), Act(step, "resume")]
    if kind == "scale":
        most = chance.randint(1, slots)
        later = step + chance.randint(1, 20)
        return [
            Act(step, "scale", (("max", most),)),
            Act(later, "scale", (("max", SLOTS),)),
        ]
    return [Act(step, kind)]


async def play(rig: Rig, job: RigJob, schedule: Schedule) -> None:
    """Send each request of the schedule when its step is in the log."""
    rig.go(_rescue(rig, job))
    for act in schedule.acts:
        await job.until(lambda act=act: job.step >= act.step or job.is_ended)
        if act.request == "resume":
            await job.until(lambda: job.status != "running" or job.is_ended)
        if job.is_ended:
            return
        try:
            await job.request(act.request, **dict(act.args))
        except RefusedRequestError as exc:
            # No rank may be training just then; a user would get the same reply.
            if exc.kind != "request":
                raise


async def _rescue(rig: Rig, job: RigJob) -> None:
    """Kill the ranks that the job warns about, as a user would.

    A rank without progress, for which no other rank waits, may be running a long computation. The
    product warns about it but kills it only on request.
    """
    num_seen = 0
    while not job.is_ended:
        warnings = [
            line for line in job.found(LogLine) if line.worker and "its stacks follow" in line.text
        ]
        for line in warnings[num_seen:]:
            with contextlib.suppress(RefusedRequestError):
                await job.request("fault", worker=line.worker, kind="kill")
        num_seen = len(warnings)
        await asyncio.sleep(0.5)
