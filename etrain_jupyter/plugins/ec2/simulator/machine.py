"""One machine: a process tree that runs an instance's user-data, with metadata and console.

``ETRAIN_FAKEAWS_INSTANCE`` in a process's environment is the id of its instance.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

import etrain_jupyter
from etrain_jupyter.plugins.ec2.simulator.backend import InstanceFacts
from etrain_jupyter.plugins.ec2.simulator.imds import ImdsServer, Page, instance_pages
from etrain_jupyter.plugins.ec2.simulator.networks import SimulatedNetwork
from etrain_jupyter.plugins.ec2.simulator.wire import ACCOUNT
from etrain_jupyter.testing.serving import processes_with

MARKER = "ETRAIN_FAKEAWS_INSTANCE"
DISK = "disk"
"""Folder of a machine's own disk, where it installs its environment."""
_GUEST = Path(__file__).parent / "guest"
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MAX_END_S = 20.0


def python_script(name: str, *arguments: str) -> list[str]:
    """Return the command that runs one of the guest's scripts."""
    return [sys.executable, "-I", "-S", str(_GUEST / f"{name}.py"), *arguments]


class SimulatedMachine:
    """A machine, initially off; ``start`` and ``power_off`` are each called once."""

    def __init__(
        self, facts: InstanceFacts, address: str, network: SimulatedNetwork, folder: Path
    ) -> None:
        self.facts = facts
        self.address = address
        self.imds: ImdsServer | None = None
        self._network = network
        self._harness_folder = folder  # the cloud's folder, with all machines' folders
        self._folder = folder / facts.instance_id
        self._folder.mkdir()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_off = False
        self._lock = threading.Lock()
        """Guards the power state."""

    @property
    def pid(self) -> int | None:
        """The process that the harness started, while it runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def console(self) -> bytes:
        """Return the console output."""
        with suppress(FileNotFoundError):
            return (self._folder / "console.log").read_bytes()
        return b""

    def start(
        self,
        *,
        endpoint: str,
        variables: Mapping[str, str],
        credentials: Callable[[], str],
        source: str = "",
    ) -> None:
        """Run its user-data; ``source`` is the instance whose disk became its image, if any."""
        # The machine may have been terminated while it was pending.
        with self._lock:
            if self._is_off:
                return
            disk = self._harness_folder / source / DISK
            if source and disk.is_dir():
                # A disk contains only environments. With hard links, as with a snapshot, no file is
                # copied before it is changed.
                subprocess.run(["cp", "-al", disk, self._folder / DISK], check=True)
            # Only the guest's first process starts here. It waits for the task below, because the
            # network must be connected before the user-data runs.
            with (self._folder / "host.log").open("ab") as log:
                self._process = subprocess.Popen(
                    self._network.wrap(python_script("init")),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env={"PATH": _SYSTEM_PATH, MARKER: self.facts.instance_id},
                    cwd=self._folder,
                    start_new_session=True,
                )
            listener = self._network.plug(self._process.pid, self.address)
            self.imds = ImdsServer(self._pages(), listener=listener)
            if self.facts.role:
                self.imds.set_role(self.facts.role, credentials)
            environment = self._environment(endpoint, variables)
            task = {
                "command": self._command(),
                "environment": environment,
                "folder": str(self._folder),
                "console": str(self._folder / "console.log"),
            }
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(task).encode() + b"\n")
            self._process.stdin.flush()

    def _command(self) -> list[str]:
        """Write its user-data to a file; return the command that runs it."""
        text = self.facts.user_data
        if not text.startswith("#!"):
            return ["true"]  # cloud-init only runs scripts
        script = self._folder / "user-data"
        script.write_text(text)
        script.chmod(0o755)
        # Run it through an interpreter, because executing a file that another thread's child still
        # has open for writing fails with "text file busy".
        return [*shlex.split(text.splitlines()[0][2:]), str(script)]

    def _environment(self, endpoint: str, variables: Mapping[str, str]) -> dict[str, str]:
        commands = self._write_commands(endpoint)
        home = self._folder / "home"
        home.mkdir()
        environment = {
            "AWS_ENDPOINT_URL": endpoint,
            # Machines share the disk of this one, but not what they install.
            "ETRAIN_ROOT": str(self._folder / DISK),
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{commands}:{Path(sys.executable).parent}:{_SYSTEM_PATH}",
            "PYTHONPATH": str(Path(etrain_jupyter.__file__).parents[1]),
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(home),
            **variables,
            MARKER: self.facts.instance_id,
        }
        # In a namespace, boto3 finds the service at its usual address.
        if self._network.mode == "loopback" and self.imds is not None:
            environment["AWS_EC2_METADATA_SERVICE_ENDPOINT"] = self.imds.url
        return environment

    def _write_commands(self, endpoint: str) -> Path:
        """Write replacements for commands that must not run here; return their folder."""
        folder = self._folder / "bin"
        folder.mkdir()
        switch = shlex.join(python_script("shutdown", endpoint, self.facts.instance_id))
        off = f"exec {switch} -h now"
        refuse = 'echo "$0: not in a fake instance" >&2; exit 1'
        scripts = {
            "halt": off,
            "poweroff": off,
            "reboot": refuse,
            "shutdown": f'exec {switch} "$@"',
            "systemctl": f'case " $* " in *" poweroff "*|*" halt "*) {off};; esac; {refuse}',
        }
        for name, text in scripts.items():
            script = folder / name
            script.write_text(f"#!/bin/sh\n{text}\n")
            script.chmod(0o755)
        return folder

    def _pages(self) -> dict[str, Page]:
        facts = self.facts
        return instance_pages(
            instance_id=facts.instance_id,
            instance_type=facts.pool.instance_type,
            zone=facts.pool.zone,
            lifecycle=facts.lifecycle,
            address=self.address,
            ami=facts.image,
            account=ACCOUNT,
            launched_at=facts.launched_at,
            tags=facts.tags if facts.shows_tags else None,
            user_data=facts.user_data or None,
        )

    def power_off(self) -> None:
        """Power the machine off once: cut the network, and kill all its processes."""
        with self._lock:
            if self._is_off:
                return
            self._is_off = True
        # Cut the network first, because a machine that loses power sends no last packet, so its
        # peers must detect the loss by a timeout. (Without namespaces, a cable cannot be cut.)
        if self._process is not None:
            self._network.pull(self.address)
            self._kill(self._process)
        if self.imds is not None:
            self.imds.close()

    def erase_disk(self) -> None:
        """Delete its disk; takes minutes if an environment is installed on it."""
        # In another process, so that the cloud's own threads continue at full speed.
        subprocess.run(["rm", "-rf", self._folder / DISK], check=False)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        # 1. Namespaces: kill the child of `unshare`, which is the machine's PID 1.
        # 2. Close the pipe, the machine's power supply: the first process kills all others.
        # 3. If it hangs or has been killed, find the processes by their environment.
        was_alive = process.poll() is None
        if was_alive and self._network.mode == "namespaces":
            # When the first process of a PID namespace dies, the kernel kills the others.
            with suppress(psutil.NoSuchProcess):
                for first in psutil.Process(process.pid).children():
                    first.kill()
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_MAX_END_S)
        if process.poll() is None:
            process.kill()
            process.wait()
            was_alive = False
        if not was_alive:
            for one in processes_with(f"{MARKER}={self.facts.instance_id}"):
                with suppress(psutil.NoSuchProcess):
                    one.kill()

    def on_end(self) -> None:
        """Wait until the machine is off, for whatever reason."""
        if self._process is not None:
            self._process.wait()
