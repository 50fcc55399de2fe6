"""Schema of a job: one frozen model, from which help, template and errors are derived.

Fields are named as in Python and JSON; a shorter key in the cell is the alias (``batch.global``).
All validation happens here, once, so that other modules can rely on a ``TrainConfig``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from etrain_jupyter.config.fields import (
    Interval,
    Optional,
    Required,
    Section,
    check_word,
    fault,
    interval_parts,
    words,
)
from etrain_jupyter.config.source_map import did_you_mean, in_words
from etrain_jupyter.config.store_url import S3, split_s3_url
from etrain_jupyter.config.vocabulary import (
    ELEMENTWISE,
    NAMED_LR,
    OTHER_PRECISIONS,
    PRECISIONS,
    REFUSED,
    check_options,
    find_optimizer,
)
from etrain_jupyter.process.processes import num_usable_cores

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "DataConfig",
    "EarlyStoppingConfig",
    "EmaConfig",
    "EvalConfig",
    "Interval",
    "LogConfig",
    "MetricConfig",
    "OptimizerConfig",
    "ReproducibleConfig",
    "ScalingConfig",
    "ScheduleConfig",
    "Section",
    "TrainConfig",
    "WorkersConfig",
]

RESERVED_METRICS = frozenset(
    (
        *("step", "epoch", "samples", "loss", "lr", "world_size", "generation", "samples_per_s"),
        *("time", "data_s", "compute_s", "communication_s", "optimizer_s"),
    )
)
"""Columns of every history; metrics must not use these names."""


# Keys whose values are expressions, in addition to the optimizer and the metrics.
REFERENCES = (
    *("model", "data.train", "data.eval", "data.collate", "loss", "step", "weight"),
    *("eval.predict", "eval.score"),
)

DEFAULT_MAX_WORKERS = 4
"""Default of ``workers.max`` if the pool has at least this many workers."""


DEFAULT_BATCH_SIZE = 32


class DataConfig(Section):
    """Source of the samples."""

    train: Annotated[Required, Field(examples=["train_set"])]
    """A data set, a data frame, a pair of tensors, or a function that builds it on the worker."""
    eval: Annotated[Optional, Field(examples=["eval_set"])] = None
    """Evaluation data, each sample evaluated once; no evaluations by default."""
    collate: Annotated[Optional, Field(examples=["collate"])] = None
    """Function that makes a batch from a list of samples; torch's default_collate by default."""
    num_workers: Annotated[int, Field(ge=0)] = 0
    """Data-loading processes per rank; 0 loads in the trainer itself."""


class OptimizerConfig(Section):
    """Optimizer: a name from torch.optim with its options, or a reference."""

    name: Annotated[str | None, Field(examples=["AdamW"])] = "AdamW"
    """Optimizer of torch.optim (upper or lower case), LAMB or LARS; null with ``reference``."""
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    """Learning rate; by default torch's default for the optimizer."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Other keyword arguments of the optimizer, for example ``weight_decay`` or ``betas``."""
    no_decay: Annotated[Literal["auto"] | None, Field(examples=["auto"])] = None
    """auto exempts biases and norms (parameters of fewer than 2 dimensions) from weight_decay."""
    reference: Annotated[Optional, Field(examples=["make_optimizer"])] = None
    """Function of ``parameters``, ``named_parameters`` or ``model`` that returns an optimizer."""

    @model_validator(mode="before")
    @classmethod
    def _from_cell(cls, data: Any) -> Any:
        if isinstance(data, str):
            # Not a name from torch.optim, so it is an expression over the notebook's names, such as
            # make_optimizer.
            if find_optimizer(data) not in (*NAMED_LR, *REFUSED):
                return {"name": None, "reference": data}
            data = {"name": _checked_name(data, ("optimizer",))}
        if not isinstance(data, Mapping):
            return data
        # The cell writes options next to the name: {name: SGD, lr: 0.1, momentum: 0.9}. Collect all
        # keys that are not fields. _check_options then rejects the keys that the optimizer does not
        # have.
        own = {"name", "lr", "no_decay", "options", "reference"}
        given = {key: value for key, value in data.items() if key in own}
        extra = {key: value for key, value in data.items() if key not in own}
        if extra:
            given["options"] = {**given.get("options", {}), **extra}
        # As model_dump writes it: {name: null, reference: ...}.
        if given.get("reference") is not None:
            given.setdefault("name", None)
        # model_dump writes name: null with a reference; otherwise the name in the cell is empty.
        elif "name" in given and given["name"] is None:
            raise fault("optimizer.name is empty", hint="write for example {name: AdamW, lr: 3e-4}")
        if isinstance(given.get("name"), str):
            given["name"] = _checked_name(given["name"], ("optimizer", "name"))
            # Record the value in the job, so that a different default in a later version of torch
            # has no effect.
            given.setdefault("lr", NAMED_LR[given["name"]])
        return given

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.name is not None:
            check_options(self.name, self.options, fault)
        elif self.no_decay is not None:
            raise fault(
                "no_decay applies to a named optimizer only, not to a function",
                hint="create the parameter groups in the function, and remove the key",
                path=("optimizer", "no_decay"),
                at_key=True,
            )
        return self


