"""Install completion and hints in an IPython shell, and remove them.

IPython calls matchers for every front end, including a terminal. Hints are the kernel's replies to
Shift-Tab, to the contextual help, and to completion lists that describe each entry. After any
error, only IPython's own reply is used, because no help is better than an exception while typing.
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
"""Priority above IPython's matchers, so that they are not called in an etrain cell."""

_log = logging.getLogger(__name__)


class _OnlyOurs(list[SimpleCompletion]):
    """Completions that suppress those of other matchers, even if the list is empty."""

    # IPython lets a matcher suppress the others only if it returns completions. In an etrain cell,
    # completions with file names and Python keywords are always wrong.
    def __len__(self) -> int:
        return max(1, super().__len__())


class _Hooks:
    def __init__(self, shell: InteractiveShell) -> None:
        facts = ShellFacts(shell)
        self._matchers: list[Any] = shell.Completer.custom_matchers
        self._matcher = _matcher(facts)
        self._matchers.append(self._matcher)
        # A terminal has no kernel and no Shift-Tab, so only the matcher is installed there.
        self._kernel: Any = getattr(shell, "kernel", object())
        original = getattr(self._kernel, "do_inspect", None)
        #   front end -> kernel.do_inspect = _Inspector -> a hint of ours -> reply
        #                                               -> otherwise: the original do_inspect
        self._inspector = _Inspector(facts, original) if original is not None else None
        if self._inspector is not None:
            self._kernel.do_inspect = self._inspector

    def remove(self) -> None:
        """Remove the matcher and the inspector."""
        if self._matcher in self._matchers:
            self._matchers.remove(self._matcher)
        if self._inspector is not None:
            self._inspector.is_on = False
            # If another extension has wrapped the inspector, it stays installed and only forwards
            # calls.
            if vars(self._kernel).get("do_inspect") is self._inspector:
                del self._kernel.do_inspect


_installed: WeakKeyDictionary[InteractiveShell, _Hooks] = WeakKeyDictionary()


def install(shell: InteractiveShell) -> None:
    """Install completion and hints in this shell; idempotent."""
    remove(shell)
    _installed[shell] = _Hooks(shell)


def remove(shell: InteractiveShell) -> None:
    """Restore the shell's own completion and hints."""
    hooks = _installed.pop(shell, None)
    if hooks is not None:
        hooks.remove()


def _matcher(facts: Facts) -> Callable[[CompletionContext], SimpleMatcherResult]:
    def match(context: CompletionContext) -> SimpleMatcherResult:
        # Import on the first completion, because loading the extension should be fast.
        from etrain_jupyter.notebook.editor.completion import complete

        lines = context.full_text.split("\n")[: context.cursor_line]
        # IPython gives line and column; `complete` takes an offset in the cell.
        cursor = sum(len(line) + 1 for line in lines) + context.cursor_position
        try:
            offers = complete(context.full_text, cursor, facts)
        except Exception:  # top level of a request from a front end
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
    """Answer inspect requests for etrain text; forward all others to the kernel."""

    def __init__(self, facts: Facts, original: Callable[..., Any]) -> None:
        self.is_on = True
        self._facts, self._original = facts, original

    def __call__(self, code: str, cursor_pos: int, *args: Any, **kwargs: Any) -> Any:
        hint = self._hint(code, cursor_pos) if self.is_on else None
        if hint is None:
            return self._original(code, cursor_pos, *args, **kwargs)
        expression = hint.expression
        if expression is not None:
            reply = self._original(expression.code, expression.cursor, *args, **kwargs)
            # Prefer the kernel's own reply. Return an awaitable as is, because its result is known
            # only after this call has returned.
            if not isinstance(reply, dict) or reply.get("found"):
                return reply
        return _reply(hint)

    def _hint(self, code: str, cursor: int) -> Hint | None:
        from etrain_jupyter.notebook.editor.hints import inspect

        try:
            return inspect(code, cursor, self._facts.names)
        except Exception:  # top level of a request from a front end
            _log.debug("inspection failed", exc_info=True)
            return None


def _reply(hint: Hint) -> dict[str, Any]:
    data = {"text/plain": hint.plain, "text/markdown": hint.markdown}
    return {
        "status": "ok",
        "found": bool(hint.plain),
        "data": data if hint.plain else {},
        "metadata": {},
    }
