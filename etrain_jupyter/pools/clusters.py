"""List, start and stop clusters: ``%etrain pools``, ``up``, ``down`` and ``reap``."""

from __future__ import annotations

from etrain_jupyter.display.numbers import counted
from etrain_jupyter.errors import PoolError
from etrain_jupyter.log.events import TERMINAL_STATUSES
from etrain_jupyter.plugin import kind_of, load, pool_kinds
from etrain_jupyter.pools.base import Leftovers
from etrain_jupyter.pools.catalog import PoolEntry, files, read_catalog
from etrain_jupyter.pools.own_clusters import (
    address_of,
    forget_scheduler,
    note_scheduler,
    noted_schedulers,
)
from etrain_jupyter.pools.registry import get_pool, pool_at, pool_names, pool_of
from etrain_jupyter.pools.rpc import ask
from etrain_jupyter.process.address import SchedulerAddress
from etrain_jupyter.process.cluster_dir import ClusterDir, ClusterRecord, cluster_dirs
from etrain_jupyter.process.start_lock import start_lock
from etrain_jupyter.process.state_root import local_prefix
from etrain_jupyter.wire.requests import (
    ClusterFacts,
    DescribeCluster,
    ListCosts,
    ListJobs,
    ListNodes,
)


def describe_pools() -> str:
    """Return the pools and their running clusters, for ``%etrain pools``."""
    pools = {"local": "processes on this machine"}
    for entry in read_catalog().values():
        pools[entry.name] = f"{entry.kind}{location_of(entry)} ({entry.file})"
    clusters: dict[str, list[str]] = {}
    for cluster in cluster_dirs():
        record = cluster.record()
        if record is None:
            continue  # the cluster is starting or shutting down
        if record.is_alive:
            state = f"at {record.address}: {_state_of(cluster, record)}"
        elif record.is_here and not cluster.cluster_id.startswith("local-"):
            # Unlike local workers, machines and batch jobs outlive the keeper and keep costing
            # money.
            state = (
                "scheduler has died. The pool's next job takes over its machines; `%etrain down` "
                "terminates them"
            )
        else:
            continue
        clusters.setdefault(cluster.settings().pool, []).append(f"  {cluster.cluster_id} {state}")
    lines = []
    # The pool of a running cluster may be defined in a pools.yaml that is not read from this
    # folder. List the configured pools first, in the order of the files.
    for name in [*pools, *(name for name in clusters if name not in pools)]:
        lines.append(f"{name}: {pools.get(name, 'defined by a pools.yaml in another folder')}")
        lines += clusters.get(name, ["  no cluster is up"])
    if len(pools) == 1:
        lines.append(f"define other pools in {' or '.join(map(str, files()))}")
    return "\n".join(lines)


def _state_of(cluster: ClusterDir, record: ClusterRecord) -> str:
    """Return a cluster's load, and its cost if it has machines that cost money."""
    address = cluster.address(record)
    try:
        # Use short timeouts so that one hanging cluster does not delay the list of the others.
        state = describe_load(ask(address, DescribeCluster(), timeout_s=3.0))
        costs = ask(address, ListCosts(), timeout_s=3.0).costs
        nodes = ask(address, ListNodes(), timeout_s=3.0).nodes
    except PoolError as exc:
        return str(exc)
    # Local workers have no costs, so their line stays short.
    if not costs:
        return state
    rate = sum(node.get("price_usd_per_h") or 0.0 for node in nodes)
    spent = sum(cost["spent_usd"] for cost in costs)
    return f"{state}; {len(nodes)} machines for ${rate:.3g} per hour, ${spent:.3g} spent"


def describe_load(facts: ClusterFacts) -> str:
    """Return the number of workers and jobs of a cluster, and its idle time.

    >>> describe_load(ClusterFacts(cluster_id="c", pid=1, workers=1, jobs=0, idle_s=7.4))
    '1 worker, no job, idle for 7 s'
    """
    num_workers, num_jobs = facts.workers, facts.jobs
    workers = counted(num_workers, "worker")
    if not num_jobs:
        return f"{workers}, no job, idle for {facts.idle_s:.0f} s"
    return f"{workers}, {counted(num_jobs, 'job')}"


def location_of(entry: PoolEntry) -> str:
    """Return the address, region or partition in a pool's entry, without validating the entry."""
    place = next(filter(None, map(entry.values.get, ("address", "region", "queue"))), None)
    return f", {place}" if isinstance(place, str) else ""


def list_cluster_ids() -> list[str]:
    """Return the ids of this user's clusters on this machine, running, starting or dead."""
    records = [(cluster.cluster_id, cluster.record()) for cluster in cluster_dirs()]
    # A cluster without a record is starting or dead. Machines may share the state directory.
    return [cluster_id for cluster_id, record in records if record is None or record.is_here]


