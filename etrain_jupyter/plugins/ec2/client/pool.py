"""Pool ``aws-spot`` with its head on this machine, as seen from a kernel or a terminal.

This module does not own a cluster. On this machine, the head's keeper owns the cluster's processes;
on AWS, tags and the bucket identify the cluster's resources. If one of the two parts is lost, the
other can still be found.
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
from etrain_jupyter.plugins.ec2.client.head_link import end_head
from etrain_jupyter.plugins.ec2.fleet_state import STATE_FILE
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.pools.base import CostReport, Leftovers
from etrain_jupyter.pools.detached import DetachedPool, end_cluster_here
from etrain_jupyter.pools.rpc import ask
from etrain_jupyter.process.cluster_dir import ClusterDir, cluster_dirs
from etrain_jupyter.process.cluster_settings import ClusterSettings
from etrain_jupyter.process.state_root import environment_key, state_root
from etrain_jupyter.wire.requests import ListCosts

if TYPE_CHECKING:
    from etrain_jupyter.plugins.ec2.ec2_api import Clients

HEAD_ELSEWHERE = "elsewhere"
"""Host in the settings of a cluster whose head has its own machine."""
UNLISTED_S = 180.0
"""Time in seconds after a launch during which EC2's listings may omit the new machine."""
NODES = "etrain_jupyter.plugins.ec2.head.main:make_nodes"


