"""Pool ``aws-spot`` with ``head: on-demand``: its scheduler runs on its own EC2 machine.

This machine has a folder for the cluster, with the client's keys and the head's address. Other
machines can still find the cluster by its tags and shut it down::

    this machine                        bucket                    head's machine
    keys, config, settings  --------->  clusters/ID/...
    CreateFleet  -------------------------------------------->    boots, reads its files
    polls  ------------------------->   lease.json  <---------    scheduler renews the lease
    connects to the address in it  -------------------------->    scheduler answers
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from typing import TYPE_CHECKING, Any

from etrain_jupyter.errors import PoolError, StoreError
from etrain_jupyter.plugins.ec2.client.head_link import (
    HEAD_FILE,
    find_command,
    head_address_of,
    is_answering,
    open_tunnel,
    write_head,
)
from etrain_jupyter.plugins.ec2.client.pool import AwsSpotPool
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.pools.catalog import PoolEntry
from etrain_jupyter.pools.detached import START_S
from etrain_jupyter.process.address import SchedulerAddress
from etrain_jupyter.process.cluster_dir import ClusterDir, cluster_dirs
from etrain_jupyter.process.cluster_settings import ClusterSettings
from etrain_jupyter.process.processes import wait_until
from etrain_jupyter.process.start_lock import lock_key_of, start_lock
from etrain_jupyter.process.state_root import open_state_root
from etrain_jupyter.process.tls import mint_certificates, write_certificates

if TYPE_CHECKING:
    from etrain_jupyter.plugins.ec2.ec2_api import Clients

PORT = 8786


class AwsRemotePool(AwsSpotPool):
    """EC2 spot machines, and an on-demand machine for their scheduler."""

    is_head_elsewhere = True

    port = PORT

    def settings(self) -> ClusterSettings:
        """Return the settings for the head, on its own machine."""
        if self.spec.head_tunnel == "ssm":
            find_command()
        return super().settings()

    def _head_host(self, clients: Clients) -> str:
        return "elsewhere"  # known when its machine has started

    def _address(self) -> SchedulerAddress:
        for cluster in filter(self._is_ours, cluster_dirs()):
            if (address := head_address_of(cluster)) is not None:
                return address
        raise PoolError(
            f"no cluster of pool {self.name} was started on this machine. Nothing was done. A cell "
            "with %%etrain distributed starts one; `%etrain ls --all` lists the clusters on EC2."
        )

    def _find(self) -> SchedulerAddress | None:
        # Consider only clusters that were started from this machine, because it has their keys.
        for cluster in filter(self._is_ours, cluster_dirs()):
            with contextlib.suppress(OSError, ValueError):
                head = json.loads((cluster.path / HEAD_FILE).read_text())
                address = self._reach(cluster, head)
                if is_answering(address):
                    return address
        return None

    def _find_or_start(self) -> SchedulerAddress:
        settings = self.settings()
        root = open_state_root()
        try:
            # A launch takes minutes, which is longer than the lock's timeout. A second kernel
            # therefore gets the error below.
            with start_lock(root, lock_key_of(self._prefix), timeout_s=START_S):
                address = self._find()
                if address is not None:
                    return address
                # Otherwise, `_address` would point to the folder of a dead head forever.
                self._remove_dead_clusters()
                return self._start(ClusterDir.create(root, settings), settings)
        except TimeoutError as exc:
            raise PoolError(
                f"{exc} for {START_S:g} s: another kernel is starting a cluster. Nothing was "
                "started. Run the cell again in a minute, or run `%etrain down`."
            ) from exc

    def _reach(self, cluster: ClusterDir, head: dict[str, str]) -> SchedulerAddress:
        """Return the address at which a head is reached; open a port forward if needed."""
        reached_at = head["address"]
        if self.spec.head_tunnel == "ssm":
            reached_at = open_tunnel(cluster, self.spec, head["instance_id"], PORT)
        return write_head(cluster, head, reached_at=reached_at)

    def _remove_dead_clusters(self) -> None:
        """Remove clusters whose head has ended or never started; raise if a head still runs."""
        from etrain_jupyter.plugins.ec2.ec2_api import LIVING, list_instances

        for cluster in list(filter(self._is_ours, cluster_dirs())):
            living = list_instances(
                self._clients().ec2, cluster_id=cluster.cluster_id, states=LIVING
            )
            heads = [one for one in living if one.tags.get("etrain:role") == "head"]
            address = head_address_of(cluster)
            # A running head may have jobs. Starting a second head would cost twice as much, and
            # terminating the first would lose its jobs.
            if heads and address is not None:
                raise PoolError(
                    f"the head of cluster {cluster.cluster_id} runs on {heads[0].id}, but "
                    f"{address.address} cannot be reached from here. No second head was started. "
                    "Check the route to it (security group, VPN), or shut it down: %etrain down "
                    f"{cluster.cluster_id}."
                )
            self.of_cluster(cluster).down()

    def _start(self, cluster: ClusterDir, settings: ClusterSettings) -> SchedulerAddress:
        """Launch a head and wait until it serves; on failure, remove everything."""
        clients = self._clients()
        write_certificates(cluster.tls, mint_certificates(cluster.cluster_id))
        try:
            instance = self._launch(clients, cluster, settings)
            lease = self._await_lease(clients, cluster, instance)
        # Clean up even after a kernel interrupt, because a launched head costs money.
        except BaseException:
            self.of_cluster(cluster).down()
            raise
        head = {"address": lease["scheduler"], "instance_id": instance}
        # Recorded in the cluster's folder, so that a later kernel finds the head without the
        # bucket.
        address = self._reach(cluster, head)
        # The lease proves that the scheduler runs. Whether this machine can reach it is still
        # unknown.
        if not wait_until(lambda: is_answering(address), timeout_s=START_S):
            self.of_cluster(cluster).down()
            raise PoolError(
                f"the head of cluster {cluster.cluster_id} serves at {address.address}, which "
                "cannot be reached from here. It was terminated. Allow this machine in the "
                "security group (network.security_group in pools.yaml), or use head: notebook in "
                "the VPC."
            )
        return address

    def _launch(self, clients: Clients, cluster: ClusterDir, settings: ClusterSettings) -> str:
        """Write the head's files to the bucket and launch its machine; return the machine's id."""
        from etrain_jupyter.plugins.ec2.aws_messages import message_of_code
        from etrain_jupyter.plugins.ec2.bootstrap import SETTINGS, config_of, make_template
        from etrain_jupyter.plugins.ec2.fleet_launch import create_fleet
        from etrain_jupyter.plugins.ec2.fleet_state import LaunchRequest
        from etrain_jupyter.plugins.ec2.launch_context import set_up
        from etrain_jupyter.storage.objects.bucket_owners import ANY
        from etrain_jupyter.wire.versions import read_fingerprint

        # Do not use `self.spec`, because the settings name the environment that was stored for the
        # machines.
        name, spec = cluster.cluster_id, AwsSpotSpec.parse(settings.spec)
        config = config_of(spec, name, fingerprint=read_fingerprint())
        context = set_up(clients, spec, name, cluster.tls, config)
        # From the head's point of view, the scheduler is on "this machine". The head uses its role
        # instead of a profile, and the bucket's owner that was determined here.
        home = {"head": "notebook", "profile": None, "bucket_owner": context.boot.owner or ANY}
        own = spec.model_copy(update=home)
        settings = dataclasses.replace(settings, spec=own.to_dict())
        text = json.dumps(dataclasses.asdict(settings)).encode()
        clients.bucket.put(f"clusters/{name}/{SETTINGS}", text, "storing the head's settings")
        tags = {**context.tags, "etrain:role": "head"}
        template = make_template(
            clients, spec, name, context.network, tags, context.boot, role="head"
        )
        request = LaunchRequest(
            token=f"{name}-head",
            lifecycle="on-demand",
            num_nodes=1,
            workers_each=0,
            # Any zone will do: on-demand prices are the same in all zones of a region.
            overrides=tuple((spec.head_type, zone) for zone in sorted(context.subnets)),
        )
        answer = create_fleet(
            clients.launcher,
            request,
            template_id=template,
            subnets=context.subnets,
            allocation="",
            tags=tags,
        )
        if answer is None:
            raise PoolError(
                "EC2 did not report whether it launched the head. Everything that it launched was "
                "removed. Run the cell again."
            )
        if not answer.acks:
            reasons = {message_of_code(one.code, one.message) for one in answer.refusals}
            raise PoolError(
                f"the head, a {spec.head_type} on demand, was not launched: "
                f"{'; '.join(sorted(reasons))}. All its resources were removed."
            )
        return answer.acks[0].id

    def _await_lease(self, clients: Clients, cluster: ClusterDir, instance: str) -> dict[str, Any]:
        """Wait for the lease, which contains the address of the head's scheduler."""
        from etrain_jupyter.plugins.ec2.ec2_api import console_tail, list_instances

        deadline = time.monotonic() + self.spec.lifetime.boot
        key = f"clusters/{cluster.cluster_id}/lease.json"
        while True:
            try:
                data = clients.bucket.get(key, "the lease cannot be read")
            except StoreError as exc:
                raise PoolError(f"the head's address cannot be read: {exc}") from exc
            if data is not None:
                lease: dict[str, Any] = json.loads(data)
                return lease
            found = list_instances(clients.ec2, cluster_id=cluster.cluster_id, ids=[instance])
            has_ended = bool(found) and not found[0].is_living
            # An empty `found` means that EC2 does not list the machine yet.
            if has_ended or time.monotonic() > deadline:
                what = "ended" if has_ended else f"took more than {self.spec.lifetime.boot:g} s"
                raise PoolError(
                    f"the head, {instance}, {what} before its scheduler listened. It was removed. "
                    "Its image must contain etrain-jupyter (image in pools.yaml), and its profile "
                    "needs the policy that `%etrain pools policy` prints. End of its console:\n"
                    f"{console_tail(clients.ec2, instance)}"
                )
            time.sleep(min(1.0, self.spec.tick))


def from_entry(entry: PoolEntry) -> AwsSpotPool:
    """Return the pool of an entry, whether its scheduler runs here or on its own machine.

    Raises:
        ConfigError: If a key is invalid, with its position in the file.
    """
    spec = entry.read_as(AwsSpotSpec)
    kind = AwsSpotPool if spec.head == "notebook" else AwsRemotePool
    return kind(entry.name, spec)
