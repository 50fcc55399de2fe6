"""Names known without an import: the optimizers of torch.optim, and keys of other systems.

The kernel checks a cell without importing torch; a test compares these literals with torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from etrain_jupyter.config.source_map import did_you_mean, in_words

DEFAULT_LR = {
    "Adadelta": 1.0,
    "Adafactor": 0.01,
    "Adagrad": 0.01,
    "Adam": 0.001,
    "AdamW": 0.001,
    "Adamax": 0.002,
    "ASGD": 0.01,
    "Muon": 0.001,
    "NAdam": 0.002,
    "RAdam": 0.001,
    "RMSprop": 0.01,
    "Rprop": 0.01,
    "SGD": 0.001,
}
"""Available optimizers, with torch's default learning rates."""

EXTRA_LR = {"LAMB": 0.001, "LARS": 0.001}
"""Optimizers of the optional package pytorch-optimizer, with its default learning rates."""

NAMED_LR = DEFAULT_LR | EXTRA_LR
"""All available optimizers."""

REFUSED = {
    "LBFGS": "it evaluates the loss several times a step, which one exchange of gradients cannot "
    "serve",
    "SparseAdam": "it needs sparse gradients, which are not exchanged between workers",
}
"""Unsupported optimizers of torch.optim, and the reasons."""

PRECISIONS = ("fp32", "bf16", "fp16")
OTHER_PRECISIONS = {
    **dict.fromkeys(("float32", "32", "full", "f32", "torch.float32"), "fp32"),
    **dict.fromkeys(("bfloat16", "bf16-mixed", "mixed", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("float16", "16", "half", "f16", "16-mixed", "torch.float16"), "fp16"),
}
"""Names of the precisions in other systems."""

_COMMON = "foreach maximize differentiable "
_OPTIONS = {
    "Adadelta": _COMMON + "rho eps weight_decay capturable",
    "Adafactor": "beta2_decay eps d weight_decay foreach maximize",
    "Adagrad": _COMMON + "lr_decay weight_decay initial_accumulator_value eps fused",
    "Adam": _COMMON + "betas eps weight_decay amsgrad capturable fused decoupled_weight_decay",
    "AdamW": _COMMON + "betas eps weight_decay amsgrad capturable fused",
    "Adamax": _COMMON + "betas eps weight_decay capturable",
    "ASGD": _COMMON + "lambd alpha t0 weight_decay capturable",
    "LAMB": "betas weight_decay weight_decouple fixed_decay rectify grad_averaging max_grad_norm "
    "adam pre_norm eps foreach maximize",
    "LARS": "weight_decay momentum dampening trust_coefficient nesterov foreach maximize",
    "Muon": "weight_decay momentum nesterov ns_coefficients eps ns_steps adjust_lr_fn",
    "NAdam": _COMMON + "betas eps weight_decay momentum_decay decoupled_weight_decay capturable",
    "RAdam": _COMMON + "betas eps weight_decay decoupled_weight_decay capturable",
    "RMSprop": _COMMON + "alpha eps weight_decay momentum centered capturable",
    "Rprop": _COMMON + "etas step_sizes capturable",
    "SGD": _COMMON + "momentum dampening weight_decay nesterov fused",
}
OPTIONS = {name: frozenset(words.split()) for name, words in _OPTIONS.items()}
"""Keywords of each optimizer, in addition to ``params`` and ``lr``."""


SWITCHES = frozenset(
    (
        *("adam", "amsgrad", "capturable", "centered", "decoupled_weight_decay", "differentiable"),
        *("fixed_decay", "foreach", "fused", "grad_averaging", "maximize", "nesterov"),
        *("pre_norm", "rectify", "weight_decouple"),
    )
)
"""Keywords that are true or false."""


def find_optimizer(text: str) -> str:
    """Return the optimizer that ``text`` names, ignoring case; ``text`` itself if it is unknown."""
    known = [*NAMED_LR, *REFUSED]
    return next((name for name in known if name.casefold() == text.strip().casefold()), text)


def check_options(name: str, options: Mapping[str, Any], fault: Callable[..., Exception]) -> None:
    """Reject keywords that optimizer ``name`` does not have, and values other than plain ones."""
    for key, value in options.items():
        path = ("optimizer", key)
        if key not in OPTIONS[name]:
            hint = did_you_mean(key, ["name", "lr", *OPTIONS[name]])
            known = f"it takes name, lr, {', '.join(sorted(OPTIONS[name]))}"
            message = f"optimizer {name} takes no '{key}'"
            raise fault(message, hint=hint or known, path=path, at_key=True)
        items = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(item, int | float | None) for item in items):
            raise fault(
                f"optimizer.{key} must be a number or a list of numbers, not {in_words(value)}",
                path=path,
            )
        if (
            key in ("weight_decay", "momentum", "eps")
            and isinstance(value, int | float)
            and value < 0
        ):
            raise fault(f"optimizer.{key} must not be below 0, not {value}", path=path)


_WORKERS = "here it is 'workers: {max: N}'"
_BATCH = "here it is 'batch: {global: N}', the samples of one step over all workers"
_LR = "here it is 'optimizer: {name: AdamW, lr: 3e-4}'"
_OPTION = "it is an option of the optimizer: 'optimizer: {name: AdamW, %s: ...}'"
_TRAIN = "here it is 'data: {train: train_set}'"
_EVAL = "here it is 'data: {eval: eval_set}'"
_SHUFFLED = "training data are always shuffled anew each epoch, by 'seed': remove the line"
_PRECISION = "here it is 'precision: bf16' or 'precision: fp16'"

