"""The ``address`` pool: an existing Dask scheduler with its own workers.

``up()`` registers the coordinator as a scheduler plugin and the supervisor as a worker plugin,
including on workers that connect later. ``down()`` unregisters both. The pool does not start a
scheduler or workers, and stops a worker only in ``release()``.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from etrain_jupyter import __version__
from etrain_jupyter.config.fields import Section
from etrain_jupyter.data.workers import Workers
from etrain_jupyter.errors import PoolError
from etrain_jupyter.pools.address.messages import (
    NotListeningError,
    installed_here,
    of_other_version,
    plain_tcp,
    unfit_scheduler,
    unfit_workers,
    unreachable,
)
from etrain_jupyter.pools.address.tasks import find_fit_workers, open_tasks
from etrain_jupyter.pools.base import CostReport, Leftovers, Node
from etrain_jupyter.pools.rpc import ask, describe_caller
from etrain_jupyter.process.address import SchedulerAddress
from etrain_jupyter.wire.requests import (
    SAVE_S,
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
"""Timeout for installing the plugins on the scheduler and all workers, in seconds."""

T = TypeVar("T")

_notified: set[str] = set()
"""Messages that this process has already shown."""


class TlsSpec(Section):
    """Certificate files for a scheduler with TLS. They are not copied."""

    ca: str
    """Certificate file of the authority that signed the cluster's certificates."""
    cert: str
    """File of the client certificate."""
    key: str
    """File of the certificate's private key; only you should be able to read it."""
    min_version: Literal["", "1.2", "1.3"] = ""
    """Minimum TLS version; empty for Dask's default."""


class AddressSpec(Section):
    """Options of a pool of kind ``address`` in ``pools.yaml``."""

    address: str
    """Address of the scheduler: tcp://HOST:PORT, or tls://HOST:PORT with tls."""
    tls: TlsSpec | None = None
    """Certificate files for a tls:// address."""


