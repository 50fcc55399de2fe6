"""Machine types that a plan considers, with their prices and the sources of the prices."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from etrain_jupyter.errors import ConfigError, PoolError
from etrain_jupyter.plugins.ec2.spec import KIND, AwsSpotSpec
from etrain_jupyter.plugins.ec2.type_table import (
    MACHINE_TYPES,
    ON_DEMAND_USD,
    TABLE_DATE,
    TABLE_REGION,
)
from etrain_jupyter.plugins.planner.planning.measured import MeasuredJob
from etrain_jupyter.pools.catalog import read_catalog

USUAL_SPOT_SHARE = 0.3
"""Price of a spot machine as a share of the on-demand price, if it is not known."""
LOOK_BACK_S = 3600.0
BOOT_S = 210.0
"""Usual time from the launch of a machine until its worker trains."""


@dataclass(frozen=True, kw_only=True)
class MachineOffer:
    """A machine type, and its prices in US dollars an hour."""

    machine: str
    workers: int = 1
    """Workers per machine."""
    on_demand_usd: float = math.nan
    spot_usd: float = math.nan
    score: int = 0
    """EC2's spot placement score of the best zone, 1 to 10; 0 if unknown."""
    is_spot_guessed: bool = False
    """True if the spot price is ``USUAL_SPOT_SHARE`` of the on-demand price."""
    boot_s: float = BOOT_S
    """Time until the first worker trains; 0 if the machine already runs."""

    @property
    def has_prices(self) -> bool:
        """True if at least one of the prices is known."""
        return not (math.isnan(self.on_demand_usd) and math.isnan(self.spot_usd))

    def with_guessed_spot(self) -> MachineOffer:
        """Return the offer with a guess in place of an unknown spot price."""
        if not math.isnan(self.spot_usd) or math.isnan(self.on_demand_usd):
            return self
        return replace(self, spot_usd=USUAL_SPOT_SHARE * self.on_demand_usd, is_spot_guessed=True)


@dataclass(frozen=True, kw_only=True)
class Market:
    """Machine types with their prices."""

    offers: tuple[MachineOffer, ...]
    notes: tuple[str, ...] = ()
    """Sources of the prices, and types without a price."""
    max_workers: int | None = None
    """Limit of the pool; None if it has none."""
    head_usd: float = 0.0
    """Hourly price of the scheduler's machine."""
    pool: str = ""
    spec: AwsSpotSpec | None = None


def market_of(measured: MeasuredJob, pool: str, types: Sequence[str] = ()) -> Market:
    """Return the machine types of a pool with their prices.

    The prices come from EC2 or, without access to EC2, from the job's log and the built-in table.
    ``types`` replace those of the pool.

    Raises:
        PoolError: If the pool does not exist.
        ConfigError: If ``types`` are given for a pool without machine types, or are not known.
    """
    catalog = read_catalog()
    entry = catalog.get(pool)
    if entry is not None and entry.kind == KIND:
        return _market_of_spec(measured, pool, entry.read_as(AwsSpotSpec), types)
    if types:
        return _market_of_table(measured, types)
    if entry is None and pool != "local":
        raise PoolError(
            f"pools.yaml does not define the pool {pool!r}. It defines "
            f"{', '.join(catalog) or 'none'}. No plan was made. Name one of them with --pool, or "
            "machine types with --types."
        )
    known = _priced_in_log(measured, [machine for machine, _ in measured.usd_per_h])
    offers = tuple(known.values()) or tuple(
        MachineOffer(machine=one.machine, workers=one.workers_per_machine or 1, boot_s=0.0)
        for one in measured.points
    )
    return Market(offers=tuple(dict.fromkeys(offers)), notes=_notes_on(offers), pool=pool)


def _market_of_table(measured: MeasuredJob, types: Sequence[str]) -> Market:
    logged = _priced_in_log(measured, types)
    offers = [logged.get(one) or _tabled(one) for one in types]
    return Market(
        offers=tuple(one.with_guessed_spot() for one in offers),
        notes=_notes_on(offers, is_tabled=any(one.machine not in logged for one in offers)),
    )


def _tabled(name: str) -> MachineOffer:
    if name not in MACHINE_TYPES and name not in ON_DEMAND_USD:
        raise ConfigError(
            f"--types {name}: the built-in table does not have this type",
            hint=f"known types: {', '.join(sorted({*MACHINE_TYPES, *ON_DEMAND_USD}))}; for others, "
            "name a pool with --pool",
        )
    return _offer_of(name)


