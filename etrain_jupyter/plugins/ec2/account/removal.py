"""Remove everything that ``init`` has created for a pool: ``%etrain pools remove``.

Only resources with the pool's tag are removed, and only those that do not belong to a
CloudFormation stack. The entry in ``pools.yaml`` is removed last, so that the command can be
repeated after an interruption.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from etrain_jupyter.errors import ConfigError, PoolError
from etrain_jupyter.plugins.ec2.account.boot import running_clusters
from etrain_jupyter.plugins.ec2.account.bucket import BucketPiece
from etrain_jupyter.plugins.ec2.account.group import GroupPiece
from etrain_jupyter.plugins.ec2.account.init import open_site
from etrain_jupyter.plugins.ec2.account.options import Ask, InitOptions, head_name, node_name
from etrain_jupyter.plugins.ec2.account.pools_file import has_mark, remove_entry
from etrain_jupyter.plugins.ec2.account.roles import LauncherPieces, RolePiece
from etrain_jupyter.plugins.ec2.account.site import (
    Piece,
    Site,
    Step,
    View,
    check_name,
    reason_of,
    run_steps,
)
from etrain_jupyter.plugins.ec2.aws_messages import AwsErrors
from etrain_jupyter.plugins.ec2.client.policy import node_policy
from etrain_jupyter.plugins.ec2.spec import KIND
from etrain_jupyter.pools.catalog import own_file, read_catalog

NOTHING = "Nothing was removed."


def remove_pool(
    name: str,
    options: InitOptions,
    *,
    ask: Ask,
    say: Callable[[str], object],
    is_confirmed: bool = False,
    is_dry_run: bool = False,
    deletes_objects: bool = False,
) -> str:
    """Remove a pool's resources, and its entry in ``pools.yaml``.

    Args:
        name: The pool.
        options: Region, bucket and profile of a pool that is not in ``pools.yaml``.
        ask: Asks a question, and returns the answer.
        say: Shows a line.
        is_confirmed: Ask nothing.
        is_dry_run: Show the steps only.
        deletes_objects: Delete the bucket even if it contains objects.

    Returns:
        The result.

    Raises:
        ConfigError: If the pool is not known, and no region is given.
        PoolError: If one of its clusters still exists, or AWS refuses a request.
    """
    check_name(name)
    known = read_catalog().get(name)
    if known is None and options.region is None:
        raise ConfigError(
            f"no pools.yaml defines pool '{name}'. {NOTHING}",
            hint=f"to remove the rest of it, name its region: pools remove {name} --region R",
        )
    region = str(known.values.get("region", "")) if known and known.kind == KIND else ""
    options = dataclasses.replace(options, region=options.region or region)
    site, _ = open_site(name, options)
    file = known.file if known is not None else options.file or own_file()
    pieces: list[Piece] = [
        LauncherPieces(site),
        RolePiece(site, head_name(name), lambda: {}),
        RolePiece(site, node_name(name), lambda: node_policy(site.spec)),
        GroupPiece(site, vpc=""),
        BucketPiece(site, deletes_objects=deletes_objects),
        _EntryPiece(name, file, is_known=known is not None),
    ]
    try:
        _refuse_running(site)
        views = [piece.to_remove() for piece in pieces]
    except AwsErrors as exc:
        raise PoolError(f"the account cannot be examined: {reason_of(exc)}. {NOTHING}") from exc
    steps = [step for view in views for step in view.steps]
    say(f"pool {name} in {site.spec.region}, AWS account {site.account}")
    for note in (note for view in views for note in view.notes):
        say(f"  {note}")
    if not steps:
        return f"Nothing of pool {name} is left to remove."
    for line in ("to do:", *(f"  {step.text}" for step in steps)):
        say(line)
    if is_dry_run:
        return f"{NOTHING} Run the command without --dry-run to remove them."
    if not is_confirmed and ask("Remove them? [y/N] ").strip().lower() not in ("y", "yes"):
        return NOTHING
    run_steps(steps, say=say, again=f"%etrain pools remove {name}")
    return f"pool {name} was removed"


def _refuse_running(site: Site) -> None:
    """Refuse to remove the resources of a running cluster."""
    ids = running_clusters(site.clients, site.spec)
    if ids:
        raise PoolError(
            f"pool {site.name} still has {', '.join(ids)}. {NOTHING} Run "
            f"`%etrain down {site.name}` first."
        )


class _EntryPiece:
    """The pool's entry in ``pools.yaml``."""

    def __init__(self, name: str, file: Path, *, is_known: bool) -> None:
        self._name = name
        self._file = file
        self._is_known = is_known

    def to_make(self) -> View:
        """Return nothing: ``init`` has its own piece for this."""
        return View()

    def to_remove(self) -> View:
        """Return the step that removes the entry, if ``init`` has written it."""
        if not self._is_known:
            return View()
        if not has_mark(self._file, self._name):
            note = f"pool {self._name} stays in {self._file}: `etrain pools init` did not write it"
            return View(notes=[note])
        text = f"remove pool {self._name} from {self._file}"
        return View(steps=[Step(text=text, run=self._remove)])

    def _remove(self) -> None:
        remove_entry(self._file, self._name)
