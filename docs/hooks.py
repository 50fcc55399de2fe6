"""MkDocs hook: fill in the tables that the package generates from its own docstrings.

A page contains a placeholder on a line of its own, for example ``{{ cell_keys }}``. A new option,
pool key or sub-command therefore appears in the documentation without an edit here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from etrain_jupyter.config import describe as cell
from etrain_jupyter.notebook.commands.arguments import CELL_COMMAND, distributed_parser
from etrain_jupyter.notebook.commands.subcommands import MEMBERS, SUBCOMMANDS
from etrain_jupyter.pools.ec2.client import describe as pool_keys
from etrain_jupyter.pools.slurm.spec import SlurmSpec

PLACEHOLDER = re.compile(r"^\{\{ (\w+) \}\}$", flags=re.MULTILINE)


def command_help() -> str:
    """Return a section with the ``--help`` text of every sub-command."""
    texts = {CELL_COMMAND: distributed_parser().format_help()}
    commands = (*SUBCOMMANDS, *MEMBERS)
    texts |= {command.name: command.parser("%etrain").format_help() for command in commands}
    return "\n\n".join(
        f"### `{name}`\n\n```text\n{text.strip()}\n```" for name, text in texts.items()
    )


TABLES: dict[str, Callable[[], str]] = {
    "cell_keys": cell.keys_as_table,
    "command_help": command_help,
    "ec2_pool_keys": pool_keys.keys_as_table,
    "slurm_pool_keys": lambda: pool_keys.keys_as_table(SlurmSpec),
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the placeholders of one page; MkDocs calls this for each page."""
    return PLACEHOLDER.sub(lambda match: TABLES[match[1]](), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Remove the ``::`` of docstrings: it announces a literal block to Sphinx, not to Markdown."""
    return html.replace("<p>::</p>", "").replace("::</p>", ":</p>")
