"""What a trainer does to itself on purpose, seen from outside of the process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from torch import nn

from etrain_jupyter.trainer.control.faults import EXIT_CODE, NO_FAULTS, FaultInjector, InjectedError
from etrain_jupyter.wire.messages import FaultFired

SCRIPT = """
import sys, threading, time
from etrain_jupyter.trainer.control.faults import FaultInjector
assert "torch" not in sys.modules

def beat():
    while True:
        print(".", end="", flush=True)
        time.sleep(0.01)

threading.Thread(target=beat, daemon=True).start()
time.sleep(0.1)
plan = [{"id": 5, "kind": sys.argv[1], "rank": 1, "step": 3, "at": "commit"}]
faults = FaultInjector(plan, lambda message: print(message, flush=True))
faults.at("commit", rank=1, step=2)
faults.at("commit", rank=0, step=3)
faults.at("forward", rank=1, step=3)
print("not yet", flush=True)
faults.at("commit", rank=1, step=3)
print("went on", flush=True)
"""


@pytest.fixture
def start() -> Iterator[Any]:
    """Run the script with a kind of fault."""
    started: list[subprocess.Popen[str]] = []

    def run(kind: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-u", "-c", SCRIPT, kind]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("kill", -signal.SIGKILL),
        ("segfault", -signal.SIGSEGV),
        ("exit", EXIT_CODE),
        ("error", 1),
    ],
)
def test_fault_is_reported_before_it_ends_the_process_at_its_place(
    start: Any, kind: str, code: int
) -> None:
    process = start(kind)

    out, err = process.communicate()

    assert process.returncode == code
    told = out.replace(".", "")
    assert told.index("not yet") < told.index("FaultFired(")
    assert "went on" not in told
    assert ("InjectedError" in err) == (kind == "error")


def await_fault(process: subprocess.Popen[str]) -> int:
    """Wait until the fault has been told of; return the output's descriptor."""
    assert process.stdout is not None
    output, seen = process.stdout.fileno(), b""
    while b"FaultFired" not in seen:
        seen += os.read(output, 1)
    time.sleep(0.1)
    os.set_blocking(output, False)
    return output


def beats(output: int) -> bool:
    """Return whether the process's other thread still runs."""
    with contextlib.suppress(BlockingIOError):
        os.read(output, 1 << 16)
    time.sleep(0.3)  # thirty beats
    try:
        return bool(os.read(output, 1 << 16))
    except BlockingIOError:
        return False


@pytest.mark.parametrize(
    ("kind", "status", "others_run"),
    [
        ("stop", psutil.STATUS_STOPPED, False),
        ("hold_gil", psutil.STATUS_SLEEPING, False),
        ("hang", psutil.STATUS_SLEEPING, True),
    ],
)
def test_hanging_process_stays_alive_with_or_without_its_other_threads(
    start: Any, kind: str, status: str, others_run: bool
) -> None:
    process = start(kind)

    output = await_fault(process)

    assert psutil.Process(process.pid).status() == status
    assert beats(output) == others_run
    assert process.poll() is None


def test_gil_is_held_despite_signals(start: Any) -> None:
    process = start("hold_gil")
    output = await_fault(process)

    process.send_signal(signal.SIGWINCH)

    assert not beats(output)


def planned(kind: str, **values: Any) -> dict[str, Any]:
    return {"id": 1, "kind": kind, "rank": 0, "step": 2, "at": "forward", **values}


def test_fault_fires_once_at_its_step_or_a_later_one() -> None:
    told: list[Any] = []
    faults = FaultInjector([planned("error")], told.append)

    faults.at("forward", rank=0, step=1)
    with pytest.raises(InjectedError):
        faults.at("forward", rank=0, step=5)
    faults.at("forward", rank=0, step=6)

    assert told == [FaultFired(fault_id=1)]


def test_renewed_plan_ignores_fault_kinds_of_the_coordinator() -> None:
    told: list[Any] = []
    faults = FaultInjector([planned("error")], told.append)

    faults.renew([planned("notice"), planned("kill_worker")])

    faults.at("forward", rank=0, step=5)
    assert told == []


def test_requested_fault_fires_in_the_main_thread() -> None:
    told: list[Any] = []
    faults = FaultInjector([], told.append)
    orders = threading.Thread(target=faults.inject, args=("error",))

    orders.start()
    orders.join()
    faults.renew([])

    with pytest.raises(InjectedError):
        faults.at("eval", rank=3, step=0)
    assert told == [], "the coordinator knows what it ordered"


def test_disconnect_breaks_the_connections_of_the_generation() -> None:
    broken: list[int] = []
    faults = FaultInjector([planned("disconnect")], lambda _: None)
    faults.disconnect = lambda: broken.append(1)

    faults.at("forward", rank=0, step=2)
    faults.inject("disconnect")

    assert broken == [1, 1]


def test_lost_sample_is_removed_and_repeated_one_replaces_another() -> None:
    share = np.array([7, 8, 9])
    lost = FaultInjector([planned("lose_sample")], lambda _: None)
    repeated = FaultInjector([planned("repeat_sample")], lambda _: None)

    assert lost.corrupt_indices(share, rank=0, step=2).tolist() == [8, 9]
    assert repeated.corrupt_indices(share, rank=0, step=2).tolist() == [8, 8, 9]
    assert lost.corrupt_indices(share, rank=0, step=3) is share
    assert share.tolist() == [7, 8, 9]


def test_share_of_one_sample_is_unchanged_and_a_later_one_is_corrupted() -> None:
    faults = FaultInjector([planned("lose_sample")], lambda _: None)

    assert faults.corrupt_indices(np.array([7]), rank=0, step=2).tolist() == [7]
    assert faults.corrupt_indices(np.array([7, 8]), rank=0, step=3).tolist() == [8]


def test_diverged_rank_has_exactly_one_changed_weight() -> None:
    model = nn.Linear(3, 2)
    before = [p.detach().clone() for p in model.parameters()]
    faults = FaultInjector([planned("diverge")], lambda _: None)

    faults.corrupt_weights(model, rank=1, step=2)
    assert [bool((p == b).all()) for p, b in zip(model.parameters(), before, strict=True)] == [
        True,
        True,
    ]
    faults.corrupt_weights(model, rank=0, step=2)

    assert sum(int((p != b).sum()) for p, b in zip(model.parameters(), before, strict=True)) == 1


def test_loss_of_one_rank_is_corrupted_once() -> None:
    faults = FaultInjector([planned("nan_loss")], lambda _: None)

    spoilt = [faults.corrupts_loss(rank=rank, step=step) for rank, step in ((0, 1), (1, 2), (0, 2))]

    assert spoilt == [False, False, True]
    assert not faults.corrupts_loss(rank=0, step=3)


def test_without_a_plan_nothing_happens() -> None:
    share = [1, 2]

    NO_FAULTS.at("forward", rank=0, step=1)

    assert NO_FAULTS.corrupt_indices(share, rank=0, step=1) is share
