"""Process that queues and runs jobs: ``python -m ...slurm.simulator.controller``.

One thread serves a Unix socket and advances the jobs every ``TICK_S`` seconds.
"""

from __future__ import annotations

import argparse
import json
import select
import shlex
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from etrain_jupyter.plugins.slurm.commands import seconds_of
from etrain_jupyter.plugins.slurm.head.script import format_walltime
from etrain_jupyter.plugins.slurm.simulator.jobs import Job
from etrain_jupyter.process.entry import die_with_keeper

TICK_S = 0.02
HEADER = "#SBATCH "
FAILED = "sbatch: error: Batch job submission failed: "


class Controller:
    """The queue.

    Args:
        folder: Folder for the socket and the scripts of running jobs.
        num_nodes: Jobs that run at the same time; more are pending.
        partitions: Names of the partitions; the first is the default.
        kill_wait_s: Seconds between SIGTERM and SIGKILL.
    """

    def __init__(
        self, folder: Path, *, num_nodes: int, partitions: Sequence[str], kill_wait_s: float
    ) -> None:
        self._folder = folder
        self._num_nodes = num_nodes
        self._partitions = partitions
        self._kill_wait_s = kill_wait_s
        self._jobs: dict[str, Job] = {}
        self._num_submitted = 0
        self._refusal = ""
        self._is_down = False

    def advance(self) -> None:
        """Start pending jobs on free nodes, and advance the others."""
        for job in self._jobs.values():
            if job.process is not None:
                job.advance(self._kill_wait_s)
        names = {f"node{number}" for number in range(1, self._num_nodes + 1)}
        free = sorted(names - {job.node for job in self._jobs.values() if job.process is not None})
        for job in self._jobs.values():
            if job.state == "PD":
                if free:
                    job.run(free.pop(0))
                else:
                    job.reason = "Resources"

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a command of SLURM, or a request of ``FakeSlurm``."""
        command, out = request["command"], None
        try:
            if command in ("sbatch", "squeue", "scancel"):
                if self._is_down:
                    raise RefusedError(
                        f"{command}: error: Unable to contact slurm controller (connect failure)"
                    )
                out = getattr(self, f"_{command}")(request)
            else:
                out = getattr(self, f"_{command}")(*request["arguments"])
            return {"out": out, "err": "", "code": 0}
        except RefusedError as exc:
            return {"out": "", "err": f"{exc}\n", "code": 1}

    def close(self) -> None:
        """Kill all jobs."""
        for job in self._jobs.values():
            job.kill()

    # --- SLURM's commands ---

    def _sbatch(self, request: dict[str, Any]) -> str:
        if self._refusal:
            raise RefusedError(FAILED + self._refusal)
        options, text = parse_sbatch(request["arguments"])
        partition = options.partition or self._partitions[0]
        if partition not in self._partitions:
            raise RefusedError(FAILED + "Invalid partition name specified")
        self._num_submitted += 1
        id = str(self._num_submitted)
        output = options.output or f"slurm-{id}.out"
        self._jobs[id] = Job(
            id=id,
            name=options.job_name or "sbatch",
            script=text,
            folder=request["folder"],
            environment=request["environment"]
            | ({"SLURM_CPUS_PER_TASK": options.cpus_per_task} if options.cpus_per_task else {}),
            partition=partition,
            limit_s=options.time,
            warning=options.signal,
            output=output,
            error=options.error or output,
            requeues=options.requeue,
            controller=str(self._folder),
        )
        return f"Submitted batch job {id}\n"

    def _squeue(self, request: dict[str, Any]) -> str:
        layout = parse_squeue(request["arguments"]).format
        now = time.monotonic()
        lines = []
        for job in self._jobs.values():
            if job.state not in ("PD", "R", "CG"):
                continue
            used_s = now - job.started_at if job.state != "PD" else 0.0
            left_s = job.ends_at - now if job.state != "PD" else job.limit_s
            line = layout
            for code, text in {
                "%i": job.id,
                "%j": job.name,
                "%t": job.state,
                "%L": "UNLIMITED" if left_s == float("inf") else format_walltime(max(0.0, left_s)),
                "%M": format_walltime(used_s),
                "%N": job.node,
                "%r": job.reason,
            }.items():
                line = line.replace(code, text)
            lines.append(line + "\n")
        return "".join(lines)

    def _scancel(self, request: dict[str, Any]) -> str:
        options = parse_scancel(request["arguments"])
        for id in options.jobs:
            job = self._jobs.get(id)
            if job is None:
                raise RefusedError(
                    f"scancel: error: Kill job error on job id {id}: Invalid job id specified"
                )
            if job.state not in ("PD", "R", "CG"):
                continue
            if options.signal in (None, "TERM") and job.state != "CG":
                job.terminate(self._kill_wait_s)
            elif options.signal == "KILL":
                job.terminate(0.0)
            elif options.signal and options.batch:
                job.send(options.signal)
        return ""

    # --- what tests request ---

    def _list_jobs(self) -> list[dict[str, Any]]:
        return [
            {
                "id": job.id,
                "name": job.name,
                "state": job.state,
                "script": job.script,
                "pid": job.process.pid if job.process is not None else 0,
                "num_restarts": job.num_restarts,
            }
            for job in self._jobs.values()
        ]

    def _preempt(self, id: str, grace_s: float, sends_signal: bool) -> None:
        self._jobs[id].preempt(grace_s, sends_signal=sends_signal)

    def _set_time_left(self, id: str, left_s: float) -> None:
        self._jobs[id].ends_at = time.monotonic() + left_s

    def _configure(self, name: str, value: Any) -> None:
        setattr(self, f"_{name}", value)


# --- options ---


class RefusedError(Exception):
    """The command is invalid; the text is what SLURM prints."""


class Parser(argparse.ArgumentParser):
    """Parser that raises instead of exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise ``RefusedError``."""
        raise RefusedError(f"{self.prog}: {message}")


def parse_sbatch(arguments: Sequence[str]) -> tuple[argparse.Namespace, str]:
    """Return the options of a job and the text of its script.

    Options on the command line take precedence over those in the script.

    Raises:
        RefusedError: If an option is unknown.
    """
    *options, path = arguments
    text = Path(path).read_text()
    header = []
    for line in text.splitlines():
        if line.startswith(HEADER):
            header += shlex.split(line.removeprefix(HEADER))
        elif line.strip() and not line.startswith("#"):
            break  # as sbatch does: directives after the first command are comments
    return _sbatch_parser().parse_args([*header, *options]), text


def _sbatch_parser() -> Parser:
    parser = Parser(prog="sbatch", add_help=False, allow_abbrev=False)
    for names in (
        ("-J", "--job-name"),
        ("-p", "--partition"),
        ("-A", "--account"),
        ("-e", "--error"),
        ("-o", "--output"),
        ("-n", "--ntasks"),
        ("-c", "--cpus-per-task"),
        ("--mem",),
        ("--gres",),
        ("--constraint",),
        ("--signal",),
    ):
        parser.add_argument(*names)
    parser.add_argument("-t", "--time", type=seconds_of, default=float("inf"))
    parser.add_argument("--requeue", dest="requeue", action="store_true")
    parser.add_argument("--no-requeue", dest="requeue", action="store_false")
    return parser


def parse_scancel(arguments: Sequence[str]) -> Any:
    """Return signal and job ids of a scancel command."""
    parser = Parser(prog="scancel", add_help=False)
    parser.add_argument("-s", "--signal")
    parser.add_argument("-b", "--batch", action="store_true")
    parser.add_argument("-f", "--full", action="store_true")
    parser.add_argument("jobs", nargs="+")
    return parser.parse_args(arguments)


def parse_squeue(arguments: Sequence[str]) -> Any:
    """Return the format of a squeue command."""
    parser = Parser(prog="squeue", add_help=False)
    parser.add_argument("-h", "--noheader", action="store_true")
    parser.add_argument("-u", "--user")
    parser.add_argument("-o", "--format", default="%i|%j|%t|%L|%M|%N|%r")
    return parser.parse_args(arguments)


def serve(controller: Controller, path: Path) -> None:
    """Serve requests until the parent exits."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(64)
        print("{}", flush=True)  # for ``start_server``
        while True:
            if select.select([listener], [], [], TICK_S)[0]:
                connection, _ = listener.accept()
                with connection, connection.makefile("rw") as file:
                    file.write(json.dumps(controller.answer(json.loads(file.readline()))))
            controller.advance()


def main() -> None:
    """Run until standard input ends, with the process that started this one."""
    parser = argparse.ArgumentParser(prog="fake-slurm")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--partitions", required=True)
    parser.add_argument("--kill-wait-s", type=float, required=True)
    arguments = parser.parse_args()
    die_with_keeper()
    controller = Controller(
        arguments.folder,
        num_nodes=arguments.nodes,
        partitions=arguments.partitions.split(","),
        kill_wait_s=arguments.kill_wait_s,
    )
    serve(controller, arguments.folder / "socket")


if __name__ == "__main__":
    main()
