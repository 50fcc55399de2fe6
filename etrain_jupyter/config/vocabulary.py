"""Names known without an import: the optimizers in torch.optim, and keys from other systems.

The kernel checks a cell without importing torch; a test compares these literals with torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    "LBFGS": "it evaluates the loss several times per step, but gradients are exchanged only once",
    "SparseAdam": "it needs sparse gradients, which are not exchanged between workers",
}
"""Unsupported optimizers from torch.optim, and the reasons."""

ELEMENTWISE = frozenset(
    (
        *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop"),
        *("Rprop", "SGD"),
    )
)
"""Optimizers that update each element by itself, so that ``shard`` can divide their state."""

PRECISIONS = ("fp32", "bf16", "fp16")
OTHER_PRECISIONS = {
    **dict.fromkeys(("float32", "32", "full", "f32", "torch.float32"), "fp32"),
    **dict.fromkeys(("bfloat16", "bf16-mixed", "mixed", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("float16", "16", "half", "f16", "16-mixed", "torch.float16"), "fp16"),
}
"""Names for precisions in other systems."""

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
"""Keywords whose values are true or false."""


def find_optimizer(text: str) -> str:
    """Return the optimizer that ``text`` names, ignoring case; ``text`` itself if it is unknown."""
    known = [*NAMED_LR, *REFUSED]
    return next((name for name in known if name.casefold() == text.strip().casefold()), text)


def check_options(name: str, options: Mapping[str, Any], fault: Callable[..., Exception]) -> None:
    """Reject keywords that optimizer ``name`` does not have, and values that are not numbers."""
    for key, value in options.items():
        path = ("optimizer", key)
        if key not in OPTIONS[name]:
            hint = known_elsewhere(path)
            hint = hint or did_you_mean(key, ["name", "lr", *OPTIONS[name]])
            known = f"known options: name, lr, {', '.join(sorted(OPTIONS[name]))}"
            message = f"optimizer {name} has no option '{key}'"
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
            raise fault(f"optimizer.{key} must be 0 or more, not {value}", path=path)


_WORKERS = "use 'workers: {max: N}'"
_BATCH = "use 'batch: {global: N}', the samples of one step over all workers"
_LR = "use 'optimizer: {name: AdamW, lr: 3e-4}'"
_OPTION = "it is an option of the optimizer: 'optimizer: {name: AdamW, %s: ...}'"
_TRAIN = "use 'data: {train: train_set}'"
_EVAL = "use 'data: {eval: eval_set}'"
_SHUFFLED = "training data are always reshuffled every epoch, by 'seed': remove the line"
_GPU = "a worker trains on one GPU if its machine has one: use 'workers: {max: N}' for N workers"
_EVERY = "use 'eval: {every: 500 steps}' or 'eval: {every: 1 epoch}'"
_DECAY = "use 'schedule: {warmup: 500 steps, decay: cosine}'; decay is none, linear or cosine"
_TO = "use 'checkpoint: {to: FOLDER}'"
_SMOOTHING = (
    "use 'loss: \"lambda output, target: F.cross_entropy(%s, target, label_smoothing=0.1)\"'"
)
_PRECISION = "use 'precision: bf16' or 'precision: fp16'"

# Keys of Determined, PyTorch Lightning, Hugging Face's Trainer and similar systems. The keys of an
# entry share its hint.
_ANSWERS: dict[str, str] = {
    "slots_per_trial slots num_gpus gpus ngpus devices num_devices nproc_per_node num_nodes nodes "
    "world_size "
    "n_workers max_workers": _WORKERS,
    "min_workers": "use 'workers: {min: N}'",
    "global_batch_size batch_size train_batch_size per_device_train_batch_size": _BATCH,
    "resource_pool cluster": "use 'pool: local'",
    "max_restarts max_failures": "the number of lost workers is not limited, and an exception in "
    "your code fails the job: remove the line",
    "num_workers": "for data-loading processes use 'data: {num_workers: N}', for training "
    "workers 'workers: {max: N}'",
    "lr learning_rate base_lr": _LR,
    "weight_decay": _OPTION % "weight_decay",
    "momentum": "it is an option of the optimizer: 'optimizer: {name: SGD, momentum: 0.9}'",
    "betas adam_beta1 adam_beta2": _OPTION % "betas",
    "adam_epsilon": _OPTION % "eps",
    "optim optimizer_name": _LR,
    "optimizer.learning_rate": "use 'lr'",
    "optimizer.type": "use 'name'",
    "optimizer.beta1 optimizer.beta2 optimizer.adam_beta1 optimizer.adam_beta2": "use 'betas: "
    "[0.9, 0.999]'",
    "resources resources_per_worker gpu use_gpu gpus_per_worker accelerator device": _GPU,
    "cpu cpus num_cpus cpus_per_worker memory": "the pool sets the cores and the memory of a "
    "worker: remove the line",
    "max_epochs num_epochs num_train_epochs n_epochs": "use 'epochs: N'",
    "max_steps num_steps n_steps iterations max_iters": "use 'steps: N'",
    "max_length": "use 'epochs: N' or 'steps: N'",
    "dataset datasets train_dataset train_set train_data trainset training_data train": _TRAIN,
    "eval_dataset eval_set val_dataset valid_dataset val_set val_data validation validation_data "
    "test_dataset "
    "test_set": _EVAL,
    "dataloader train_loader train_dataloader": "pass the data set itself, 'data: "
    "{train: train_set}': the workers make the batches",
    "collate_fn data_collator": "use 'data: {collate: function}'",
    "tokenizer processing_class": "tokenize the samples in 'data.train', and pad a batch in 'data: "
    "{collate: function}'",
    "dataloader_num_workers": "use 'data: {num_workers: N}'",
    "criterion loss_fn loss_function objective": "use 'loss'",
    "network net module model_class": "use 'model'",
    "scheduler lr_scheduler lr_schedule lr_scheduler_type": _DECAY,
    "schedule.name schedule.type schedule.kind": "use 'decay', which is none, linear or cosine",
    "warmup_ratio": "count the warm-up in steps or epochs: a tenth of 'epochs: 3' is 'schedule: "
    "{warmup: 0.3 epochs}'",
    "warmup warmup_steps num_warmup_steps": "use 'schedule: {warmup: 500 steps}'",
    "gradient_clipping max_grad_norm gradient_clip_val clip_grad "
    "grad_clip": "use 'clip_grad_norm: 1.0'",
    "amp mixed_precision fp16 bf16 dtype": _PRECISION,
    "gradient_accumulation_steps accumulate_grad_batches": "use 'batch: {global: N, "
    "aggregation_frequency: K}' for K passes per worker, and 'batch: {micro: N}' to limit the "
    "memory of a pass",
    "micro_batch_size": "use 'batch: {micro: N}'",
    "random_seed manual_seed experiment_seed": "use 'seed'",
    "checkpoint_dir output_dir save_dir default_root_dir": _TO,
    "save_total_limit": "use 'checkpoint: {keep: N}'",
    "resume_from_checkpoint ckpt_path": "use --resume JOB on the first line",
    "gradient_checkpointing": "enable it in the function that builds the model, for example with "
    "model.gradient_checkpointing_enable()",
    "early_stopping_patience patience early_stop": "use 'early_stopping: {metric: loss, "
    "patience: 3}'",
    "metric_for_best_model greater_is_better load_best_model_at_end save_best_only "
    "save_best": "use 'checkpoint: {best: {metric: accuracy, mode: max}}'",
    "terminate_on_nan nan_policy": "use 'on_nan_loss: fail', which is the default, or pause",
    "early_stopping.monitor checkpoint.best.monitor": "use 'metric'",
    "early_stopping.threshold early_stopping.delta": "use 'min_delta'",
    "save_steps save_strategy checkpoint_freq save_every": "use 'checkpoint: {every: 200 steps}'",
    "eval_steps eval_every validation_freq min_validation_period eval_strategy val_check_interval "
    "evaluation_strategy check_val_every_n_epoch": _EVERY,
    "eval.strategy checkpoint.strategy": "use 'every'",
    "eval_batch_size per_device_eval_batch_size": "an evaluation uses the batches of 'batch': "
    "remove the line",
    "compute_metrics": "use 'metrics: {accuracy: function}' with (output, target), or 'eval: "
    "{predict: function, score: function}' for scores of the whole set",
    "callbacks callback": "callbacks are not supported: use 'early_stopping', 'checkpoint: {best: "
    "...}', 'log: {to: ...}' or 'eval: {predict: function, score: function}'",
    "max_time max_time_s time_limit": "the length of a job is counted in 'epochs: N' or 'steps: "
    "N'; %etrain stop ends it earlier and saves a checkpoint",
    "drop_last dataloader_drop_last data.drop_last": "each epoch trains every sample exactly once, "
    "so its last batch may be smaller: remove the line",
    "pin_memory dataloader_pin_memory data.pin_memory": "batches for a GPU are pinned without a "
    "key: remove the line",
    "label_smoothing": _SMOOTHING % "output",
    "label_smoothing_factor": _SMOOTHING % "output.logits",
    "push_to_hub": "after the job, upload the weights with "
    "job.load_into(model).push_to_hub('USER/NAME')",
    "remove_unused_columns": "the model gets the columns that its forward accepts: remove the "
    "line, and other columns with train_set.remove_columns([...])",
    "report_to logger loggers": "use 'log: {to: wandb}', 'log: {to: mlflow}' or 'log: "
    "{tensorboard: true}'",
    "torch_compile": "use 'compile: true'",
    "fsdp fsdp_wrap deepspeed zero_stage strategy": "use 'shard: optimizer' to divide the "
    "optimizer's state between the workers",
    "trainer args training_args": "write its values as keys of the cell: %etrain template lists "
    "the keys",
    "log_every log_every_n_steps logging_steps log_interval "
    "scheduling_unit": "use 'log: {every: 10 steps}'",
    "shuffle": _SHUFFLED,
    "job_name run_name experiment_name": "use 'name', or --name on the first line",
    "deterministic": "use 'reproducible: true'",
    "process_group_backend distributed_backend dist_backend": "use 'backend: auto'",
    "entrypoint": "a job consists of 'model' and 'data': remove the line",
    "search hyperparameters searcher space param_space tune_config": "a search begins with "
    "%%etrain search, and its names are in 'search: {space: {...}}'",
    "batch.global_batch_size batch.batch_size batch.size batch.total": "use 'global'",
    "batch.micro_batch_size": "use 'micro'",
    "batch.per_worker_batch_size batch.per_gpu "
    "batch.per_device": "use 'global', the samples over all workers",
    "batch.gradient_accumulation_steps batch.accumulate": "use 'aggregation_frequency' for the "
    "number of passes per step, and 'micro' to limit the memory of a pass",
    "workers.num workers.n workers.count workers.size workers.num_workers "
    "workers.max_workers": "use 'max'",
    "workers.min_workers": "use 'min'",
    "data.dataset data.train_dataset data.training": "use 'train'",
    "data.val data.valid data.validation data.test data.eval_dataset": "use 'eval'",
    "data.batch_size": _BATCH,
    "data.shuffle": _SHUFFLED,
    "data.collate_fn": "use 'collate'",
    "data.workers": "use 'num_workers'",
    "checkpoint.path checkpoint.dir checkpoint.folder checkpoint.directory": "use 'to'",
    "checkpoint.save_total_limit checkpoint.max_to_keep": "use 'keep'",
    "checkpoint.interval checkpoint.frequency checkpoint.freq": "use 'every'",
}

KNOWN_ELSEWHERE: dict[str, str] = dict(
    chain.from_iterable(((key, text) for key in keys.split()) for keys, text in _ANSWERS.items())
)
"""Maps a dotted key from another system to a hint about the equivalent key."""


def known_elsewhere(path: Sequence[str]) -> str:
    """Return the hint for a key of another system; empty if the key is unknown.

    A key in a group, such as ``data.batch_size``, may have its own hint. Otherwise it has that of
    the top level.
    """
    key = str(path[-1]).replace("-", "_").lower()
    return KNOWN_ELSEWHERE.get(".".join([*path[:-1], key])) or KNOWN_ELSEWHERE.get(key, "")
