"""Named places in the training loop: each sends a heartbeat and may trigger an injected fault."""

from __future__ import annotations

from etrain_jupyter.trainer.control.faults import NO_FAULTS, FaultInjector
from etrain_jupyter.wire.progress_page import ProgressPage


class Places:
    """Report where the main thread is."""

    def __init__(self, faults: FaultInjector = NO_FAULTS, page: ProgressPage | None = None) -> None:
        self.faults = faults
        self.page = page

    def reach(self, place: str, *, rank: int, step: int, phase: str = "computing") -> None:
        """Report that ``rank`` has reached a place, and inject the faults planned for it.

        Args:
            place: One of the places that ``FaultInjector.at`` lists.
            rank: This rank.
            step: The step in progress; between steps, the last committed one.
            phase: One of ``progress_page.PHASES``.
        """
        if self.page is not None:
            self.page.beat(step=step, phase=phase)
        self.faults.at(place, rank=rank, step=step)

    def beat(self) -> None:
        """Send a heartbeat from the same place."""
        if self.page is not None:
            self.page.beat()
