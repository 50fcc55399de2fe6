"""The thread that makes EC2 be what is wanted: it looks, decides by ``fleet``, and acts.

It runs in the head's process and owns all that it knows; the event loop gives it ``orders`` and
reads its ``snapshot``, two values that are swapped whole. What it must not forget is written to the
head's disk before it acts; the rest it finds again in EC2's tags and in the bucket, so that the
next head goes on where this one was killed.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from botocore.parsers import ResponseParserError

from etrain_jupyter.errors import CheckpointError, PoolError
from etrain_jupyter.pools.ec2.aws_messages import AwsErrors, kind_of, words_of_error
from etrain_jupyter.pools.ec2.ec2_api import (
    Clients,
    Instance,
    create_fleet,
    list_instances,
    placement_scores,
    tag_list,
    terminate,
)
from etrain_jupyter.pools.ec2.fleet_state import MEMORY_FILE, FleetState, LaunchRequest
from etrain_jupyter.pools.ec2.head.cluster_files import ClusterFiles
from etrain_jupyter.pools.ec2.head.desired_fleet import (
    DesiredFleet,
    Reports,
    Snapshot,
    worker_names,
)
from etrain_jupyter.pools.ec2.head.fleet import decide
from etrain_jupyter.pools.ec2.head.fleet_messages import why_halted
from etrain_jupyter.pools.ec2.head.roster import (
    FleetNode,
    FleetRoster,
    is_left_to_ec2,
    rows_of,
    snapshot_of,
)
from etrain_jupyter.pools.ec2.head.view import Decision, Machine, Rules, View
from etrain_jupyter.pools.ec2.launch_context import (
    AFTER_LIFE_S,
    LaunchContext,
    Renewal,
    workers_of,
)
from etrain_jupyter.pools.ec2.ledger import Ledger
from etrain_jupyter.pools.ec2.prices import Prices
from etrain_jupyter.pools.ec2.spec import AwsSpotSpec
from etrain_jupyter.process.files import write_private

logger = logging.getLogger(__name__)

KEEP_S = 60.0
SCORES_S = 600.0
SAY_AGAIN_S = 600.0
"""The same warning is repeated after that time if it still holds."""
AWS_FAILURES = (*AwsErrors, ResponseParserError, CheckpointError, PoolError)


@dataclass(kw_only=True)
class Timers:
    """What is done less often than every tick."""

    lease: Renewal
    tags: Renewal
    ledger: Renewal = field(default_factory=lambda: Renewal(every_s=KEEP_S))
    scores: Renewal = field(default_factory=lambda: Renewal(every_s=SCORES_S))


class Reconciler:
    """One cluster's machines. Its thread is called ``etrain-aws``.

    Args:
        spec: What is allowed.
        cluster_id: Whose machines.
        clients: Of AWS.
        folder: On this machine's disk, for what must survive the head.
        around: What launches refer to.
        reports: Who is told.
    """

    def __init__(
        self,
        spec: AwsSpotSpec,
        cluster_id: str,
        clients: Clients,
        folder: Path,
        around: LaunchContext,
        reports: Reports,
    ) -> None:
        self.orders = DesiredFleet()
        self.snapshot = Snapshot()
        self._spec = spec
        self._id = cluster_id
        self._clients = clients
        self._path = folder / MEMORY_FILE
        self._around = around
        self._reports = reports
        self._rules = Rules.of(spec, cluster_id)
        self._files = ClusterFiles(clients.bucket, cluster_id)
        self._prices = Prices(clients=clients, region=spec.region, volume_type=spec.volume.type)
        self._roster = FleetRoster(self._files, clients, reports)
        self._memory = FleetState()
        self._ledger = Ledger()
        self._scores: dict[str, int] = {}
        self._said: dict[str, float] = {}
        self._scheduler = ""
        self._renewals = 0
        self._detail = ""
        self._has_halted = False
        self._is_troubled = False
        self._timers = Timers(
            lease=Renewal(every_s=spec.lifetime.lease_ttl / 4),
            tags=Renewal(every_s=spec.lifetime.max / 4, last=time.time()),
        )
        self._wake = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="etrain-aws", daemon=True)

    # --- from other threads ---

    def adopt(self, scheduler: str) -> None:
        """Take over what heads before have left, and take the lease; blocks, before ``start``.

        Raises:
            CheckpointError: If the bucket does not answer.
        """
        self._scheduler = scheduler
        life = self._files.num_lives() + 1
        if self._path.exists():
            self._memory = FleetState.from_dict(json.loads(self._path.read_text()))
        self._memory = self._memory.with_(life=life)
        self._ledger = self._files.ledger()
        self._renew_lease(time.time())

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wake(self) -> None:
        """Look at once."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread; blocks until it has."""
        self._is_closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def settle(self) -> None:
        """Close the books after everything has ended; blocks, after ``stop``."""
        now = time.time()
        try:
            self._note_money(list_instances(self._clients.ec2, cluster_id=self._id), now)
            self._publish(now)
            self._keep_ledger(now)
        except AWS_FAILURES as exc:
            logger.warning("the ledger of %s was not closed: %s", self._id, exc)

    # --- the thread ---

    def _run(self) -> None:
        while not self._is_closing:
            try:
                self._tick()
                self._calm()
            except AWS_FAILURES as exc:
                self._explain(exc)
            except Exception:  # the top of the thread: machines must not be left to themselves
                logger.exception("a look at the machines of %s failed", self._id)
                self._warn("tick", "A look at EC2 failed; see the head's log. It is tried again.")
            self._wake.wait(self._spec.tick)
            self._wake.clear()

    def _explain(self, exc: Exception) -> None:
        words = str(exc) if isinstance(exc, SELF_EXPLANATORY) else words_of_error(exc)
        fate = "Nodes run on; it is tried again soon."
        if kind_of(exc.__cause__ or exc) == "credentials":
            self._clients.forget()
            fate = (
                "Nodes run on, but not for long: without credentials the lease is not renewed, and "
                f"{self._spec.lifetime.lease_ttl:g} s after the last renewal they end themselves."
            )
        self._is_troubled |= self._warn("aws", f"EC2 cannot be asked: {words}. {fate}")

    def _calm(self) -> None:
        """Say that what was told of EC2 is over."""
        if self._is_troubled:
            self._is_troubled = False
            self._reports.warning("EC2 answers again. Nodes are launched and ended as before.")

    def _tick(self) -> None:
        now = time.time()
        if self._timers.lease.is_due(now):
            self._renew_lease(now)
        orders = self.orders
        instances = list_instances(self._clients.ec2, cluster_id=self._id)
        self._prices.refresh(
            {*self._around.types, *(one.type for one in instances)},
            since=min((r.launched_at for r in self._ledger.rows.values()), default=now) - 60,
            now=now,
        )
        members = self._members(instances)
        self._memory = self._roster.look(
            members,
            orders,
            self._memory.listed(one.id for one in instances),
            self._rules.max_boot_failures,
            now,
        )
        self._note_money(instances, now)
        self._publish(now)
        self._roster.tell_gone()
        self._detail = self._roster.last_failure or self._detail
        if self._timers.scores.is_due(now) and orders.wanted and len(self._around.subnets) > 1:
            self._scores = placement_scores(
                self._clients.ec2, list(self._around.types), orders.wanted, self._spec.region
            )
        decision = decide(self._memory, self._rules, self._view(orders, now))
        self._memory = decision.memory
        self._act(decision, orders, now)
        self._publish(now)
        if self._timers.ledger.is_due(now):
            self._keep_ledger(now)
        if self._timers.tags.is_due(now):
            self._extend(instances, now)

    def _members(self, instances: Sequence[Instance]) -> list[FleetNode]:
        """Return the nodes of what EC2 lists."""
        found = []
        for one in instances:
            if one.tags.get("etrain:role", "node") == "node":
                facts = self._around.types.get(one.type)
                names = worker_names(one.id, workers_of(self._spec, facts))
                device = "cuda:0" if facts and facts.gpus else "cpu"
                found.append(FleetNode(instance=one, workers=names, device=device))
        return found

    def _view(self, orders: DesiredFleet, now: float) -> View:
        machines = []
        for member in self._roster.members.values():
            one = member.instance
            leaving = one.id in orders.releasing or one.id in self._roster.leaving
            machines.append(
                Machine(
                    id=one.id,
                    type=one.type,
                    zone=one.zone,
                    lifecycle=one.lifecycle,
                    workers=len(member.workers),
                    launched_at=one.launched_at,
                    is_ready=one.id in self._roster.hello,
                    is_leaving=leaving,
                    is_at_risk=one.id in orders.noticed,
                    is_busy=one.id in orders.busy,
                )
            )
        book = self._prices.book
        return View(
            now=now,
            wanted=max(orders.wanted, self._spec.workers.min),
            machines=tuple(machines),
            offers=self._around.offers(self._spec, book, self._scores, now),
            spent_usd=self._ledger.committed(book, now),
            rate_usd=self._ledger.rate(book, now),
        )

    # --- acting ---

    def _act(self, decision: Decision, orders: DesiredFleet, now: float) -> None:
        self._roster.let_go(decision.releases, orders, now, drain_s=self._spec.interruption.drain)
        ends = {id for id, _ in decision.terminations}
        for id, why in decision.terminations:
            if id not in self._roster.ending and self._memory.halted != "budget":
                self._roster.explain(id, why)
                self._detail = self._roster.last_failure
            self._roster.ending[id] = why
        ends |= self._due(orders, now)
        terminate(self._clients.ec2, sorted(ends))
        self._look_up(decision.lookups, now)
        self._write_memory()
        for request in decision.launches:
            if not self._is_closing:
                self._launch(request)
        for kind, text in decision.warnings:
            self._warn(kind, text)
        if self._memory.halted and not self._has_halted:
            self._has_halted = True
            book = self._prices.book
            self._reports.halt(
                why_halted(
                    self._memory,
                    self._rules,
                    spent_usd=self._ledger.committed(book, now),
                    rate_usd=self._ledger.rate(book, now),
                    detail=self._detail,
                )
            )

    def _due(self, orders: DesiredFleet, now: float) -> set[str]:
        """Return the nodes whose time has come; those that are still listed, again and again."""
        due = set()
        leaving = {**self._roster.leaving, **orders.releasing}
        for id, member in self._roster.members.items():
            if id in self._roster.ending or id in orders.killing:
                due.add(id)
            elif id in leaving and (id not in orders.busy or now >= leaving[id]):
                notice = orders.noticed.get(id)
                if self._spec.interruption.first_hour == "wait-for-ec2" and is_left_to_ec2(
                    member.instance, notice, now
                ):
                    continue
                self._roster.ending[id] = "released"
                due.add(id)
        return due

    def _look_up(self, ids: Sequence[str], now: float) -> None:
        """Ask for machines that EC2 acknowledged and never listed; end those that it denies."""
        if not ids:
            return
        found = {one.id for one in list_instances(self._clients.ec2, ids=ids)}
        missing = set(ids) - found
        # EC2 may deny one that runs.
        terminate(self._clients.ec2, sorted(missing))
        self._memory = self._memory.looked_up(found, missing, now)

    def _launch(self, request: LaunchRequest) -> None:
        self._memory = self._memory.sent(request, time.time())
        self._write_memory()
        answer = create_fleet(
            self._clients.launcher,
            request,
            template_id=self._around.template_id,
            subnets=self._around.subnets,
            allocation=self._spec.capacity.allocation,
            tags=self._around.tags,
            pause=self._wake.wait,
        )
        if answer is None:
            self._warn(
                "unanswered",
                f"EC2 has not answered a request for {request.num_nodes} nodes. It is repeated "
                "under the same token, so that no machine is launched twice.",
            )
            return
        self._memory = self._memory.answered(request, answer, time.time())
        self._write_memory()
        logger.info(
            "asked for %d %s nodes, got %s; refused: %s",
            request.num_nodes,
            request.lifecycle,
            [ack.id for ack in answer.acks],
            sorted({one.code for one in answer.refusals}),
        )
        for one in answer.refusals:
            if one.kind in ("quota", "fatal"):
                place = f" of {one.type} in {one.zone}" if one.type else ""
                self._detail = f"EC2 refused a launch{place}: {one.message}."
                self._warn(f"refused {one.code}", self._detail)
        if answer.acks:
            self._wake.set()

    def _write_memory(self) -> None:
        write_private(self._path, json.dumps(self._memory.to_dict()))

    # --- lease, money, tags ---

    def _renew_lease(self, now: float) -> None:
        try:
            self._files.renew_lease(self._scheduler, self._memory.life, self._renewals)
            self._renewals += 1
            self._timers.lease.last = now
        except CheckpointError as exc:
            if not self._renewals:
                raise
            self._timers.lease.last = now - self._timers.lease.every_s + self._spec.tick
            ttl = self._spec.lifetime.lease_ttl
            self._warn(
                "lease",
                f"{exc}. Nodes end themselves {ttl:g} s after the last renewal; it is tried again "
                f"every {self._spec.tick:g} s.",
            )

    def _note_money(self, instances: Sequence[Instance], now: float) -> None:
        rows = rows_of(
            instances,
            self._ledger,
            now,
            volume_gib=self._spec.volume.gib,
            living=() if self._is_closing else self._roster.members,
        )
        self._ledger = self._ledger.with_rows(rows)

    def _keep_ledger(self, now: float) -> None:
        facts = {
            "cluster_id": self._id,
            "region": self._spec.region,
            "prices": self._prices.describe(),
            "max_total": self._spec.budget.max_total,
        }
        self._files.keep_ledger(self._ledger, self._prices.book, now, facts)

    def _publish(self, now: float) -> None:
        self.snapshot = snapshot_of(
            self._roster,
            self._ledger,
            self._prices.book,
            now,
            workers_of=lambda type: workers_of(self._spec, self._around.types.get(type)),
            prices=self._prices.describe(),
            halted=self._memory.halted,
        )

    def _extend(self, instances: Sequence[Instance], now: float) -> None:
        """Put off the instant from which what is ours may be reaped: the head lives."""
        ids = [one.id for one in instances if one.is_living]
        ids.append(self._around.template_id)
        if self._around.network.is_ours:
            ids.append(self._around.network.security_group)
        expires = str(int(now + self._spec.lifetime.max + AFTER_LIFE_S))
        tags = tag_list({"etrain:expires": expires})
        self._clients.ec2.create_tags(Resources=ids, Tags=tags)

    def _warn(self, key: str, text: str) -> bool:
        """Tell the jobs something, unless it was told not long ago; return whether it was."""
        now = time.time()
        if now - self._said.get(key, float("-inf")) < SAY_AGAIN_S:
            return False
        self._said[key] = now
        logger.warning("%s", text)
        self._reports.warning(text)
        return True


SELF_EXPLANATORY = (CheckpointError, PoolError)
"""These say already what is to be said."""
