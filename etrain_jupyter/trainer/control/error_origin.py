"""Whose fault an exception is: the notebook's, whose job then fails, the network's, or our own.

A defect of ours ends the trainer that has it, as a segfault would: the others go on, and only where
it comes back in the same step again and again does the job fail.
"""

from __future__ import annotations

from pathlib import Path

from torch.distributed import DistError

import etrain_jupyter
from etrain_jupyter.trainer.control.faults import InjectedError
from etrain_jupyter.trainer.micro_batch import is_out_of_memory

_PACKAGE = Path(etrain_jupyter.__file__).parent
_BORDER = frozenset({"workload.py", "optimizers.py", "data.py", "restore.py"})
"""Modules that call what the notebook gave us: a call with wrong arguments fails in them."""


def is_our_defect(exc: BaseException) -> bool:
    """Return whether our own code raised this, and did not mean to.

    What we raise on purpose has a class of ours, and its message tells the user what to mend.
    """
    if isinstance(exc, InjectedError):
        return True
    if is_out_of_memory(exc):
        return False  # it may run out anywhere, and the cell decides how much is needed
    trace = exc.__traceback__
    if type(exc).__module__.partition(".")[0] == _PACKAGE.name or trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    path = Path(trace.tb_frame.f_code.co_filename)
    return path.is_relative_to(_PACKAGE) and path.name not in _BORDER


def is_broken_exchange(exc: BaseException) -> bool:
    """Return whether a collective broke that torch had started by itself.

    DDP agrees on its buckets in the second step of each generation, and waits for that inside gloo;
    a peer that dies just then is seen as a bare RuntimeError, before anybody aborts the generation.
    """
    if isinstance(exc, DistError):
        return True
    return isinstance(exc, RuntimeError) and "gloo/transport" in str(exc)