class AwsSpotPool(DetachedPool):
    """EC2 spot machines.

    Args:
        name: The pool's name in a cell.
        spec: The pool's entry in ``pools.yaml``.
        cluster_id: Bind the object to this cluster; by default, the pool's running cluster.
        change: Changes the head's settings; for tests.
    """

    def __init__(
        self,
        name: str,
        spec: AwsSpotSpec,
        *,
        cluster_id: str | None = None,
        change: Callable[[ClusterSettings], ClusterSettings] = lambda settings: settings,
    ) -> None:
        super().__init__(name=name, prefix=_prefix_of(name, spec), cluster_id=cluster_id)
        self.spec = spec
        self._change = change

    @classmethod
    def of_cluster(cls, cluster: ClusterDir) -> AwsSpotPool:
        """Return the pool of a cluster that has a folder on this machine."""
        settings = cluster.settings()
        # Use the spec from the start of the cluster, because pools.yaml may have changed since.
        spec = AwsSpotSpec.from_json(json.dumps(settings.spec))
        return cls(settings.pool, spec, cluster_id=cluster.cluster_id)

    def settings(self) -> ClusterSettings:
        """Return the settings for the head of a new cluster.

        Raises:
            PoolError: If the account, the network, the image or the bucket cannot be used.
        """
        from etrain_jupyter.plugins.ec2.client.check import check_account, find_head_host
        from etrain_jupyter.plugins.ec2.client.environment import with_environment

        clients = self._clients()
        check_account(clients, self.spec)
        spec = with_environment(clients, self.spec)
        # Printed after the checks and before anything costs money.
        self._print_price()
        return self._change(
            ClusterSettings(
                idle_s=self.spec.lifetime.idle,
                linger_s=self.spec.lifetime.linger,
                pool=self.name,
                prefix=self._prefix,
                host=find_head_host(clients, self.spec),
                nodes=NODES,
                spec=json.loads(spec.to_json()),
            )
        )

    def _print_price(self) -> None:
        """Print the worst-case cost, before anything is launched."""
        print(f"etrain: pool {self.name} costs {self.price(self.spec.workers.max)}")

    def prepare_start(self, root: Path) -> ClusterDir | None:
        """Return the folder of a cluster whose head has died, to take it over with its machines.

        A dead cluster without machines is removed; otherwise its jobs would unexpectedly resume and
        cost money. Users can resume them with ``%etrain resume``.
        """
        from etrain_jupyter.plugins.ec2.ec2_api import LIVING, list_instances

        for cluster in cluster_dirs(root):
            record = cluster.record()
            if cluster.prefix != self._prefix or (record is not None and not record.is_here):
                continue  # belongs to another pool, or to another machine that shares the folder
            #   record    machines        action
            #   dead      yes, or maybe   take over: a new head finds jobs, state and machines
            #   dead      none            remove what is left
            #   none      any             remove: its start or shutdown is incomplete
            #
            # Called under the start lock, after `_find` found no running head, so any record is
            # that of a dead head.
            if record is not None and (
                _has_just_launched(cluster)
                or list_instances(self._clients().ec2, cluster_id=cluster.cluster_id, states=LIVING)
            ):
                return cluster
            self.of_cluster(cluster).down()
        return None

    def shared_place(self) -> str:
        """Return a folder in the pool's bucket that the nodes' role may write to."""
        return f"s3://{self.spec.bucket}/{self.spec.prefix}runs"

    def price(self, max_workers: int) -> str:
        """Return the worst-case cost of that many workers as text, from AWS's current prices.

        Raises:
            PoolError: If AWS cannot be reached, or ``image.archive`` has no digest.
        """
        from etrain_jupyter.plugins.ec2.client.check import check_archive
        from etrain_jupyter.plugins.ec2.client.worst_case import describe_price

        clients = self._clients()
        check_archive(clients, self.spec)
        return describe_price(clients, self.spec, min(max_workers, self.spec.workers.max))

    def cost(self) -> CostReport:
        """Return what the machines of the running cluster have cost so far."""
        costs = ask(self._address(), ListCosts()).costs
        return CostReport(
            spent_usd=sum(one["spent_usd"] for one in costs),
            on_demand_usd=sum(one["on_demand_usd"] for one in costs),
            node_hours=sum(one["hours"] for one in costs),
        )

    def down(self, *, timeout_s: float = 240.0) -> Leftovers:
        """Shut the cluster down here, then remove its resources in EC2 and the bucket.

        Returns:
            Resources that could not be removed; empty on success, and if there was no cluster.

        Raises:
            PoolError: If AWS cannot be reached.
        """
        from etrain_jupyter.plugins.ec2.reaping import find_tagged, remove

        # End the heads on their own machines first, then the processes here, and then everything
        # that is found in AWS by its tags: a head that is still running would replace terminated
        # nodes.
        clients, region = self._clients(), self.spec.region
        ours = [cluster for cluster in cluster_dirs() if self._is_ours(cluster)]
        for cluster in ours:
            end_head(cluster)
        ends = [end_cluster_here(cluster, min(20.0, timeout_s)) for cluster in ours]
        tagged = {one.cluster_id for one in find_tagged(clients, region)}
        # Tags find clusters without a folder here (started from another machine); folders find
        # clusters that have no tagged resources but still have objects in the bucket.
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
            from etrain_jupyter.plugins.ec2.ec2_api import Clients
        except ModuleNotFoundError as exc:
            raise PoolError(
                f"pool {self.name!r} needs boto3 ({exc}). Nothing was started. "
                "%pip install 'etrain-jupyter[aws]' and restart the kernel."
            ) from exc
        return Clients(self.spec)


def _has_just_launched(cluster: ClusterDir) -> bool:
    """Return whether the cluster may have machines that EC2 does not list yet."""
    with contextlib.suppress(FileNotFoundError):
        # The file is written before each launch, see `fleet_state`.
        return time.time() - (cluster.path / STATE_FILE).stat().st_mtime < UNLISTED_S
    return False


def _prefix_of(name: str, spec: AwsSpotSpec) -> str:
    """Return the prefix of a pool's cluster ids.

    Pools with the same name in two notebooks' folders are different pools, unless they share
    region, bucket, state directory and Python environment.
    """
    places = (spec.region, spec.bucket, spec.prefix, state_root(), environment_key())
    text = "\n".join(map(str, (name, *places)))
    return f"aws-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
