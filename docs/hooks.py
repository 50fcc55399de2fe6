"""Generate the parts of pages that come from docstrings: ``python docs/hooks.py``.

A generated part is committed, so that the pages can be read in a clone and on a code host:

    <!-- cell_keys -->                                        a table of ``TABLES``
    ...
    <!-- end -->

    <!-- ::: etrain_jupyter.launch.distributed -->            signatures and docstrings
    ...
    <!-- end -->

A test compares the committed parts with what is generated. In the site, MkDocs replaces the second
kind by the directive, from which mkdocstrings makes links and tables.
"""

from __future__ import annotations

import ast
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args
from unittest import mock

import yaml
from pydantic import PlainSerializer
from pydantic.fields import FieldInfo

from etrain_jupyter.config.describe import all_keys
from etrain_jupyter.config.fields import Section
from etrain_jupyter.notebook.commands.arguments import CELL_COMMAND, distributed_parser
from etrain_jupyter.notebook.commands.subcommands import members, subcommands
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.plugins.slurm.spec import SlurmSpec

DOCS = Path(__file__).parent
PART = re.compile(
    r"<!-- (?P<what>\w+|::: [\w.]+(?:\n [^\n]+)*)\n?\s*-->\n(?P<text>.*?)<!-- end -->",
    flags=re.DOTALL,
)
PUBLIC = ["!^_"]


def command_help() -> str:
    """Return a section with the ``--help`` text of every sub-command."""
    commands = (*subcommands(), *members())
    with mock.patch.dict(os.environ, COLUMNS="80"):  # not the width of this terminal
        texts = {CELL_COMMAND: distributed_parser().format_help()}
        texts |= {command.name: command.parser("%etrain").format_help() for command in commands}
    return "\n\n".join(
        f"### `{name}`\n\n```text\n{text.strip()}\n```" for name, text in texts.items()
    )


def cell_keys() -> str:
    """Return all keys of a cell as a Markdown table."""
    rows = ["| key | takes | meaning |", "|---|---|---|"]
    for key in all_keys():
        meaning = key.meaning.replace("|", "\\|")
        rows.append(f"| `{key.name}` | {key.facts} | {meaning} |")
    return "\n".join(rows)


def pool_keys(spec: type[Section]) -> str:
    """Return every key of a pool with its default and its meaning, in Markdown."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in fields_of(spec):
        meaning = " ".join((field.description or "").replace("``", "`").split())
        rows.append(f"| `{name}` | {default_of(field)} | {meaning} |")
    return "\n".join(rows)


def fields_of(section: type[Section], before: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the keys of a section and of its groups, such as ``lifetime.max``."""
    for key, field in section.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        # An optional section is a union: `GpuSpec | None`.
        groups = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
        if groups:
            yield from fields_of(groups[0], f"{before}{key}.")
        else:
            yield f"{before}{key}", field


