"""Keys ``workers`` and ``capacity`` of the ``aws-spot`` pool: which machines, how many, where."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from etrain_jupyter.config.fields import Section, check_word, fault
from etrain_jupyter.config.source_map import in_words
from etrain_jupyter.pools.spec_fields import Duration, Names, auto_or_list

DEFAULT_TYPES = ("g5.xlarge", "g6.xlarge", "g4dn.xlarge")
"""Types with one GPU. With fewer than three types, EC2 gives every zone a low score."""


WORDS = {
    "policy": (("spot", "deadline"), "deadline"),
    "placement": (("single-az", "spread"), "single-az"),
    "on_shortage": (("shrink", "migrate", "spread", "auto"), "shrink"),
}
"""Accepted words of a key, and the one to suggest."""


class WorkersSpec(Section):
    """Number of workers; one per GPU."""

    min: Annotated[int, Field(ge=0)] = 0
    """Workers to keep while the cluster is up, whether or not a job needs them."""
    want: Annotated[int | None, Field(ge=0)] = None
    """Workers to start with the cluster; None for ``min``."""
    max: Annotated[int, Field(ge=1)] = 4
    """Maximum number of workers."""
    per_node: Annotated[int, Field(ge=0)] = 0
    """Workers per machine; 0 for one per GPU, or one on a machine without GPUs."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        # A model validator, because a field validator of `min` does not see `max` yet.
        for key in ("min", "want"):
            if (value := getattr(self, key)) is not None and value > self.max:
                raise fault(
                    f"workers.{key}={value} is more than workers.max={self.max}",
                    hint=f"write workers.max: {value}, or lower workers.{key}",
                    path=("workers", key),
                )
        return self


class GpuSpec(Section):
    """Requirements on machine types, instead of their names."""

    memory_gib: float = 0.0
    """Minimum memory of a GPU, for example ``16`` or ``">=16"``."""
    count: Annotated[int, Field(ge=1)] = 1
    """GPUs per machine."""

    @field_validator("memory_gib", mode="before")
    @classmethod
    def _at_least(cls, value: Any) -> Any:
        # Accept ">=16" as well, which states that the number is a minimum.
        if isinstance(value, str) and (found := re.fullmatch(r"\s*>=\s*([0-9.]+)\s*", value)):
            return float(found[1])
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


class OnDemandSpec(Section):
    """On-demand machines: full price, never interrupted."""

    base: Annotated[int, Field(ge=0)] = 0
    """Number of workers that always run on demand."""
    after: Annotated[Duration, Field(gt=0)] = 120.0
    """Time without spot capacity after which missing workers may be launched on demand."""
    max: Annotated[int, Field(ge=0)] = 0
    """Maximum number of on-demand workers, including ``base``; if both are 0, spot only."""

    @property
    def most(self) -> int:
        """Maximum number of on-demand workers: the larger of ``base`` and ``max``."""
        return max(self.base, self.max)


class CapacitySpec(Section):
    """Machine types and zones."""

    types: Annotated[Names, Field(min_length=1)] = DEFAULT_TYPES
    """Acceptable types."""
    gpu: GpuSpec | None = None
    """Use all types with such GPUs, instead of ``types``."""
    zones: Literal["auto"] | Names = "auto"
    """Availability zones; auto is every zone that has a subnet."""
    placement: Literal["single-az", "spread"] = "single-az"
    """single-az keeps workers in one zone: traffic between zones costs more than GPUs."""
    on_shortage: Literal["shrink", "migrate", "spread", "auto"] = "migrate"
    """Reaction of single-az to a shortage: shrink, migrate all workers, or use other zones; auto
    uses them if a worker there, with its traffic, costs less than on demand."""
    allocation: Literal[
        "price-capacity-optimized", "capacity-optimized", "lowest-price", "diversified"
    ] = "price-capacity-optimized"
    """EC2's strategy for choosing among the types in a zone."""
    policy: Literal["spot", "deadline"] = "spot"
    """spot uses on-demand machines as ``on_demand`` allows; deadline, if a job is behind
    ``finish_by``."""
    finish_by: Annotated[Duration | None, Field(gt=0)] = None
    """With ``policy: deadline``: time from a job's submission until it must have finished."""
    keep: float = 0.5
    """With ``policy: deadline``: part of the spare time that is kept for the end; 0 is cheapest."""
    spares: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Workers kept ready in addition to those that jobs use, within ``workers.max``; auto keeps as
    many as avoid a larger loss than they cost, which only jobs with a fixed size have."""
    on_demand: OnDemandSpec = OnDemandSpec()

    def most_on_demand(self, max_workers: int) -> int:
        """Return the maximum number of on-demand workers."""
        # With a deadline, on_demand.max is only a limit; without it, all workers may be on demand.
        if self.policy == "deadline" and not self.on_demand.max:
            return max_workers
        return self.on_demand.most

    @model_validator(mode="after")
    def _deadline_has_time(self) -> Self:
        is_given = self.finish_by is not None
        if self.policy == "deadline" and not is_given:
            raise fault(
                "capacity.policy: deadline needs capacity.finish_by",
                hint="write for example capacity: {policy: deadline, finish_by: 6 h}",
                path=("capacity", "policy"),
            )
        if self.policy != "deadline" and is_given:
            raise fault(
                "capacity.finish_by has an effect only with capacity.policy: deadline",
                hint="add policy: deadline, or remove finish_by",
                path=("capacity", "finish_by"),
                at_key=True,
            )
        return self

    @field_validator("keep", mode="before")
    @classmethod
    def _like_a_share(cls, value: Any) -> Any:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= 1:
            raise fault(
                f"{{key}} must be between 0 and 1, not {in_words(value)}", hint="write keep: 0.5"
            )
        return float(value)  # YAML reads 0 and 1 as integers

    @field_validator("policy", "placement", "on_shortage", mode="before")
    @classmethod
    def _known_word(cls, value: Any, info: ValidationInfo) -> Any:
        known, usual = WORDS[str(info.field_name)]
        return check_word(value, known, usual=f"{info.field_name}: {usual}")

    @model_validator(mode="before")
    @classmethod
    def _one_of_two(cls, data: Any) -> Any:
        # Check before validation, which fills in the default types.
        if isinstance(data, Mapping) and data.get("types") and data.get("gpu"):
            raise fault(
                "capacity.types and capacity.gpu are mutually exclusive",
                hint="keep types to name machines, or gpu to describe them",
                path=("capacity", "gpu"),
                at_key=True,
            )
        return data

    @field_validator("spares", mode="before")
    @classmethod
    def _number_or_auto(cls, value: Any) -> Any:
        is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if value == "auto" or is_number:
            return value
        raise fault(
            f"capacity.spares must be auto or a number of workers, not {in_words(value)}",
            hint="write spares: auto, or for example spares: 1",
            path=("capacity", "spares"),
        )

    @field_validator("types", mode="after")
    @classmethod
    def _like_types(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not re.fullmatch(r"[a-z][a-z0-9-]*\.[a-z0-9-]+", name):
                raise fault(f"'{name}' is not a machine type", hint="write for example g5.xlarge")
        # A duplicate type would become two identical overrides in a launch request.
        return tuple(dict.fromkeys(value))

    @field_validator("zones", mode="before")
    @classmethod
    def _list_or_auto(cls, value: Any) -> Any:
        return auto_or_list(value, "zones", "[us-east-1a, us-east-1b]")
