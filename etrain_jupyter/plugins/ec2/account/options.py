"""Answers that describe a new pool, and the entry of ``pools.yaml`` made from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etrain_jupyter.errors import ConfigError
from etrain_jupyter.plugins.ec2.capacity_spec import DEFAULT_TYPES
from etrain_jupyter.plugins.ec2.spec import KIND

MAX_TOTAL_USD = 20.0
"""Default limit of a cluster's cost in US dollars, so that every pool has one."""
WORKERS = 4

Ask = Callable[[str], str]


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """Flags of ``pools init``; a value that is None or empty is asked for, or has a default."""

    region: str | None = None
    bucket: str | None = None
    """None for a name made from the pool, the account and the region."""
    types: Sequence[str] = ()
    workers: int | None = None
    budget: float | None = None
    """Maximum cost of a cluster in US dollars."""
    subnets: Sequence[str] = ()
    """Empty for the subnets of the default VPC."""
    security_group: str | None = None
    """An existing security group."""
    role: str | None = None
    """An existing instance profile."""
    head: str | None = None
    ami: str | None = None
    python: str | None = None
    profile: str | None = None
    file: Path | None = None
    """The file to write the entry to; None for the user's own."""


def node_name(pool: str) -> str:
    """Return the name of the nodes' role and instance profile."""
    return f"etrain-{pool}-node"


def default_bucket(pool: str, account: str, region: str) -> str:
    """Return the bucket's default name, which no other account is likely to use.

    >>> default_bucket("spot", "111122223333", "us-east-1")
    'etrain-spot-111122223333-us-east-1'
    """
    return f"etrain-{pool}-{account}-{region}"[:63].rstrip("-")


def values_of(pool: str, options: InitOptions, *, bucket: str, region: str) -> dict[str, Any]:
    """Return the keys of the pool's entry, without ``kind``."""
    values: dict[str, Any] = {"region": region, "bucket": bucket}
    if options.profile:
        values["profile"] = options.profile
    if options.head == "on-demand":
        values["head"] = "on-demand"
    values["workers"] = {"max": options.workers or WORKERS}
    values["capacity"] = {"types": list(options.types) or list(DEFAULT_TYPES)}
    values["budget"] = {"max_total": options.budget or MAX_TOTAL_USD}
    if network := _given(subnets=list(options.subnets), security_group=options.security_group):
        values["network"] = network
    values["iam"] = {"instance_profile": options.role or node_name(pool)}
    if options.head == "on-demand":
        values["iam"]["head_profile"] = f"etrain-{pool}-head"
    if image := _given(ami=options.ami, python=options.python):
        values["image"] = image
    return values


def _given(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value}


COMMENTS = {
    "kind": "EC2 spot instances",
    "region": "of the machines and of the bucket",
    "bucket": "checkpoints, the nodes' configuration, cost records",
    "profile": "credentials in ~/.aws",
    "head": "the scheduler runs on its own machine, and outlives this one",
    "workers": "at most this many, one per GPU",
    "capacity": "any of these types; more types are interrupted less often",
    "budget": "US dollars per cluster; then jobs save a checkpoint and stop",
    "network": "the group admits its own members only",
    "iam": "what the machines may do",
    "image": "operating system with driver; interpreter with torch",
}
"""Comment of each line of an entry."""


def lines_of(values: dict[str, Any]) -> list[tuple[str, Any, str]]:
    """Return the lines of an entry: key, value and comment."""
    return [(key, value, COMMENTS[key]) for key, value in {"kind": KIND, **values}.items()]


def questions(options: InitOptions, *, region: str, ask: Ask) -> dict[str, Any]:
    """Ask for values that no flag sets; an empty answer selects the default.

    Raises:
        ConfigError: If an answer is not a number.
    """
    answers: dict[str, Any] = {}
    if options.region is None:
        answers["region"] = ask(f"Region [{region}]: ").strip() or region
    if not options.types:
        default = ",".join(DEFAULT_TYPES)
        answers["types"] = split_words(ask(f"Machine types [{default}]: ") or default)
    if options.workers is None:
        answers["workers"] = int(_number("Most workers at a time", str(WORKERS), ask))
    if options.budget is None:
        answers["budget"] = _number("Most US dollars per cluster", f"{MAX_TOTAL_USD:g}", ask)
    return answers


def _number(question: str, default: str, ask: Ask) -> float:
    answer = ask(f"{question} [{default}]: ").strip() or default
    try:
        value = float(answer)
    except ValueError:
        value = 0.0
    if not 1 <= value < 1e9:
        raise ConfigError(
            f"{question}: '{answer}' is not a number of 1 or more. Nothing was created",
            hint=f"answer for example {default}",
        )
    return value


def split_words(text: str | None) -> tuple[str, ...]:
    """Split a comma-separated list.

    >>> split_words("g5.xlarge, g6.xlarge")
    ('g5.xlarge', 'g6.xlarge')
    """
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())
