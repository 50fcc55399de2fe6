"""Base class of pools whose entry in ``pools.yaml`` describes machines of another system."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from etrain_jupyter.config.cell import parse_section
from etrain_jupyter.config.fields import Section
from etrain_jupyter.config.source_map import NOWHERE, SourceMap
from etrain_jupyter.pools.base import CostReport
from etrain_jupyter.pools.catalog import PoolEntry
from etrain_jupyter.pools.detached import DetachedPool
from etrain_jupyter.pools.rpc import ask
from etrain_jupyter.process.cluster_dir import ClusterDir, cluster_dirs
from etrain_jupyter.process.cluster_settings import ClusterSettings
from etrain_jupyter.process.state_root import environment_key, state_root
from etrain_jupyter.wire.requests import ListCosts


class PoolSpec(Section):
    """The keys of a pool's entry."""

    @classmethod
    def parse(cls, data: Mapping[str, Any], source: SourceMap = NOWHERE) -> Self:
        """Parse a pool's keys, or the result of ``to_dict``.

        Raises:
            ConfigError: If a key is invalid, with its path, and its line if there is a file.
        """
        return parse_section(data, cls, source)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, without defaults."""
        return self.model_dump(mode="json", exclude_unset=True)


S = TypeVar("S", bound=PoolSpec)


class SpecPool(DetachedPool, Generic[S]):
    """A pool of machines that can be found without the head, for example by their names.

    Args:
        name: The pool's name in a cell.
        spec: The pool's entry in ``pools.yaml``.
        cluster_id: Bind the object to this cluster; by default, the pool's running cluster.
        change: Changes the head's settings; for tests.
    """

    kind_prefix: ClassVar[str]
    """First word of the cluster ids."""
    spec_type: ClassVar[type[PoolSpec]]
    nodes_path: ClassVar[str]
    """Factory of the head's node source, as ``package.module:attribute``."""
    identity_keys: ClassVar[tuple[str, ...]]
    """Keys in which two pools of the same name differ if they are different pools."""

    def __init__(
        self,
        name: str,
        spec: S,
        *,
        cluster_id: str | None = None,
        change: Callable[[ClusterSettings], ClusterSettings] = lambda settings: settings,
    ) -> None:
        # Pools with the same name in two notebooks' folders are different pools, unless they share
        # these keys, state directory and Python environment.
        keys = (getattr(spec, key) for key in self.identity_keys)
        text = "\n".join(map(str, (name, *keys, state_root(), environment_key())))
        digest = hashlib.sha256(text.encode()).hexdigest()[:6]
        super().__init__(name=name, prefix=f"{self.kind_prefix}-{digest}", cluster_id=cluster_id)
        self.spec = spec
        self._change = change

    @classmethod
    def from_entry(cls, entry: PoolEntry) -> Self:
        """Return the pool of an entry of ``pools.yaml``; nothing is started yet.

        Raises:
            ConfigError: If a key is invalid, with its position in the file.
        """
        spec: Any = entry.read_as(cls.spec_type)
        return cls(entry.name, spec)

    @classmethod
    def of_cluster(cls, cluster: ClusterDir) -> Self:
        """Return the pool of a cluster that has a folder on this machine."""
        settings = cluster.settings()
        # Use the spec from the start of the cluster, because pools.yaml may have changed since.
        spec: Any = cls.spec_type.parse(settings.spec)
        return cls(settings.pool, spec, cluster_id=cluster.cluster_id)

    def prepare_start(self, root: Path) -> ClusterDir | None:
        """Return the folder of a cluster whose head has died, to take it over with its machines.

        A dead cluster without machines is removed; otherwise its jobs would unexpectedly resume and
        cost money. Users can resume them with ``%etrain resume``.
        """
        for cluster in cluster_dirs(root):
            record = cluster.record()
            if cluster.prefix != self._prefix or (record is not None and not record.is_here):
                continue  # belongs to another pool, or to another machine that shares the folder
            #   record    machines        action
            #   dead      yes, or maybe   take over: a new head finds jobs, state and machines
            #   dead      none            remove what is left
            #   none      any             remove: its start or shutdown is incomplete
            #
            # Called under the start lock, after `_find` found no running head, so any record is
            # that of a dead head.
            if record is not None and self._may_have_machines(cluster):
                return cluster
            self.of_cluster(cluster).down()
        return None

    def cost(self) -> CostReport:
        """Return what the machines of the running cluster have cost so far."""
        costs = ask(self._address(), ListCosts()).costs
        return CostReport(
            spent_usd=sum(one["spent_usd"] for one in costs),
            on_demand_usd=sum(one["on_demand_usd"] for one in costs),
            node_hours=sum(one["hours"] for one in costs),
        )

    def _may_have_machines(self, cluster: ClusterDir) -> bool:
        """Return whether a cluster whose head has died may still have machines."""
        raise NotImplementedError

    def _settings_for(
        self, spec: S, *, idle_s: float, linger_s: float, **at: Any
    ) -> ClusterSettings:
        """Return the settings for the head of a new cluster; ``at`` has its host and port."""
        return self._change(
            ClusterSettings(
                idle_s=idle_s,
                linger_s=linger_s,
                pool=self.name,
                prefix=self._prefix,
                nodes=self.nodes_path,
                spec=spec.to_dict(),
                **at,
            )
        )
