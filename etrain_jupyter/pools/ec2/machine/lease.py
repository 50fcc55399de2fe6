"""The lease: an object that the cluster's head renews, and without which its nodes turn off.

Its age is told by S3's clock alone, so that no machine's own matters. One look that goes wrong says
little: the lease is lost when two in a row are stale, a while apart. Without S3 nothing is known;
for longer than the lease would hold, that counts as stale, too.
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
"""A look that takes so much longer than it may is one that never ends."""


class LeaseRule:
    """Decides when a lease is lost. Time is an argument, by a clock that is never set.

    >>> rule = LeaseRule(ttl_s=60, grace_s=10, now=0)
    >>> [rule.take(age_s, now) for age_s, now in [(5, 1), (61, 60), (71, 65), (81, 71)]]
    ['', '', '', 'the lease is 81 s old; it holds for 60 s']
    """

    def __init__(self, *, ttl_s: float, grace_s: float, now: float) -> None:
        self._ttl_s = ttl_s
        self._grace_s = grace_s
        self._heard_at = now
        """When S3 told anything of the lease."""
        self._stale_since: float | None = None
        self._num_stale = 0

    def take(self, age_s: float | None, now: float, trouble: str = "") -> str:
        """Take in one look; return why the lease is lost, an empty string if it is not.

        Args:
            age_s: How old it is; infinite if it is gone, None if S3 cannot be asked.
            now: When.
            trouble: Why S3 cannot be asked.
        """
        if age_s is not None:
            self._heard_at = now
        if age_s is None:
            silent_s = now - self._heard_at
            is_stale = silent_s > self._ttl_s
            words = f"nothing was heard of the lease for {silent_s:.0f} s ({trouble})"
        else:
            is_stale = age_s >= self._ttl_s
            words = f"the lease is {age_s:.0f} s old"
            if age_s == float("inf"):
                words = "there is no lease"
        if not is_stale:
            self._stale_since, self._num_stale = None, 0
            return ""
        self._num_stale += 1
        if self._stale_since is None:
            self._stale_since = now
        if self._num_stale < 2 or now - self._stale_since < self._grace_s:
            return ""
        return f"{words}; it holds for {self._ttl_s:g} s"


class LeaseWatch:
    """Looks at the lease again and again, on a thread of its own.

    Args:
        bucket: The cluster's objects.
        ttl_s: How long it holds.
        check_s: How often to look, and how far two stale looks are apart at least.
        on_news: Called on the thread with what the lease says, when that is new.
        on_lost: Called on the thread, once, with why it is lost.
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        ttl_s: float,
        check_s: float,
        on_news: Callable[[dict[str, Any]], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._bucket = bucket
        self._rule = LeaseRule(ttl_s=ttl_s, grace_s=check_s, now=time.monotonic())
        self._ttl_s, self._check_s = ttl_s, check_s
        self._on_news, self._on_lost = on_news, on_lost
        self._told: dict[str, Any] = {}
        self._trouble = ""
        self._looked_at = time.monotonic()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="etrain-lease", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more; does not wait for a look that is under way."""
        self._end.set()

    def stuck_s(self) -> float:
        """Return by how much the look that is under way is late; 0.0 if none is."""
        late_s = time.monotonic() - self._looked_at - self._ttl_s - self._check_s - STUCK_S
        return max(0.0, late_s)

    def _run(self) -> None:
        while not self._end.is_set():
            lost = self._look()
            self._looked_at = time.monotonic()
            if lost:
                self._on_lost(lost)
                return
            self._end.wait(self._check_s)

    def _look(self) -> str:
        age_s, trouble = None, ""
        try:
            found = self._bucket.get_aged(LEASE, f"{LEASE} cannot be read")
            age_s = float("inf") if found is None else found.age_s
            if found is not None:
                self._tell(json.loads(found.data))
        except StoreError as exc:
            trouble = str(exc)
        except Exception as exc:  # whatever it is, it must not keep the machine running
            trouble = f"{type(exc).__name__}: {exc}"
        if trouble != self._trouble:
            logger.warning("the lease: %s", trouble or "it can be read again")
            self._trouble = trouble
        return self._rule.take(age_s, time.monotonic(), trouble)

    def _tell(self, lease: dict[str, Any]) -> None:
        news = {"scheduler": lease["scheduler"], "num_lives": lease["num_lives"]}
        if news != self._told:
            self._on_news(news)
            self._told = news
