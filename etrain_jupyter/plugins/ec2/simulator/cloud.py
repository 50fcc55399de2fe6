"""Client of the simulated cloud, for tests and notebooks: starts its process and controls it.

::

    with FakeAws() as cloud:
        account = cloud.make_account()
        os.environ |= cloud.environment
        ...  # start a cluster in account.bucket with account.image
        cloud.preempt(cloud.instances()[0].instance_id, notice_s=10)
        assert not cloud.leftovers()
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from etrain_jupyter.plugins.ec2.simulator.bill import Bill, BillRow, InstanceRecord
from etrain_jupyter.plugins.ec2.simulator.faults import ApiFault
from etrain_jupyter.plugins.ec2.simulator.iam import Request
from etrain_jupyter.testing.s3_faults import S3Fault
from etrain_jupyter.testing.s3_server import S3Endpoint
from etrain_jupyter.testing.serving import Closing, start_server

CLUSTERS = "etrain/clusters/"
RESPONSE_S = 120.0
ImdsFault = Literal["", "500", "hang", "expired", "expire-tokens"]


@dataclass(frozen=True, kw_only=True)
class Account:
    """Resources that an account has before a cluster is started."""

    account_id: str
    region: str
    bucket: str
    role: str
    """Role of the nodes."""
    instance_profile: str
    role_arn: str
    image: str
    """Id of an AMI. Instances always run this machine's programs."""
    image_parameter: str
    """SSM parameter with the image's id."""