def _checked_name(text: str, path: tuple[str, ...]) -> str:
    name = find_optimizer(text)
    if name in NAMED_LR:
        return name
    if name in REFUSED:
        raise fault(
            f"optimizer {name} is not supported: {REFUSED[name]}",
            hint="use for example AdamW",
            path=path,
        )
    hint = did_you_mean(text, NAMED_LR, count=3)
    names = f"names: {', '.join(NAMED_LR)}; or 'optimizer: a_function' (parameters)"
    raise fault(f"unknown optimizer '{text}'", hint=hint or names, path=path)


class ScheduleConfig(Section):
    """Learning rate schedule, counted in samples."""

    warmup: Annotated[Interval | None, Field(examples=["500 steps"])] = None
    """Steps or epochs in which the learning rate rises from nearly 0 to the optimizer's."""
    decay: Annotated[Literal["none", "linear", "cosine"], Field(examples=["cosine"])] = "none"
    """Decay to 0 at the end of the job: linear or cosine; none keeps the learning rate."""

    @field_validator("warmup")
    @classmethod
    def _reject_time(cls, value: Interval | None) -> Interval | None:
        if value is not None and value.unit == "s":
            raise fault(
                f"{{key}} is counted in steps or epochs, not in time ('{value}')",
                hint="write for example '500 steps'",
            )
        return value

    @field_validator("decay", mode="before")
    @classmethod
    def _known_decay(cls, value: Any) -> Any:
        if value is None:
            return "none"
        # constant_with_warmup, cosine_with_restarts, CosineAnnealingLR, polynomial ...
        usual = {"con": "none", "cos": "cosine"}.get(str(value)[:3].lower(), "linear")
        return check_word(value, ("none", "linear", "cosine"), usual=f"decay: {usual}")


INSTEAD: dict[str, JsonValue] = {"instead_of": "global"}


