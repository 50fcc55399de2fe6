"""The agent of an on-demand head: a scheduler with its keeper on its own machine.

It reads the cluster's settings and the scheduler's keys from the bucket and starts the same
processes that otherwise run on the notebook's machine. Its scheduler renews the lease. The agent
turns the machine off when the cluster has ended or its maximum lifetime has passed.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.ec2.bootstrap import HEAD_TLS, NODE_TLS, SETTINGS
from etrain_jupyter.plugins.ec2.machine.base_agent import AgentError, MachineAgent, arm_timer
from etrain_jupyter.pools.detached import start_cluster
from etrain_jupyter.process.cluster_dir import ClusterDir
from etrain_jupyter.process.cluster_settings import ClusterSettings
from etrain_jupyter.process.start_lock import start_lock
from etrain_jupyter.process.state_root import open_state_root
from etrain_jupyter.process.tls import write_certificates
from etrain_jupyter.storage.objects.bucket_owners import VARIABLE as OWNERS

KEEPER_GONE_S = 60.0
"""Time without a keeper after which the machine is turned off: nothing restarts a keeper here."""


class HeadAgent(MachineAgent):
    """Keeps the machine of a scheduler on while the scheduler runs.

    It does not watch the lease, because the scheduler that renews the lease runs on this machine.
    """

    def __init__(self, url: str, folder: Path, *, keys: str, owner: str = "") -> None:
        super().__init__(url, folder, keys=keys, owner=owner)
        self._cluster: ClusterDir
        self._keeper_seen_at = time.monotonic()

    def _start(self) -> None:
        # Set before the first call to `open_state_root`. `turn_off` removes the folder.
        os.environ["ETRAIN_STATE"] = str(self._folder / "state")
        os.environ.setdefault("AWS_DEFAULT_REGION", self._identity.region)
        os.environ[OWNERS] = self._bucket_owners()
        self._cluster = self._make_folder()
        # No other launcher exists on this machine, so the lock is always free. `start_cluster`
        # needs its descriptor, which the scheduler process closes once it listens.
        with start_lock(self._cluster.path.parent, self._cluster.lock_key, timeout_s=5.0) as lock:
            settings = self._cluster.settings()
            try:
                start_cluster(self._cluster.path.parent, settings, lock, self._cluster)
            except PoolError as exc:
                raise AgentError(f"the scheduler did not start: {exc}") from exc
        assert self._reports is not None
        self._reports.report("ready")
        # Until now, the user-data's timer (lifetime.boot) was armed. The scheduler serves, so the
        # lifetime applies from here on.
        arm_timer(self._ends_at - time.monotonic())
        self._keeper_seen_at = time.monotonic()

    def _make_folder(self) -> ClusterDir:
        """Create the cluster's folder as the notebook's machine would."""
        given = self._wait_for("the settings", lambda: self._read_json(SETTINGS))
        # The notebook's version may have settings that this one lacks.
        known = {field.name for field in dataclasses.fields(ClusterSettings)}
        settings = ClusterSettings(**{key: value for key, value in given.items() if key in known})
        # The launcher did not know the address, because the machine did not exist yet.
        settings = dataclasses.replace(settings, host=self._identity.private_ip)
        cluster = ClusterDir.make(open_state_root() / self._config.cluster_id, settings)
        write_certificates(cluster.tls, self._wait_for("the certificates", self._read_keys))
        return cluster

    def _read_keys(self) -> dict[str, str]:
        places = {name: f"tls-head/{name}" for name in HEAD_TLS}
        places |= {name: f"{self._keys}/{name}" for name in NODE_TLS}
        return {name: self._read(place).decode() for name, place in places.items()}

    def _poll(self) -> str:
        record = self._cluster.record()
        #   record   folder   state of the cluster
        #   alive    yes      running
        #   none     no       shut down cleanly: turn off
        #   none     yes      the keeper is about to remove the folder: treat as dead
        #   dead     yes      the keeper was killed, and nothing restarts it: allow KEEPER_GONE_S
        if record is not None and record.is_alive:
            self._keeper_seen_at = time.monotonic()
        elif record is None and not self._cluster.path.exists():
            return "the cluster has ended"
        elif time.monotonic() - self._keeper_seen_at > KEEPER_GONE_S:
            return f"the keeper of the cluster has been gone for {KEEPER_GONE_S:g} s"
        return ""
