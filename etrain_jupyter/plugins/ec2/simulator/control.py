"""Control interface of the simulated cloud, for its client ``cloud.FakeAws``.

``POST /_fakeaws/VERB`` with the arguments as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from moto.moto_api._internal.models import moto_api_backend

from etrain_jupyter.plugins.ec2.simulator import account
from etrain_jupyter.plugins.ec2.simulator.api import CloudApi
from etrain_jupyter.plugins.ec2.simulator.backend import Backend
from etrain_jupyter.plugins.ec2.simulator.bill import make_bill
from etrain_jupyter.plugins.ec2.simulator.ec2 import Ec2
from etrain_jupyter.plugins.ec2.simulator.faults import ApiFault
from etrain_jupyter.plugins.ec2.simulator.hypervisor import Hypervisor
from etrain_jupyter.plugins.ec2.simulator.market import CapacityPool, Market
from etrain_jupyter.testing.serving import Wsgi

CONTROL = "/_fakeaws/"


class Control:
    """The verbs, by name in ``verbs``.

    ``reset`` restores the default market of ``zones``, and keeps ``variables`` in the instances'
    environment.
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
        self._owners = {
            "boot_s": hypervisor, "clock_skew_s": api, "lag_s": ec2, "role_ttl_s": backend
        }  # fmt: skip
        self.verbs: dict[str, Callable[..., Any]] = {
            "bill": self._bill,
            "break_imds": self._break_imds,
            "calls": api.faults.calls,
            "change_on_demand": self._change_on_demand,
            "change_pools": self._change_pools,
            "console": lambda instance_id: hypervisor.console(instance_id).decode(errors="replace"),
            "enforce_iam": backend.iam.enforce,
            "imds_requests": lambda instance_id: hypervisor.imds(instance_id).requests(),
            "instances": self._instances,
            "leftovers": self._leftovers,
            "make_account": partial(account.make_account, backend),
            "make_user": partial(account.make_user, backend),
            "permissions": self._permissions,
            "preempt": hypervisor.preempt,
            "recommend_rebalance": lambda instance_id: hypervisor.imds(
                instance_id
            ).recommend_rebalance(),
            "reset": self.reset,
            "set": self._set,
            "set_faults": self._set_faults,
            "set_market": self._set_market,
            "set_quota": lambda code, vcpus: api.vcpus.update({code: vcpus}),
            "set_variables": self._set_variables,
            "shut_down": hypervisor.shut_down,
        }
        self.reset()

    def reset(self) -> None:
        """Restore the initial state: no instances, no objects, the default market, no faults."""
        # Switch off the machines first, because a running machine may still use the account.
        self._hypervisor.forget()
        with self._backend.lock:
            moto_api_backend.reset()
            market = Market.default(self._zones)
            self._ec2.reset(market)
            self._hypervisor.market = market
            self._set_variables({})
            self._set(boot_s=self._boot_s, clock_skew_s=0.0, lag_s=0.0, role_ttl_s=3600)
            self._backend.iam.enforce(False)
        self._api.faults.set(())
        self._api.vcpus.clear()

    def _set(self, **values: float) -> None:
        for name, value in values.items():
            setattr(self._owners[name], name, value)

    # The market ---------------------------------------------------------------------------------

    def _set_market(self, pools: list[dict[str, Any]], on_demand: list[dict[str, Any]]) -> None:
        with self._backend.lock:
            market = Market()
            for offer in pools:
                pool = CapacityPool(offer.pop("instance_type"), offer.pop("zone"))
                market.set_pool(pool, at=time.time(), **offer)
            for offer in on_demand:
                market.set_on_demand(**offer)
            # Running machines keep their capacity in the new market.
            for usage in self._hypervisor.usages():
                if usage.ended_at is None:
                    market.take(usage.instance_id, usage.pool, usage.lifecycle)
            self._ec2.market = self._hypervisor.market = market

    def _change_pools(
        self,
        instance_type: str,
        zone: str,
        capacity: int | None = None,
        price_usd: float | None = None,
    ) -> None:
        # An empty type or zone matches all.
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

    def _change_on_demand(self, instance_type: str, **changes: Any) -> None:
        with self._backend.lock:
            market = self._ec2.market
            for name in [instance_type] if instance_type else market.on_demand_types():
                market.set_on_demand(name, **changes)

    # Faults -------------------------------------------------------------------------------------

    def _set_faults(self, faults: list[dict[str, Any]]) -> None:
        self._api.faults.set(tuple(ApiFault(**fault) for fault in faults))

    def _break_imds(self, instance_id: str, how: str) -> None:
        imds = self._hypervisor.imds(instance_id)
        if how == "expire-tokens":
            imds.expire_tokens()
        else:
            imds.break_(how)

    def _set_variables(self, variables: dict[str, str]) -> None:
        self._hypervisor.variables = {**self._variables, **variables}

    # Results ------------------------------------------------------------------------------------

    def _instances(self) -> list[dict[str, Any]]:
        with self._backend.lock:
            return [asdict(record) for record in self._hypervisor.records()]

    def _bill(self) -> list[dict[str, Any]]:
        with self._backend.lock:
            bill = make_bill(self._hypervisor.usages(), self._ec2.market, time.time())
        return [asdict(row) for row in bill.rows]

    def _permissions(self) -> list[list[Any]]:
        found = list(self._backend.iam.requests.values())
        return [[r.action, r.resource, dict(r.context), ok] for r, ok in found]

    def _leftovers(self, cluster: str, prefix: str) -> dict[str, list[str]]:
        # Call this before taking the lock, because it waits for machines that are being switched
        # off.
        strays = self._hypervisor.find_strays()
        return account.find_leftovers(self._backend, cluster=cluster, prefix=prefix) | strays


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
            if verb not in control.verbs:
                raise ValueError(f"The simulated cloud has no verb {verb!r}.")
            result = control.verbs[verb](**json.loads(body or b"{}"))
        except Exception as exc:  # reported to the test
            if not isinstance(exc, ValueError):
                print(f"fakeaws: {verb} failed: {exc!r}", file=sys.stderr, flush=True)
            status, result = "400 Bad Request", f"{exc}" or repr(exc)
        data = json.dumps(result).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(data)))]
        start_response(status, headers)
        return [data]

    return handle
