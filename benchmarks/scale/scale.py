"""Load of the head with up to 1,000 workers: processor time, messages, decisions, memory and log.

The scheduler and the coordinator are real, in a process of their own, and so are the supervisors,
which connect over TLS; see ``workers``. Their trainers only sleep. All processes share this
machine, so times are upper bounds; processor seconds are those of the head alone.

::

    submit ── all formed ── steady ── SIGKILL of a worker ── break ── form ── all formed
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import report
from benchmarks.scale.handlers import measure_handlers
from etrain_jupyter.bundle.restore import HEADER
from etrain_jupyter.log import events
from etrain_jupyter.log.event_log import read_events
from etrain_jupyter.notebook.dashboard.feed import SentSnapshot
from etrain_jupyter.notebook.dashboard.job_view import JobView
from etrain_jupyter.process.peers import pinned_to_scheduler
from etrain_jupyter.process.tls import mint_certificates, read_security, write_certificates
from etrain_jupyter.wire import requests as q

SIZES = (16, 64, 256, 1000)
WORKERS_PER_PROCESS = 500
RATE = 10.0
"""Steps per second."""
STEADY_S = 20.0
MEMORY_STEPS = 100_000
FAST_RATE, FAST_RECORDS = 2000.0, 100
"""Steps per second, and per message, while memory is measured."""
TIMEOUT_S = 400.0
BARS = {"cpu": 1.0, "decided_s": 0.1, "formed_s": 1.0}
"""Bars at 1,000 workers: processor seconds per second, the decision, and all ranks formed."""

INSTANTS = ("decided_s", "received_s", "form_decided_s")

SETTLE_S = 2.0
"""Seconds between the end of a change and what is measured next."""

_CELLS = b'{"cells": {}}'
_BUNDLE = HEADER.pack(len(_CELLS)) + _CELLS
_JOB = "scale"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--workers", type=int, action="append", help="default: 16, 64, 256, 1000")
    parser.add_argument("--kills", type=int, help="workers killed per size (default 3)")
    parser.add_argument("--steady-s", type=float, help="seconds of steady training (default 20)")
    parser.add_argument(
        "--no-rendezvous", action="store_true", help="the ranks exchange no keys to connect"
    )
    parser.add_argument(
        "--handlers", action="store_true", help="only the coordinator's messages, without a network"
    )
    parser.add_argument("--no-memory", action="store_true", help="leave out the 100,000 steps")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure each number of workers, then the memory over many steps."""
    handled = {str(num): measure_handlers(num) for num in options.workers or SIZES}
    result: dict[str, Any] = {"benchmark": "scale", "rate": RATE, "bars": BARS, "handlers": handled}
    if options.handlers:
        return {**result, "workers": {}}
    sizes = options.workers or ([16, 64] if options.quick else list(SIZES))
    kills = options.kills or (1 if options.quick else 3)
    steady_s = options.steady_s or (5.0 if options.quick else STEADY_S)
    has_keys = not options.no_rendezvous
    found = {}
    for num in sizes:
        with Cluster(num, has_keys=has_keys) as cluster:
            found[str(num)] = one = cluster.run(steady_s, kills)
        print(f"{num} workers: {json.dumps(one)}", flush=True)
    result["workers"] = found
    if not options.no_memory:
        with Cluster(16, has_keys=has_keys) as cluster:
            result["memory"] = cluster.grow(MEMORY_STEPS // 10 if options.quick else MEMORY_STEPS)
    return result


class Cluster:
    """A head and ``num`` simulated workers; a context manager."""

    def __init__(self, num: int, *, has_keys: bool) -> None:
        self._num, self._has_keys = num, has_keys
        self._folder = Path(tempfile.mkdtemp(prefix="etrain-scale-"))
        self._run_dir = self._folder / "runs" / _JOB
        write_certificates(self._folder / "tls", mint_certificates("scale"))
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Cluster:
        try:
            head = self._spawn("scale.head", str(self._folder))
            self.head = psutil.Process(head.pid)
            self._address = _line(head)
            started = time.monotonic()
            self._hosts = [
                self._spawn(
                    "scale.workers",
                    *(str(self._folder), self._address, str(first)),
                    *(str(min(WORKERS_PER_PROCESS, self._num - first)), str(RATE)),
                    *(["keys"] if self._has_keys else []),
                )
                for first in range(0, self._num, WORKERS_PER_PROCESS)
            ]
            for host in self._hosts:
                json.loads(_line(host))
            self._connect_s = time.monotonic() - started
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _spawn(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.{module}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    # --- phases ---

    def run(self, steady_s: float, kills: int) -> dict[str, Any]:
        """Form, train for ``steady_s`` seconds, and lose ``kills`` workers one after another."""
        found: dict[str, Any] = {"connect_s": self._connect_s}
        submitted, cpu, sent = time.time(), self._cpu_s(), self._sent_bytes()
        self._submit()
        self._wait_formed(self._num)
        ready = self._events(events.GenerationReady)
        found["first"] = {
            "formed_s": ready[-1].time - submitted,
            "generations": len(ready),
            "cpu_s": self._cpu_s() - cpu,
            "sent_bytes": self._sent_bytes() - sent,
        }
        time.sleep(SETTLE_S)
        found["steady"] = self._measure_steady(steady_s)
        found["kills"] = [self._kill_one() for _ in range(kills)]
        found["dashboard"] = self._measure_dashboard()
        found["rss_mb"] = self.head.memory_info().rss / 1e6
        found["largest_event_bytes"] = max(map(len, self._log().read_bytes().splitlines()))
        return found

    def _measure_steady(self, seconds: float) -> dict[str, Any]:
        before, cpu, size = self._counts(), self._cpu_s(), self._log().stat().st_size
        started, step = time.monotonic(), self._step()
        time.sleep(seconds)
        passed_s, steps = time.monotonic() - started, self._step() - step
        after = self._counts()
        names = ("received", "reports", "beats")
        changes = {name: after[name] - before[name] for name in names}
        return {
            "cpu": (self._cpu_s() - cpu) / passed_s,
            "steps": steps,
            "messages_per_step": sum(changes.values()) / max(1, steps),
            "log_bytes_per_step": (self._log().stat().st_size - size) / max(1, steps),
        }

    def _kill_one(self) -> dict[str, Any]:
        """Kill one worker, and return when the others learned of it and had formed again."""
        time.sleep(SETTLE_S)
        [*_, formed] = self._events(events.GenerationFormed)
        victim = formed.ranks[len(formed.ranks) // 2]
        cpu, sent = self._cpu_s(), self._sent_bytes()
        host = self._hosts[int(victim[1:]) // WORKERS_PER_PROCESS]
        killed_at = _ask(host, do="kill", worker=victim)["killed_at"]
        self._wait_formed(len(formed.ranks) - 1)
        after = self._counts()
        [*_, lost] = self._events(events.WorkerLost)
        [*_, formed] = self._events(events.GenerationFormed)
        [*_, ready] = self._events(events.GenerationReady)
        instants = {
            "decided_s": lost.time,
            "received_s": after["last"]["BreakGeneration"],
            "form_decided_s": formed.time,
            "form_received_s": after["last"]["JoinGeneration"],
            "formed_s": ready.time,
        }
        return {
            **{name: at - killed_at for name, at in instants.items()},
            "cpu_s": self._cpu_s() - cpu,
            "sent_bytes": self._sent_bytes() - sent,
        }

    def _measure_dashboard(self) -> dict[str, Any]:
        """Return the size of a dashboard's updates, one for each step, and the CPU time of one."""
        known = [event for event in read_events(self._log()) if event.seq]
        steps = [event for event in known if isinstance(event, events.StepCompleted)][-50:]
        view, sent = JobView(_JOB), SentSnapshot()
        view.add([event for event in known if event.seq < steps[0].seq])
        first = view.snapshot().to_json()
        sent.record_all(first)
        started, sizes = time.process_time(), []
        for step in steps:
            view.add([step])
            sizes.append(len(json.dumps(sent.record_changes(view.snapshot().to_json()))))
        return {
            "first_bytes": len(json.dumps(first)),
            "update_bytes": sum(sizes) / len(sizes),
            "update_cpu_s": (time.process_time() - started) / len(sizes),
        }

    def grow(self, num_steps: int) -> dict[str, Any]:
        """Train many steps as fast as possible, and return the head's memory after each tenth."""
        self._submit()
        self._wait_formed(self._num)
        for host in self._hosts:
            _ask(host, do="rate", rate=FAST_RATE, records=FAST_RECORDS)
        sizes, size, cpu = [], self._log().stat().st_size, self._cpu_s()
        first = self._step()
        for tenth in range(1, 11):
            while self._step() - first < num_steps * tenth / 10:
                time.sleep(0.1)
            sizes.append(self.head.memory_info().rss / 1e6)
        steps = self._step() - first
        return {
            "steps": steps,
            "rss_mb": sizes,
            "log_bytes_per_step": (self._log().stat().st_size - size) / steps,
            "cpu_us_per_step": (self._cpu_s() - cpu) / steps * 1e6,
        }

    # --- what it observes ---

    def _submit(self) -> None:
        self._run_dir.mkdir(parents=True)
        (self._run_dir / "bundle").write_bytes(_BUNDLE)
        job = {
            **{"job_id": _JOB, "name": _JOB, "run_dir": str(self._run_dir), "config": {}},
            **{"min_workers": 1, "max_workers": self._num, "bundle_size": len(_BUNDLE)},
            "bundle_digest": hashlib.sha256(_BUNDLE).hexdigest(),
        }
        asyncio.run(self._request(q.SubmitJob(job=job)))

    async def _request(self, request: q.Request[Any]) -> Any:
        from distributed import core

        dask: Any = core
        security = read_security(self._folder / "tls", "client")
        arguments = pinned_to_scheduler(security.get_connection_args("client"))
        async with dask.rpc(self._address, connection_args=arguments) as head:
            return await q.call_scheduler(head, request)

    def _wait_formed(self, num_ranks: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            ready = self._events(events.GenerationReady)
            formed = self._events(events.GenerationFormed)
            is_ready = bool(ready) and ready[-1].generation == formed[-1].generation
            if is_ready and len(formed[-1].ranks) == num_ranks:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{num_ranks} ranks did not form within {TIMEOUT_S:.0f} s")
            time.sleep(0.05)

    def _events(self, kind: type[events.Event]) -> list[Any]:
        # Parse only the lines of this kind: there may be thousands of steps.
        mark = f'"{kind.__name__}"'.encode()
        if not self._log().exists():
            return []
        lines = self._log().read_bytes().split(b"\n")[:-1]
        return [events.event_from_dict(json.loads(line)) for line in lines if mark in line]

    def _log(self) -> Path:
        return self._run_dir / "events.jsonl"

    def _step(self) -> int:
        with self._log().open("rb") as file:
            file.seek(max(0, self._log().stat().st_size - 20_000))
            lines = [line for line in file.read().split(b"\n")[1:-1] if b'"StepCompleted"' in line]
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def _counts(self) -> dict[str, Any]:
        found = [_ask(host, do="counts") for host in self._hosts]
        total = {name: sum(one[name] for one in found) for name in ("received", "reports", "beats")}
        kinds = {kind for one in found for kind in one["last"]}
        last = {kind: max(one["last"].get(kind, 0.0) for one in found) for kind in kinds}
        return {**total, "last": last}

    def _cpu_s(self) -> float:
        times = self.head.cpu_times()
        return times.user + times.system

    def _sent_bytes(self) -> int:
        return int(self.head.io_counters().write_chars)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process exited with code {process.wait()}: {process.args!r}")
    return line.strip()


def _ask(process: subprocess.Popen[str], **command: Any) -> dict[str, Any]:
    assert process.stdin is not None
    process.stdin.write(json.dumps(command) + "\n")
    process.stdin.flush()
    reply: dict[str, Any] = json.loads(_line(process))
    return reply


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as Markdown tables."""
    head = (
        *("workers", "CPU s/s", "messages/step", "log bytes/step", "first formed, s (CPU)"),
        *("lost, ms", "all informed, ms", "form decided, ms", "formed, ms (CPU)", "MB sent"),
        *("RSS, MB", "dashboard kB/update (CPU ms)"),
    )
    rows = []
    for num, one in result["workers"].items():
        kills, steady, first = one["kills"], one["steady"], one["first"]
        middle = {name: sorted(kill[name] for kill in kills)[len(kills) // 2] for name in kills[0]}
        rows.append((
            num, f"{steady['cpu']:.3f}", f"{steady['messages_per_step']:.1f}",
            f"{steady['log_bytes_per_step']:.0f}",
            f"{first['formed_s']:.2f} ({first['cpu_s']:.2f})",
            *(f"{middle[name] * 1e3:.0f}" for name in INSTANTS),
            f"{middle['formed_s'] * 1e3:.0f} ({middle['cpu_s'] * 1e3:.0f})",
            f"{middle['sent_bytes'] / 1e6:.1f}", f"{one['rss_mb']:.0f}",
            f"{one['dashboard']['update_bytes'] / 1e3:.1f} "
            f"({one['dashboard']['update_cpu_s'] * 1e3:.1f})",
        ))  # fmt: skip
    text = report.table(head, rows) if rows else ""
    handled = result["handlers"]
    phases = list(next(iter(handled.values())))
    text += "\n\nProcessor time of the coordinator without a network, ms:\n\n"
    text += report.table(
        ("workers", *phases),
        [(num, *(f"{1e3 * one[phase]:.0f}" for phase in phases)) for num, one in handled.items()],
    )
    if memory := result.get("memory"):
        sizes = ", ".join(f"{size:.0f}" for size in memory["rss_mb"])
        text += (
            f"\n\n{memory['steps']:,} steps: RSS of the head after each tenth {sizes} MB; "
            f"{memory['log_bytes_per_step']:.0f} bytes of log and "
            f"{memory['cpu_us_per_step']:.0f} us of processor time per step."
        )
    return text
