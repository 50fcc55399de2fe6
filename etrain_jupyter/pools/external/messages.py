"""What the pool ``address`` says of somebody else's cluster: what is missing, what to type."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import platform
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from etrain_jupyter import __version__

ENDED = "nobody listens at"
PROBE_S = 2.0
NEEDED = ("python", "etrain-jupyter", "torch")
"""What must be alike: functions are sent as code, the parts speak one protocol, and the ranks of a
job exchange tensors."""
MOST_NAMED = 6


def installed_here() -> dict[str, str]:
    """Return what the kernel has of ``NEEDED``."""
    found = {"python": platform.python_version(), "etrain-jupyter": __version__, "torch": ""}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["torch"] = importlib.metadata.version("torch")
    return found


def plain_tcp(address: str) -> str:
    """Warn of a scheduler without TLS."""
    return (
        f"{address} has no TLS: anybody who reaches that port can run code there as you, and read "
        "what your cells send. It is used all the same, since it is not ours to change. Start it "
        "with certificates and write tls:// to mend it."
    )


async def unreachable(address: str, exc: BaseException) -> str:
    """Return why a scheduler could not be reached, as far as can be told, and what to type."""
    cause = exc
    while cause.__cause__ is not None:
        cause = cause.__cause__
    is_tls = address.startswith("tls://")
    text = f"{exc} {cause}"
    try:
        await _probe(address)
    except ConnectionRefusedError:
        return (
            f"{ENDED} {address}. Nothing was done. Start the scheduler there, or correct the "
            "address: `dask scheduler` prints it."
        )
    except (OSError, TimeoutError) as failure:
        return (
            f"{address} cannot be reached from this machine ({_short(failure)}). Nothing was done. "
            "Correct the address, or ask who runs it whether its port is open to you."
        )
    if isinstance(cause, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY" in text:
        return (
            f"the certificate of {address} was not signed by the authority in tls.ca "
            f"({_short(cause)}). Nothing was sent there. Name the ca.pem of that cluster in "
            "pools.yaml; if it is the right one, another machine may answer at that address."
        )
    # The greeting of a scheduler without TLS may come before ours: tornado says that otherwise.
    others = ("WRONG_VERSION_NUMBER", "record layer", "cannot convert to SSL")
    if is_tls and any(words in text for words in others):
        return (
            f"{address} does not speak TLS. Nothing was sent there. Write tcp:// if that is how "
            "it is meant to be, or start it with certificates."
        )
    advice = (
        "It may want TLS: write tls:// and name its certificates in pools.yaml."
        if not is_tls
        else "It may not accept our certificate: tls.cert must be signed by its authority."
    )
    return (
        f"{address} takes connections, but does not answer as a Dask scheduler ({_short(cause)}). "
        f"Nothing was done. {advice}"
    )


async def _probe(address: str) -> None:
    """Open a connection and close it again.

    Raises:
        ConnectionRefusedError: If nobody listens there.
        OSError: If the machine is not found or not reached.
        TimeoutError: If it does not answer.
    """
    host, _, port = address.partition("://")[2].rpartition(":")
    async with asyncio.timeout(PROBE_S):
        _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def _short(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}".partition("\n")[0][:200]


def unfit_scheduler(address: str, exc: BaseException, here: Mapping[str, str]) -> str:
    """Say that the scheduler's process cannot run our coordinator."""
    if isinstance(exc, ImportError):
        return (
            f"the scheduler at {address} cannot load etrain-jupyter ({exc}). Nothing was changed. "
            f"{install_advice(here)} Then start the scheduler again, and its workers."
        )
    return (
        f"the scheduler at {address} refuses to run our code ({_short(exc)}): Dask's setting "
        "distributed.scheduler.pickle must be true there. Nothing was changed."
    )


def of_other_version(address: str, found: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Say that the scheduler has another etrain-jupyter, perhaps with jobs of somebody in it."""
    busy = " and a coordinator of it, perhaps with jobs" if found["coordinator"] else ""
    return (
        f"the scheduler at {address} has etrain-jupyter {found['etrain-jupyter']}{busy}; this "
        f"notebook has {here['etrain-jupyter']}. Nothing was changed. Use the same one here: pip "
        f"install 'etrain-jupyter=={found['etrain-jupyter']}'; or install "
        f"{here['etrain-jupyter']} there and start the scheduler and its workers again."
    )


def install_advice(here: Mapping[str, str]) -> str:
    """Return the command that makes an environment like the kernel's."""
    torch = here["torch"].partition("+")[0]
    return (
        f"In Python {_minor(here['python'])} there: pip install "
        f"'etrain-jupyter=={here['etrain-jupyter']}' 'torch=={torch}'."
    )


@dataclass(frozen=True, kw_only=True)
class UnfitWorkers:
    """Workers that cannot take part."""

    num_unfit: int
    text: str
    """Which, and why."""
    advice: str


def unfit_workers(
    address: str, found: Mapping[str, Any], here: Mapping[str, str]
) -> UnfitWorkers | None:
    """Return which workers cannot take part; None if all can.

    Args:
        address: The scheduler's.
        found: By worker, what is installed there, or the exception of whoever wanted to know.
        here: What is installed in the kernel.
    """
    by_reason: dict[str, list[str]] = {}
    for worker, facts in found.items():
        if reason := _reason(facts, here):
            by_reason.setdefault(reason, []).append(worker)
    if not by_reason:
        return None
    num_unfit = sum(len(workers) for workers in by_reason.values())
    lines = "; ".join(f"{reason} on {_named(workers)}" for reason, workers in by_reason.items())
    text = f"{num_unfit} of {len(found)} workers of {address} cannot train: {lines}."
    return UnfitWorkers(num_unfit=num_unfit, text=text, advice=install_advice(here))


def _reason(facts: Any, here: Mapping[str, str]) -> str:
    # What goes wrong before a function runs comes as the text of an exception.
    if isinstance(facts, ImportError) or re.search(r"ModuleNotFound|ImportError", str(facts)):
        return f"etrain-jupyter cannot be loaded ({_short(facts)})"
    if not isinstance(facts, Mapping):
        return f"it cannot be asked what is installed ({_short(facts)})"
    for name in NEEDED:
        there = facts.get(name, "")
        if not there:
            return f"{name} is missing"
        if _comparable(name, there) != _comparable(name, here[name]):
            return f"{name} is {there}, not {here[name]}"
    return ""


def _comparable(name: str, version: str) -> str:
    return _minor(version) if name == "python" else version.partition("+")[0]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _named(workers: list[str]) -> str:
    more = len(workers) - MOST_NAMED
    return ", ".join(workers[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
