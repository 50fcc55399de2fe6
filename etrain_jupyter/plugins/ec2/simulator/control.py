"""Control interface of the simulated cloud: each public method handles one verb.

``POST /_fakeaws/VERB`` with the arguments as JSON. The client is ``cloud.FakeAws``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from moto.moto_api._internal.models import moto_api_backend

from etrain_jupyter.plugins.ec2.simulator import account
from etrain_jupyter.plugins.ec2.simulator.api import CloudApi, Wsgi
from etrain_jupyter.plugins.ec2.simulator.backend import Backend
from etrain_jupyter.plugins.ec2.simulator.bill import make_bill
from etrain_jupyter.plugins.ec2.simulator.ec2 import Ec2
from etrain_jupyter.plugins.ec2.simulator.faults import ApiFault
from etrain_jupyter.plugins.ec2.simulator.hypervisor import Hypervisor
from etrain_jupyter.plugins.ec2.simulator.market import CapacityPool, Market

CONTROL = "/_fakeaws/"


class Control:
    """The verbs.

    Args:
        backend: Moto's state.
        hypervisor: The machines.
        ec2: Our own EC2 actions.
        api: The application.
        zones: Zones of the default market, which ``reset`` restores.
        variables: Additional environment variables of the instances, kept across resets.
    """

    def __init__(
        self,
        *,
        backend: Backend,
        hypervisor: Hypervisor,
        ec2: Ec2,
        api: CloudApi,
        zones: list[str],
        variables: Mapping[str, str],
    ) -> None:
        self._backend = backend
        self._hypervisor = hypervisor
        self._ec2 = ec2
        self._api = api
        self._zones = zones
        self._variables = dict(variables)
        self._boot_s = hypervisor.boot_s
        self.reset()

    def reset(self) -> None:
        """Restore the initial state: no instances, no objects, the default market, no faults."""
        # Switch off the machines first: a running machine may still use the account.
        self._hypervisor.forget()
        with self._backend.lock:
            moto_api_backend.reset()
            market = Market.default(self._zones)
            self._ec2.reset(market)
            self._hypervisor.market = market
            self._hypervisor.variables = dict(self._variables)
            self._hypervisor.boot_s = self._boot_s
            self._backend.role_ttl_s = 3600
            self._backend.iam.enforce(False)
        self._api.faults.set(())
        self._api.quotas.vcpus.clear()
        self._api.clock_skew_s = 0.0

    # The market ---------------------------------------------------------------------------------

    def set_market(self, pools: list[dict[str, Any]], on_demand: list[dict[str, Any]]) -> None:
        """Replace the market with these pools and on-demand offers."""
        with self._backend.lock:
            market = Market()
            for offer in pools:
                pool = CapacityPool(offer["instance_type"], offer["zone"])
                market.set_pool(
                    pool,
                    at=time.time(),
                    capacity=offer.get("capacity"),
                    price_usd=offer.get("price_usd"),
                )
            for offer in on_demand:
                market.set_on_demand(
                    offer["instance_type"],
                    price_usd=offer.get("price_usd"),
                    capacity=offer.get("capacity"),
                )
            # Running machines keep their capacity in the new market.
            for usage in self._hypervisor.usages():
                if usage.ended_at is None:
                    market.take(usage.instance_id, usage.pool, usage.lifecycle)
            self._ec2.market = self._hypervisor.market = market

    def change_pools(
        self,
        instance_type: str,
        zone: str,
        capacity: int | None = None,
        price_usd: float | None = None,
    ) -> None:
        """Change the pools of a type and zone; an empty value matches all."""
        with self._backend.lock:
            market = self._ec2.market
            chosen = [
                pool
                for pool in market.pools()
                if instance_type in ("", pool.instance_type) and zone in ("", pool.zone)
            ]
            # A type and a zone together identify a pool, which may be new.
            if not chosen and instance_type and zone:
                chosen = [CapacityPool(instance_type, zone)]
            if not chosen:
                raise ValueError(
                    f"The market has no pool with {instance_type=} and {zone=}. Give both to "
                    "create one."
                )
            for pool in chosen:
                market.set_pool(pool, at=time.time(), capacity=capacity, price_usd=price_usd)

    def change_on_demand(
        self, instance_type: str, capacity: int | None = None, price_usd: float | None = None
    ) -> None:
        """Change the on-demand offer of a type; an empty value matches all."""
        with self._backend.lock:
            market = self._ec2.market
            for name in [instance_type] if instance_type else market.on_demand_types():
                market.set_on_demand(name, capacity=capacity, price_usd=price_usd)

    def set_quota(self, code: str, vcpus: float) -> None:
        """Set a limit on vCPUs, by its code."""
        self._api.quotas.vcpus[code] = vcpus

    # Faults -------------------------------------------------------------------------------------

    def set_faults(self, faults: list[dict[str, Any]]) -> None:
        """Replace all faults."""
        self._api.faults.set(tuple(ApiFault(**fault) for fault in faults))

    def calls(self) -> dict[str, int]:
        """Return the number of requests by action since the faults were set."""
        return self._api.faults.calls()

    def set_lag(self, seconds: float) -> None:
        """Hide instances younger than this from listings."""
        self._ec2.lag_s = seconds

    def set_clock_skew(self, seconds: float) -> None:
        """Set the cloud's clock ahead of this machine's."""
        self._api.clock_skew_s = seconds

    def break_imds(self, instance_id: str, how: str) -> None:
        """Make a metadata service fail; ``expire-tokens`` expires its tokens once."""
        imds = self._hypervisor.imds(instance_id)
        if how == "expire-tokens":
            imds.expire_tokens()
        else:
            imds.break_(how)

    def set_boot(self, seconds: float) -> None:
        """Set the pending time of new instances."""
        self._hypervisor.boot_s = seconds

    def set_variables(self, variables: dict[str, str]) -> None:
        """Set additional environment variables for instances started from now on."""
        self._hypervisor.variables = {**self._variables, **variables}

    # Instances ----------------------------------------------------------------------------------

    def preempt(
        self, instance_id: str, notice_s: float, rebalance_s: float | None, silent: bool
    ) -> None:
        """Reclaim an instance."""
        self._hypervisor.preempt(
            instance_id, notice_s=notice_s, rebalance_s=rebalance_s, silent=silent
        )

    def recommend_rebalance(self, instance_id: str) -> None:
        """Send an instance a rebalance recommendation."""
        self._hypervisor.recommend_rebalance(instance_id)

    def instances(self) -> list[dict[str, Any]]:
        """Return all instances."""
        with self._backend.lock:
            return [asdict(record) for record in self._hypervisor.records()]

    def console(self, instance_id: str) -> str:
        """Return an instance's console output."""
        return self._hypervisor.console(instance_id).decode(errors="replace")

    def imds_requests(self, instance_id: str) -> list[str]:
        """Return the requests of an instance to its metadata service."""
        found: list[str] = self._hypervisor.imds(instance_id).requests()
        return found

    def bill(self) -> list[dict[str, Any]]:
        """Return the cost of each instance."""
        with self._backend.lock:
            bill = make_bill(self._hypervisor.usages(), self._ec2.market, time.time())
        return [asdict(row) for row in bill.rows]

    # The account --------------------------------------------------------------------------------

    def make_account(
        self, region: str, bucket: str, role: str, role_policy: dict[str, Any] | None
    ) -> dict[str, str]:
        """Create the account's resources."""
        return account.make_account(
            self._backend, region=region, bucket=bucket, role=role, role_policy=role_policy
        )

    def make_user(self, name: str, policies: list[dict[str, Any]]) -> dict[str, str]:
        """Create a user; return its credentials."""
        return account.make_user(self._backend, name=name, policies=policies)

    def enforce_iam(self, is_on: bool) -> None:
        """Start or stop checking signatures and policies."""
        self._backend.iam.enforce(is_on)

    def permissions(self) -> list[list[Any]]:
        """Return the distinct requests to IAM since enforcement started."""
        found = list(self._backend.iam.requests.values())
        return [[r.action, r.resource, dict(r.context), ok] for r, ok in found]

    def set_role_ttl(self, seconds: int) -> None:
        """Set the lifetime of role credentials issued from now on."""
        self._backend.role_ttl_s = seconds

    def leftovers(self, cluster: str, prefix: str) -> dict[str, list[str]]:
        """Return leftover resources, including processes of ended instances on this machine."""
        # Call this before taking the lock: it waits for machines that are being switched off.
        strays = self._hypervisor.find_strays()
        return {
            **account.find_leftovers(self._backend, cluster=cluster, prefix=prefix),
            **strays,
        }


def with_control(app: Wsgi, control: Control) -> Wsgi:
    """Return an application that handles the verbs, and passes everything else to another one."""

    def handle(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path: str = environ["PATH_INFO"]
        if not path.startswith(CONTROL):
            return app(environ, start_response)
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        verb = path.removeprefix(CONTROL)
        status = "200 OK"
        try:
            # The verbs are the public methods of Control, whose client is in the same package.
            if verb.startswith("_") or not hasattr(Control, verb):
                raise ValueError(f"The simulated cloud has no verb {verb!r}.")
            result = getattr(control, verb)(**json.loads(body or b"{}"))
        except Exception as exc:  # reported to the test
            if not isinstance(exc, ValueError):
                print(f"fakeaws: {verb} failed: {exc!r}", file=sys.stderr, flush=True)
            status, result = "400 Bad Request", f"{exc}" or repr(exc)
        data = json.dumps(result).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(data)))]
        start_response(status, headers)
        return [data]

    return handle
