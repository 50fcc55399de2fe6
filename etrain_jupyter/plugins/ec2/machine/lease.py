"""The lease: an object that the cluster's head renews; without it, nodes turn themselves off.

Its age is computed only from S3's clock (``Date`` minus ``Last-Modified``), so it does not depend
on the machines' clocks. One stale check is not enough, because a renewal may just be late::

    age      280 s    310 s     340 s          280 s    310 s    20 s
    check      |--------|---------|              |--------|--------|
             valid    stale 1   stale 2: lost  valid    stale 1  renewed: valid

If S3 cannot be reached for longer than the lease is valid, that counts as stale, too.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from etrain_jupyter.errors import StoreError
from etrain_jupyter.storage.objects.s3_bucket import Bucket

logger = logging.getLogger("etrain.agent")

LEASE = "lease.json"
STUCK_S = 60.0
"""A check that is overdue by this many seconds is considered stuck."""


class LeaseRule:
    """Decide when a lease is lost: after two stale checks, at least ``grace_s`` apart.

    Time is an argument, taken from a monotonic clock.

    >>> rule = LeaseRule(ttl_s=60, grace_s=10, now=0)
    >>> [rule.take(age_s, now) for age_s, now in [(5, 1), (61, 60), (71, 65), (81, 71)]]
    ['', '', '', 'the lease is 81 s old; it is valid for 60 s']
    """

    def __init__(self, *, ttl_s: float, grace_s: float, now: float) -> None:
        self._ttl_s = ttl_s
        self._grace_s = grace_s
        self._answered_at = now
        """When S3 last answered."""
        self._stale_since: float | None = None
        self._num_stale = 0

    def take(self, age_s: float | None, now: float, error: str = "") -> str:
        """Process one check; return why the lease is lost, or an empty string.

        ``age_s`` is infinite if the lease does not exist, and None if S3 did not respond.
        """
        if age_s is not None:
            self._answered_at = now
        if age_s is None:
            # A missing response does not make the lease stale, because the head may be renewing the
            # lease while only this node has lost access to S3. The node therefore gets as much time
            # without S3 as without a renewal.
            silent_s = now - self._answered_at
            is_stale = silent_s > self._ttl_s
            reason = f"the lease could not be read for {silent_s:.0f} s ({error})"
        else:
            is_stale = age_s >= self._ttl_s
            reason = f"the lease is {age_s:.0f} s old"
            # An object that does not exist is stale at once: the cluster's files were removed.
            if age_s == float("inf"):
                reason = "there is no lease"
        if not is_stale:
            # A valid check resets the count, because the stale checks must be consecutive.
            self._stale_since, self._num_stale = None, 0
            return ""
        self._num_stale += 1
        if self._stale_since is None:
            self._stale_since = now
        # Two checks in quick succession could fail because of the same late renewal.
        if self._num_stale < 2 or now - self._stale_since < self._grace_s:
            return ""
        return f"{reason}; it is valid for {self._ttl_s:g} s"


class LeaseWatch:
    """Polls the lease, on its own thread, every ``check_s`` seconds.

    Both callbacks run on that thread: ``on_change`` gets the scheduler in the lease whenever it
    changes; ``on_lost`` is called once, with the reason.
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        ttl_s: float,
        check_s: float,
        on_change: Callable[[dict[str, Any]], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._bucket = bucket
        self._rule = LeaseRule(ttl_s=ttl_s, grace_s=check_s, now=time.monotonic())
        self._ttl_s, self._check_s = ttl_s, check_s
        self._on_change, self._on_lost = on_change, on_lost
        self._scheduler: dict[str, Any] = {}
        self._error = ""
        self._checked_at = time.monotonic()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="etrain-lease", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop polling; does not wait for a check in progress."""
        self._end.set()

    def stuck_s(self) -> float:
        """Return how many seconds beyond ``STUCK_S`` the current check is overdue, or 0.0."""
        # Allow the time that `LeaseRule` allows for S3 to respond, plus a margin. Then an S3 outage
        # is reported by the rule, and only a blocked thread is reported as stuck.
        late_s = time.monotonic() - self._checked_at - self._ttl_s - self._check_s - STUCK_S
        return max(0.0, late_s)

    def _run(self) -> None:
        while not self._end.is_set():
            lost = self._check()
            self._checked_at = time.monotonic()
            if lost:
                # Stop polling, because the agent never recovers from a lost lease.
                self._on_lost(lost)
                return
            self._end.wait(self._check_s)

    def _check(self) -> str:
        age_s, error = None, ""
        try:
            found = self._bucket.get_aged(LEASE, f"{LEASE} cannot be read")
            age_s = float("inf") if found is None else found.age_s
            # If this raises because the content is malformed, the age is still valid: a head wrote
            # the object, perhaps a head of another version.
            if found is not None:
                self._note_scheduler(json.loads(found.data))
        except StoreError as exc:
            error = str(exc)
        except Exception as exc:  # a bug here must not keep the machine on
            error = f"{type(exc).__name__}: {exc}"
        if error != self._error:
            logger.warning("reading the lease: %s", error or "succeeds again")
            self._error = error
        return self._rule.take(age_s, time.monotonic(), error)

    def _note_scheduler(self, lease: dict[str, Any]) -> None:
        scheduler = {"scheduler": lease["scheduler"], "num_lives": lease["num_lives"]}
        # Renewals change the object every time; only a new head changes these two values.
        if scheduler != self._scheduler:
            self._on_change(scheduler)
            self._scheduler = scheduler