class AddressPool:
    """Workers of an existing Dask scheduler.

    Args:
        address: ``tcp://HOST:PORT`` or ``tls://HOST:PORT``.
        tls: The files ``ca``, ``cert`` and ``key`` for a ``tls://`` address.
        min_version: Minimum TLS version, ``1.2`` or ``1.3``; empty for Dask's default.
    """

    is_head_elsewhere = False

    def __init__(
        self,
        address: str,
        *,
        tls: Mapping[str, str] | None = None,
        min_version: str = "",
    ) -> None:
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

    @classmethod
    def at(cls, address: SchedulerAddress) -> AddressPool:
        """Return the pool of a scheduler whose address and certificates are known."""
        files = {"ca": address.tls_ca, "cert": address.tls_cert, "key": address.tls_key}
        tls = {kind: path for kind, path in files.items() if path}
        return cls(address.address, tls=tls, min_version=address.tls_min_version)

    @property
    def address(self) -> SchedulerAddress:
        """Address and certificates. The cluster id is the address, until ``up`` has connected."""
        return self._address

    @classmethod
    def from_entry(cls, entry: PoolEntry) -> AddressPool:
        """Create the pool from an entry of ``pools.yaml``, without connecting."""
        spec, folder = entry.read_as(AddressSpec), entry.file.parent
        if spec.tls is None:
            return cls(spec.address)
        # Paths are relative to the folder of pools.yaml, wherever the kernel runs.
        files = {"ca": spec.tls.ca, "cert": spec.tls.cert, "key": spec.tls.key}
        tls = {kind: str(folder / Path(path).expanduser()) for kind, path in files.items()}
        return cls(spec.address, tls=tls, min_version=spec.tls.min_version)

    def check_machine(self) -> None:
        """Do nothing: the pool needs nothing on this machine."""

    def up(self) -> SchedulerAddress:
        """Install the plugins on the scheduler and its workers, unless they are already installed.

        Raises:
            PoolError: If the scheduler cannot be reached, or a required package is missing there.
        """
        self._check()
        # A connection within this machine does not cross a network, so it needs no warning.
        host = self._address.address.partition("://")[2].rpartition(":")[0].strip("[]")
        if self._address.address.startswith("tcp://") and not _is_loopback(host):
            self._notify_once(plain_tcp(self._address.address))
        return self._with_client(self._install)

    def want(self, n: int, *, reason: str) -> None:
        """Set the number of wanted workers. This pool cannot start any, so it notifies the user."""
        present = ask(self._address, WantWorkers(count=n, reason=reason)).num_present
        if n > present:
            self._notify_once(
                f"{self._address.address} has {present} of {n} wanted workers. etrain does not "
                "start workers of an existing cluster. Start more with `cluster.scale`, "
                "`cluster.adapt` or `dask worker`; jobs use them as soon as they connect."
            )

    def nodes(self) -> list[Node]:
        """Return the Dask workers that can train, in the order in which they connected."""
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
        """Retire a Dask worker after its ranks have left; this pool does not replace it."""
        ask(self._address, ReleaseWorker(worker=node_id, drain_s=drain_s))

    def shared_place(self) -> str:
        """Return an empty string: workers share the kernel's folders, as checked on submit."""
        return ""

    def price(self, max_workers: int) -> str:
        """Return a message saying that the price of an existing cluster is unknown."""
        return "unknown, this is an existing Dask cluster"

    def cost(self) -> CostReport:
        """Return zeros: the cost of an existing cluster is unknown."""
        return CostReport()

    def tasks(self) -> AbstractContextManager[Workers]:
        """Connect to the workers, to run functions as Dask tasks; nothing is installed.

        Raises:
            PoolError: If the scheduler cannot be reached, or no worker has the same versions.
        """
        self._check()
        fit = self._with_client(partial(find_fit_workers, self._address.address))
        if fit.warning:
            self._notify_once(fit.warning)
        return open_tasks(self._address, fit)

    def is_installed(self) -> bool:
        """Return whether our coordinator is on the scheduler; False if the scheduler has ended."""
        self._check()
        try:
            return self._with_client(self._is_installed)
        except NotListeningError:
            return False

    def down(self, *, timeout_s: float = SAVE_S) -> Leftovers:
        """Stop etrain's jobs with a checkpoint and remove the plugins; Dask keeps running."""
        self._check()
        try:
            if not self._with_client(self._is_installed):
                return Leftovers()
            #   ShutDownCluster     jobs save a checkpoint and stop        up to timeout_s
            #   worker plugin       unregistered: supervisors and trainers end
            #   RemoveCoordinator   handlers and plugin leave the scheduler
            #
            # The coordinator goes last; otherwise, the supervisors' last reports would be lost.
            stop = ShutDownCluster(drain_s=timeout_s, by=describe_caller())
            ask(self._address, stop, timeout_s=timeout_s + CONNECT_S)
            return self._with_client(self._uninstall)
        except NotListeningError:
            return Leftovers()  # the scheduler has ended, and the plugins with it
        except PoolError as exc:
            return Leftovers(processes=(f"etrain's plugins at {self._address.address}: {exc}",))

    # --- checks that need no network ---

    def _check(self) -> None:
        """Validate the address and the certificate files, without connecting."""
        scheme, _, rest = self._address.address.partition("://")
        host, _, port = rest.rpartition(":")
        if scheme not in ("tcp", "tls") or not host or not port.isdigit():
            raise PoolError(
                f"{self._address.address!r} is not a valid address of a Dask scheduler. Nothing "
                "was done. Write tcp://HOST:8786 or tls://HOST:8786, as `dask scheduler` prints it."
            )
        files = [self._address.tls_ca, self._address.tls_cert, self._address.tls_key]
        if scheme == "tcp" and any(files):
            raise PoolError(
                f"{self._address.address} is configured with certificates, but tcp:// does not use "
                f"any. Nothing was done. Write tls://{rest}, or remove tls."
            )
        if scheme == "tls" and not all(files):
            raise PoolError(
                f"{self._address.address} needs certificates. Nothing was done. Define the pool in "
                f"pools.yaml: 'lab: {{kind: address, address: {self._address.address}, tls: "
                "{ca: ca.pem, cert: client.pem, key: client.key}}', and write pool: lab."
            )
        missing = [file for file in files if file and not Path(file).is_file()]
        if missing:
            raise PoolError(
                f"certificate files of {self._address.address} are missing: {', '.join(missing)}. "
                "Nothing was done. Correct tls of this pool in pools.yaml."
            )

    def _notify_once(self, text: str) -> None:
        if text not in _notified:
            _notified.add(text)
            print(f"etrain: {text}")

    # --- requests through Dask's client ---

    def _with_client(self, work: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        """Run ``work`` with a Dask client, in another thread, because the kernel's runs a loop."""

        async def run() -> T:
            import distributed

            make: Any = distributed.Client
            # Create the client before awaiting it, because a client that fails to connect must be
            # closed, too.
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
                raise await unreachable(self._address.address, exc) from exc
            try:
                async with asyncio.timeout(INSTALL_S):
                    return await work(client)
            except (OSError, TimeoutError) as exc:
                raise await unreachable(self._address.address, exc) from exc
            finally:
                await client.close()

        with ThreadPoolExecutor(1, thread_name_prefix="etrain-pool-ask") as thread:
            return thread.submit(asyncio.run, run()).result()

    async def _install(self, client: Any) -> SchedulerAddress:
        """Check the installed versions and register the two plugins."""
        from etrain_jupyter.pools.address.coordinator import GuestCoordinator
        from etrain_jupyter.pools.address.guest import GuestSupervisor, sent_as_code

        address = self._address.address
        here = installed_here()
        # Check everything before the first change, because a scheduler with only one of the plugins
        # would need cleaning up.
        await self._check_scheduler(client, here)
        await self._check_workers(client, here)
        info = client.scheduler_info()
        coordinator = GuestCoordinator(cluster_id=str(info["id"]))
        # Register the coordinator first, because supervisors report to it as soon as they start.
        await client.register_plugin(coordinator)
        # Pickle the plugin by value. Pickled by name, it would keep workers without
        # etrain-jupyter from starting.
        with sent_as_code():
            await client.register_plugin(GuestSupervisor(__version__))
        # From now on, use the scheduler's own id, because a restarted scheduler at the same address
        # is another cluster.
        values = self._address.to_dict() | {"address": address, "cluster_id": str(info["id"])}
        return SchedulerAddress.from_dict(values)

    async def _check_scheduler(self, client: Any, here: Mapping[str, str]) -> None:
        from etrain_jupyter.pools.address.guest_worker import look_here

        address = self._address.address
        try:
            found = await client.run_on_scheduler(look_here)
        # Dask unpickles the function by name there: ImportError if the package is missing,
        # ValueError if the scheduler refuses pickles.
        except (ImportError, ValueError, AttributeError) as exc:
            raise PoolError(unfit_scheduler(address, exc, here)) from exc
        if found["etrain-jupyter"] != __version__:
            raise PoolError(of_other_version(address, found, here))
        # Any other coordinator class of ours belongs to a cluster of ours.
        if found["coordinator"] not in ("", "GuestCoordinator"):
            raise PoolError(
                f"{address} is a cluster that etrain started itself. Nothing was done. Remove the "
                "key pool, or set it to the pool that started the cluster."
            )

    async def _check_workers(self, client: Any, here: Mapping[str, str]) -> None:
        """Reject a cluster with no usable worker; notify the user of unusable workers."""
        from etrain_jupyter.pools.address.guest_worker import look_here

        # on_error="return": one broken worker must not hide the responses of the others.
        found = await client.run(look_here, on_error="return")
        if not found:
            self._notify_once(
                f"{self._address.address} has no workers yet. Jobs wait until you start some, for "
                "example with `dask worker`."
            )
        unfit = unfit_workers(self._address.address, found, here)
        if not unfit:
            return
        if unfit.num_unfit == len(found):
            raise PoolError(f"{unfit.text} {unfit.advice}")
        self._notify_once(
            f"{unfit.text} The other {len(found) - unfit.num_unfit} train. {unfit.advice}"
        )

    async def _is_installed(self, client: Any) -> bool:
        from etrain_jupyter.pools.address.guest_worker import look_here

        try:
            found = await client.run_on_scheduler(look_here)
        except (ImportError, ValueError, AttributeError):
            return False
        return bool(found["coordinator"] == "GuestCoordinator")

    async def _uninstall(self, client: Any) -> Leftovers:
        """Unregister the supervisors, which stops the trainers, and then the coordinator."""
        left: tuple[str, ...] = ()
        try:
            await client.unregister_worker_plugin("etrain-supervisor")
        except ValueError:
            pass  # another client has just unregistered it
        except (KeyError, OSError) as exc:
            # A worker connected or left during the request. The others have unregistered it.
            left = (f"possibly a supervisor on a worker that did not answer ({exc!r})",)
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