def down(cluster: str | None = None, *, all_clusters: bool = False, timeout_s: float = 10.0) -> str:
    """Shut down one cluster, a pool's clusters, or this notebook's idle clusters.

    Running jobs save a checkpoint first. Without ``cluster``, clusters with running jobs are kept,
    because the jobs may be those of another notebook.

    Args:
        cluster: Cluster id; or a pool name or address, for all clusters of that pool. On an
            existing Dask cluster, only our plugins are removed.
        all_clusters: Without ``cluster``, shut down all clusters of this user on this machine,
            and remove our plugins from all Dask schedulers to which this user submitted a job.
        timeout_s: Timeout per cluster for processes. Pools with machines get at least the
            ``down_s`` of their ``PoolKind``.

    Raises:
        PoolError: If there is no cluster with this id, or if processes or files remain.
    """
    # A pool's own `down` also uses tags to find clusters started from other machines.
    if cluster is not None and ("://" in cluster or cluster in pool_names()):
        limit_s = max(timeout_s, *(kind.down_s for kind in pool_kinds().values()))
        return report_ended({cluster: get_pool(cluster).down(timeout_s=limit_s)}, "")
    # Includes clusters that are starting or dead: `down` must clean up after those, too.
    ids = list_cluster_ids()
    if cluster is not None and cluster not in ids:
        raise PoolError(
            f"no cluster {cluster!r} is up. Nothing was stopped. Running clusters: "
            f"{', '.join(ids) or 'none'}. `%etrain ls --all` lists those that were started "
            "on other machines, and `%etrain reap` removes what they have left."
        )
    # Bind each pool to one cluster, so that the cluster's own settings apply, not the current
    # pools.yaml.
    here = {found.cluster_id: found for found in cluster_dirs()}
    keeps_busy = cluster is None and not all_clusters
    leftovers: dict[str, Leftovers] = {}
    kept: list[str] = []
    for cluster_id in ids if cluster is None else [cluster]:
        if keeps_busy and (why := _why_kept(here[cluster_id])):
            kept.append(f"{cluster_id} was kept: {why}")
            continue
        # The default of a few seconds is for processes; machines need minutes.
        kind = kind_of(cluster_id)
        limit_s = timeout_s if kind is None else max(timeout_s, kind.down_s)
        leftovers[cluster_id] = pool_of(here[cluster_id]).down(timeout_s=limit_s)
    for address in noted_schedulers() if cluster is None else []:
        try:
            end = _uninstall_from(address, keeps_busy=keeps_busy)
        except PoolError as exc:
            # The scheduler may be gone for good, which is not an error here.
            kept.append(f"{address.address} was not changed: {exc}")
        else:
            # None means that our plugins were not installed, so there is nothing to report.
            if end is not None:
                leftovers[f"etrain on {address.address}"] = end
    text = report_ended(leftovers, "" if kept else "No cluster is up.")
    return "\n".join([text] * bool(text) + kept)


def _why_kept(cluster: ClusterDir) -> str:
    """Return why ``down`` without a name keeps a cluster; empty if it may end."""
    address = address_of(cluster)
    if address is None:
        try:
            with start_lock(cluster.path.parent, cluster.lock_key, timeout_s=0.0):
                return ""  # dead
        except TimeoutError:
            return f"it is starting or shutting down. {_how_to_end(cluster.cluster_id)}"
    if cluster.cluster_id.startswith("local-"):
        is_ours, owner = cluster.prefix == local_prefix(), "another Python environment"
    else:
        is_ours, owner = cluster.settings().pool in pool_names(), "a pools.yaml in another folder"
    if not is_ours:
        return f"it belongs to {owner}. {_how_to_end(cluster.cluster_id)}"
    return _jobs_at(address, cluster.cluster_id)


def _jobs_at(address: SchedulerAddress, name: str) -> str:
    """Return which jobs keep a scheduler running; empty if it is idle.

    ``name`` is the argument with which ``down`` ends the cluster in any case.
    """
    how = _how_to_end(name)
    try:
        if ask(address, DescribeCluster()).idle_s > 0:
            return ""
        jobs = ask(address, ListJobs()).jobs
    except PoolError as exc:
        return f"it may have running jobs, but {exc} {how}"
    lines = [
        f"  {job['job_id']}: {job['status']}, step {job['step']:,} of {job['total_steps'] or '?'}"
        for job in jobs
        if job["status"] not in TERMINAL_STATUSES
    ]
    return "\n".join(["it has running jobs." if lines else "it runs a search.", *lines, how])


def _how_to_end(name: str) -> str:
    return f"To save and end it: %etrain down {name}. To end all clusters: %etrain down --all"


def _uninstall_from(address: SchedulerAddress, *, keeps_busy: bool) -> Leftovers | None:
    """Remove our plugins from a Dask scheduler; return None if it has none.

    Raises:
        PoolError: If the scheduler cannot be reached, or if ``keeps_busy`` and it has jobs.
    """
    pool = pool_at(address)
    end = None
    if pool.is_installed():
        if keeps_busy and (why := _jobs_at(address, address.address)):
            raise PoolError(why)
        end = pool.down()
    # Forget the scheduler only if nothing remains there; otherwise the next `down` retries.
    if not end:
        forget_scheduler(address.address)
    return end


def report_ended(leftovers: dict[str, Leftovers], if_none: str) -> str:
    """Return one line per cluster, or ``if_none``; raise ``PoolError`` if anything remains."""
    remaining = {cluster_id: left for cluster_id, left in leftovers.items() if left}
    if remaining:
        raise PoolError(
            "could not remove everything: "
            + "; ".join(f"{cluster_id}: {left}" for cluster_id, left in remaining.items())
            + ". Everything else was stopped. Retry; if that fails, kill the processes by hand, "
            "or remove the machines in the console of their provider."
        )
    return "\n".join(f"{cluster_id} has ended" for cluster_id in leftovers) or if_none


def describe_machines(*, region: str | None = None) -> str:
    """Return the machines of all clusters in the user's accounts, one per line.

    ``region`` is an additional region, next to those of ``pools.yaml``.
    """
    found = [load(kind.find)(region) for kind in pool_kinds().values() if kind.find]
    return "\n".join(found) or "No installed kind of pool has machines."


def bring_up(name: str, *, num_workers: int | None = None) -> str:
    """Start a pool's cluster before a job needs it; return its id and address."""
    pool = get_pool(name)
    address = pool.up()
    note_scheduler(address)
    if num_workers is not None:
        pool.want(num_workers, reason="requested with %etrain up")
    requested = "" if num_workers is None else f", {num_workers} workers requested"
    return f"{address.cluster_id} is up at {address.address}{requested}"
