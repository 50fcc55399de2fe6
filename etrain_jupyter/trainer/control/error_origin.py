"""Find the origin of an exception: the notebook's code, the network, or a bug in this package.

An exception from the notebook fails the job. A bug in this package ends the trainer, as a segfault
would: the other ranks continue, and the job fails only if the bug recurs in the same step.
"""

from __future__ import annotations

from pathlib import Path

from torch.distributed import DistError

import etrain_jupyter
from etrain_jupyter.trainer.control.faults import InjectedError
from etrain_jupyter.trainer.micro_batch import is_out_of_memory

_PACKAGE = Path(etrain_jupyter.__file__).parent
_BORDER = frozenset(
    (
        *("workload.py", "optimizers.py", "data.py", "restore.py", "one_pass.py", "measures.py"),
        *("weight.py", "whole_set.py"),
    )
)
"""Modules that call the notebook's objects. If such an object is built-in code (``torch.dot``), or
the call does not fit its parameters, the exception is raised in a frame of these modules."""


def is_our_defect(exc: BaseException) -> bool:
    """Return True if a bug in this package raised the exception."""
    # exception                                  its innermost frame    a bug in this package
    # injected                                   any                    yes, that is its purpose
    # out of memory                              any                    no: the cell decides how
    #                                                                   much memory is needed
    # a class of this package (WorkloadError)    any                    no: raised on purpose
    # anything else                              this package           yes, except in _BORDER
    # anything else                              notebook, a library    no
    if isinstance(exc, InjectedError):
        return True
    if is_out_of_memory(exc):
        return False
    trace = exc.__traceback__
    if type(exc).__module__.partition(".")[0] == _PACKAGE.name or trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    path = Path(trace.tb_frame.f_code.co_filename)
    return path.is_relative_to(_PACKAGE) and path.name not in _BORDER


def is_broken_exchange(exc: BaseException) -> bool:
    """Return True if a collective that torch itself started has failed."""
    # In the second step of each generation, DDP synchronizes its buckets with the other ranks, and
    # blocks inside gloo. If a peer dies at that moment, this rank gets a bare RuntimeError before
    # the generation is aborted.
    if isinstance(exc, DistError):
        return True
    return isinstance(exc, RuntimeError) and "gloo/transport" in str(exc)
