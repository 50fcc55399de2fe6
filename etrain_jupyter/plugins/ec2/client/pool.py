"""Pool ``aws-spot`` with its head on this machine, as seen from a kernel or a terminal.

This module does not own a cluster. On this machine, the head's keeper owns the cluster's processes;
on AWS, tags and the bucket identify the cluster's resources. If one of the two parts is lost, the
other can still be found.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.ec2.client.head_link import end_head
from etrain_jupyter.plugins.ec2.fleet_state import STATE_FILE
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.pools.base import Leftovers
from etrain_jupyter.pools.detached import end_cluster_here
from etrain_jupyter.pools.spec_pool import SpecPool
from etrain_jupyter.process.cluster_dir import ClusterDir, cluster_dirs
from etrain_jupyter.process.cluster_settings import ClusterSettings

if TYPE_CHECKING:
    from etrain_jupyter.plugins.ec2.ec2_api import Clients

UNLISTED_S = 180.0
"""Time in seconds after a launch during which EC2's listings may omit the new machine."""


class AwsSpotPool(SpecPool[AwsSpotSpec]):
    """EC2 spot machines."""

    kind_prefix = "aws"
    spec_type = AwsSpotSpec
    nodes_path = "etrain_jupyter.plugins.ec2.head.nodes:AwsNodes"
    identity_keys = ("region", "bucket", "prefix")
    port = 0
    """Port of the scheduler; 0 for any."""

    def settings(self) -> ClusterSettings:
        """Return the settings for the head of a new cluster.

        Raises:
            PoolError: If the account, the network, the image or the bucket cannot be used.
        """
        from etrain_jupyter.plugins.ec2.client.check import check_account
        from etrain_jupyter.plugins.ec2.environment.prepare import with_environment

        clients, lifetime = self._clients(), self.spec.lifetime
        check_account(clients, self.spec)
        spec = with_environment(clients, self.spec)
        # Printed after the checks and before anything costs money.
        print(f"etrain: pool {self.name} costs {self.price(self.spec.workers.max)}")
        at = {"host": self._head_host(clients), "port": self.port}
        return self._settings_for(spec, idle_s=lifetime.idle, linger_s=lifetime.linger, **at)

    def _head_host(self, clients: Clients) -> str:
        """Return the address on which the scheduler listens."""
        from etrain_jupyter.plugins.ec2.client.check import find_head_host

        return find_head_host(clients, self.spec)

    def _may_have_machines(self, cluster: ClusterDir) -> bool:
        from etrain_jupyter.plugins.ec2.ec2_api import LIVING, list_instances

        with contextlib.suppress(FileNotFoundError):
            # The file is written before each launch; see `fleet_state`.
            if time.time() - (cluster.path / STATE_FILE).stat().st_mtime < UNLISTED_S:
                return True
        ec2 = self._clients().ec2
        return bool(list_instances(ec2, cluster_id=cluster.cluster_id, states=LIVING))

    def shared_place(self) -> str:
        """Return a folder in the pool's bucket that the nodes' role may write to."""
        return f"s3://{self.spec.bucket}/{self.spec.prefix}runs"

    def price(self, max_workers: int) -> str:
        """Return the worst-case cost of ``max_workers`` workers as text, from AWS's current prices.

        Raises:
            PoolError: If AWS cannot be reached, or ``image.archive`` has no digest.
        """
        from etrain_jupyter.plugins.ec2.client.check import check_archive
        from etrain_jupyter.plugins.ec2.client.live_prices import describe_price

        clients = self._clients()
        check_archive(clients, self.spec)
        return describe_price(clients, self.spec, min(max_workers, self.spec.workers.max))

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