class BatchConfig(Section):
    """Number of samples in a step."""

    shorthand = "global"

    global_batch_size: Annotated[int | None, Field(alias="global", ge=1, examples=[32])] = None
    """Samples per step over all workers, for any number of workers; 32 by default."""
    micro_batch_size: Annotated[
        int | Literal["auto"] | None, Field(alias="micro", examples=["auto"])
    ] = None
    """Maximum samples per forward pass; auto uses what fits into memory, null a worker's share."""
    per_worker_batch_size: Annotated[
        int | None, Field(alias="per_worker", ge=1, examples=[32], json_schema_extra=INSTEAD)
    ] = None
    """Samples per step on each worker, instead of ``global``; grows with the number of workers."""
    aggregation_frequency: Annotated[int, Field(ge=1, examples=[4])] = 1
    """Passes per worker in each step, whose gradients are accumulated before the exchange."""
    split: Literal["even", "auto"] = "even"
    """Samples of each worker in a step: the same number, or auto for shares by measured speed."""

    @model_validator(mode="before")
    @classmethod
    def _check_sizes(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        sizes = [
            # Both spellings occur: the cell's key and, from model_dump, the field name.
            next((data[key] for key in keys if data.get(key) is not None), None)
            for keys in (("global", "global_batch_size"), ("per_worker", "per_worker_batch_size"))
        ]
        # The cell has both keys. A dump, in which one of them is null, is accepted.
        if None not in sizes:
            raise fault(
                f"batch.global={sizes[0]} and batch.per_worker={sizes[1]} are mutually exclusive",
                hint="keep global for a constant batch, or per_worker for a batch that "
                "grows with the number of workers",
                path=("batch", "per_worker"),
                at_key=True,
            )
        # Set it explicitly, so that the recorded job does not depend on a default that may change.
        if sizes == [None, None]:
            rest = {key: value for key, value in data.items() if key != "global_batch_size"}
            return {**rest, "global": DEFAULT_BATCH_SIZE}
        return data

    @model_validator(mode="after")
    def _check_passes(self) -> Self:
        # A single worker has the largest share of a step. If this share is too small for the
        # passes, every share is.
        size, passes = self.size(1), self.aggregation_frequency
        if size < passes:
            key = "global" if self.per_worker_batch_size is None else "per_worker"
            raise fault(
                f"aggregation_frequency={passes} leaves {passes - size} of {passes} passes without "
                f"a sample, even with one worker: batch.{key} is {size}",
                hint=f"write aggregation_frequency: {size} or less, or batch: {{{key}: {passes}}} "
                "or more",
                path=("batch", "aggregation_frequency"),
            )
        return self

    def size(self, world_size: int) -> int:
        """Return the number of samples in a full step of ``world_size`` ranks."""
        if self.per_worker_batch_size is not None:
            return self.per_worker_batch_size * world_size
        return self.global_batch_size or DEFAULT_BATCH_SIZE

    @field_validator("micro_batch_size", mode="before")
    @classmethod
    def _check_micro(cls, value: Any) -> Any:
        if value is None or value == "auto":
            return value
        # In Python, True is an int.
        if isinstance(value, bool) or not isinstance(value, int):
            wanted, hint = "a whole number or auto", "write micro: auto"
            raise fault(f"{{key}} must be {wanted}, not {in_words(value)}", hint=hint)
        if value < 1:
            raise fault(f"{{key}} must be 1 or more, not {value}")
        return value


class ScalingConfig(Section):
    """Scaling of the learning rate when the batch grows and shrinks with the workers."""

    rule: Annotated[
        Literal["none", "linear", "sqrt", "adascale"] | None, Field(examples=["auto"])
    ] = None
    """none, linear, sqrt, or adascale, which follows the gradient noise; auto is linear for SGD,
    sqrt for Adam-family optimizers, LAMB and LARS."""
    base_workers: Annotated[int, Field(ge=1)] = 1
    """Number of workers for which optimizer.lr was chosen."""
    ramp: Annotated[int | None, Field(ge=0, examples=["auto", "10 steps"])] = None
    """Steps over which the learning rate rises when workers join; auto derives it from momentum."""
    max_scale: Annotated[float | None, Field(ge=1, allow_inf_nan=False, examples=[8])] = None
    """Maximum factor of the learning rate; no limit by default."""

    # None stands for auto, because the rule depends on the optimizer, which is in another group.
    _words = words({None: None, "auto": None}, rule="linear")

    @field_validator("ramp", mode="before")
    @classmethod
    def _read_steps(cls, value: Any) -> Any:
        return None if value == "auto" else _parse_steps(value)


def _parse_steps(value: Any) -> Any:
    """Parse '10 steps'; a bare number is passed through and also means steps."""
    if not isinstance(value, str):
        return value
    parts = interval_parts(value)
    if parts["unit"] != "steps":
        raise fault(
            f"{{key}} is counted in steps, not '{value}'", hint="write for example '10 steps'"
        )
    return int(parts["value"])


class EvalConfig(Section):
    """When to evaluate data.eval, and how to score it as a whole."""

    interval = "every"

    every: Interval = Interval(value=1, unit="epochs")
    """Interval of evaluations on data.eval: steps, epochs or time."""
    predict: Annotated[Optional, Field(examples=["predict"])] = None
    """Function (model, batch) that returns one record per sample, for eval.score."""
    score: Annotated[Optional, Field(examples=["score"])] = None
    """Function (records) that returns {name: value}: numbers, and figures, texts or tables to
    display; it gets one record per sample of data.eval, in its order."""
    loss: bool = True
    """false leaves out the loss and the metrics, for example if data.eval has no targets."""

    @model_validator(mode="before")
    @classmethod
    def _from_interval(cls, data: Any) -> Any:
        # Both spellings: `eval: 1 epoch` and `eval: {every: 1 epoch}`.
        if isinstance(data, Mapping | EvalConfig) and set(data) != {"value", "unit"}:
            return data
        every = data if isinstance(data, Interval | Mapping) else interval_parts(data)
        return {"every": every}

    @model_serializer(mode="wrap")
    def _to_text(self, handler: SerializerFunctionWrapHandler) -> Any:
        # An interval alone is written as text, as in a cell.
        is_interval = self.predict is None and self.loss
        return str(self.every) if is_interval else handler(self)


class MetricConfig(Section):
    """A metric of the evaluations, and whether it is minimized or maximized."""

    metric: Annotated[str, Field(examples=["accuracy"])]
    """Metric of the evaluation: loss, a name in metrics, or a name that eval.score returns."""
    mode: Annotated[Literal["min", "max"], Field(examples=["max"])]
    """min if lower values are better, max if higher ones are; min by default for loss."""

    @model_validator(mode="before")
    @classmethod
    def _default_mode(cls, data: Any) -> Any:
        # A loss is always minimized. For any other metric, a wrong guess would keep the worst
        # weights.
        if not isinstance(data, Mapping) or data.get("mode") is not None:
            return data
        metric = data.get("metric")
        if metric == "loss":
            return {**data, "mode": "min"}
        if isinstance(metric, str):
            raise fault(
                f"mode is missing: is a lower or a higher {metric} better?",
                hint=f"write {{metric: {metric}, mode: max}}, or mode: min",
            )
        return data

    _words = words(mode="max if more is better")


class EarlyStoppingConfig(MetricConfig):
    """Condition for ending a job early, once its metric no longer improves."""

    patience: Annotated[int, Field(ge=1)] = 3
    """Consecutive evaluations without an improvement after which the job ends."""
    min_delta: Annotated[float, Field(ge=0, allow_inf_nan=False, examples=[0])] = 0.0
    """Improvements up to this size do not count."""


class CheckpointConfig(Section):
    """Location and frequency of checkpoints."""

    to: Annotated[str | None, Field(examples=["checkpoints"])] = None
    """Folder or s3://bucket/prefix, with a subfolder per job; by default the job's run folder."""
    every: Annotated[Interval | None, Field(examples=["auto"])] = None
    """Steps, epochs or time; auto weighs the cost of a checkpoint against the work at risk."""
    keep: Annotated[int, Field(ge=1)] = 3
    """Number of newest checkpoints to keep."""
    best: Annotated[
        MetricConfig | None, Field(examples=[{"metric": "accuracy", "mode": "max"}])
    ] = None
    """Metric of the best evaluation, whose checkpoint is kept in addition to the newest ones."""

    @field_validator("every", mode="before")
    @classmethod
    def _read_auto(cls, value: Any) -> Any:
        return None if value == "auto" else value

    @field_validator("to", mode="before")
    @classmethod
    def _check_location(cls, value: Any) -> Any:
        # The value may come from Python or !py, where users may pass a Path.
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        if isinstance(value, str) and not value.strip():
            raise fault("{key} is empty", hint="name a folder, or remove the line")
        if isinstance(value, str) and value.startswith(S3):
            try:
                split_s3_url(value)
            except ValueError as exc:
                raise fault(f"{{key}} {exc}", hint="write s3://bucket/prefix") from None
        # gs:// or abfs:// would otherwise create a folder with that name.
        elif isinstance(value, str) and "://" in value:
            hint = "write a folder on this machine, or s3://bucket/prefix"
            raise fault(f"'{value}' is neither a folder nor an S3 URL", hint=hint)
        return value


class WorkersConfig(Section):
    """Number of workers that may train at the same time."""

    shorthand = "max"

    min: Annotated[int, Field(ge=1)] = 1
    """Minimum number of workers; with fewer, the job waits."""
    max: Annotated[int | None, Field(ge=1, examples=[4])] = None
    """Maximum number of workers; by default the size of the pool, at most 4."""
    target: Annotated[Literal["max", "goodput"], Field(examples=["goodput"])] = "max"
    """Workers to take between min and max: max takes all that the pool has; goodput adds a worker
    only while it is worth its cost, or the pool's deadline requires it."""

    _words = words({None: "max"}, target="goodput")

    @field_validator("max")
    @classmethod
    def _check_min(cls, value: int | None, info: ValidationInfo) -> int | None:
        # The value is missing if min itself is invalid, which is reported separately.
        least = info.data.get("min")
        if value is not None and least is not None and value < least:
            raise fault(
                f"workers.max={value} is below workers.min={least}",
                hint=f"write max: {least} or more",
            )
        return value


class ReproducibleConfig(Section):
    """Weights that are bit-for-bit identical for any number of workers."""

    shards: Annotated[int | None, Field(ge=1, examples=[8])] = None
    """Number of pieces of each step, which limits the number of workers. It affects the weights:
    set it to compare jobs with different workers.max."""


class EmaConfig(Section):
    """Exponential moving average of the weights, which evaluations use."""

    decay: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.999
    """Weight of the previous average after each step; the average covers about 1 / (1 - decay)
    steps."""
    warmup: bool = True
    """Use a lower decay in the first steps, so that the initial weights do not dominate."""


class LogConfig(Section):
    """Contents of the history, and the tools to which values are logged."""

    every: Annotated[int, Field(ge=1, examples=["1 step"])] = 1
    """Steps between two rows of the history."""
    tensorboard: Annotated[bool | str, Field(examples=[True])] = False
    """Write TensorBoard files: true for a folder next to the job's log, or a folder for all jobs,
    with a subfolder per job."""
    to: Annotated[
        dict[str, dict[str, JsonValue]], Field(examples=[{"mlflow": {"experiment": "digits"}}])
    ] = Field(default_factory=dict)
    """Loggers: mlflow, wandb or the name that another package has registered. A name, a list of
    names, or a group with the options of each."""

    @field_validator("to", mode="before")
    @classmethod
    def _read_loggers(cls, value: Any) -> Any:
        # to: mlflow     to: [mlflow, wandb]     to: {mlflow: true, wandb: {mode: offline}}
        if isinstance(value, str):
            value = [value]
        if isinstance(value, list):
            named = [name for name in value if isinstance(name, str)]
            if len(named) < len(value) or len(set(named)) < len(named):
                raise fault(
                    "{key} must be a list of different names of loggers",
                    hint="write for example 'to: [mlflow, wandb]'",
                )
            return {name: {} for name in named}
        if isinstance(value, Mapping):
            return {k: {} if v is None or v is True else v for k, v in value.items()}
        if value is None:
            return value
        raise fault(
            f"{{key}} must be the name of a logger or a group of loggers, not {in_words(value)}",
            hint="write for example 'to: mlflow' or 'to: {wandb: {mode: offline}}'",
        )

    @field_validator("every", mode="before")
    @classmethod
    def _read_steps(cls, value: Any) -> Any:
        return _parse_steps(value)

    @field_validator("tensorboard")
    @classmethod
    def _make_absolute(cls, value: bool | str) -> bool | str:
        # The coordinator may run in a different folder than the notebook.
        return str(Path(os.path.expanduser(value)).absolute()) if isinstance(value, str) else value

    @field_validator("to")
    @classmethod
    def _refuse_second_tensorboard(cls, value: Any, info: ValidationInfo) -> Any:
        if "tensorboard" in value and info.data.get("tensorboard"):
            raise fault(
                "{key} names tensorboard, as log.tensorboard does", hint="remove one of them"
            )
        return value

    def loggers_of(self, run_dir: Path) -> dict[str, dict[str, JsonValue]]:
        """Return the options of all loggers by name, including those of ``tensorboard``."""
        if not self.tensorboard:
            return self.to
        is_folder = isinstance(self.tensorboard, str)
        folder = str(self.tensorboard) if is_folder else str(run_dir / "tensorboard")
        return {"tensorboard": {"folder": folder}, **self.to}

    def tensorboard_of(self, job_id: str, run_dir: Path) -> Path | None:
        """Return the folder of a job's TensorBoard files, or None if they are disabled."""
        if not self.tensorboard:
            return None
        # A folder that several jobs share has a subfolder per job, so that TensorBoard shows each
        # job as a run.
        is_folder = isinstance(self.tensorboard, str)
        return Path(str(self.tensorboard)) / job_id if is_folder else run_dir / "tensorboard"


class TrainConfig(Section):
    """One job, as given in its cell, with every default filled in."""

    model: Annotated[Required, Field(examples=["Net()"])]
    """An nn.Module, its class, or a function that builds it on the worker."""
    data: DataConfig
    """Training and evaluation data."""
    loss: Annotated[
        Optional, Field(examples=["F.cross_entropy"], json_schema_extra={"usual": True})
    ] = None
    """Function (output, target) that returns a mean or one value per sample; by default the .loss
    of the model's output, or the sum of a dict of losses."""
    step: Annotated[
        Optional, Field(examples=["train_step"], json_schema_extra={"instead_of": "loss"})
    ] = None
    """Function (model, batch) that returns the loss, or {"loss": ..., name: ...} with metrics."""
    weight: Annotated[Optional, Field(examples=["num_tokens"])] = None
    """Function (batch) that returns the weight of the batch in the average, such as its number of
    tokens; by default its number of samples."""
    metrics: dict[str, Required] = Field(
        default_factory=dict,
        examples=[{"accuracy": "accuracy"}],
        json_schema_extra={"not_with": "step"},
    )
    """Functions (output, target) that return one value per sample, or torchmetrics, by name."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """A name from torch.optim with its options, or a function of the parameters."""
    schedule: Annotated[
        ScheduleConfig | None, Field(examples=[{"warmup": "500 steps", "decay": "cosine"}])
    ] = None
    """Learning rate schedule, such as {warmup: 500 steps, decay: cosine}; constant by default."""
    batch: BatchConfig = BatchConfig()
    """Number of samples per step."""
    scaling: Annotated[
        ScalingConfig | None,
        Field(examples=[{"rule": "linear"}], json_schema_extra={"instead_of": "batch.global"}),
    ] = None
    """With batch.per_worker: scaling of the learning rate with the number of workers."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the forward pass: fp32, bf16 or fp16; the weights keep their own type."""
    compile: bool = False
    """Compile the model with torch.compile on each worker before it joins the others."""
    compression: Literal["none", "bf16", "fp16", "powersgd"] = "none"
    """Compression of the exchanged gradients, for slow networks: none, bf16, fp16 or powersgd."""
    shard: Literal["none", "optimizer"] = "none"
    """State that the workers divide to save memory: none, or that of the optimizer."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Gradient exchange backend: nccl, gloo, or auto (nccl if each worker has a GPU, else gloo)."""
    clip_grad_norm: Annotated[float | None, Field(gt=0, allow_inf_nan=False, examples=[1.0])] = None
    """Maximum norm of the gradient; a larger gradient is scaled down. No limit by default."""
    ema: Annotated[EmaConfig | None, Field(examples=[0.999])] = None
    """Decay of an exponential moving average of the weights, which is evaluated and exported, or
    {decay: 0.999, warmup: false}; no average by default."""
    sync_batchnorm: bool = False
    """Compute BatchNorm over the samples of all workers instead of each worker's own."""
    reproducible: Annotated[ReproducibleConfig | None, Field(examples=[False])] = None
    """Make the weights bit-for-bit identical for any number of workers: true, or {shards: 8}."""
    epochs: Annotated[float | None, Field(gt=0, allow_inf_nan=False, examples=[1])] = None
    """Passes over the training data; may be a fraction, such as 0.5."""
    steps: Annotated[
        int | None, Field(ge=1, examples=[1000], json_schema_extra={"instead_of": "epochs"})
    ] = None
    """Optimizer steps, instead of epochs."""
    # Not named eval, which is a function of Python.
    eval_every: Annotated[EvalConfig, Field(alias="eval")] = EvalConfig()
    """Interval of evaluations on data.eval; with predict and score, scores of the whole set."""
    early_stopping: Annotated[
        EarlyStoppingConfig | None,
        Field(examples=[{"metric": "accuracy", "mode": "max", "patience": 3}]),
    ] = None
    """Condition for ending early: {metric: accuracy, mode: max, patience: 3}; never by default."""
    on_nan_loss: Literal["fail", "pause"] = "fail"
    """Reaction to a NaN or infinite loss, whose step is undone: fail or pause."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Location and interval of checkpoints."""
    workers: WorkersConfig = WorkersConfig()
    """Number of workers that may train at the same time."""
    pool: str = "local"
    """Source of workers: local (this machine), a scheduler's address, or a name in pools.yaml."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Random seed of the sample order and of all other randomness."""
    log: LogConfig = LogConfig()
    """Contents of the history, and the tools to which values are logged."""
    name: Annotated[str | None, Field(examples=["digits"])] = None
    """Name of the job; --name on the first line overrides it."""

    @field_validator("reproducible", mode="before")
    @classmethod
    def _read_true(cls, value: Any) -> Any:
        if value is None or isinstance(value, bool):
            # `true` becomes a group without a number of shards, see num_shards.
            return {} if value else None
        if not isinstance(value, Mapping | ReproducibleConfig):
            raise fault(
                f"{{key}} must be true, false or {{shards: 8}}, not {in_words(value)}",
                hint="write reproducible: true",
            )
        return value

    @field_validator("ema", mode="before")
    @classmethod
    def _read_decay(cls, value: Any) -> Any:
        if value is None or value is False:
            return None
        if isinstance(value, Mapping | EmaConfig):
            return value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < 1:
            given = value if is_number else in_words(value)
            raise fault(
                f"{{key}} must be a number between 0 and 1, not {given}",
                hint="write for example ema: 0.999",
            )
        return {"decay": value}

    @field_validator("metrics")
    @classmethod
    def _check_metric_names(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if name in RESERVED_METRICS or not name.strip():
                hint = f"write for example '{name}_metric: {value[name]}'" if name.strip() else ""
                message = (
                    f"a metric cannot be called '{name}': the history has a column of that name"
                )
                raise fault(message, hint=hint, path=("metrics", name), at_key=True)
        return value

    @field_validator("steps")
    @classmethod
    def _check_epochs(cls, value: int | None, info: ValidationInfo) -> int | None:
        # `epochs` precedes `steps` in the schema, so it has already been validated.
        epochs = info.data.get("epochs")
        if value is not None and epochs is not None:
            raise fault(
                f"steps={value} and epochs={epochs:g} are mutually exclusive",
                hint="keep one of the two",
            )
        return value

    _words = words(on_nan_loss="pause", backend="auto")
    _words_or_none = words({None: "none"}, compression="bf16", shard="optimizer")

    @field_validator("precision", mode="before")
    @classmethod
    def _known_precision(cls, value: Any) -> Any:
        # Check the words of other systems first, because they are not similar to the correct word.
        meant = OTHER_PRECISIONS.get(str(value).lower(), "fp32, bf16 or fp16")
        return check_word(value, PRECISIONS, hint=f"write precision: {meant}")

    @field_validator("backend", mode="before")
    @classmethod
    def _ignore_case(cls, value: Any) -> Any:
        # NCCL is usually written in capitals. Pydantic runs this before _words, which is above.
        return value.lower() if isinstance(value, str) else value

    @field_validator("pool", "name")
    @classmethod
    def _reject_empty(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and not value.strip():
            is_pool = info.field_name == "pool"
            hint = "pool: local, which is this machine" if is_pool else "a name, or remove the line"
            raise fault("{key} is empty", hint=f"write {hint}")
        return value

    @model_validator(mode="before")
    @classmethod
    def _default_epochs(cls, data: Any) -> Any:
        # In the recorded configuration exactly one of the two is set.
        if isinstance(data, Mapping) and data.get("epochs") is None and data.get("steps") is None:
            return {**data, "epochs": 1.0}
        return data

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        for conflict in _conflicts(self):
            raise conflict
        return self

    @property
    def eval(self) -> EvalConfig:
        """When to evaluate, and how to score."""
        return self.eval_every

    def references(self) -> dict[str, str]:
        """Return all expressions by key, for example ``{"data.train": "train_set"}``."""
        found = {key: attrgetter(key)(self) for key in REFERENCES}
        found["optimizer"] = self.optimizer.reference
        found |= {f"metrics.{name}": text for name, text in self.metrics.items()}
        return {key: text for key, text in found.items() if text is not None}

    def num_shards(self) -> int | None:
        """Return the number of shards in a step; None if ``reproducible`` is not set.

        ``true`` selects the smallest power of two that gives each of ``workers.max`` workers a
        shard. If ``workers.max`` is omitted, four workers are assumed, so that the number depends
        only on the cell, never on the machine.
        """
        if self.reproducible is None:
            return None
        if self.reproducible.shards is not None:
            return self.reproducible.shards
        # Round up to a power of two: powers of two divide evenly among 1, 2, 4 and 8 workers.
        most = self.workers.max or max(DEFAULT_MAX_WORKERS, self.workers.min)
        return min(1 << (most - 1).bit_length(), self.batch.size(1))

    def max_workers(self, cores: int | None = None) -> int:
        """Return the largest number of workers that each get a sample, or a shard, in every step.

        ``cores`` are those of the pool's machine; None for those of this machine.
        """
        if cores is None:
            cores = num_usable_cores()
        most = self.workers.max or max(2, min(DEFAULT_MAX_WORKERS, cores), self.workers.min)
        return min(most, self.num_shards() or self.batch.size(most))


# --- keys that exclude or require each other ------------------------------------------------------


def _conflicts(job: TrainConfig) -> Iterator[PydanticCustomError]:
    """Yield an error for each combination of keys that is invalid; only the first is reported."""
    yield from _step_conflicts(job)
    yield from _eval_conflicts(job)
    yield from _scaling_conflicts(job)
    yield from _reproducible_conflicts(job)
    yield from _metric_conflicts(job, job.checkpoint.best, ("checkpoint", "best"))
    yield from _metric_conflicts(job, job.early_stopping, ("early_stopping",))
    # Every step must have a sample for each of the workers that the job waits for.
    size, least = job.batch.size(job.workers.min), job.workers.min
    if size < least:
        yield fault(
            f"batch.global={size} leaves {least - size} of workers.min={least} workers without a "
            "sample",
            hint=f"write batch: {{global: {least}}} or more, or workers: {{min: {size}}}",
            path=("batch", "global"),
        )
    yield from _shards_conflicts(job)
    # An optimizer from a function is checked on the worker, which builds it.
    name = job.optimizer.name
    if job.shard != "none" and name is not None and name not in ELEMENTWISE:
        yield fault(
            f"shard: {job.shard} cannot be used with {name}, whose update of one element depends "
            "on others of the same tensor",
            hint="write optimizer: {name: AdamW}, or shard: none",
            path=("shard",),
        )
    yield from _exchange_conflicts(job)


def _step_conflicts(job: TrainConfig) -> Iterator[PydanticCustomError]:
    if job.step is not None and job.loss is not None:
        yield fault(
            "step and loss are mutually exclusive: step returns the loss",
            hint="remove one of the two lines",
            path=("step",),
            at_key=True,
        )
    if job.step is not None and job.metrics:
        yield fault(
            "metrics cannot be used with step: they need (output, target), which step does not "
            "return",
            hint='return them from step: {"loss": loss, "accuracy": accuracy}',
            path=("metrics",),
            at_key=True,
        )


def _eval_conflicts(job: TrainConfig) -> Iterator[PydanticCustomError]:
    wanted = {"predict": "(model, batch)", "score": "(records)"}
    for given, missing in (("predict", "score"), ("score", "predict")):
        if getattr(job.eval, given) is not None and getattr(job.eval, missing) is None:
            yield fault(
                f"eval.{given} needs eval.{missing}: predict returns the records that score gets",
                hint=f"add {missing}: a function {wanted[missing]}",
                path=("eval", given),
                at_key=True,
            )
    if job.eval.predict is None and not job.eval.loss:
        yield fault(
            "eval.loss: false leaves nothing to evaluate without eval.predict and eval.score",
            hint="add predict and score, or remove the line",
            path=("eval", "loss"),
        )
    if job.eval.predict is not None and job.data.eval is None:
        yield fault(
            "eval.predict needs an evaluation set, but data.eval is not set",
            hint="write data: {train: ..., eval: eval_set}, or remove the line",
            path=("eval", "predict"),
            at_key=True,
        )


def _scaling_conflicts(job: TrainConfig) -> Iterator[PydanticCustomError]:
    if job.scaling is None:
        return
    if job.batch.per_worker_batch_size is None:
        yield fault(
            "scaling needs a batch that grows with the number of workers, but batch.global is "
            "constant",
            hint="write batch: {per_worker: 32}, or remove the line",
            path=("scaling",),
            at_key=True,
        )
    if job.weight is not None and job.scaling.rule == "adascale":
        yield fault(
            "rule: adascale requires that all workers have the same weight in the average, but "
            "the key weight makes their weights differ",
            hint="write scaling: {rule: linear} or {rule: sqrt}",
            path=("scaling", "rule"),
        )


def _reproducible_conflicts(job: TrainConfig) -> Iterator[PydanticCustomError]:
    """Yield an error for each option that would make the weights depend on the machines."""
    if job.reproducible is None:
        return
    batch = job.batch
    for is_given, option, why, instead in (
        (
            batch.per_worker_batch_size is not None,
            "batch.per_worker",
            "steps depend on the number of workers",
            "batch: {global: 256}",
        ),
        (
            batch.micro_batch_size == "auto",
            "batch.micro: auto",
            "passes depend on the memory of each machine",
            "batch: {micro: 32}",
        ),
        (
            batch.split == "auto",
            "batch.split: auto",
            "shares depend on the speed of each machine",
            "batch: {split: even}",
        ),
        (
            job.compile,
            "compile: true",
            "kernels sum in an order that depends on the machine and on the shapes",
            "compile: false",
        ),
    ):
        if is_given:
            yield fault(
                f"reproducible cannot be guaranteed with {option}, whose {why}",
                hint=f"write {instead}, or reproducible: false",
                path=("reproducible",),
                at_key=True,
            )


def _metric_conflicts(
    job: TrainConfig, wanted: MetricConfig | None, path: tuple[str, ...]
) -> Iterator[PydanticCustomError]:
    """Yield an error for a metric that is never evaluated."""
    if wanted is None:
        return
    key = ".".join(path)
    if job.data.eval is None:
        yield fault(
            f"{key} needs evaluations, but data.eval is not set",
            hint="write data: {train: ..., eval: eval_set}, or remove the line",
            path=path,
            at_key=True,
        )
    known = ["loss", *job.metrics]
    if not job.eval.loss and wanted.metric in known:
        yield fault(
            f"{key} names the metric '{wanted.metric}', which eval.loss: false leaves out",
            hint="name one that eval.score returns, or remove loss: false",
            path=(*path, "metric"),
        )
    # The other metrics that step or eval.score return are known only on the worker.
    is_open = job.step is not None or job.eval.score is not None
    if not is_open and wanted.metric not in known:
        hint = did_you_mean(wanted.metric, known)
        yield fault(
            f"{key} names the metric '{wanted.metric}', which is not evaluated",
            hint=hint or f"known metrics: {', '.join(known)}; define others in metrics",
            path=(*path, "metric"),
        )


def _shards_conflicts(job: TrainConfig) -> Iterator[PydanticCustomError]:
    shards = job.reproducible.shards if job.reproducible is not None else None
    if shards is None:
        return
    # Each shard needs a sample in every step, and each worker a shard.
    size, path = job.batch.size(1), ("reproducible", "shards")
    if shards > size:
        yield fault(
            f"reproducible.shards={shards} leaves {shards - size} shards of batch.global={size} "
            "without a sample",
            hint=f"write shards: {size} or less, or batch: {{global: {shards}}} or more",
            path=path,
        )
    # Without max, max_workers() never exceeds the number of shards, so only min can be too large.
    name, most = ("min", job.workers.min) if job.workers.max is None else ("max", job.workers.max)
    if shards < most:
        yield fault(
            f"reproducible.shards={shards} leaves {most - shards} of workers.{name}={most} workers "
            "without a shard",
            hint=f"write shards: {most} or more, or workers: {{{name}: {shards}}}",
            path=path,
        )


def _exchange_conflicts(job: TrainConfig) -> Iterator[PydanticCustomError]:
    if job.reproducible is not None and job.compression != "none":
        yield fault(
            f"reproducible cannot be guaranteed with compression: {job.compression}, which rounds "
            "sums whose order depends on the workers",
            hint="write compression: none, or reproducible: false",
            path=("compression",),
        )
    if job.compression == "powersgd" and job.precision == "fp16":
        yield fault(
            "compression: powersgd cannot be used with precision: fp16, because overflows of fp16 "
            "would remain in the residual of powersgd",
            hint="write precision: bf16, or compression: fp16",
            path=("compression",),
        )
    # Each shard has a pass of its own, in which BatchNorm sees only the shard.
    if job.sync_batchnorm and job.reproducible is not None:
        yield fault(
            "sync_batchnorm cannot be used with reproducible, which normalizes over each shard of "
            "a step by itself",
            hint="write sync_batchnorm: false, or reproducible: false",
            path=("sync_batchnorm",),
            at_key=True,
        )
    if job.sync_batchnorm and job.batch.micro_batch_size == "auto":
        yield fault(
            "sync_batchnorm cannot be used with batch.micro: auto: all workers need the same "
            "number of passes, but their memory may differ",
            hint="write batch: {micro: 32}, or sync_batchnorm: false",
            path=("sync_batchnorm",),
            at_key=True,
        )
