"""The pool ``address``: a Dask scheduler that somebody else made, with its own workers.

``up()`` puts our coordinator into the scheduler and a supervisor onto every worker that there is or
that comes; ``down()`` takes both away again. The scheduler and the workers are theirs: we start
none, and end none but a worker that we are asked to release.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import ValidationError

from etrain_jupyter import __version__
from etrain_jupyter.config.fields import Section
from etrain_jupyter.errors import ConfigError, PoolError
from etrain_jupyter.pools.base import CostReport, Leftovers, Node
from etrain_jupyter.pools.external.messages import (
    ENDED,
    installed_here,
    of_other_version,
    plain_tcp,
    unfit_scheduler,
    unfit_workers,
    unreachable,
)
from etrain_jupyter.pools.rpc import ask
from etrain_jupyter.process.address import SchedulerAddress
from etrain_jupyter.wire.requests import (
    ListNodes,
    NotOursError,
    RefusedRequestError,
    ReleaseWorker,
    RemoveCoordinator,
    ShutDownCluster,
    WantWorkers,
    call_scheduler,
)

if TYPE_CHECKING:
    from etrain_jupyter.pools.catalog import PoolEntry

CONNECT_S = 10.0
INSTALL_S = 60.0
"""How long our part may take to get onto a scheduler and its workers."""

T = TypeVar("T")
Say = Callable[[str], None]

_said: set[str] = set()
"""What this process has said once."""


class TlsSpec(Section):
    """Files by which a scheduler lets us in. They stay where they are."""

    ca: str
    """File with the authority that signed the cluster's certificates."""
    cert: str
    """File with the certificate that we show."""
    key: str
    """File with its key; only you should be able to read it."""
    min_version: Literal["", "1.2", "1.3"] = ""
    """Oldest TLS that is spoken; empty for Dask's default."""


class AddressSpec(Section):
    """What ``pools.yaml`` says of a scheduler that somebody else made."""

    address: str
    """Where it listens: tcp://HOST:PORT, or tls://HOST:PORT with tls."""
    tls: TlsSpec | None = None
    """Of a tls:// address: the files that let us in."""


