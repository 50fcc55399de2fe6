"""The agent of an on-demand head: a scheduler with its keeper, on a machine of its own.

It finds the cluster's settings and the scheduler's keys in the bucket and starts what would run on
the notebook's machine otherwise. Its scheduler renews the lease; when the cluster has ended, or its
lifetime is over, it turns the machine off.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from typing import TYPE_CHECKING, Any

from etrain_jupyter.errors import PoolError
from etrain_jupyter.pools.detached import start_cluster
from etrain_jupyter.pools.ec2.bootstrap import HEAD_TLS, NODE_TLS, SETTINGS
from etrain_jupyter.pools.ec2.machine.agent import LOOK_S, Agent, AgentError, AskedToEndError
from etrain_jupyter.pools.ec2.machine.node_reports import NodeReports
from etrain_jupyter.pools.ec2.machine.node_store import NodeStore
from etrain_jupyter.pools.ec2.machine.power import arm_timer
from etrain_jupyter.process.cluster_dir import ClusterDir
from etrain_jupyter.process.cluster_settings import ClusterSettings
from etrain_jupyter.process.start_lock import start_lock
from etrain_jupyter.process.state_root import open_state_root
from etrain_jupyter.process.tls import write_certificates
from etrain_jupyter.storage.objects.bucket_owners import VARIABLE as OWNERS
from etrain_jupyter.wire.versions import read_fingerprint

if TYPE_CHECKING:
    from etrain_jupyter.pools.ec2.node_config import NodeConfig

GONE_S = 60.0
"""How long a keeper may be gone: nobody starts another one here."""


class HeadAgent(Agent):
    """Keeps the machine of a scheduler as long as that lives."""

    def _boot(self) -> None:
        self._identity = self._insist("the metadata service", self._imds.identity)
        self._known_at = time.monotonic()
        me = self._identity
        self._store = NodeStore(self._url, region=me.region, owner=self._owner)
        self._config: NodeConfig = self._insist("config.json", self._read_config)
        self._ends_at = self._known_at + self._config.lifetime_s - max(0.0, me.age_s)
        fingerprint = read_fingerprint()
        self._reports = NodeReports(self._store, me, fingerprint)
        self._reports.say("booting")
        self._check(fingerprint)
        os.environ["ETRAIN_STATE"] = str(self._folder / "state")
        os.environ.setdefault("AWS_DEFAULT_REGION", me.region)
        os.environ[OWNERS] = self._owners()
        self._cluster = self._make_folder()
        with start_lock(self._cluster.path.parent, self._cluster.lock_key, timeout_s=5.0) as lock:
            settings = self._cluster.settings()
            try:
                start_cluster(self._cluster.path.parent, settings, lock, self._cluster)
            except PoolError as exc:
                raise AgentError(f"the scheduler did not start: {exc}") from exc
        self._reports.say("ready")
        arm_timer(self._ends_at - time.monotonic())

    def _make_folder(self) -> ClusterDir:
        """Make the cluster's folder as the notebook's machine would have."""
        told = self._insist("the settings", self._read_settings)
        known = {field.name for field in dataclasses.fields(ClusterSettings)}
        settings = ClusterSettings(**{key: value for key, value in told.items() if key in known})
        settings = dataclasses.replace(settings, host=self._identity.private_ip)
        cluster = ClusterDir.make(open_state_root() / self._config.cluster_id, settings)
        write_certificates(cluster.tls, self._insist("the certificates", self._read_keys))
        return cluster

    def _read_settings(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self._read(SETTINGS))
        return told

    def _read_keys(self) -> dict[str, str]:
        places = {name: f"tls-head/{name}" for name in HEAD_TLS}
        places |= {name: f"{self._keys}/{name}" for name in NODE_TLS}
        return {name: self._read(place).decode() for name, place in places.items()}

    def _serve(self) -> str:
        seen_at = time.monotonic()
        while True:
            self._take_messages(LOOK_S)
            if why := self._is_over():
                return why
            if self._is_asked_to_end:
                raise AskedToEndError("the agent was asked to end")
            record = self._cluster.record()
            if record is not None and record.is_alive:
                seen_at = time.monotonic()
            elif record is None and not self._cluster.path.exists():
                return "the cluster has ended"
            elif time.monotonic() - seen_at > GONE_S:
                return f"the keeper of the cluster has been gone for {GONE_S:g} s"
