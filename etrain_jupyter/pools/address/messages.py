"""Errors and warnings of the ``address`` pool about an existing Dask cluster."""

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
from etrain_jupyter.errors import PoolError

PROBE_S = 2.0
"""Timeout for opening a connection to find out why a scheduler does not respond."""
REQUIRED = ("python", "etrain-jupyter", "torch")
"""Packages whose versions must match the kernel's.

Functions are sent as bytecode, the processes share a protocol, and the ranks exchange tensors.
"""
MAX_NAMED = 6
"""Maximum number of workers that a message lists."""


class NotListeningError(PoolError):
    """The scheduler's machine refuses connections: no process listens on the port."""


def installed_here() -> dict[str, str]:
    """Return the kernel's versions of the packages in ``REQUIRED``."""
    found = {"python": platform.python_version(), "etrain-jupyter": __version__, "torch": ""}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["torch"] = importlib.metadata.version("torch")
    return found


def plain_tcp(address: str) -> str:
    """Return a warning about a scheduler without TLS."""
    return (
        f"{address} does not use TLS: anyone who can connect to that port can run code there as "
        "you, and read what your cells send. Using it anyway. To fix this, start the scheduler "
        "with certificates and write tls://."
    )


async def unreachable(address: str, exc: BaseException) -> PoolError:
    """Return an error that explains why a scheduler could not be reached.

    Opens a plain connection to distinguish the cases:

    =========================  ==================================================
    the connection ...         likely cause
    =========================  ==================================================
    is refused                 no scheduler listens there: ``NotListeningError``
    fails or times out         wrong host, or a firewall
    opens, then TLS fails      certificates of another cluster, or TLS on one side
    opens, then nothing        not a Dask scheduler, or it rejects our certificate
    =========================  ==================================================
    """
    cause = exc
    # Dask wraps the error from the operating system or OpenSSL several times.
    while cause.__cause__ is not None:
        cause = cause.__cause__
    is_tls = address.startswith("tls://")
    text = f"{exc} {cause}"
    try:
        # Without TLS: this distinguishes "cannot connect" from "connects, but the handshake fails".
        await _probe(address)
    except ConnectionRefusedError:
        return NotListeningError(
            f"no scheduler is listening at {address}. Nothing was done. Start the scheduler there, "
            "or correct the address: `dask scheduler` prints it."
        )
    except (OSError, TimeoutError) as failure:
        return PoolError(
            f"{address} cannot be reached from this machine ({_short(failure)}). Nothing was done. "
            "Correct the address, or check with its administrator whether the port is open to you."
        )
    # Check the text, too, because some of Dask's wrappers keep only that.
    if isinstance(cause, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY" in text:
        return PoolError(
            f"the certificate of {address} was not signed by the authority in tls.ca "
            f"({_short(cause)}). Nothing was sent there. Set tls.ca in pools.yaml to the ca.pem of "
            "that cluster. If it is the right file, another machine may answer at that address."
        )
    # A scheduler without TLS may send its first bytes before ours arrive. Depending on which side
    # is faster, OpenSSL reports a wrong version, or tornado reports that it cannot convert the
    # connection.
    plain_text_errors = ("WRONG_VERSION_NUMBER", "record layer", "cannot convert to SSL")
    if is_tls and any(error in text for error in plain_text_errors):
        return PoolError(
            f"{address} does not use TLS. Nothing was sent there. Write tcp:// if this is "
            "intended, or start the scheduler with certificates."
        )
    advice = (
        "It may require TLS: write tls:// and set its certificates in pools.yaml."
        if not is_tls
        else "It may reject the certificate in tls.cert, which its authority must have signed."
    )
    return PoolError(
        f"{address} accepts connections but does not answer like a Dask scheduler "
        f"({_short(cause)}). Nothing was done. {advice}"
    )


async def _probe(address: str) -> None:
    """Open and close a connection; raise the error that prevents this."""
    # An IPv6 host is in brackets, and contains colons itself.
    host, _, port = address.partition("://")[2].rpartition(":")
    async with asyncio.timeout(PROBE_S):
        _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def _short(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}".partition("\n")[0][:200]


def unfit_scheduler(address: str, exc: BaseException, here: Mapping[str, str]) -> str:
    """Return the error for a scheduler that cannot run the coordinator."""
    if isinstance(exc, ImportError):
        return (
            f"the scheduler at {address} cannot import etrain-jupyter ({exc}). "
            f"Nothing was changed. {install_advice(here)} Then restart the scheduler and workers."
        )
    return (
        f"the scheduler at {address} refuses to run etrain's code ({_short(exc)}). Nothing was "
        "changed. Set distributed.scheduler.pickle to true in its Dask configuration."
    )


def of_other_version(address: str, found: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Return the error for a scheduler with another version of etrain-jupyter."""
    busy = " and runs a coordinator of it, possibly with jobs" if found["coordinator"] else ""
    return (
        f"the scheduler at {address} has etrain-jupyter {found['etrain-jupyter']}{busy}; this "
        f"notebook has {here['etrain-jupyter']}. Nothing was changed. Install the same version "
        f"here: pip install 'etrain-jupyter=={found['etrain-jupyter']}'; or install "
        f"{here['etrain-jupyter']} there and restart the scheduler and its workers."
    )


def install_advice(here: Mapping[str, str]) -> str:
    """Return the command that installs the kernel's versions."""
    torch = here["torch"].partition("+")[0]
    return (
        f"Install the versions of this notebook there (Python {_minor(here['python'])}): pip "
        f"install 'etrain-jupyter=={here['etrain-jupyter']}' 'torch=={torch}'."
    )


@dataclass(frozen=True, kw_only=True)
class UnfitWorkers:
    """Message about workers that cannot train."""

    num_unfit: int
    text: str
    """The workers and the reasons."""
    advice: str
    """The command that fixes them."""


def unfit_workers(
    address: str, found: Mapping[str, Any], here: Mapping[str, str]
) -> UnfitWorkers | None:
    """Return a message about the workers that cannot train; None if all can.

    ``found`` has each worker's installed versions, or the exception from the query.
    """
    by_reason: dict[str, list[str]] = {}
    for worker, facts in found.items():
        # One line per reason, because on a cluster of many machines, usually all workers have the
        # same reason.
        if reason := _reason(facts, here):
            by_reason.setdefault(reason, []).append(worker)
    if not by_reason:
        return None
    num_unfit = sum(len(workers) for workers in by_reason.values())
    lines = "; ".join(f"{reason} on {_named(workers)}" for reason, workers in by_reason.items())
    text = f"{num_unfit} of {len(found)} workers of {address} cannot train: {lines}."
    return UnfitWorkers(num_unfit=num_unfit, text=text, advice=install_advice(here))


def _reason(facts: Any, here: Mapping[str, str]) -> str:
    # Dask reports an error that occurs before the function runs as the text of an exception.
    if isinstance(facts, ImportError) or re.search(r"ModuleNotFound|ImportError", str(facts)):
        return f"etrain-jupyter cannot be imported ({_short(facts)})"
    if not isinstance(facts, Mapping):
        return f"installed versions are unknown ({_short(facts)})"
    for name in REQUIRED:
        # Python first, because its version often explains the other differences.
        there = facts.get(name, "")
        if not there:
            return f"{name} is missing"
        if _comparable(name, there) != _comparable(name, here[name]):
            return f"{name} is {there}, not {here[name]}"
    return ""


def _comparable(name: str, version: str) -> str:
    # Bytecode is compatible within a minor version. "+cu124" names a build, not another version.
    return _minor(version) if name == "python" else version.partition("+")[0]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _named(workers: list[str]) -> str:
    more = len(workers) - MAX_NAMED
    return ", ".join(workers[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
