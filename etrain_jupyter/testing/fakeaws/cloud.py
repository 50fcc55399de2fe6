"""The fake cloud as a test or a notebook holds it: a process, and what can be done to it.

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
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from etrain_jupyter.testing.fakeaws.bill import Bill, BillRow
from etrain_jupyter.testing.fakeaws.faults import ApiFault
from etrain_jupyter.testing.fakeaws.records import InstanceRecord
from etrain_jupyter.testing.fakeaws.settings import Settings
from etrain_jupyter.testing.iam import Request
from etrain_jupyter.testing.s3_faults import S3Fault
from etrain_jupyter.testing.s3_server import S3Endpoint
from etrain_jupyter.testing.serving import Closing

CLUSTERS = "etrain/clusters/"
ANSWER_S = 120.0
ImdsFault = Literal["", "500", "hang", "expired", "expire-tokens"]


@dataclass(frozen=True, kw_only=True)
class Account:
    """What an account has before a cluster is started."""

    account_id: str
    region: str
    bucket: str
    role: str
    """The role of the nodes."""
    instance_profile: str
    role_arn: str
    image: str
    """The id of an AMI. Whatever it is, an instance has the programs of this machine."""
    image_parameter: str
    """The SSM parameter that has it."""


class FakeAws(Closing):
    """A cloud of its own. Several may run beside each other."""

    def __init__(
        self,
        mode: Literal["auto", "namespaces", "loopback"] = "auto",
        *,
        minute_s: float = 60.0,
        boot_s: float = 0.0,
        region: str = "us-east-1",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start it.

        Args:
            mode: ``namespaces`` gives each instance a network and a process table of its own
                (needs root), ``loopback`` makes them processes of this machine; ``auto`` takes
                what can be had.
            minute_s: How long the minute of an instance's ``shutdown -h +1`` is.
            boot_s: How long an instance is pending.
            region: Where the default market has capacity.
            variables: More variables of the instances' environment.

        Raises:
            RuntimeError: If it does not start, as without root in mode ``namespaces``.
        """
        settings = Settings(
            mode=mode,
            region=region,
            minute_s=minute_s,
            boot_s=boot_s,
            variables=dict(variables or {}),
        )
        self.region = region
        self._process = subprocess.Popen(
            [sys.executable, "-m", "etrain_jupyter.testing.fakeaws.process", settings.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Jupyter interrupts and kills the whole group of a kernel. It must end in order.
            start_new_session=True,
            # A profile or an endpoint of this machine's is none of its business, nor are clusters.
            env={
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("AWS_", "ETRAIN_"))
            },
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError("the fake cloud did not start; what it printed says why")
        told = json.loads(line)
        self.mode: Literal["namespaces", "loopback"] = told["mode"]
        self.host_address: str = told["host_address"]
        """Where this machine listens so that instances reach it."""
        self.bridge: str = told["bridge"]
        self.folder: str = told["folder"]
        self.url = f"http://{self.host_address}:{told['port']}"
        self.s3 = S3Endpoint(self.url)
        """Its S3, with what its faults and its objects are asked by."""

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def environment(self) -> dict[str, str]:
        """What boto3, and so our product, needs to find it, and nothing else."""
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
        """Make a bucket, a role with its instance profile, and an image; twice does no harm.

        Args:
            bucket: The bucket's name.
            role: The name of the role, and of the profile.
            role_policy: What the role may do; only looked at with ``enforce_iam``.
        """
        policy = dict(role_policy) if role_policy is not None else None
        told = self._ask(
            "make_account", region=self.region, bucket=bucket, role=role, role_policy=policy
        )
        return Account(**told)

    def make_user(self, name: str, *policies: Mapping[str, Any]) -> dict[str, str]:
        """Make a user with these policies; return the variables that make boto3 that user."""
        told: dict[str, str] = self._ask("make_user", name=name, policies=list(policies))
        return told

    def enforce_iam(self, is_on: bool = True) -> None:
        """Check signatures and policies from now on: only users and roles made here may act.

        Policies are evaluated with their resources and conditions, see ``testing.iam``.
        """
        self._ask("enforce_iam", is_on=is_on)

    def permissions(self) -> list[tuple[Request, bool]]:
        """Return what IAM was asked since ``enforce_iam``, and whether it was allowed."""
        return [
            (Request(action, resource, context), is_permitted)
            for action, resource, context, is_permitted in self._ask("permissions")
        ]

    def set_role_ttl(self, seconds: int) -> None:
        """Set how long credentials of roles live that are given from now on."""
        self._ask("set_role_ttl", seconds=seconds)

    # The market ---------------------------------------------------------------------------------

    def set_market(
        self,
        pools: Sequence[Mapping[str, Any]],
        on_demand: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Replace the market.

        Args:
            pools: Spot offers: ``instance_type``, ``zone``, ``capacity``, ``price_usd``.
            on_demand: Offers on demand: ``instance_type``, ``price_usd`` and, if it is limited,
                ``capacity``.
        """
        self._ask("set_market", pools=[*map(dict, pools)], on_demand=[*map(dict, on_demand)])

    def set_price(self, usd: float, *, instance_type: str = "", zone: str = "") -> None:
        """Set the spot price from now on, of all pools or those of a type or a zone."""
        self._ask("change_pools", instance_type=instance_type, zone=zone, price_usd=usd)

    def set_capacity(self, capacity: int, *, instance_type: str = "", zone: str = "") -> None:
        """Set the spot capacity, of all pools or those of a type or a zone.

        Machines in use count; those beyond the capacity run on until they are preempted.
        """
        self._ask("change_pools", instance_type=instance_type, zone=zone, capacity=capacity)

    def set_on_demand(
        self,
        *,
        instance_type: str = "",
        capacity: int | None = None,
        price_usd: float | None = None,
    ) -> None:
        """Set capacity or price on demand, of all types or one."""
        self._ask(
            "change_on_demand",
            instance_type=instance_type,
            capacity=capacity,
            price_usd=price_usd,
        )

    # Instances ----------------------------------------------------------------------------------

    def instances(self, *states: str) -> list[InstanceRecord]:
        """Return the instances there were, oldest first; only those in these states, if given."""
        records = [InstanceRecord(**told) for told in self._ask("instances")]
        return [one for one in records if not states or one.state in states]

    def preempt(
        self,
        instance_id: str,
        *,
        notice_s: float = 120.0,
        rebalance_s: float | None = None,
        silent: bool = False,
    ) -> None:
        """Take an instance back; others have its capacity afterwards.

        Args:
            instance_id: Which.
            notice_s: How long before its end it is told.
            rebalance_s: How long before that it gets a rebalance recommendation; None for none.
            silent: End it now, without a word. Also for on-demand instances: their host fails.
        """
        self._ask(
            "preempt",
            instance_id=instance_id,
            notice_s=notice_s,
            rebalance_s=rebalance_s,
            silent=silent,
        )

    def recommend_rebalance(self, instance_id: str) -> None:
        """Tell an instance that it is at elevated risk, and do nothing."""
        self._ask("recommend_rebalance", instance_id=instance_id)

    def console(self, instance_id: str) -> str:
        """Return what an instance printed."""
        text: str = self._ask("console", instance_id=instance_id)
        return text

    def imds_requests(self, instance_id: str) -> list[str]:
        """Return what an instance asked its metadata service, oldest first."""
        asked: list[str] = self._ask("imds_requests", instance_id=instance_id)
        return asked

    def set_boot(self, seconds: float) -> None:
        """Set how long instances are pending that are started from now on."""
        self._ask("set_boot", seconds=seconds)

    def set_variables(self, variables: Mapping[str, str]) -> None:
        """Set more variables of the environment of instances that are started from now on."""
        self._ask("set_variables", variables=dict(variables))

    def wait_until(self, is_true: Callable[[], object], *, within_s: float = 100.0) -> None:
        """Wait for something, looking every moment.

        Raises:
            TimeoutError: With what the instances printed, if it does not come.
        """
        ends_at = time.monotonic() + within_s
        while not is_true():
            if time.monotonic() > ends_at:
                told = [
                    f"{one.instance_id} {one.state} {one.reason}\n{self.console(one.instance_id)}"
                    for one in self.instances()
                ]
                raise TimeoutError(f"not within {within_s} s; the instances:\n" + "\n".join(told))
            time.sleep(0.05)

    # Faults -------------------------------------------------------------------------------------

    def set_faults(self, *faults: ApiFault | S3Fault) -> None:
        """Let these go wrong from now on, and nothing else; counts begin anew."""
        api = [fault.to_dict() for fault in faults if isinstance(fault, ApiFault)]
        self._ask("set_faults", faults=api)
        self.s3.set_faults(*(fault for fault in faults if isinstance(fault, S3Fault)))

    def calls(self) -> dict[str, int]:
        """Return how often each ``service.Action`` was asked for since the faults were set."""
        counted: dict[str, int] = self._ask("calls")
        return counted

    def set_lag(self, seconds: float) -> None:
        """Leave instances that are younger out of ``DescribeInstances``, as EC2 may."""
        self._ask("set_lag", seconds=seconds)

    def set_clock_skew(self, seconds: float) -> None:
        """Set the cloud's clock (``Date``, S3's ``LastModified``) ahead of this machine's.

        As on AWS, requests that are signed more than 15 minutes off are refused.
        """
        self._ask("set_clock_skew", seconds=seconds)

    def break_imds(self, instance_id: str, how: ImdsFault) -> None:
        """Let an instance's metadata service fail until it is told ``""``.

        ``500`` answers errors, ``hang`` does not answer, ``expired`` refuses every token;
        ``expire-tokens`` ends those that it gave, once.
        """
        self._ask("break_imds", instance_id=instance_id, how=how)

    # What came of it ------------------------------------------------------------------------------

    def bill(self) -> Bill:
        """Return what everything really cost until now."""
        return Bill(rows=tuple(BillRow(**row) for row in self._ask("bill")))

    def leftovers(self, cluster: str = "", *, prefix: str = CLUSTERS) -> dict[str, list[str]]:
        """Return what is still there by kind, nothing if all is gone.

        Instances that are not terminated, volumes, launch templates, security groups, objects below
        the prefix; and processes and network cables of instances that have ended.

        Args:
            cluster: The value of the tag ``etrain:cluster``; empty for any, with or without it.
            prefix: Where clusters have their objects; a cluster's are in a folder of its name.
        """
        found: dict[str, list[str]] = self._ask("leftovers", cluster=cluster, prefix=prefix)
        return found

    def reset(self) -> None:
        """Make everything as new: instances, objects, account, market, faults, clock."""
        self._ask("reset")
        self.s3.set_faults()

    def _ask(self, verb: str, **words: Any) -> Any:
        request = urllib.request.Request(
            f"{self.url}/_fakeaws/{verb}",
            json.dumps(words).encode(),
            {"Content-Type": "application/json"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=ANSWER_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as exc:
            with exc:
                raise ValueError(json.loads(exc.read())) from None

    def close(self) -> None:
        """End all instances and the process; what it made on this machine is gone afterwards."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