def _offer_of(name: str) -> MachineOffer:
    """Return an offer with whatever the built-in tables contain about a type."""
    known = MACHINE_TYPES.get(name)
    usd = ON_DEMAND_USD.get(name, math.nan)
    return MachineOffer(machine=name, workers=known.gpus if known else 1, on_demand_usd=usd)


def _priced_in_log(measured: MeasuredJob, types: Iterable[str]) -> dict[str, MachineOffer]:
    """Return offers at the prices that the pool reported when the job's workers joined."""
    found = {}
    for name in dict.fromkeys(types):
        known = MACHINE_TYPES.get(name)
        workers = known.gpus if known else 1
        prices = {
            lifecycle: usd * workers
            for (machine, lifecycle), usd in measured.usd_per_h.items()
            if machine == name
        }
        if prices:
            found[name] = MachineOffer(
                machine=name,
                workers=workers,
                on_demand_usd=prices.get("on-demand", ON_DEMAND_USD.get(name, math.nan)),
                spot_usd=prices.get("spot", math.nan),
            )
    return found


def _notes_on(offers: Sequence[MachineOffer], *, is_tabled: bool = False) -> tuple[str, ...]:
    notes = []
    if is_tabled:
        notes.append(f"On-demand prices: built-in table, {TABLE_REGION}, {TABLE_DATE}.")
    elif any(one.has_prices for one in offers):
        notes.append("Prices: those that the pool reported while the job ran.")
    unpriced = [one.machine for one in offers if not one.has_prices]
    if unpriced:
        notes.append(
            f"{', '.join(unpriced)}: no price is known, so the cost of these options is not shown."
            " Name a pool with prices (--pool) or machine types (--types)."
        )
    return tuple(notes)


# --- pools on EC2 ---------------------------------------------------------------------------------


def _market_of_spec(
    measured: MeasuredJob, pool: str, spec: AwsSpotSpec, types: Sequence[str]
) -> Market:
    if types:
        capacity = spec.capacity.model_copy(update={"types": tuple(types), "gpu": None})
        spec = spec.model_copy(update={"capacity": capacity})
    try:
        offers, notes, head_usd = _live_offers(spec)
    except PoolError as exc:
        # A plan without AWS is better than no plan, as long as a note says so.
        names = [] if spec.capacity.gpu else list(spec.capacity.types)
        if not names:
            raise
        logged = _priced_in_log(measured, names)
        per_node = spec.workers.per_node
        offers = [logged.get(one) or _offer_of(one) for one in names]
        offers = [replace(one, workers=per_node or one.workers) for one in offers]
        notes = [f"EC2 was not reached, so these are not its current prices: {exc}"]
        notes += _notes_on(offers, is_tabled=any(one not in logged for one in names))
        head_usd = ON_DEMAND_USD.get(spec.head_type, 0.0) if spec.head == "on-demand" else 0.0
    if not any(one.has_prices for one in offers):
        raise PoolError(
            f"pool {pool!r} has no prices: EC2 and the built-in table ({TABLE_REGION}, "
            f"{TABLE_DATE}) have none for {', '.join(one.machine for one in offers)}. No plan was "
            "made. Name other machine types with --types."
        )
    return Market(
        offers=tuple(one.with_guessed_spot() for one in offers),
        notes=tuple(notes),
        max_workers=spec.workers.max,
        head_usd=head_usd,
        pool=pool,
        spec=spec,
    )


def _live_offers(spec: AwsSpotSpec) -> tuple[list[MachineOffer], list[str], float]:
    """Return the offers and the price of the head's machine, from EC2.

    Raises:
        PoolError: If boto3 is missing, or EC2 refuses or does not respond.
    """
    try:
        from etrain_jupyter.plugins.ec2.client.live_prices import read_live_prices
    except ImportError as exc:
        raise PoolError(
            f"reading prices needs the package boto3 ({exc}): pip install boto3"
        ) from exc
    live = read_live_prices(spec, since=time.time() - LOOK_BACK_S, now=time.time())
    offers = []
    for name, workers in live.workers.items():
        zones: Mapping[str, float] = live.spot.get(name, {})
        offers.append(
            MachineOffer(
                machine=name,
                workers=workers,
                on_demand_usd=live.on_demand.get(name, math.nan),
                spot_usd=min(zones.values(), default=math.nan),
                score=live.scores.get(name, 0),
            )
        )
    return offers, [f"{live.source[:1].upper()}{live.source[1:]}."], live.head_usd