class AddressPool:
    """Workers of an existing Dask scheduler.

    Args:
        address: ``tcp://HOST:PORT`` or ``tls://HOST:PORT``.
        tls: The files ``ca``, ``cert`` and ``key``, for the latter.
        min_version: Oldest TLS that is spoken, ``1.2`` or ``1.3``; empty for Dask's default.
        say: Told, once a process, what a person should know; prints by default.
    """

    is_head_elsewhere = False

    def __init__(
        self,
        address: str,
        *,
        tls: Mapping[str, str] | None = None,
        min_version: str = "",
        say: Say | None = None,
    ) -> None:
        self._say = say or _print
        files = {
            kind: str(Path(path).expanduser().absolute()) for kind, path in (tls or {}).items()
        }
        self._address = SchedulerAddress(
            address=address,
            cluster_id=address,
            tls_ca=files.get("ca", ""),
            tls_cert=files.get("cert", ""),
            tls_key=files.get("key", ""),
            tls_min_version=min_version,
        )

    @property
    def address(self) -> SchedulerAddress:
        """Where it is, and what lets us in; its id is known once somebody has asked."""
        return self._address

    @classmethod
    def from_spec(cls, values: Mapping[str, Any]) -> AddressPool:
        """Return the pool that ``address`` and ``tls`` of a file describe.

        Raises:
            ConfigError: If they are not what they should be.
        """
        try:
            return cls._of(AddressSpec.model_validate(dict(values)))
        except ValidationError as exc:
            first = exc.errors()[0]
            words = str((first.get("ctx") or {}).get("message") or first["msg"])
            key = ".".join(map(str, first["loc"])) or "the pool"
            raise ConfigError(f"{key}: {words.replace('{key}', key)}") from exc

    @classmethod
    def from_entry(cls, entry: PoolEntry) -> AddressPool:
        """Return the pool of an entry of ``pools.yaml``; nothing is asked yet.

        Raises:
            ConfigError: If its keys are not what they should be, with the place of the fault.
        """
        return cls._of(entry.read_as(AddressSpec), folder=entry.file.parent)

    @classmethod
    def _of(cls, spec: AddressSpec, folder: Path = Path()) -> AddressPool:
        """Return the pool; relative paths begin in ``folder``, where its file is."""
        if spec.tls is None:
            return cls(spec.address)
        files = {"ca": spec.tls.ca, "cert": spec.tls.cert, "key": spec.tls.key}
        tls = {kind: str(folder / Path(path).expanduser()) for kind, path in files.items()}
        return cls(spec.address, tls=tls, min_version=spec.tls.min_version)

    def up(self) -> SchedulerAddress:
        """Put our part onto the scheduler and its workers, unless it is there; nothing is started.

        Raises:
            PoolError: If the scheduler cannot be reached, or something is missing there.
        """
        self._check()
        host = self._address.address.partition("://")[2].rpartition(":")[0].strip("[]")
        if self._address.address.startswith("tcp://") and not _is_loopback(host):
            self._say_once(plain_tcp(self._address.address))
        return self._ask_dask(self._settle_in)

    def want(self, n: int, *, reason: str) -> None:
        """Say how many workers are wished for: whoever made the cluster starts them."""
        present = ask(self._address, WantWorkers(count=n, reason=reason)).num_present
        if n > present:
            self._say_once(
                f"{n} workers are wanted at {self._address.address}, which has {present}. They are "
                "somebody else's: start more as that cluster was made (`cluster.scale`, "
                "`cluster.adapt`, `dask worker`); those that come are used."
            )

    def nodes(self) -> list[Node]:
        """Return the Dask workers that can take part, in the order in which they came."""
        return [
            Node(
                id=record["worker"],
                state=record["state"],
                type="Dask worker",
                zone=record["zone"],
                lifecycle="existing",
                pid=record["pid"],
                device=record["device"],
            )
            for record in ask(self._address, ListNodes()).nodes
        ]

    def release(self, node_id: str, *, drain_s: float) -> None:
        """Ask Dask to retire a worker, after our jobs have left it; nobody replaces it."""
        ask(self._address, ReleaseWorker(worker=node_id, drain_s=drain_s))

    def shared_place(self) -> str:
        """Return nothing: its workers see the same folders, which `up` sees to."""
        return ""

    def price(self, max_workers: int) -> str:
        """Return that nobody knows here."""
        return "not known here: the cluster is somebody else's"

    def cost(self) -> CostReport:
        """Return zeros: what these machines cost is between their owner and whoever pays."""
        return CostReport()

    def down(self, *, timeout_s: float = 30.0) -> Leftovers:
        """Stop our jobs there, with a checkpoint, and take our part away; theirs stays as it is.

        Returns:
            What is still there of ours.
        """
        self._check()
        try:
            if not self._ask_dask(self._is_there):
                return Leftovers()
            stop = ShutDownCluster(drain_s=timeout_s)
            ask(self._address, stop, timeout_s=timeout_s + CONNECT_S)
            return self._ask_dask(self._move_out)
        except PoolError as exc:
            if ENDED in str(exc):
                return Leftovers()  # their scheduler has ended, and our part with it
            return Leftovers(processes=(f"our part of {self._address.address}: {exc}",))

    # --- checks that need no network ---

    def _check(self) -> None:
        """Refuse what cannot work.

        Raises:
            PoolError: If the address is none, or the certificates are missing or of no use.
        """
        scheme, _, rest = self._address.address.partition("://")
        host, _, port = rest.rpartition(":")
        if scheme not in ("tcp", "tls") or not host or not port.isdigit():
            raise PoolError(
                f"{self._address.address!r} is no address of a Dask scheduler. Nothing was done. "
                "Write tcp://HOST:8786 or tls://HOST:8786, as `dask scheduler` prints it."
            )
        files = [self._address.tls_ca, self._address.tls_cert, self._address.tls_key]
        if scheme == "tcp" and any(files):
            raise PoolError(
                f"{self._address.address} comes with certificates, but tcp:// does not use any. "
                f"Nothing was done. Write tls://{rest}, or leave tls out."
            )
        if scheme == "tls" and not all(files):
            raise PoolError(
                f"{self._address.address} needs certificates. Nothing was done. Name the pool in "
                f"pools.yaml: 'lab: {{kind: address, address: {self._address.address}, tls: "
                "{ca: ca.pem, cert: client.pem, key: client.key}}', and write pool: lab."
            )
        missing = [file for file in files if file and not Path(file).is_file()]
        if missing:
            raise PoolError(
                f"{', '.join(missing)} is not there, so that {self._address.address} would not let "
                "us in. Nothing was done. Correct tls of this pool in pools.yaml."
            )

    def _say_once(self, text: str) -> None:
        if text not in _said:
            _said.add(text)
            self._say(text)

    # --- what needs Dask's own client ---

    def _ask_dask(self, work: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        """Run ``work`` with a client of the cluster, on a thread: a kernel's has a loop already.

        Raises:
            PoolError: If the scheduler cannot be reached.
        """

        async def run() -> T:
            import distributed

            make: Any = distributed.Client
            # Made before it is awaited: one that does not connect must be closed, too.
            client = make(
                self._address.address,
                security=self._address.security() if self._address.tls_ca else None,
                timeout=CONNECT_S,
                asynchronous=True,
                set_as_default=False,
                name="etrain",
            )
            try:
                await client
            except (OSError, TimeoutError, ValueError) as exc:
                await client.close()
                raise PoolError(await unreachable(self._address.address, exc)) from exc
            try:
                async with asyncio.timeout(INSTALL_S):
                    return await work(client)
            except (OSError, TimeoutError) as exc:
                raise PoolError(await unreachable(self._address.address, exc)) from exc
            finally:
                await client.close()

        with ThreadPoolExecutor(1, thread_name_prefix="etrain-pool-ask") as thread:
            return thread.submit(asyncio.run, run()).result()

    async def _settle_in(self, client: Any) -> SchedulerAddress:
        """Check what is installed there, and put our two plugins there."""
        from etrain_jupyter.pools.external.coordinator import GuestCoordinator
        from etrain_jupyter.pools.external.guest import GuestSupervisor, sent_as_code

        where = self._address.address
        here = installed_here()
        await self._check_scheduler(client, here)
        await self._check_workers(client, here)
        info = client.scheduler_info()
        coordinator = GuestCoordinator(cluster_id=str(info["id"]))
        await client.register_plugin(coordinator)
        with sent_as_code():
            await client.register_plugin(GuestSupervisor(__version__))
        values = self._address.to_dict() | {"address": where, "cluster_id": str(info["id"])}
        return SchedulerAddress.from_dict(values)

    async def _check_scheduler(self, client: Any, here: Mapping[str, str]) -> None:
        from etrain_jupyter.pools.external.guest_worker import look_here

        where = self._address.address
        try:
            found = await client.run_on_scheduler(look_here)
        except (ImportError, ValueError, AttributeError) as exc:
            raise PoolError(unfit_scheduler(where, exc, here)) from exc
        if found["etrain-jupyter"] != __version__:
            raise PoolError(of_other_version(where, found, here))
        if found["coordinator"] not in ("", "GuestCoordinator"):
            raise PoolError(
                f"{where} is a cluster that etrain started itself. Nothing was done. Leave pool "
                "out, or name the pool that started it."
            )

    async def _check_workers(self, client: Any, here: Mapping[str, str]) -> None:
        """Refuse a cluster none of whose workers can take part; say which of them cannot."""
        from etrain_jupyter.pools.external.guest_worker import look_here

        found = await client.run(look_here, on_error="return")
        if not found:
            self._say_once(
                f"{self._address.address} has no worker now. Whoever made it starts them; jobs "
                "wait until some are there."
            )
        words = unfit_workers(self._address.address, found, here)
        if not words:
            return
        if words.num_unfit == len(found):
            raise PoolError(f"{words.text} {words.advice}")
        self._say_once(
            f"{words.text} The other {len(found) - words.num_unfit} train. {words.advice}"
        )

    async def _is_there(self, client: Any) -> bool:
        from etrain_jupyter.pools.external.guest_worker import look_here

        try:
            found = await client.run_on_scheduler(look_here)
        except (ImportError, ValueError, AttributeError):
            return False
        return bool(found["coordinator"] == "GuestCoordinator")

    async def _move_out(self, client: Any) -> Leftovers:
        """Take the supervisors away, which ends the trainers, and then the coordinator."""
        left: tuple[str, ...] = ()
        try:
            await client.unregister_worker_plugin("etrain-supervisor")
        except ValueError:
            pass  # somebody else has just done it
        except (KeyError, OSError) as exc:
            # A worker that came or went meanwhile; the others were told.
            left = (f"perhaps a supervisor on a worker that did not answer ({exc!r})",)
        try:
            await call_scheduler(client.scheduler, RemoveCoordinator())
        except (NotOursError, RefusedRequestError) as exc:
            raise PoolError(str(exc)) from exc
        return Leftovers(processes=left)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _print(text: str) -> None:
    print(f"etrain: {text}")
