"""What is known of this kernel's notebook: its names, the jobs, the pools, and Python's own words.

A completion must never make somebody wait. What comes from a disk is asked for by a thread that may
take as long as it likes; who waits for it waits ``PATIENCE_S``, and then has what was known before.
"""

from __future__ import annotations

import builtins
import inspect
import keyword
import re
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.completer import IPCompleter, provisionalcompleter, rectify_completions
from IPython.core.guarded_eval import EvaluationContext, guarded_eval

from etrain_jupyter.errors import EtrainError
from etrain_jupyter.notebook.editor.offers import Completion, Offers
from etrain_jupyter.notebook.job.known_jobs import list_known_jobs
from etrain_jupyter.pools.local.pool import find_remains
from etrain_jupyter.pools.registry import pool_names

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

PATIENCE_S = 0.15
FRESH_S = 2.0

_BUILTINS = frozenset(dir(builtins))
_UNWANTED = frozenset(keyword.kwlist) - frozenset(
    ("True", "False", "None", "lambda", "not", "and", "or", "if", "else", "for", "in", "is")
)
# Each of these would run code of the user's, read the disk, or is no expression.
_NOT_ASKED = tuple(
    f"IPCompleter.{name}_matcher" for name in ("python_func_kw", "magic", "magic_config", "file")
)
_UNTYPED = (None, "<unknown>")
_OPEN_CALL = re.compile(r"([^\W\d][\w.]*)\(([^()]*)$")


class CachedList:
    """A list that is looked up in the background, at most once at a time.

    Args:
        look_up: Returns it; may take long. What it raises counts as an empty list.
        name: Of the thread.
        clock: Seconds that never go back.
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

    def get(self, patience_s: float = PATIENCE_S) -> Sequence[str]:
        """Return the list, an older one if looking it up takes longer than that."""
        if self._clock() - self._known_at > FRESH_S and not self._is_busy():
            # A daemon: a disk that hangs must not keep the kernel from ending.
            self._thread = threading.Thread(target=self._recall, name=self._name, daemon=True)
            self._thread.start()
        if self._thread is not None:
            self._thread.join(patience_s)
        return self._known

    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _recall(self) -> None:
        try:
            self._known = self._look_up()
        except Exception:  # The top of a thread, and nobody is helped by a traceback while typing.
            self._known = ()
        self._known_at = self._clock()


class ShellFacts:
    """The facts of one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._jobs = CachedList(list_known_jobs, "etrain-known-jobs")
        self._clusters = CachedList(find_remains, "etrain-known-clusters")

    @property
    def names(self) -> Mapping[str, Any]:
        """The notebook's names."""
        # What IPython itself has put there, such as its own ``open``, is nobody's model.
        hidden = self._shell.user_ns_hidden
        names: dict[str, Any] = self._shell.user_ns
        return {
            name: value for name, value in names.items() if hidden.get(name, hidden) is not value
        }

    def jobs(self) -> Sequence[str]:
        """Names and ids of jobs, the newest first."""
        return self._jobs.get()

    def pools(self) -> Sequence[str]:
        """The names of pools; only the one that needs no file if that cannot be read."""
        try:
            return pool_names()
        except EtrainError:
            return ["local"]

    def clusters(self) -> Sequence[str]:
        """The ids of living clusters."""
        return self._clusters.get()

    def complete_python(self, code: str) -> Offers:
        """Return what IPython's completer says of an expression, and keywords of an open call.

        The completer is one of our own: the shell's has Jedi, which is slow at first, and looks for
        keywords by evaluating the function without a guard.
        """
        completer = IPCompleter(  # type: ignore[no-untyped-call]
            shell=self._shell,
            namespace=self._shell.user_ns,
            global_namespace=self._shell.user_global_ns,
            parent=self._shell.Completer,
            use_jedi=False,
        )
        completer.disable_matchers = [*completer.disable_matchers, *_NOT_ASKED]
        with provisionalcompleter(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = list(rectify_completions(code, completer.completions(code, len(code))))
        start = found[0].start if found else len(code)
        # An attribute comes as .name or as owner.name, by the version of IPython.
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
        """Return ``hidden=`` within ``Net(``; the function is looked at, not called."""
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
        except Exception:  # Whatever the guard, the name or the signature has against it.
            return Offers(len(code))
        given = set(re.findall(r"([^\W\d]\w*)\s*=", match[2]))
        free = [
            name
            for name, parameter in parameters.items()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        items = [f"{n}=" for n in free if n.startswith(word) and n not in given]
        return Offers(len(code) - len(word), tuple(Completion(text, "param") for text in items))
