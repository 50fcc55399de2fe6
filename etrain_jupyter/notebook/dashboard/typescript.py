"""Generate ``snapshot.ts``, the front end's types of a snapshot, on standard output.

``make snapshot`` writes the output to ``labextension/src/snapshot.ts``. A unit test compares the
two. The TypeScript compiles only if ``protocol.ts`` converts every field.

The types describe a snapshot after this conversion, in which NaN and infinity, which JSON lacks,
are numbers again.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from etrain_jupyter.log import startup
from etrain_jupyter.notebook.dashboard import snapshot

HEAD = """\
// The state of a job as the kernel sends it, after the checks of protocol.ts.
//
// Generated from snapshot.py by `make snapshot`. Do not edit.
"""
WIDTH = 100
SIMPLE = {int: "number", float: "number", str: "string", bool: "boolean", NoneType: "null"}


def generate() -> str:
    """Return the text of ``snapshot.ts``, in Prettier's formatting."""
    # In source order, so that each dataclass comes before those that use it.
    kinds = [kind for kind in vars(snapshot).values() if is_own_dataclass(kind)]
    return "\n".join([HEAD, *(interface_of(kind) for kind in kinds)])


def is_own_dataclass(value: Any) -> bool:
    """Return whether a value is a dataclass of a snapshot, from ``snapshot.py`` or the log."""
    is_class = isinstance(value, type) and is_dataclass(value)
    return is_class and value.__module__ in (snapshot.__name__, startup.__name__)


def interface_of(kind: type) -> str:
    """Return a dataclass as a TypeScript interface."""
    docs = docs_of(kind)
    lines = [*comment_of(inspect.getdoc(kind) or "", ""), f"export interface I{kind.__name__} {{"]
    for name, hint in get_type_hints(kind).items():
        lines += comment_of(docs.get(name, ""), "  ")
        lines.append(f"  {name}: {type_of(hint)};")
    return "\n".join([*lines, "}", ""])


def type_of(hint: Any) -> str:
    """Return the TypeScript equivalent of a type hint.

    >>> type_of(int | None), type_of(tuple[str, ...]), type_of(Mapping[str, float])
    ('number | null', 'string[]', 'Record<string, number>')
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in SIMPLE:
        return SIMPLE[hint]
    # A reference to another interface in the same file.
    if is_own_dataclass(hint):
        return f"I{hint.__name__}"
    if origin is UnionType:
        return " | ".join(type_of(argument) for argument in arguments)
    if origin is tuple and arguments[1:] == (...,):
        return f"{type_of(arguments[0])}[]"
    if origin is Mapping:
        return f"Record<{type_of(arguments[0])}, {type_of(arguments[1])}>"
    raise TypeError(f"{hint} has no TypeScript type. Add it to type_of.")


def docs_of(kind: type) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass, by field."""
    # Python discards them at run time, so read the source.
    [node] = ast.parse(inspect.getsource(kind)).body
    assert isinstance(node, ast.ClassDef)
    docs = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    docs[field.target.id] = inspect.cleandoc(text)
    return docs


def comment_of(text: str, indent: str) -> Iterator[str]:
    """Yield the lines of a documentation comment; none for an empty text."""
    text = " ".join(text.replace("``", "`").replace("None", "Null").split())
    text = text.replace("; Null", "; null")
    if not text:
        return
    # Format it as Prettier does: a single line if it fits, otherwise one line per line of text.
    if len(line := f"{indent}/** {text} */") <= WIDTH:
        yield line
        return
    yield f"{indent}/**"
    yield from textwrap.wrap(
        text, WIDTH, initial_indent=f"{indent} * ", subsequent_indent=f"{indent} * "
    )
    yield f"{indent} */"


if __name__ == "__main__":
    print(generate(), end="")
