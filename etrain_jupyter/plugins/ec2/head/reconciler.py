"""Reconcile the EC2 fleet with its desired state, in a background thread.

Each tick lists the machines, calls ``fleet.decide`` and acts. The thread runs in the head's process
and owns its state; see ``nodes`` for what it shares with the event loop. State that must survive
the head is written to disk before acting; the rest is recovered from EC2's tags and the bucket, so
that the next head continues where this one was killed::

    head 1                                EC2                     head 2
    fleet.json: request, token t
    CreateFleet(t)    ----------------->  launches i-1
    killed before the answer arrives                              reads fleet.json: t unanswered
                                          answers i-1 again <---- CreateFleet(t)
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from botocore.parsers import ResponseParserError

from etrain_jupyter.errors import PoolError, StoreError
from etrain_jupyter.plugins.ec2.aws_messages import AwsErrors, kind_of, message_of_error
from etrain_jupyter.plugins.ec2.deadline import DeadlineSchedule
from etrain_jupyter.plugins.ec2.ec2_api import (
    Clients,
    Instance,
    list_instances,
    placement_scores,
    tag_list,
    terminate,
)
from etrain_jupyter.plugins.ec2.fleet_launch import create_fleet
from etrain_jupyter.plugins.ec2.fleet_state import STATE_FILE, FleetState, LaunchRequest
from etrain_jupyter.plugins.ec2.head.cluster_files import Accounts, ClusterFiles
from etrain_jupyter.plugins.ec2.head.fleet import decide
from etrain_jupyter.plugins.ec2.head.fleet_messages import why_halted
from etrain_jupyter.plugins.ec2.head.roster import (
    DesiredFleet,
    FleetRoster,
    FleetSnapshot,
    Reports,
    is_left_to_ec2,
    nodes_of,
    snapshot_of,
)
from etrain_jupyter.plugins.ec2.head.spare_plan import SparePlan
from etrain_jupyter.plugins.ec2.head.view import Decision, Rules, View
from etrain_jupyter.plugins.ec2.launch_context import (
    AFTER_LIFE_S,
    LaunchContext,
    make_offers,
    workers_of,
)
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.pools.warning_limit import RateLimitedWarnings
from etrain_jupyter.process.files import write_private

logger = logging.getLogger(__name__)

STORE_LEDGER_S = 60.0
SCORES_S = 600.0
OUR_ERRORS = (StoreError, PoolError)
"""Errors whose messages need no further explanation."""
AWS_ERRORS = (*AwsErrors, ResponseParserError, *OUR_ERRORS)


@dataclass(kw_only=True)
class Timer:
    """Interval of a periodic action."""

    every_s: float
    last: float = float("-inf")

    def restart_if_due(self, now: float) -> bool:
        """Return whether the action is due; if so, restart the interval."""
        if now - self.last < self.every_s:
            return False
        self.last = now
        return True


class Reconciler:
    """One cluster's machines. The thread is called ``etrain-aws``."""

    def __init__(
        self,
        spec: AwsSpotSpec,
        cluster_id: str,
        clients: Clients,
        folder: Path,
        context: LaunchContext,
        reports: Reports,
    ) -> None:
        self.desired = DesiredFleet()
        self.snapshot = FleetSnapshot()
        self._spec = spec
        self._id = cluster_id
        self._clients = clients
        # Use this machine's disk, so that the write before a launch does not depend on the network.
        self._path = folder / STATE_FILE
        self._context = context
        self._reports = reports
        self._rules = Rules.of(spec, cluster_id)
        self._schedule = DeadlineSchedule.of(spec)
        self._spares = SparePlan(spares=spec.capacity.spares, max_workers=spec.workers.max)
        self._files = ClusterFiles(clients.bucket, cluster_id)
        self._accounts = Accounts(spec, cluster_id, clients, self._files)
        self._roster = FleetRoster(
            self._files,
            clients,
            reports,
            max_failures=self._rules.max_boot_failures,
            installs=bool(spec.image.manifest),
        )
        self._warnings = RateLimitedWarnings(reports.warning)
        self._state = FleetState()
        self._scores: dict[str, int] = {}
        self._scheduler = ""
        self._renewals = 0
        self._detail = ""
        self._is_halt_reported = False
        self._is_failing = False
        # Three renewals may fail before the lease is stale. `spec` ensures lease_ttl >= 4 ticks.
        self._lease_timer = Timer(every_s=spec.lifetime.lease_ttl / 4)
        self._ledger_timer = Timer(every_s=STORE_LEDGER_S)
        self._scores_timer = Timer(every_s=SCORES_S)
        # `set_up` and the launches have just set the tag.
        self._tags_timer = Timer(every_s=spec.lifetime.max / 4, last=time.time())
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="etrain-aws", daemon=True)

    # --- from other threads ---

    def adopt(self, scheduler: str) -> None:
        """Load the state of previous heads and acquire the lease. Blocks; call it before ``start``.

        Raises:
            StoreError: If the bucket cannot be read or written.
        """
        self._scheduler = scheduler
        # Use the number in the bucket, because a head on another machine does not have fleet.json.
        # A higher number shows workers that this is a new scheduler, and makes new tokens unique.
        life = self._files.num_lives() + 1
        # The file is on this machine's disk, so it is from a head that ran here and died: repeat
        # its unanswered requests. Everything else about machines comes from the listing.
        if self._path.exists():
            self._state = FleetState.from_dict(json.loads(self._path.read_text()))
        self._state = self._state.with_(life=life)
        self._accounts.ledger = self._files.ledger()
        # Unlike later renewals, this one raises: no node would find this head without the lease.
        self._renew_lease(time.time())

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Start the next tick now."""
        self._wake.set()

    def stop(self) -> None:
        """Stop the thread and wait for it."""
        self._closing.set()
        self._wake.set()
        # `stop` may be called without `start`, if the cluster failed to start.
        if self._thread.is_alive():
            self._thread.join()

    def settle(self) -> None:
        """Store the final ledger after the machines have ended. Blocks; call it after ``stop``."""
        now = time.time()
        try:
            self._record_costs(list_instances(self._clients.ec2, cluster_id=self._id), now)
            self._publish(now)
            self._accounts.store(now)
        # This is not fatal, because the stored ledger is at most STORE_LEDGER_S old, and `reap`
        # finds the machines.
        except AWS_ERRORS as exc:
            logger.warning("the final ledger of %s was not stored: %s", self._id, exc)

    # --- the thread ---

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._tick()
                if self._is_failing:
                    self._is_failing = False
                    self._reports.warning(
                        "EC2 answers again. Launches and terminations have resumed."
                    )
            except AWS_ERRORS as exc:
                self._report_failure(exc)
            except Exception:  # top of the thread: it must keep renewing the lease
                logger.exception("a tick of cluster %s failed", self._id)
                self._warnings.warn(
                    "tick", "Checking EC2 failed; see the head's log. The next check retries."
                )
            # Wait after an error, too. Each tick starts from a listing, so the next one retries
            # everything.
            self._wake.wait(self._spec.tick)
            self._wake.clear()

    def _report_failure(self, exc: Exception) -> None:
        message = str(exc) if isinstance(exc, OUR_ERRORS) else message_of_error(exc)
        consequence = "Nodes keep running; the next check retries."
        # The user renews credentials outside of this process, for example with `aws sso login`.
        # Existing clients keep the credentials that they have read.
        if kind_of(exc.__cause__ or exc) == "credentials":
            self._clients.forget()
            consequence = (
                "Nodes keep running, but not for long: without credentials the lease is not "
                f"renewed, and {self._spec.lifetime.lease_ttl:g} s after the last renewal they "
                "turn themselves off."
            )
        text = f"EC2 cannot be reached: {message}. {consequence}"
        # Report the recovery only if the failure was reported, and not if its warning was
        # suppressed.
        self._is_failing |= self._warnings.warn("aws", text)

    def _tick(self) -> None:
        now = time.time()
        # Renew the lease first, because an error below ends the tick. While EC2's API fails but S3
        # works, the lease must stay valid, so that nodes do not turn themselves off.
        if self._lease_timer.restart_if_due(now):
            self._renew_lease(now)
        # Read it only once, because the event loop may replace the value at any time during this
        # tick.
        desired = self.desired
        instances = list_instances(self._clients.ec2, cluster_id=self._id)
        types = {*self._context.types, *(one.type for one in instances)}
        self._accounts.refresh_prices(types, now)
        self._state = self._roster.update(
            nodes_of(instances, self._spec, self._context),
            desired,
            self._state.listed(one.id for one in instances),
            now,
        )
        self._record_costs(instances, now)
        # Publish before reporting the machines that are gone, because a callback may call nodes(),
        # which must no longer list them.
        self._publish(now)
        self._roster.report_gone()
        self._detail = self._roster.last_failure or self._detail
        has_zones = len(self._context.subnets) > 1 and desired.wanted
        if has_zones and self._scores_timer.restart_if_due(now):
            self._scores = placement_scores(
                self._clients.ec2, list(self._context.types), desired.wanted, self._spec.region
            )
        view = self._view(desired, now)
        if self._schedule is not None:
            plan = self._schedule.plan(desired.jobs, view.machines, view.wanted, now)
            view = replace(view, on_demand=plan.on_demand)
            for warning in plan.warnings:
                self._warnings.warn(warning.key, warning.text)
        decision = decide(self._state, self._rules, view)
        self._state = decision.state
        self._act(decision, desired, now)
        # Publish again, including the releases and terminations of this tick.
        self._publish(now)
        if self._ledger_timer.restart_if_due(now):
            self._accounts.store(now)
        if self._tags_timer.restart_if_due(now):
            self._postpone_expiry(instances, now)

    def _view(self, desired: DesiredFleet, now: float) -> View:
        book = self._accounts.prices.book
        wanted, machines = (
            max(desired.wanted, self._spec.workers.min),
            self._roster.machines(desired),
        )
        rows = self._accounts.ledger.rows.values()
        sizes = [(job.gradient_bytes, job.steps_per_s) for job in desired.jobs]
        gradient_bytes, steps_per_s = max(
            sizes, key=lambda one: one[0] * one[1], default=(0.0, 0.0)
        )
        return View(
            now=now,
            wanted=wanted,
            machines=machines,
            spares=self._spares.num(desired.jobs, machines, rows, wanted, now),
            gradient_bytes=gradient_bytes,
            steps_per_s=steps_per_s,
            offers=make_offers(
                self._spec, self._context.types, self._context.subnets, book, self._scores, now
            ),
            spent_usd=self._accounts.spent_usd(now),
            rate_usd=self._accounts.rate_usd(now),
            type_rates=next((job.type_rates for job in desired.jobs if job.type_rates), {}),
        )

    # --- acting ---

    def _act(self, decision: Decision, desired: DesiredFleet, now: float) -> None:
        self._roster.release(decision.releases, desired, now, drain_s=self._spec.interruption.drain)
        ends = {id for id, _ in decision.terminations}
        for id, why in decision.terminations:
            # A machine terminated because the budget is spent is not a boot failure.
            if id not in self._roster.ending and self._state.halted != "budget":
                self._roster.report_failure(id, why)
                self._detail = self._roster.last_failure
            self._roster.ending[id] = why
        ends |= self._due(desired, now)
        # Terminate before launching, because quotas and the budget count machines that are still
        # running.
        terminate(self._clients.ec2, sorted(ends))
        self._look_up(decision.lookups, now)
        self._write_state()
        for request in decision.launches:
            # `remove` lists and terminates the machines after `stop`. A machine launched now might
            # not be listed in time.
            if not self._closing.is_set():
                self._launch(request)
        for warning in decision.warnings:
            self._warnings.warn(warning.key, warning.text)
        # Each head reports a halt once. A new head repeats the report of a halt in fleet.json.
        if self._state.halted and not self._is_halt_reported:
            self._is_halt_reported = True
            self._reports.halt(
                why_halted(
                    self._state,
                    self._rules,
                    spent_usd=self._accounts.spent_usd(now),
                    rate_usd=self._accounts.rate_usd(now),
                    detail=self._detail,
                )
            )

    def _due(self, desired: DesiredFleet, now: float) -> set[str]:
        """Return the nodes to terminate now; the request is repeated while they are listed.

        ==================================  ====================================================
        already ended, or killed            now
        leaving, not used by a job          now
        leaving, used by a job              when its drain time is over
        ... but EC2 will reclaim it free    left to EC2 (``first_hour: wait-for-ec2``)
        ==================================  ====================================================
        """
        due = set()
        # The rules and the coordinator release nodes; the coordinator's deadlines take precedence.
        leaving = {**self._roster.leaving, **desired.releasing}
        for id, member in self._roster.members.items():
            if id in self._roster.ending or id in desired.killing:
                # Repeated until the machine is no longer listed: `terminate` may have failed or
                # come too early.
                due.add(id)
            elif id in leaving and (id not in desired.busy or now >= leaving[id]):
                notice = desired.noticed.get(id)
                if self._spec.interruption.first_hour == "wait-for-ec2" and is_left_to_ec2(
                    member.instance, notice, now
                ):
                    continue
                self._roster.ending[id] = "released"
                due.add(id)
        return due

    def _look_up(self, ids: Sequence[str], now: float) -> None:
        """Query machines that EC2 acknowledged but never listed; terminate any not found."""
        if not ids:
            return
        found = {one.id for one in list_instances(self._clients.ec2, ids=ids)}
        missing = set(ids) - found
        # EC2 may not find a machine that is running, so terminate it to be safe.
        terminate(self._clients.ec2, sorted(missing))
        self._state = self._state.looked_up(found, missing, now)

    def _launch(self, request: LaunchRequest) -> None:
        # Write this before the request, so that after a crash, the same token returns the same
        # machines.
        self._state = self._state.sent(request, time.time())
        self._write_state()
        answer = create_fleet(
            self._clients.launcher,
            request,
            template_id=self._context.template_id,
            subnets=self._context.subnets,
            allocation=self._spec.capacity.allocation,
            tags=self._context.tags,
            # Only `stop` ends a pause early: a wake-up must not turn the back-off into a busy loop.
            pause=self._closing.wait,
        )
        # The request stays in `unanswered`, and `decide` repeats it in the next tick.
        if answer is None:
            self._warnings.warn(
                "unanswered",
                f"EC2 has not answered a request for {request.num_nodes} nodes. The next attempt "
                "uses the same token, so that no machine is launched twice.",
            )
            return
        self._state = self._state.answered(request, answer, time.time())
        self._write_state()
        logger.info(
            "requested %d %s nodes, got %s; refused: %s",
            request.num_nodes,
            request.lifecycle,
            [ack.id for ack in answer.acks],
            sorted({one.code for one in answer.refusals}),
        )
        for one in answer.refusals:
            # Missing capacity is normal for spot machines: `plan_launch` warns when nothing is left
            # to try.
            if one.kind in ("quota", "fatal"):
                place = f" of {one.type} in {one.zone}" if one.type else ""
                self._detail = f"EC2 refused a launch{place}: {one.message}."
                self._warnings.warn(f"refused {one.code}", self._detail)
        if answer.acks:
            # Tick again immediately, because there may be more to launch, and the new machines will
            # be listed soon.
            self._wake.set()

    def _write_state(self) -> None:
        write_private(self._path, json.dumps(self._state.to_dict()))

    # --- lease, costs, tags ---

    def _renew_lease(self, now: float) -> None:
        try:
            self._files.renew_lease(self._scheduler, self._state.life, self._renewals)
            self._renewals += 1
            self._lease_timer.last = now
        except StoreError as exc:
            # The first renewal acquires the lease; see `adopt`.
            if not self._renewals:
                raise
            # Retry in the next tick instead of after a quarter of the lease's duration.
            self._lease_timer.last = now - self._lease_timer.every_s + self._spec.tick
            ttl = self._spec.lifetime.lease_ttl
            self._warnings.warn(
                "lease",
                f"{exc}. Nodes turn themselves off {ttl:g} s after the last renewal; it is "
                f"retried every {self._spec.tick:g} s.",
            )

    def _record_costs(self, instances: Sequence[Instance], now: float) -> None:
        # A listing may lack a running machine; the roster has checked each by id. At the end the
        # roster is stale: `settle` runs after `remove`, which waits for listings without machines.
        living = () if self._closing.is_set() else self._roster.members
        self._accounts.record(instances, living, now)

    def _publish(self, now: float) -> None:
        self.snapshot = snapshot_of(
            self._roster,
            self._accounts.ledger,
            self._accounts.prices.book,
            now,
            num_workers_of=lambda type: workers_of(self._spec, self._context.types.get(type)),
        )

    def _postpone_expiry(self, instances: Sequence[Instance], now: float) -> None:
        """Postpone the time from which ``etrain reap`` may remove this running cluster."""
        ids = [one.id for one in instances if one.is_living]
        ids.append(self._context.template_id)
        if self._context.network.is_ours:
            ids.append(self._context.network.security_group)
        expires = str(int(now + self._spec.lifetime.max + AFTER_LIFE_S))
        tags = tag_list({"etrain:expires": expires})
        self._clients.ec2.create_tags(Resources=ids, Tags=tags)
