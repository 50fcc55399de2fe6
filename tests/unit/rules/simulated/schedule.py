"""Random schedules of a simulated cluster, each determined by its seed."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.unit.rules.simulated.cluster import Cluster

MOST_WORKERS = 6


class Schedule:
    """Chooses at random what happens next; ``play`` it and look at the cluster.

    Args:
        seed: The same seed gives the same schedule.
        num_events: Number of events before the fair end.
        fault_rate: Share of them that are faults or requests.
    """

    def __init__(self, seed: int, *, num_events: int = 40, fault_rate: float = 0.3) -> None:
        self._dice = random.Random(seed)
        self._nan_dice = random.Random(f"nan {seed}")
        """Chooses whose loss is NaN; separate, so that the rest of a schedule does not change."""
        self._num_events, self._fault_rate = num_events, fault_rate
        bounds = [self._bounds() for _ in range(self._dice.choice((1, 1, 2)))]
        self.cluster = Cluster(*bounds)
        for _ in range(self._dice.randint(0, 4)):
            self.cluster.join()

    def play(self) -> Cluster:
        """Play the schedule, and let every job end."""
        calm = (self._go_on, self._go_on_fairly)
        rough = self._faults() + self._requests()
        for _ in range(self._num_events):
            is_rough = self._dice.random() < self._fault_rate
            self._dice.choice(rough if is_rough else calm)()
            if self._nan_dice.random() < self._fault_rate / 20 and self.cluster.raisers():
                self._nan_dice.choice(self.cluster.raisers()).is_spoilt = True
        self.cluster.finish()
        return self.cluster

    def _bounds(self) -> tuple[int, int]:
        low = self._dice.randint(1, 3)
        return low, low + self._dice.randint(0, 4)

    def _go_on(self) -> None:
        for _ in range(self._dice.randint(1, 12)):
            acts = self.cluster.acts()
            if acts:
                self._dice.choice(acts)()

    def _go_on_fairly(self) -> None:
        for _ in range(self._dice.randint(1, 12)):
            self.cluster.play_round()

    def _faults(self) -> list[Callable[[], None]]:
        cluster, dice = self.cluster, self._dice

        def of_a_worker(do: Callable[[str], None]) -> Callable[[], None]:
            return lambda: do(dice.choice(list(cluster.workers))) if cluster.workers else None

        def join() -> None:
            if len(cluster.workers) < MOST_WORKERS:
                cluster.join()

        def kill() -> None:
            if cluster.processes():
                cluster.kill(dice.choice(cluster.processes()))

        def hang() -> None:
            if cluster.processes():
                cluster.hang(dice.choice(cluster.processes()), dice.choice(("stopped", "stuck")))

        workers = [cluster.vanish, cluster.notice, cluster.cut_off, cluster.reconnect]
        return [join, join, kill, kill, hang, *map(of_a_worker, workers)]

    def _requests(self) -> list[Callable[[], None]]:
        cluster, dice = self.cluster, self._dice

        def rarely(do: Callable[[], None]) -> Callable[[], None]:
            return lambda: do() if dice.random() < 0.2 else None

        def fail() -> None:
            if cluster.raisers():
                dice.choice(cluster.raisers()).raise_user_error()

        return [
            lambda: cluster.pause(dice.choice(cluster.jobs), dice.random() < 0.5),
            lambda: cluster.scale(dice.choice(cluster.jobs), *self._bounds()),
            lambda: cluster.ask_to_save(dice.choice(cluster.jobs), dice.random() < 0.3),
            lambda: dice.choice(cluster.jobs).hear_again(dice.randrange(1000)),
            lambda: cluster.tick(dice.choice((0.25, 1.0, 5.0, 31.0, 61.0))),
            rarely(lambda: cluster.stop(dice.choice(cluster.jobs), now=dice.random() < 0.3)),
            rarely(fail),
        ]