def default_of(field: FieldInfo) -> str:
    """Return a default as written in the file; empty if the key may be left out."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value in (None, (), {}):
        return ""
    # Only durations have a serializer, see `spec_fields`. Write the largest unit that divides one.
    if any(isinstance(item, PlainSerializer) for item in field.metadata):
        units = (("h", 3600.0), ("min", 60.0), ("s", 1.0))
        return next(f"{value / size:g} {unit}" for unit, size in units if value % size == 0)
    if isinstance(value, tuple):
        return f"[{', '.join(value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, int | float) else str(value)


TABLES: dict[str, Callable[[], str]] = {
    "cell_keys": cell_keys,
    "command_help": command_help,
    "ec2_pool_keys": lambda: pool_keys(AwsSpotSpec),
    "slurm_pool_keys": lambda: pool_keys(SlurmSpec),
}


def generate(markdown: str) -> str:
    """Return a page with its generated parts up to date."""

    def fill(match: re.Match[str]) -> str:
        what = match["what"]
        text = TABLES[what]() if what in TABLES else api(what.removeprefix("::: "))
        return match[0][: match.start("text") - match.start()] + f"\n{text}\n\n<!-- end -->"

    return PART.sub(fill, markdown)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the committed API by mkdocstrings' directives; MkDocs calls this for each page."""
    return PART.sub(lambda part: part[0] if part["what"] in TABLES else part["what"], markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Adapt the HTML of one page.

    Removes the ``::`` of docstrings, which announces a literal block to Sphinx, not to Markdown.
    A name in the first column of a table, such as ``data.num_workers``, stays on one line.
    """
    html = re.sub(r"<td>(?=<code>[\w.]+</code></td>)", '<td style="white-space: nowrap">', html)
    return html.replace("<p>::</p>", "").replace("::</p>", ":</p>")


# ------------------------------------------------------------------ signatures and docstrings


class Source(NamedTuple):
    """A module, class or function in its file."""

    path: Path
    node: Any


def api(directive: str) -> str:
    """Return the signatures and docstrings of an object and its public members, as Python.

    Args:
        directive: Its dotted name, and mkdocstrings' options below it.
    """
    name, _, rest = directive.partition("\n")
    options = (yaml.safe_load(rest) or {}).get("options", {}) if rest else {}
    source = find(name.strip())
    lines = list(stub(source, options)) if source else []
    heading = "" if options.get("show_root_heading") is False else f"## {name.split('.')[-1]}\n\n"
    return f"{heading}```python\n{textwrap.dedent(chr(10).join(lines)).strip()}\n```"


def find(name: str) -> Source | None:
    """Return the definition of a dotted name, following imports; None if there is none."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        base = DOCS.parent.joinpath(*parts[:count])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                module = Source(path, ast.parse(path.read_text(encoding="utf-8")))
                return module if count == len(parts) else member(module, parts[count])
    return None


def member(module: Source, name: str) -> Source | None:
    """Return a class or function that a module defines or imports."""
    for node in module.node.body:
        if getattr(node, "name", "") == name:
            return Source(module.path, node)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return find(f"{node.module}.{alias.name}")
    return None


def stub(source: Source, options: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of an object: its signature, its docstring, and its members'."""
    path, node = source
    lines = path.read_text(encoding="utf-8").splitlines()
    decorators = getattr(node, "decorator_list", [])
    start = 0 if isinstance(node, ast.Module) else (decorators or [node])[0].lineno - 1
    is_documented = is_text(node.body[0])
    yield from lines[start : node.body[0].end_lineno if is_documented else node.body[0].lineno - 1]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    wanted = options.get("members")
    filters = [rule[1:] for rule in options.get("filters", PUBLIC)]
    for part, following in zip(node.body, [*node.body[1:], None], strict=True):
        target = getattr(part, "target", *getattr(part, "targets", [None])[:1])
        name = getattr(part, "name", "") or getattr(target, "id", "")
        is_hidden = any(re.search(rule, name) for rule in filters) and (
            name != "__init__" or "^__init__$" in filters
        )
        if not name or (name not in wanted if wanted else is_hidden):
            continue
        if getattr(part, "name", ""):
            if name == "__init__" or is_text(part.body[0]):
                yield from ("", *stub(Source(path, part), {}))
        elif is_text(following):
            yield from ("", *lines[part.lineno - 1 : following.end_lineno])
    yield from inherited(source, options)


def inherited(source: Source, options: dict[str, Any]) -> Iterator[str]:
    """Yield the members in ``options`` that a class inherits, or that a package imports."""
    path, node = source
    wanted = options.get("inherited_members") or []
    module = Source(path, ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.Module):
        for name in options.get("members") or []:
            found = member(module, name)
            if found and found.path != path:
                yield from ("", "", *stub(found, {}))
        return
    for base in getattr(node, "bases", []) if wanted else []:
        found = member(module, getattr(base, "id", ""))
        if found:
            rules = [*options.get("filters", PUBLIC), "!^__init__$"]
            names = {"members": wanted} if isinstance(wanted, list) else {"filters": rules}
            _, *body = stub(found, {**names, "inherited_members": wanted})
            yield from ("", f"    # from {found.node.name}", *body)


def is_text(node: Any) -> bool:
    """Return whether a statement is a docstring."""
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)


if __name__ == "__main__":
    for page in sorted((DOCS / "reference").rglob("*.md")):
        page.write_text(generate(page.read_text(encoding="utf-8")), encoding="utf-8")
