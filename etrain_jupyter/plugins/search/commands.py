"""The commands ``%%etrain search`` and ``%etrain study``, and the function ``search``."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import textwrap
from collections.abc import Mapping
from typing import Annotated, Any

from etrain_jupyter.config.fields import Section
from etrain_jupyter.errors import ConfigError
from etrain_jupyter.launch import plan_job
from etrain_jupyter.notebook.commands.arguments import Parser, Spelling, StoreCount, cell_parser
from etrain_jupyter.notebook.commands.subcommands import CellSurface, Surface
from etrain_jupyter.notebook.dashboard.browser import has_front_end
from etrain_jupyter.plugins.search.cell import (
    ParsedSearch,
    parse_search_cell,
    parse_search_mapping,
)
from etrain_jupyter.plugins.search.open_studies import attach_study, submit_study
from etrain_jupyter.plugins.search.plan import StudyPlan, size_of
from etrain_jupyter.plugins.search.schema import Budget, Parameter, SearchConfig
from etrain_jupyter.plugins.search.screen import list_study, show_study
from etrain_jupyter.plugins.search.study import Study

EXAMPLE = """\
%%etrain search -o study
model: Net(hidden=hidden)
data: {train: train_set, eval: eval_set}
loss: F.cross_entropy
metrics: {accuracy: accuracy}
optimizer: {name: Adam, lr: !py lr}
epochs: 16
search:
  space:
    hidden: {choice: [64, 128, 256]}
    lr: {low: 1e-5, high: 1e-1, log: true}
  metric: eval_accuracy
  mode: max
  trials: 20"""


def make_search_parser() -> Parser:
    """Return the parser for the line ``%%etrain search``."""
    return cell_parser(
        "search",
        "Search over the names in search.space: each trial trains the job in the cell's body with "
        "other values, on the same pool.",
        epilog="The body is that of %%etrain distributed, with the group 'search'.",
        makes="study",
        wait="block until the study has ended; it survives an interrupt",
        dry_run="print the trials and rungs; submit nothing",
        quiet="show no table",
    )


def help_on_search() -> str:
    """Return the text of ``%%etrain search --help``."""
    groups: dict[str, type[Section]] = {
        "": SearchConfig,
        "space.NAME.": Parameter,
        "budget.": Budget,
    }
    keys = {
        prefix + (info.alias or key): info.description or ""
        for prefix, group in groups.items()
        for key, info in group.model_fields.items()
    }
    width = max(map(len, keys))
    lines = [f"  {key:<{width}}  {' '.join(text.split())}" for key, text in keys.items()]
    return (
        f"{make_search_parser().format_help().rstrip()}\n\n"
        "The names in search.space are names in the cell's expressions and !py values.\n\n"
        "keys of 'search':\n" + "\n".join(lines) + "\n\nexample:\n"
        f"{textwrap.indent(EXAMPLE, '    ')}"
    )


def run_cell(surface: CellSurface, options: argparse.Namespace, line: str, body: str) -> str:
    """Submit a search, and show its trials below the cell."""
    surface.bind(options.out)
    name = options.out if options.name is None else options.name
    given = {"name": name, "pool": options.pool}
    flags = {key: value for key, value in given.items() if value is not None}
    plan = plan_search(body, surface.names, flags, f"%%etrain {line}".rstrip())
    if options.dry_run:
        return str(plan)
    study = submit_study(plan)
    surface.bind(options.out, study)
    if not options.quiet:
        show_study(study)
    else:
        list_study(study)  # --quiet suppresses the output below the cell only
    if options.wait:
        study.wait()
        return str(study)
    return ""


def plan_search(
    body: str, notebook: Mapping[str, Any], flags: Mapping[str, Any], line: str
) -> StudyPlan:
    """Check the cell of a search; see ``launch.plan_cell``."""
    parsed = parse_search_cell(body, namespace=notebook, overrides=flags, first_line=line)
    return plan_study(parsed, notebook, cell=body)


def plan_study(parsed: ParsedSearch, notebook: Mapping[str, Any], *, cell: str = "") -> StudyPlan:
    """Plan one example trial of a search, with everything that all of its trials need."""
    config = parsed.template.build(parsed.example)
    config = config.model_copy(update={"name": parsed.job.config.name})
    example = dataclasses.replace(parsed.job, config=config)
    trial = plan_job(example, notebook, cell=cell)
    num_samples = size_of(parsed.job.config.data.train, parsed.job.namespace(notebook))
    return StudyPlan(parsed=parsed, trial=trial, num_samples=num_samples)


def search(body: Mapping[str, Any] | None = None, /, **keys: Any) -> Study:
    """Submit a search from Python, with the keys of a ``%%etrain search`` cell.

    Expressions with names of the space are texts: ``"Net(width=width)"``, ``"!py lr * 2"``.
    """
    caller = sys._getframe(1)  # a decorator around this function would hide the caller's names
    names = {**caller.f_globals, **caller.f_locals}
    study = submit_study(plan_study(parse_search_mapping({**(body or {}), **keys}, names), names))
    if has_front_end():
        show_study(study)
    return study


def study(
    surface: Surface,
    name: str | None = None,
    *,
    stop: bool = False,
    resume: bool = False,
    trials: Annotated[int, Spelling(metavar="N", action=StoreCount)] = 0,
) -> str:
    """Show a search: its trials, the best so far, and why trials ended.

    Args:
        name: Name, id or start of an id; by default the newest study.
        stop: Stop it; its running trials save checkpoints.
        resume: Continue a stopped study, or an ended one with more trials.
        trials: With --resume: trials to add.

    Example:
        study digits --resume --trials 10
    """
    if (stop and resume) or (trials and not resume):
        raise ConfigError(
            "study: --stop and --resume exclude each other, and --trials belongs to --resume",
            hint="study digits --resume --trials 10",
        )
    found = attach_study(name, store=surface.store)
    if stop:
        return found.stop()
    if resume:
        return found.resume(trials=trials)
    if not has_front_end():
        return str(found)
    show_study(found)  # updates while it runs
    return ""