class FakeAws(Closing):
    """A simulated cloud. Several can run at the same time."""

    def __init__(
        self,
        mode: Literal["auto", "namespaces", "loopback"] = "auto",
        *,
        minute_s: float = 60.0,
        boot_s: float = 0.0,
        region: str = "us-east-1",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start the cloud's process.

        Args:
            mode: ``namespaces`` gives each instance its own network and process table (requires
                root), ``loopback`` makes them processes of this machine; ``auto`` uses namespaces
                if possible.
            minute_s: Duration of a minute of an instance's ``shutdown -h +1``, in seconds.
            boot_s: Time for which an instance is pending, in seconds.
            region: Region of the default market.
            variables: Additional environment variables of the instances.

        Raises:
            RuntimeError: If it does not start, for example in mode ``namespaces`` without root.
        """
        settings = {
            "mode": mode,
            "region": region,
            "minute_s": minute_s,
            "boot_s": boot_s,
            "variables": dict(variables or {}),
        }
        self.region = region
        # Leave out this machine's AWS profile and endpoint, and its clusters.
        known = os.environ.items()
        env = {name: value for name, value in known if not name.startswith(("AWS_", "ETRAIN_"))}
        process = "etrain_jupyter.plugins.ec2.simulator.process"
        self._process, reply = start_server(
            "The simulated cloud", process, json.dumps(settings), env=env
        )
        self.mode: Literal["namespaces", "loopback"] = reply["mode"]
        self.host_address: str = reply["host_address"]
        """Address at which instances can reach this machine."""
        self.bridge: str = reply["bridge"]
        self.folder: str = reply["folder"]
        self.url = f"http://{self.host_address}:{reply['port']}"
        self.s3 = S3Endpoint(self.url)
        """Client for its S3, with faults and direct access to objects."""

    @property
    def pid(self) -> int:
        """Id of its process."""
        return self._process.pid

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that direct boto3 and this package to it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    # The account --------------------------------------------------------------------------------

    def make_account(
        self,
        *,
        bucket: str = "etrain-bucket",
        role: str = "etrain-node",
        role_policy: Mapping[str, Any] | None = None,
    ) -> Account:
        """Create a bucket, a role with its instance profile, and an image, unless they exist.

        Args:
            bucket: The bucket's name.
            role: Name of the role and of the profile.
            role_policy: Policy of the role; only used with ``enforce_iam``.
        """
        policy = dict(role_policy) if role_policy is not None else None
        given = {"region": self.region, "bucket": bucket, "role": role, "role_policy": policy}
        return Account(**self._call("make_account", **given))

    def make_user(self, name: str, *policies: Mapping[str, Any]) -> dict[str, str]:
        """Create a user with these policies; return the environment variables for boto3."""
        return dict(self._call("make_user", name=name, policies=list(policies)))

    def enforce_iam(self, is_on: bool = True) -> None:
        """Check signatures and policies from now on: only users and roles created here are valid.

        Policies are evaluated with resources and conditions; see ``testing.iam``.
        """
        self._call("enforce_iam", is_on=is_on)

    def permissions(self) -> list[tuple[Request, bool]]:
        """Return the requests to IAM since ``enforce_iam``, and whether they were allowed."""
        return [
            (Request(action, resource, context), is_permitted)
            for action, resource, context, is_permitted in self._call("permissions")
        ]

    def set_role_ttl(self, seconds: int) -> None:
        """Set the lifetime of role credentials issued from now on."""
        self._call("set", role_ttl_s=seconds)

    # The market ---------------------------------------------------------------------------------

    def set_market(
        self,
        pools: Sequence[Mapping[str, Any]],
        on_demand: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Replace the market.

        Args:
            pools: Spot offers: ``instance_type``, ``zone``, ``capacity``, ``price_usd``.
            on_demand: On-demand offers: ``instance_type``, ``price_usd`` and optionally
                ``capacity``.
        """
        self._call("set_market", pools=[*map(dict, pools)], on_demand=[*map(dict, on_demand)])

    def set_price(self, usd: float, *, instance_type: str = "", zone: str = "") -> None:
        """Set the spot price from now on, in all pools or those of a type or zone."""
        self._call("change_pools", instance_type=instance_type, zone=zone, price_usd=usd)

    def set_capacity(self, capacity: int, *, instance_type: str = "", zone: str = "") -> None:
        """Set the spot capacity, in all pools or those of a type or zone.

        Machines in use count towards it; those beyond the capacity keep running until they are
        preempted.
        """
        self._call("change_pools", instance_type=instance_type, zone=zone, capacity=capacity)

    def set_on_demand(
        self,
        *,
        instance_type: str = "",
        capacity: int | None = None,
        price_usd: float | None = None,
    ) -> None:
        """Set the on-demand capacity or price, for all types or for one."""
        changes = {"capacity": capacity, "price_usd": price_usd}
        self._call("change_on_demand", instance_type=instance_type, **changes)

    def set_quota(self, code: str, vcpus: float) -> None:
        """Set a limit of the account on spot vCPUs, by its code, such as ``L-3819A6DF``."""
        self._call("set_quota", code=code, vcpus=vcpus)

    # Instances ----------------------------------------------------------------------------------

    def instances(self, *states: str) -> list[InstanceRecord]:
        """Return all instances, or those in some states, oldest first."""
        records = [InstanceRecord(**reply) for reply in self._call("instances")]
        return [one for one in records if not states or one.state in states]

    def preempt(
        self,
        instance_id: str,
        *,
        notice_s: float = 120.0,
        rebalance_s: float | None = None,
        silent: bool = False,
    ) -> None:
        """Reclaim an instance; its capacity is lost.

        Args:
            instance_id: The instance.
            notice_s: Time from the notice to the end, in seconds.
            rebalance_s: Time from a rebalance recommendation to the notice; None for no
                recommendation.
            silent: End it now, without a notice, like a failure of its host. This is also possible
                for on-demand instances.
        """
        times = {"notice_s": notice_s, "rebalance_s": rebalance_s}
        self._call("preempt", instance_id=instance_id, silent=silent, **times)

    def recommend_rebalance(self, instance_id: str) -> None:
        """Send an instance a rebalance recommendation, without an interruption."""
        self._call("recommend_rebalance", instance_id=instance_id)

    def console(self, instance_id: str) -> str:
        """Return an instance's console output."""
        return str(self._call("console", instance_id=instance_id))

    def imds_requests(self, instance_id: str) -> list[str]:
        """Return the requests of an instance to its metadata service, oldest first."""
        return list(self._call("imds_requests", instance_id=instance_id))

    def set_boot(self, seconds: float) -> None:
        """Set the pending time of instances started from now on."""
        self._call("set", boot_s=seconds)

    def set_variables(self, variables: Mapping[str, str]) -> None:
        """Set additional environment variables for instances started from now on."""
        self._call("set_variables", variables=dict(variables))

    def wait_until(self, is_true: Callable[[], object], *, within_s: float = 100.0) -> None:
        """Poll until a condition is true.

        Raises:
            TimeoutError: On timeout, with the instances' consoles.
        """
        ends_at = time.monotonic() + within_s
        while not is_true():
            if time.monotonic() > ends_at:
                reply = [
                    f"{one.instance_id} {one.state} {one.reason}\n{self.console(one.instance_id)}"
                    for one in self.instances()
                ]
                raise TimeoutError(
                    f"The condition was still false after {within_s:g} s. The instances:\n"
                    + "\n".join(reply)
                )
            time.sleep(0.05)

    # Faults -------------------------------------------------------------------------------------

    def set_faults(self, *faults: ApiFault | S3Fault) -> None:
        """Replace all faults and reset the counters."""
        api = [fault.to_dict() for fault in faults if isinstance(fault, ApiFault)]
        self._call("set_faults", faults=api)
        self.s3.set_faults(*(fault for fault in faults if isinstance(fault, S3Fault)))

    def calls(self) -> dict[str, int]:
        """Return the number of requests by ``service.Action`` since the faults were set."""
        return dict(self._call("calls"))

    def set_lag(self, seconds: float) -> None:
        """Hide instances younger than this from ``DescribeInstances``, as EC2 may."""
        self._call("set", lag_s=seconds)

    def set_clock_skew(self, seconds: float) -> None:
        """Set the cloud's clock (``Date``, S3's ``LastModified``) ahead of this machine's.

        As on AWS, requests whose signature time is more than 15 minutes off are refused.
        """
        self._call("set", clock_skew_s=seconds)

    def break_imds(self, instance_id: str, how: ImdsFault) -> None:
        """Make an instance's metadata service fail, until this is called with ``""``.

        With ``500`` it responds with errors, with ``hang`` it does not respond, and with
        ``expired`` it refuses all tokens. ``expire-tokens`` expires the existing tokens once.
        """
        self._call("break_imds", instance_id=instance_id, how=how)

    # Results --------------------------------------------------------------------------------------

    def bill(self) -> Bill:
        """Return the real cost of everything so far."""
        return Bill(rows=tuple(BillRow(**row) for row in self._call("bill")))

    def leftovers(self, cluster: str = "", *, prefix: str = CLUSTERS) -> dict[str, list[str]]:
        """Return the leftover resources by kind; empty if there are none.

        Includes instances that are not terminated, volumes, launch templates, security groups,
        objects below the prefix, and processes and network cables of instances that have ended.

        Args:
            cluster: The value of the tag ``etrain:cluster``; empty for all, tagged or not.
            prefix: Prefix of the clusters' objects; each cluster has a folder with its name.
        """
        return dict(self._call("leftovers", cluster=cluster, prefix=prefix))

    def reset(self) -> None:
        """Restore the initial state: instances, objects, account, market, faults, clock."""
        self._call("reset")
        self.s3.set_faults()

    def _call(self, verb: str, **arguments: Any) -> Any:
        request = urllib.request.Request(
            f"{self.url}/_fakeaws/{verb}",
            json.dumps(arguments).encode(),
            {"Content-Type": "application/json"},
        )
        # Ignore HTTP_PROXY: the cloud is on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=RESPONSE_S) as response:
                return json.load(response)
        except urllib.error.HTTPError as exc:
            with exc:
                raise ValueError(json.loads(exc.read())) from None

    def close(self) -> None:
        """End all instances and the process, and remove everything created on this machine."""
        # Closing its standard input makes the process shut down cleanly. If it has not exited after
        # 60 s, it is killed, and its janitor cleans up.
        with self._process:
            assert self._process.stdin is not None
            with suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