# Keys of Determined, PyTorch Lightning, Hugging Face's Trainer and similar systems. The keys of an
# entry share its hint.
_ANSWERS: dict[str, str] = {
    "slots_per_trial slots num_gpus gpus ngpus devices num_devices nproc_per_node num_nodes nodes "
    "world_size "
    "n_workers max_workers": _WORKERS,
    "min_workers": "here it is 'workers: {min: N}'",
    "global_batch_size batch_size train_batch_size per_device_train_batch_size": _BATCH,
    "resource_pool cluster": "here it is 'pool: local'",
    "max_restarts max_failures": "lost workers never count, and an exception of yours fails the "
    "job at once: "
    "remove the line",
    "num_workers": "processes that load data are 'data: {num_workers: N}'; machines that train "
    "are 'workers: {max: N}'",
    "lr learning_rate base_lr": _LR,
    "weight_decay": _OPTION % "weight_decay",
    "momentum": "it is an option of the optimizer: 'optimizer: {name: SGD, momentum: 0.9}'",
    "betas": _OPTION % "betas",
    "max_epochs num_epochs num_train_epochs n_epochs": "here it is 'epochs: N'",
    "max_steps num_steps n_steps iterations max_iters": "here it is 'steps: N'",
    "max_length": "here it is 'epochs: N' or 'steps: N'",
    "dataset datasets train_dataset train_set train_data trainset training_data train": _TRAIN,
    "eval_dataset eval_set val_dataset valid_dataset val_set val_data validation validation_data "
    "test_dataset "
    "test_set": _EVAL,
    "dataloader train_loader train_dataloader": "give the data set itself, 'data: "
    "{train: train_set}': "
    "batches are made on the workers",
    "collate_fn": "here it is 'data: {collate: function}'",
    "criterion loss_fn loss_function objective": "here it is 'loss'",
    "network net module model_class": "here it is 'model'",
    "scheduler lr_scheduler lr_schedule": "here it is 'schedule: {warmup: 500 steps, decay: "
    "cosine}'",
    "warmup warmup_steps num_warmup_steps": "here it is 'schedule: {warmup: 500 steps}'",
    "gradient_clipping max_grad_norm gradient_clip_val clip_grad "
    "grad_clip": "here it is 'clip_grad_norm: 1.0'",
    "amp mixed_precision fp16 bf16 dtype": _PRECISION,
    "gradient_accumulation_steps accumulate_grad_batches": "the batch is 'batch: {global: N}', "
    "which 'batch: {aggregation_frequency: K}' cuts into K passes a worker; what does not fit into "
    "memory at once is bounded by 'batch: {micro: N}'",
    "micro_batch_size": "here it is 'batch: {micro: N}'",
    "random_seed manual_seed experiment_seed": "here it is 'seed'",
    "checkpoint_dir output_dir save_dir": "here it is 'checkpoint: {to: FOLDER}'",
    "early_stopping_patience patience early_stop": "here it is 'early_stopping: {metric: loss, "
    "patience: 3}'",
    "metric_for_best_model greater_is_better load_best_model_at_end save_best_only "
    "save_best": "here it is 'checkpoint: {best: {metric: accuracy, mode: max}}'",
    "terminate_on_nan nan_policy": "here it is 'on_nan_loss: fail', which is the default, or pause",
    "early_stopping.monitor checkpoint.best.monitor": "here it is 'metric'",
    "early_stopping.threshold early_stopping.delta": "here it is 'min_delta'",
    "save_steps checkpoint_freq save_every": "here it is 'checkpoint: {every: 200 steps}'",
    "eval_steps eval_every validation_freq "
    "min_validation_period": "here it is 'eval: {every: 500 steps}'",
    "log_every logging_steps log_interval scheduling_unit": "here it is 'log: {every: 10 steps}'",
    "shuffle": _SHUFFLED,
    "job_name run_name experiment_name": "here it is 'name', or --name on the first line",
    "deterministic": "here it is 'reproducible: true'",
    "process_group_backend distributed_backend dist_backend": "here it is 'backend: auto'",
    "entrypoint hyperparameters searcher": "a job is one model and its data, named by 'model' and "
    "'data': "
    "remove the line",
    "batch.global_batch_size batch.batch_size batch.size batch.total": "here it is 'global'",
    "batch.micro_batch_size": "here it is 'micro'",
    "batch.per_worker_batch_size batch.per_gpu "
    "batch.per_device": "the batch is counted over all workers: 'global'",
    "batch.gradient_accumulation_steps batch.accumulate": "passes between two communications are "
    "'aggregation_frequency'; what does not fit into memory at once is bounded by 'micro'",
    "workers.num workers.n workers.count workers.size workers.num_workers "
    "workers.max_workers": "here it is 'max'",
    "workers.min_workers": "here it is 'min'",
    "data.dataset data.train_dataset data.training": "here it is 'train'",
    "data.val data.valid data.validation data.test data.eval_dataset": "here it is 'eval'",
    "data.batch_size": _BATCH,
    "data.shuffle": _SHUFFLED,
    "data.collate_fn": "here it is 'collate'",
    "data.workers": "here it is 'num_workers'",
    "checkpoint.path checkpoint.dir checkpoint.folder checkpoint.directory": "here it is 'to'",
    "checkpoint.save_total_limit checkpoint.max_to_keep": "here it is 'keep'",
    "checkpoint.interval checkpoint.frequency checkpoint.freq": "here it is 'every'",
}

KNOWN_ELSEWHERE: dict[str, str] = dict(
    chain.from_iterable(((key, text) for key in keys.split()) for keys, text in _ANSWERS.items())
)
"""Maps a dotted key of another system to a hint about the equivalent key."""
