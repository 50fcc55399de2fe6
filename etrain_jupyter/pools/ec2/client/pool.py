"""The pool ``aws-spot``, as a kernel or a terminal has it: its head runs on this machine.

What is here owns nothing. The head's keeper owns the cluster on this side, EC2's tags and the
bucket say what belongs to it on the other; either can be found again without the other.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from etrain_jupyter.errors import PoolError
from etrain_jupyter.pools.base import CostReport, Leftovers
from etrain_jupyter.pools.detached import DetachedPool, end_cluster_here
from etrain_jupyter.pools.ec2.fleet_state import MEMORY_FILE
from etrain_jupyter.pools.ec2.spec import AwsSpotSpec
from etrain_jupyter.pools.rpc import ask
from etrain_jupyter.process.cluster_dir import (
    ClusterDir,
    LocalSettings,
    cluster_dirs,
    environment_key,
    state_root,
)
from etrain_jupyter.wire.requests import ListCosts

if TYPE_CHECKING:
    from etrain_jupyter.pools.catalog import PoolEntry
    from etrain_jupyter.pools.ec2.ec2_api import Clients

HEAD_ELSEWHERE = "elsewhere"
"""Host of a cluster, in the folder that this machine has of it, whose head has one of its own."""
UNLISTED_S = 180.0
NODES = "etrain_jupyter.pools.ec2.head.main:make_nodes"


class AwsSpotPool(DetachedPool):
    """Spot machines of EC2.

    Args:
        name: What a cell calls it.
        spec: What ``pools.yaml`` says of it.
        cluster_id: Bind the object to that cluster, instead of the living one of the pool.
        change: Changes how the head behaves; for tests.
    """

    def __init__(
        self,
        name: str,
        spec: AwsSpotSpec,
        *,
        cluster_id: str | None = None,
        change: Callable[[LocalSettings], LocalSettings] = lambda settings: settings,
    ) -> None:
        super().__init__(name=name, prefix=_prefix_of(name, spec), cluster_id=cluster_id)
        self.spec = spec
        self._change = change

    @classmethod
    def from_entry(cls, entry: PoolEntry) -> AwsSpotPool:
        """Return the pool of an entry of ``pools.yaml``; nothing is asked yet.

        Raises:
            ConfigError: If its keys are not what they should be, with the place of the fault.
        """
        return _class_of(spec := entry.read_as(AwsSpotSpec))(entry.name, spec)

    @classmethod
    def of_cluster(cls, cluster: ClusterDir) -> AwsSpotPool:
        """Return the pool of a cluster whose head is or was on this machine."""
        settings = cluster.settings()
        spec = AwsSpotSpec.from_json(json.dumps(settings.spec))
        return _class_of(spec)(settings.pool, spec, cluster_id=cluster.cluster_id)

    def settings(self) -> LocalSettings:
        """Return how the head of a cluster that has to be started shall behave.

        Raises:
            PoolError: If AWS refuses what it needs.
        """
        from etrain_jupyter.pools.ec2.client.check import check_account, find_head_host

        clients = self._clients()
        check_account(clients, self.spec)
        self._say_price()
        return self._change(
            LocalSettings(
                idle_s=self.spec.lifetime.idle,
                linger_s=self.spec.lifetime.linger,
                pool=self.name,
                prefix=self._prefix,
                host=find_head_host(clients, self.spec),
                nodes=NODES,
                spec=json.loads(self.spec.to_json()),
            )
        )

    def _say_price(self) -> None:
        """Say what it can cost at worst, before anything is launched."""
        print(f"etrain: pool {self.name} costs {self.price(self.spec.workers.max)}")

    def prepare_start(self, root: Path) -> ClusterDir | None:
        """Return the folder of a cluster whose head died, to be taken over with its machines.

        One that has none any more is removed: its jobs would begin to train again, and to cost,
        when nobody thinks of them. ``resume`` brings them back.
        """
        from etrain_jupyter.pools.ec2.ec2_api import LIVING, list_instances

        for cluster in cluster_dirs(root):
            record = cluster.record()
            if cluster.prefix != self._prefix or (record is not None and not record.is_here):
                continue  # of another pool, or of another machine that shares the folder
            if record is not None and (
                _has_just_launched(cluster)
                or list_instances(self._clients().ec2, cluster_id=cluster.cluster_id, states=LIVING)
            ):
                return cluster
            self.of_cluster(cluster).down()
        return None

    def shared_place(self) -> str:
        """Return a folder of the pool's bucket, which its nodes' role may write."""
        return f"s3://{self.spec.bucket}/{self.spec.prefix}runs"

    def price(self, max_workers: int) -> str:
        """Return what that many workers can cost at worst, in words; asks AWS for its prices.

        Raises:
            PoolError: If AWS cannot be asked, or nodes would unpack what nobody vouches for.
        """
        from etrain_jupyter.pools.ec2.client.check import check_archive
        from etrain_jupyter.pools.ec2.client.worst_case import price_in_words

        clients = self._clients()
        check_archive(clients, self.spec)
        return price_in_words(clients, self.spec, min(max_workers, self.spec.workers.max))

    def cost(self) -> CostReport:
        """Return what the machines of the living cluster have cost so far."""
        costs = ask(self._address(), ListCosts()).costs
        return CostReport(
            spent_usd=sum(one["spent_usd"] for one in costs),
            on_demand_usd=sum(one["on_demand_usd"] for one in costs),
            node_hours=sum(one["hours"] for one in costs),
        )

    def down(self, *, timeout_s: float = 240.0) -> Leftovers:
        """End the cluster here, then whatever EC2 and the bucket have of it.

        Returns:
            What is still there; empty when all is well, also if there was no cluster.

        Raises:
            PoolError: If AWS cannot be asked.
        """
        from etrain_jupyter.pools.ec2.reaping import find_tagged, remove

        clients, region = self._clients(), self.spec.region
        ours = [cluster for cluster in cluster_dirs() if self._is_ours(cluster)]
        ends = [end_cluster_here(cluster, min(20.0, timeout_s)) for cluster in ours]
        tagged = {one.cluster_id for one in find_tagged(clients, region)}
        found = {one for one in tagged if self._has_id(one)} | {one.cluster_id for one in ours}
        for one in sorted(found):
            home = self.spec.home(one)
            ends.append(remove(clients, region, one, timeout_s=timeout_s, home=home))
        return Leftovers.of_all(ends)

    def _has_id(self, cluster_id: str) -> bool:
        if self._cluster_id is not None:
            return cluster_id == self._cluster_id
        return cluster_id.rpartition("-")[0] == self._prefix

    def _clients(self) -> Clients:
        try:
            from etrain_jupyter.pools.ec2.ec2_api import Clients
        except ModuleNotFoundError as exc:
            raise PoolError(
                f"pool {self.name!r} needs boto3 ({exc}). Nothing was started. "
                "%pip install 'etrain-jupyter[aws]' and restart the kernel."
            ) from exc
        return Clients(self.spec)


def _has_just_launched(cluster: ClusterDir) -> bool:
    """Whether EC2 may have machines of it that it does not list yet."""
    with contextlib.suppress(FileNotFoundError):
        return time.time() - (cluster.path / MEMORY_FILE).stat().st_mtime < UNLISTED_S
    return False


def _class_of(spec: AwsSpotSpec) -> type[AwsSpotPool]:
    if spec.head == "notebook":
        return AwsSpotPool
    from etrain_jupyter.pools.ec2.client.remote_pool import AwsRemotePool

    return AwsRemotePool


def _prefix_of(name: str, spec: AwsSpotSpec) -> str:
    """Return what the ids of a pool's clusters begin with.

    Two pools of one name in two notebooks' folders are two pools, unless they are in one place.
    """
    places = (spec.region, spec.bucket, spec.prefix, state_root(), environment_key())
    text = "\n".join(map(str, (name, *places)))
    return f"aws-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
