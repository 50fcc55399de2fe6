"""A simulated machine for a node's agent: metadata service, S3 and a harmless `shutdown`.

The agent is a real process. Its PATH contains only the fake `shutdown`, so that it cannot call the
real command of the machine that runs the tests.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from etrain_jupyter.plugins.ec2.node_config import NodeConfig
from etrain_jupyter.plugins.ec2.simulator.imds import ImdsServer, instance_pages
from etrain_jupyter.process.tls import mint_certificates
from etrain_jupyter.testing.s3_faults import OWNER
from etrain_jupyter.testing.s3_server import S3Server
from etrain_jupyter.wire.versions import read_fingerprint
from tests.unit.pools.standins import SUPERVISOR

ROOT = Path(__file__).parents[2]
PATIENCE_S = 90.0
CLUSTER = "c1"
KEYS = "keys/0123"
FOLDER = f"etrain/clusters/{CLUSTER}"
MARK = "ETRAIN_TEST_MACHINE"
NOBODY = "tls://127.0.0.1:1"
"""Address without a scheduler: a worker keeps retrying and stays alive."""

SHUTDOWN = """#!/bin/sh
echo "$@" >> "$ETRAIN_TEST_SHUTDOWNS"
"""

SCHEDULER = """if True:
    import asyncio, sys
    from pathlib import Path
    from distributed import Scheduler
    from etrain_jupyter.process.tls import configure_dask, read_security, without_http

    async def read_line():
        return (await asyncio.to_thread(sys.stdin.readline)).strip()

    async def serve():
        tls, scratch = sys.argv[1:]
        configure_dask(Path(scratch))
        security = read_security(tls, "scheduler")
        options = {"host": "127.0.0.1", "port": 0, "protocol": "tls", "dashboard": False}
        scheduler = without_http(Scheduler)(security=security, **options)
        await scheduler
        print(scheduler.address, flush=True)
        while line := await read_line():
            if line.startswith("dismiss "):
                address = scheduler.aliases[line.removeprefix("dismiss ")]
                await scheduler.remove_worker(address, stimulus_id="test")
            print(*sorted(scheduler.aliases), flush=True)

    asyncio.run(serve())
"""


class RemoteScheduler:
    """A Dask scheduler in its own process, controlled by its standard input."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SCHEDULER, str(folder / "tls"), str(folder / "scheduler")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        assert self.address

    def _ask(self, words: str) -> list[str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{words}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().split()

    def workers(self) -> list[str]:
        """Return the names of the workers that are connected."""
        return self._ask("workers")

    def dismiss(self, name: str) -> None:
        """Dismiss a worker, as a pool does when it releases it."""
        self._ask(f"dismiss {name}")

    def kill(self) -> None:
        """Kill the scheduler with SIGKILL."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Machine:
    """One instance, from its launch to its termination."""

    def __init__(
        self,
        folder: Path,
        s3: S3Server,
        bucket: str,
        *,
        instance_id: str = "i-1",
        certificates: Mapping[str, str] | None = None,
        **identity: Any,
    ) -> None:
        """Prepare the machine. Pass ``certificates`` if the cluster has other members."""
        folder.mkdir(exist_ok=True)
        self.folder, self._s3, self._bucket = folder, s3, bucket
        self.instance_id = instance_id
        self.imds = ImdsServer(instance_pages(instance_id=instance_id, **identity))
        self._shutdowns = folder / "shutdowns"
        (folder / "bin").mkdir()
        command = folder / "bin" / "shutdown"
        command.write_text(SHUTDOWN)
        command.chmod(0o755)
        self.config = NodeConfig(
            cluster_id=CLUSTER,
            region="us-east-1",
            imds_poll_s=0.1,
            lease_ttl_s=3600.0,
            lease_check_s=0.2,
            fingerprint=read_fingerprint(),
            supervisor=SUPERVISOR,
        )
        (folder / "tls").mkdir()
        for name, text in (certificates or mint_certificates(CLUSTER)).items():
            (folder / "tls" / name).write_text(text)
            self.put(f"{KEYS}/{name}", text.encode())
        self.renew_lease(NOBODY)
        self.process: subprocess.Popen[bytes] | None = None

    # --- actions of the head and the cloud ---

    def put(self, name: str, data: bytes) -> None:
        """Write an object of the cluster."""
        self._s3.write(self._bucket, f"{FOLDER}/{name}", data)

    def remove(self, name: str) -> None:
        """Remove an object of the cluster."""
        self._s3.remove(self._bucket, f"{FOLDER}/{name}")

    def renew_lease(self, scheduler: str, num_lives: int = 1) -> None:
        """Renew the lease as the head does."""
        lease = {"scheduler": scheduler, "num_lives": num_lives, "renewals": 1}
        self.put("lease.json", json.dumps(lease).encode())

    def configure(self, **values: Any) -> None:
        """Change values of ``config.json``."""
        self.config = dataclasses.replace(self.config, **values)

    def start(self, **environment: str) -> None:
        """Run the last line of the user data."""
        self.put("config.json", json.dumps(dataclasses.asdict(self.config)).encode())
        kept = {
            key: value
            for key, value in os.environ.items()
            if key not in ("AWS_EC2_METADATA_DISABLED", "ETRAIN_NOTICES")
        }
        with open(self.folder / "console", "wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "etrain_jupyter.plugins.ec2.machine.agent"),
                    *(f"s3://{self._bucket}/{FOLDER}", "--keys", KEYS, "--owner", OWNER),
                ],
                env={
                    **kept,
                    "PATH": str(self.folder / "bin"),
                    "ETRAIN_TEST_SHUTDOWNS": str(self._shutdowns),
                    "AWS_EC2_METADATA_SERVICE_ENDPOINT": self.imds.url,
                    "ETRAIN_NODE_DIR": str(self.folder / "node"),
                    MARK: str(self.folder),
                    **environment,
                },
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def terminate(self) -> None:
        """Send the agent SIGTERM."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    # --- observations ---

    def console(self) -> str:
        """Return the console output of the machine."""
        return (self.folder / "console").read_text(errors="replace")

    def shutdowns(self) -> list[str]:
        """Return the arguments of each call of `shutdown`."""
        return self._shutdowns.read_text().splitlines() if self._shutdowns.exists() else []

    @property
    def is_off(self) -> bool:
        """True if the machine was turned off without a delay."""
        return "-h now" in self.shutdowns()

    def report(self) -> dict[str, Any]:
        """Return the node's own report; empty if there is none yet."""
        name = f"{FOLDER}/nodes/{self.instance_id}.json"
        if name not in self._s3.list_keys(self._bucket, f"{FOLDER}/nodes/"):
            return {}
        report: dict[str, Any] = json.loads(self._s3.read(self._bucket, name))
        return report

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the machine without the agent."""
        found = []
        for process in psutil.process_iter():
            try:
                if (
                    process.environ().get(MARK) == str(self.folder)
                    and process.status() != psutil.STATUS_ZOMBIE
                    and (self.process is None or process.pid != self.process.pid)
                ):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def until(self, is_so: Callable[[], Any]) -> None:
        """Wait until a condition holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < deadline, self.console()
            time.sleep(0.05)

    def until_off(self) -> str:
        """Wait until the agent has turned the machine off and exited; return the console."""
        assert self.process is not None
        self.until(lambda: self.is_off)
        assert self.process.wait(PATIENCE_S) == 0
        return self.console()

    def close(self) -> None:
        """Kill the agent and wait until no process is left."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.until(lambda: not self.processes())
        self.imds.close()
