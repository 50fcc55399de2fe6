"""Explain the word at the cursor, on an ``%etrain`` line or in a cell."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from etrain_jupyter.config.describe import describe, describe_optimizer
from etrain_jupyter.config.keys import (
    OPTIMIZER,
    KeyHelp,
    KeyPath,
    extra_group,
    group_at,
    is_reference,
    keys_in,
)
from etrain_jupyter.config.source_map import did_you_mean
from etrain_jupyter.config.vocabulary import known_elsewhere
from etrain_jupyter.notebook.commands.arguments import CELL_COMMAND
from etrain_jupyter.notebook.editor.help_texts import (
    find_parser,
    help_on_cell,
    help_on_magic,
    usage_of,
)
from etrain_jupyter.notebook.editor.lines import Magic, find_flag, find_magic, find_place
from etrain_jupyter.notebook.editor.outline import CursorContext, Outline, read_outline


@dataclass(frozen=True, kw_only=True)
class Expression:
    """A Python expression at the cursor, to be explained by IPython itself."""

    code: str
    cursor: int


@dataclass(frozen=True, kw_only=True)
class Hint:
    """Explanation of the word at the cursor, as plain text and as Markdown."""

    plain: str
    markdown: str
    expression: Expression | None = None
    """Expression that IPython should explain instead, if it can."""


def inspect(text: str, cursor: int, names: Mapping[str, Any]) -> Hint | None:
    """Return an explanation of the word at an offset of a cell; None if there is none.

    Front ends truncate the text at the cursor while they show completions. An offset after its end
    counts as the end. The notebook's names take precedence over those of optimizers.
    """
    cursor = min(max(cursor, 0), len(text))
    magic = find_magic(text, cursor)
    if magic is None:
        return _on_magic(text, cursor)
    if not magic.is_in_body(cursor):
        return _on_line(magic, cursor)
    outline = read_outline(text[magic.body_start :], cursor - magic.body_start)
    context = outline.context
    if context is None:
        return None
    if context.is_key:
        return _on_key(context, outline)
    return _on_value(context, outline, names)


def _on_magic(text: str, cursor: int) -> Hint | None:
    # "%etrain" is a magic only as the first word of a line; elsewhere, it is part of the user's
    # text.
    line = text[text.rfind("\n", 0, cursor) + 1 :].lstrip()
    word = line.split()[0] if line.split() else ""
    return _preformatted(help_on_magic()) if word in ("%etrain", "%%etrain") else None


# --- the line of the magic ------------------------------------------------------------------------


def _on_line(magic: Magic, cursor: int) -> Hint | None:
    place = find_place(magic.line, cursor - magic.start)
    if place is None:
        return None
    words = [*place.words, place.word] if place.word else list(place.words)
    if not words:
        return _preformatted(help_on_magic())
    parser = find_parser(words, is_cell=magic.is_cell)
    if parser is None:
        return None
    # The word at the cursor is a flag, or the value of the flag before it.
    for word in reversed(words[1:][-2:]):
        flag = find_flag(parser, word)
        if flag is not None and (word == words[-1] or flag.nargs != 0):
            return _on_flag(parser.prog, flag)
        # A switch or an unknown flag: the word after it is not its value.
        if word.startswith("-"):
            break
    if words[0] == CELL_COMMAND:
        return _preformatted(help_on_cell())
    return _preformatted(parser.format_help())


def _on_flag(prog: str, argument: argparse.Action) -> Hint:
    meaning = argument.help or ""
    flag = usage_of(argument)
    return Hint(plain=f"{prog} {flag}\n\n{meaning}", markdown=f"`{prog} {flag}`\n\n{meaning}")


def _preformatted(text: str) -> Hint:
    text = text.rstrip()
    return Hint(plain=text, markdown=f"```text\n{text}\n```")


# --- the body -------------------------------------------------------------------------------------


def _on_key(context: CursorContext, outline: Outline) -> Hint | None:
    name = context.name or context.word
    if not name:
        return _on_group(context.path)
    path = (*context.path, name)
    return _of(describe(path, optimizer=_optimizer(outline))) or _on_unknown(path)


def _on_unknown(path: KeyPath) -> Hint | None:
    """Explain an unknown key: the equivalent of another system's key, or the nearest key."""
    extra = extra_group(path) if len(path) == 2 else None
    hint = extra.answers.get(path[-1].lower(), "") if extra else known_elsewhere(path)
    hint = hint or did_you_mean(path[-1], keys_in(path[:-1]))
    if not hint:
        return None
    text = f"There is no key '{'.'.join(path)}': {hint}"
    return Hint(plain=text, markdown=text)


def _on_group(path: KeyPath) -> Hint | None:
    """Explain an empty position by listing the keys that are possible there."""
    group = group_at(path)
    if group is None:
        return _of(describe(path))
    own = describe(path)
    found = [describe((*path, key)) for key in keys_in(path)]
    keys = [key for key in found if key is not None and key.path != (*OPTIMIZER, "options")]
    title = f"Keys of {own.name}: {own.meaning}" if own else "Keys of the body"
    plain = "\n".join([title, "", *(f"{key.path[-1]}: {key.facts}" for key in keys)])
    rows = [f"| `{key.path[-1]}` | {key.facts} | {key.meaning} |" for key in keys]
    table = "\n".join(["| key | takes | meaning |", "|---|---|---|", *rows])
    return Hint(plain=plain, markdown=f"**{title}**\n\n{table}")


def _on_value(context: CursorContext, outline: Outline, names: Mapping[str, Any]) -> Hint | None:
    whole = f"{context.word}{context.rest}".strip()
    own = _of(describe(context.path, optimizer=_optimizer(outline)))
    if context.path in (OPTIMIZER, (*OPTIMIZER, "name")) and whole not in names:
        own = _of(describe_optimizer(whole)) or own
    is_python = context.is_computed or is_reference(context.path)
    if not is_python or not whole or context.is_whole:
        return own
    # The value is a Python expression, so IPython explains the object, with the key's help as
    # fallback.
    expression = Expression(code=f"{context.word}{context.rest}", cursor=len(context.word))
    # Without help for the key, use IPython's reply, even if it is empty.
    if own is None:
        return Hint(plain="", markdown="", expression=expression)
    return Hint(plain=own.plain, markdown=own.markdown, expression=expression)


def _optimizer(outline: Outline) -> str:
    return outline.values.get((*OPTIMIZER, "name"), "").strip("'\"") or "AdamW"


def _of(found: KeyHelp | None) -> Hint | None:
    return Hint(plain=str(found), markdown=found.markdown()) if found is not None else None
