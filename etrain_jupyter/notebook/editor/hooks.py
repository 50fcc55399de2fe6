"""Puts completion and hints into an IPython shell, and takes them out again.

IPython asks matchers in every front end, a terminal too. Hints are an answer of the kernel: to
Shift-Tab, to the contextual help, and to a list of completions that shows what each entry means.
Whatever goes wrong here leaves the word to IPython: an editor that raises is worse than one that
knows nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from IPython.core.completer import SimpleCompletion, completion_matcher

from etrain_jupyter.notebook.editor.facts import ShellFacts
from etrain_jupyter.notebook.editor.offers import Facts, Offers

if TYPE_CHECKING:
    from IPython.core.completer import CompletionContext, SimpleMatcherResult
    from IPython.core.interactiveshell import InteractiveShell

    from etrain_jupyter.notebook.editor.hints import Hint

PRIORITY = 1_000
"""Before all matchers of IPython: in a cell of ours those are not even asked."""

_log = logging.getLogger(__name__)


class _OnlyOurs(list[SimpleCompletion]):
    """Completions that silence those of others, also where there are none.

    IPython lets a matcher suppress the others only if it offers something. Where a cell of ours has
    nothing to offer, file names and Python's keywords would be noise.
    """

    def __len__(self) -> int:
        return max(1, super().__len__())


class _Hooks:
    """What was put into one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        facts = ShellFacts(shell)
        self._matchers: list[Any] = shell.Completer.custom_matchers
        self._matcher = _matcher(facts)
        self._matchers.append(self._matcher)
        self._kernel: Any = getattr(shell, "kernel", object())
        original = getattr(self._kernel, "do_inspect", None)
        self._inspector = _Inspector(facts, original) if original is not None else None
        if self._inspector is not None:
            self._kernel.do_inspect = self._inspector

    def remove(self) -> None:
        """Take it out; if somebody has wrapped the kernel's answer since, ours only passes on."""
        if self._matcher in self._matchers:
            self._matchers.remove(self._matcher)
        if self._inspector is not None:
            self._inspector.is_on = False
            if vars(self._kernel).get("do_inspect") is self._inspector:
                del self._kernel.do_inspect


_installed: WeakKeyDictionary[InteractiveShell, _Hooks] = WeakKeyDictionary()


def install(shell: InteractiveShell) -> None:
    """Complete and explain in this shell; to do so twice is to do so once."""
    remove(shell)
    _installed[shell] = _Hooks(shell)


def remove(shell: InteractiveShell) -> None:
    """Leave the shell as it was."""
    hooks = _installed.pop(shell, None)
    if hooks is not None:
        hooks.remove()


def _matcher(facts: Facts) -> Callable[[CompletionContext], SimpleMatcherResult]:
    def match(context: CompletionContext) -> SimpleMatcherResult:
        # Whoever loads the extension waits for what it imports; whoever presses Tab comes later.
        from etrain_jupyter.notebook.editor.completion import complete

        lines = context.full_text.split("\n")[: context.cursor_line]
        cursor = sum(len(line) + 1 for line in lines) + context.cursor_position
        try:
            offers = complete(context.full_text, cursor, facts)
        except Exception:  # The top of what a front end asks.
            _log.debug("completion failed", exc_info=True)
            offers = Offers(cursor)
        if offers is None:
            return {"completions": [], "suppress": False}
        items = [SimpleCompletion(offer.text, type=offer.kind) for offer in offers.items]
        return {
            "completions": _OnlyOurs(items),
            "matched_fragment": context.full_text[offers.start : cursor],
            "suppress": True,
            "ordered": True,
        }

    named: Any = completion_matcher(priority=PRIORITY, identifier="etrain", api_version=2)(match)
    return cast("Callable[[CompletionContext], SimpleMatcherResult]", named)


class _Inspector:
    """Answers in the kernel's place where a text is ours, and passes everything else on."""

    def __init__(self, facts: Facts, original: Callable[..., Any]) -> None:
        self.is_on = True
        self._facts, self._original = facts, original

    def __call__(self, code: str, cursor_pos: int, *args: Any, **kwargs: Any) -> Any:
        hint = self._hint(code, cursor_pos) if self.is_on else None
        if hint is None:
            return self._original(code, cursor_pos, *args, **kwargs)
        asked = hint.expression
        if asked is not None:
            answer = self._original(asked.code, asked.cursor, *args, **kwargs)
            # A kernel that answers later cannot be asked first.
            if not isinstance(answer, dict) or answer.get("found"):
                return answer
        return _reply(hint)

    def _hint(self, code: str, cursor: int) -> Hint | None:
        from etrain_jupyter.notebook.editor.hints import inspect

        try:
            return inspect(code, cursor, self._facts.names)
        except Exception:  # The top of what a front end asks.
            _log.debug("a hint failed", exc_info=True)
            return None


def _reply(hint: Hint) -> dict[str, Any]:
    data = {"text/plain": hint.plain, "text/markdown": hint.markdown}
    return {
        "status": "ok",
        "found": bool(hint.plain),
        "data": data if hint.plain else {},
        "metadata": {},
    }
