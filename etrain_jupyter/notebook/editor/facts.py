"""Facts about this kernel's notebook: names, jobs, pools, and Python's completions.

A completion must not block typing. A background thread therefore reads lists from the disk. The
caller waits at most ``MAX_WAIT_S`` for the new list, then uses the previous one.
"""

from __future__ import annotations

import builtins
import inspect
import keyword
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.completer import IPCompleter, provisionalcompleter, rectify_completions
from IPython.core.guarded_eval import EvaluationContext, guarded_eval

from etrain_jupyter.errors import EtrainError
from etrain_jupyter.notebook.editor.offers import Completion, Offers
from etrain_jupyter.notebook.job.job_record import RECORD_FILE
from etrain_jupyter.notebook.job.run_store import ROOT_VARIABLE, default_root
from etrain_jupyter.pools.clusters import list_cluster_ids
from etrain_jupyter.pools.registry import pool_names
from etrain_jupyter.storage.bucket_log.locations import is_remote, spool_of_root

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

MAX_WAIT_S = 0.15
"""Maximum time that a completion waits for a list, in seconds."""
FRESH_S = 2.0
"""Time for which a list is reused, in seconds."""

_BUILTINS = frozenset(dir(builtins))
_UNWANTED = frozenset(keyword.kwlist) - frozenset(
    ("True", "False", "None", "lambda", "not", "and", "or", "if", "else", "for", "in", "is")
)
# Each of these matchers would run user code, read from disk, or complete text that is not an
# expression.
_DISABLED_MATCHERS = tuple(
    f"IPCompleter.{name}_matcher" for name in ("python_func_kw", "magic", "magic_config", "file")
)
_UNTYPED = (None, "<unknown>")
_OPEN_CALL = re.compile(r"([^\W\d][\w.]*)\(([^()]*)$")
_ID = re.compile(r"(.+)-[0-9a-f]{8}")


class CachedList:
    """A list that is loaded in a background thread, at most one at a time.

    ``look_up`` loads it and may be slow; an exception counts as an empty list.
    """

    def __init__(
        self,
        look_up: Callable[[], Sequence[str]],
        name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look_up, self._name, self._clock = look_up, name, clock
        self._known: Sequence[str] = ()
        self._known_at = float("-inf")
        self._thread: threading.Thread | None = None

    def get(self, max_wait_s: float = MAX_WAIT_S) -> Sequence[str]:
        """Return the list, or the previous one if loading takes longer than ``max_wait_s``."""
        if self._clock() - self._known_at > FRESH_S and not self._is_loading():
            # A daemon thread, so that a disk that hangs does not keep the kernel from exiting.
            self._thread = threading.Thread(target=self._load, name=self._name, daemon=True)
            self._thread.start()
        # Returns at once if the thread has finished, which is the usual case.
        if self._thread is not None:
            self._thread.join(max_wait_s)
        return self._known

    def _is_loading(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _load(self) -> None:
        try:
            self._known = self._look_up()
        except Exception:  # a traceback while typing would not help
            self._known = ()
        # Also after a failure, so that a broken disk is not read again at every keystroke.
        self._known_at = self._clock()


class ShellFacts:
    """The facts of one IPython shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._jobs = CachedList(list_known_jobs, "etrain-known-jobs")
        self._clusters = CachedList(list_cluster_ids, "etrain-known-clusters")

    @property
    def names(self) -> Mapping[str, Any]:
        """The notebook's names."""
        # Hide names that IPython itself added, such as its own ``open``, unless the user replaced
        # them.
        hidden = self._shell.user_ns_hidden
        names: dict[str, Any] = self._shell.user_ns
        return {
            name: value for name, value in names.items() if hidden.get(name, hidden) is not value
        }

    def jobs(self) -> Sequence[str]:
        """Names and ids of jobs, newest first."""
        return self._jobs.get()

    def pools(self) -> Sequence[str]:
        """Names of pools; only ``local``, which needs no file, if ``pools.yaml`` is invalid."""
        try:
            return pool_names()
        except EtrainError:
            return ["local"]

    def clusters(self) -> Sequence[str]:
        """Ids of the user's clusters on this machine."""
        return self._clusters.get()

    def complete_python(self, code: str) -> Offers:
        """Complete an expression with IPython's completer, plus keywords of an open call.

        Uses a separate completer. The shell's completer uses Jedi, whose first call is slow, and
        finds keywords by evaluating the function expression without a guard.
        """
        completer = IPCompleter(  # type: ignore[no-untyped-call]
            shell=self._shell,
            namespace=self._shell.user_ns,
            global_namespace=self._shell.user_global_ns,
            parent=self._shell.Completer,
            use_jedi=False,
        )
        completer.disable_matchers = [*completer.disable_matchers, *_DISABLED_MATCHERS]
        with provisionalcompleter(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = list(rectify_completions(code, completer.completions(code, len(code))))
        start = found[0].start if found else len(code)
        # Depending on its version, IPython returns an attribute as .name or as owner.name.
        owner = code[start : code.rfind(".") + 1]
        items = [
            Completion(c.text.removeprefix(owner), "name" if c.type in _UNTYPED else str(c.type))
            for c in found
            if c.text not in _UNWANTED and (start < len(code) or c.text not in _BUILTINS)
        ]
        keywords = self._keywords(code)
        if keywords.items and keywords.start == start:
            items = [*keywords.items, *items]
        elif keywords.items:
            return keywords
        return Offers(start + len(owner), tuple(items))

    def _keywords(self, code: str) -> Offers:
        """Return keywords such as ``hidden=`` inside ``Net(``, from the function's signature."""
        # Find the innermost unclosed call. Handling nested calls in its arguments would require a
        # parser.
        match = _OPEN_CALL.search(code)
        begun = re.search(r"(?:^|[(,])\s*([^\W\d]\w*)?$", code)
        if match is None or begun is None:
            return Offers(len(code))
        word = begun[1] or ""
        context = EvaluationContext(
            globals=self._shell.user_global_ns, locals=self._shell.user_ns, evaluation="limited"
        )
        try:
            parameters = inspect.signature(guarded_eval(match[1], context)).parameters
        except Exception:  # a forbidden expression, an unknown name, or no signature
            return Offers(len(code))
        given = set(re.findall(r"([^\W\d]\w*)\s*=", match[2]))
        # Positional-only and variadic parameters cannot be passed by name.
        free = [
            name
            for name, parameter in parameters.items()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        items = [f"{n}=" for n in free if n.startswith(word) and n not in given]
        return Offers(len(code) - len(word), tuple(Completion(text, "param") for text in items))


def list_known_jobs(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Scan the folder once, and return the names and then the ids of known jobs, newest first.

    This neither reads records nor accesses buckets. If the run store is in a bucket, only jobs with
    a copy on this machine are listed. Unreadable entries are skipped.
    """
    root = environment.get(ROOT_VARIABLE)
    # Completion must be fast, so read the local copies of a bucket only.
    folder = spool_of_root(root) if root and is_remote(root) else default_root(environment)
    found = sorted(_jobs_in(folder), reverse=True)
    ids = [job_id for _, job_id in found]
    names = [match[1] for match in map(_ID.fullmatch, ids) if match]
    return list(dict.fromkeys([*names, *ids]))


def _jobs_in(folder: Path) -> list[tuple[float, str]]:
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):  # a job that is being created
                    continue
                # The record is replaced at each resume, so its modification time is that of the
                # last resume.
                try:
                    modified = os.stat(os.path.join(entry.path, RECORD_FILE)).st_mtime
                except OSError:
                    continue
                found.append((modified, entry.name))
    except OSError:
        return []
    return found
