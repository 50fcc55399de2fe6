"""Wrong cells and exactly what each prints: line 1 is the magic, the body begins on line 2."""

# ruff: noqa: E501 (what is printed stands here as it is)

from __future__ import annotations

import math
from typing import Any

import pytest

from etrain_jupyter.config import check_references, parse_cell
from etrain_jupyter.errors import ConfigError

MAGIC = "%%etrain distributed --name digits"
GOOD = "model: Net()\ndata: {train: train_set}\nloss: loss\n"
EVALUATED = (
    "model: Net()\ndata: {train: train_set, eval: train_set}\nloss: loss\n"
    "metrics: {accuracy: loss}\n"
)


class Net:
    def __init__(self, hidden: int = 128) -> None:
        self.hidden = hidden

    def forward(self, x: Any) -> Any:
        return x

    def state_dict(self) -> dict[str, Any]:
        return {}


def loss(output: Any, target: Any) -> Any:
    return output - target


NOTEBOOK: dict[str, Any] = {
    "Net": Net,
    "loss": loss,
    "train_set": [(1, 2)],
    "base_seed": 3,
    "nothing": None,
    "empty": [],
    "number": 3,
    "math": math,
}


def check(body: str) -> None:
    job = parse_cell(body, namespace=NOTEBOOK, first_line=MAGIC)
    check_references(job.config, job.namespace(NOTEBOOK), source=job.source)


def printed(body: str) -> tuple[str, ConfigError]:
    with pytest.raises(ConfigError) as caught:
        check(body)
    return "\n".join(caught.value.render()), caught.value


CELLS = {
    "misspelled key": (
        GOOD + "optimiser: {name: adam}\n",
        """\
etrain: line 5, column 1: unknown key 'optimiser'
    5 | optimiser: {name: adam}
      | ^^^^^^^^^
  did you mean 'optimizer'?""",
    ),
    "misspelled key in a group": (
        GOOD + "batch: {gloabl: 3}\n",
        """\
etrain: line 5, column 9: unknown key 'gloabl' in 'batch'
    5 | batch: {gloabl: 3}
      |         ^^^^^^
  did you mean 'global'?""",
    ),
    "key of another level": (
        GOOD + "micro: 3\n",
        """\
etrain: line 5, column 1: unknown key 'micro'
    5 | micro: 3
      | ^^^^^
  'micro' belongs in 'batch': write batch: {micro: ...}""",
    ),
    "key of the top in a group": (
        "model: Net()\ndata:\n  train: train_set\n  loss: loss\n",
        """\
etrain: line 5, column 3: unknown key 'loss' in 'data'
    5 |   loss: loss
      |   ^^^^
  'loss' is a top-level key, not a key of 'data': remove its indentation""",
    ),
    "determined: slots_per_trial": (
        GOOD + "slots_per_trial: 4\n",
        """\
etrain: line 5, column 1: unknown key 'slots_per_trial'
    5 | slots_per_trial: 4
      | ^^^^^^^^^^^^^^^
  use 'workers: {max: N}'""",
    ),
    "top-level num_workers": (
        GOOD + "num_workers: 4\n",
        """\
etrain: line 5, column 1: unknown key 'num_workers'
    5 | num_workers: 4
      | ^^^^^^^^^^^
  for data-loading processes use 'data: {num_workers: N}', for training workers 'workers: {max: N}'""",
    ),
    "top-level lr": (
        GOOD + "lr: 3e-4\n",
        """\
etrain: line 5, column 1: unknown key 'lr'
    5 | lr: 3e-4
      | ^^
  use 'optimizer: {name: AdamW, lr: 3e-4}'""",
    ),
    "a text for a number": (
        GOOD + "epochs: three\n",
        """\
etrain: line 5, column 9: epochs must be a number, not the text 'three'
    5 | epochs: three
      |         ^^^^^""",
    ),
    "a quoted number": (
        GOOD + "epochs: '3'\n",
        """\
etrain: line 5, column 9: epochs must be a number, not the text '3'
    5 | epochs: '3'
      |         ^^^
  remove the quotes""",
    ),
    "a fraction for a whole number": (
        GOOD + "seed: 1.5\n",
        """\
etrain: line 5, column 7: seed must be a whole number, not 1.5
    5 | seed: 1.5
      |       ^^^""",
    ),
    "a number for a group": (
        GOOD + "log: 32\n",
        """\
etrain: line 5, column 6: log must be a group of keys, not 32
    5 | log: 32
      |      ^^
  write for example 'log: {every: 10 steps}'""",
    ),
    "a word for a group that has a shorthand": (
        GOOD + "batch: many\n",
        """\
etrain: line 5, column 8: batch must be a whole number or a group of keys, not the text 'many'
    5 | batch: many
      |        ^^^^
  write for example 'batch: 256' or 'batch: {global: 256}'""",
    ),
    "a fraction for a shorthand": (
        GOOD + "workers: 1.5\n",
        """\
etrain: line 5, column 10: workers must be a whole number or a group of keys, not 1.5
    5 | workers: 1.5
      |          ^^^
  write for example 'workers: 4' or 'workers: {min: 1, max: 4}'""",
    ),
    "a shorthand out of range": (
        GOOD + "workers: 0\n",
        """\
etrain: line 5, column 1: workers.max must be 1 or more, not 0
    5 | workers: 0
      | ^^^^^^^""",
    ),
    "a group for an expression": (
        "model: {name: Net}\ndata: {train: train_set}\nloss: loss\n",
        """\
etrain: line 2, column 8: model must be a Python expression over this notebook's names, not a group of keys
    2 | model: {name: Net}
      |        ^^^^^^^^^^^
  write for example 'Net(hidden=128)', or package.module:attribute""",
    ),
    "out of range": (
        GOOD + "optimizer: {lr: -1}\n",
        """\
etrain: line 5, column 17: optimizer.lr must be above 0, not -1
    5 | optimizer: {lr: -1}
      |                 ^^""",
    ),
    "max below min": (
        GOOD + "workers: {min: 4, max: 2}\n",
        """\
etrain: line 5, column 24: workers.max=2 is below workers.min=4
    5 | workers: {min: 4, max: 2}
      |                        ^
  write max: 4 or more""",
    ),
    "fewer samples than workers": (
        GOOD + "batch: {global: 2}\nworkers: {min: 3}\n",
        """\
etrain: line 5, column 17: batch.global=2 leaves 1 of workers.min=3 workers without a sample
    5 | batch: {global: 2}
      |                 ^
  write batch: {global: 3} or more, or workers: {min: 2}""",
    ),
    "epochs and steps": (
        GOOD + "epochs: 3\nsteps: 4\n",
        """\
etrain: line 6, column 8: steps=4 and epochs=3 are mutually exclusive
    6 | steps: 4
      |        ^
  keep one of the two""",
    ),
    "interval without a unit": (
        GOOD + "checkpoint: {every: 200}\n",
        """\
etrain: line 5, column 21: the number 200 needs a unit
    5 | checkpoint: {every: 200}
      |                     ^^^
  write '200 steps', '200 epochs' or '200 min'""",
    ),
    "unknown optimizer": (
        GOOD + "optimizer: {name: Adamm}\n",
        """\
etrain: line 5, column 19: unknown optimizer 'Adamm'
    5 | optimizer: {name: Adamm}
      |                   ^^^^^
  did you mean 'Adam' or 'RAdam' or 'NAdam'?""",
    ),
    "option of no optimizer": (
        GOOD + "optimizer: {name: Adam, weight_decy: 1}\n",
        """\
etrain: line 5, column 25: optimizer Adam has no option 'weight_decy'
    5 | optimizer: {name: Adam, weight_decy: 1}
      |                         ^^^^^^^^^^^
  did you mean 'weight_decay'?""",
    ),
    "LBFGS": (
        GOOD + "optimizer: LBFGS\n",
        """\
etrain: line 5, column 12: optimizer LBFGS is not supported: it evaluates the loss several times per step, but gradients are exchanged only once
    5 | optimizer: LBFGS
      |            ^^^^^
  use for example AdamW""",
    ),
    "micro that is neither a number nor auto": (
        GOOD + "batch: {micro: automatic}\n",
        """\
etrain: line 5, column 16: batch.micro must be a whole number or auto, not the text 'automatic'
    5 | batch: {micro: automatic}
      |                ^^^^^^^^^
  write micro: auto""",
    ),
    "micro below one": (
        GOOD + "batch: {micro: 0}\n",
        """\
etrain: line 5, column 16: batch.micro must be 1 or more, not 0
    5 | batch: {micro: 0}
      |                ^""",
    ),
    "micro batches of the machine's choice in a reproducible job": (
        GOOD + "reproducible: true\nbatch: {micro: auto}\n",
        """\
etrain: line 5, column 1: reproducible cannot be guaranteed with batch.micro: auto, whose passes depend on the memory of each machine
    5 | reproducible: true
      | ^^^^^^^^^^^^
  write batch: {micro: 32}, or reproducible: false""",
    ),
    "compiled and reproducible": (
        GOOD + "compile: true\nreproducible: true\n",
        """\
etrain: line 6, column 1: reproducible cannot be guaranteed with compile: true, whose kernels sum in an order that depends on the machine and on the shapes
    6 | reproducible: true
      | ^^^^^^^^^^^^
  write compile: false, or reproducible: false""",
    ),
    "compile that is no bool": (
        GOOD + "compile: inductor\n",
        """\
etrain: line 5, column 10: compile must be true or false, not the text 'inductor'
    5 | compile: inductor
      |          ^^^^^^^^""",
    ),
    "precision by its name elsewhere": (
        GOOD + "precision: float16\n",
        """\
etrain: line 5, column 12: precision must be fp32, bf16 or fp16, not the text 'float16'
    5 | precision: float16
      |            ^^^^^^^
  write precision: fp16""",
    ),
    "warm-up in time": (
        GOOD + "schedule: {warmup: 5 min}\n",
        """\
etrain: line 5, column 20: schedule.warmup is counted in steps or epochs, not in time ('300 s')
    5 | schedule: {warmup: 5 min}
      |                    ^^^^^
  write for example '500 steps'""",
    ),
    "no decay": (
        GOOD + "schedule: {decay: cosin}\n",
        """\
etrain: line 5, column 19: schedule.decay must be none, linear or cosine, not the text 'cosin'
    5 | schedule: {decay: cosin}
      |                   ^^^^^
  did you mean 'cosine'?""",
    ),
    "two batches": (
        GOOD + "batch: {global: 64, per_worker: 8}\n",
        """\
etrain: line 5, column 21: batch.global=64 and batch.per_worker=8 are mutually exclusive
    5 | batch: {global: 64, per_worker: 8}
      |                     ^^^^^^^^^^
  keep global for a constant batch, or per_worker for a batch that grows with the \
number of workers""",
    ),
    "more passes than samples": (
        GOOD + "batch: {global: 4, aggregation_frequency: 8}\n",
        """\
etrain: line 5, column 43: aggregation_frequency=8 leaves 4 of 8 passes without a sample, even with one worker: batch.global is 4
    5 | batch: {global: 4, aggregation_frequency: 8}
      |                                           ^
  write aggregation_frequency: 4 or less, or batch: {global: 8} or more""",
    ),
    "more passes than samples of a worker": (
        GOOD + "batch: {per_worker: 2, aggregation_frequency: 3}\n",
        """\
etrain: line 5, column 47: aggregation_frequency=3 leaves 1 of 3 passes without a sample, even with one worker: batch.per_worker is 2
    5 | batch: {per_worker: 2, aggregation_frequency: 3}
      |                                               ^
  write aggregation_frequency: 2 or less, or batch: {per_worker: 3} or more""",
    ),
    "learning rate of nothing": (
        GOOD + "optimizer: {name: SGD, lr: 0}\n",
        """\
etrain: line 5, column 28: optimizer.lr must be above 0, not 0
    5 | optimizer: {name: SGD, lr: 0}
      |                            ^""",
    ),
    "scaling of a batch that never changes": (
        GOOD + "scaling: {rule: linear}\n",
        """\
etrain: line 5, column 1: scaling needs a batch that grows with the number of \
workers, but batch.global is constant
    5 | scaling: {rule: linear}
      | ^^^^^^^
  write batch: {per_worker: 32}, or remove the line""",
    ),
    "reproducible with a batch that grows": (
        GOOD + "batch: {per_worker: 8}\nreproducible: true\n",
        """\
etrain: line 6, column 1: reproducible cannot be guaranteed with batch.per_worker, whose steps depend on the number of workers
    6 | reproducible: true
      | ^^^^^^^^^^^^
  write batch: {global: 256}, or reproducible: false""",
    ),
    "no rule": (
        GOOD + "batch: {per_worker: 8}\nscaling: {rule: lineal}\n",
        """\
etrain: line 6, column 17: scaling.rule must be none, linear, sqrt or adascale, not the text 'lineal'
    6 | scaling: {rule: lineal}
      |                 ^^^^^^
  did you mean 'linear'?""",
    ),
    "no shard": (
        GOOD + "shard: full\n",
        """\
etrain: line 5, column 8: shard must be none or optimizer, not the text 'full'
    5 | shard: full
      |        ^^^^
  write shard: optimizer""",
    ),
    "an optimizer that cannot be divided": (
        GOOD + "shard: optimizer\noptimizer: {name: LAMB}\n",
        """\
etrain: line 5, column 8: shard: optimizer cannot be used with LAMB, whose update of one element \
depends on others of the same tensor
    5 | shard: optimizer
      |        ^^^^^^^^^
  write optimizer: {name: AdamW}, or shard: none""",
    ),
    "no compression": (
        GOOD + "compression: powersdg\n",
        """\
etrain: line 5, column 14: compression must be none, bf16, fp16 or powersgd, not the text 'powersdg'
    5 | compression: powersdg
      |              ^^^^^^^^
  did you mean 'powersgd'?""",
    ),
    "compressed and reproducible": (
        GOOD + "compression: bf16\nreproducible: true\n",
        """\
etrain: line 5, column 14: reproducible cannot be guaranteed with compression: bf16, which \
rounds sums whose order depends on the workers
    5 | compression: bf16
      |              ^^^^
  write compression: none, or reproducible: false""",
    ),
    "noise of unequal shares": (
        GOOD + "weight: loss\nbatch: {per_worker: 8}\nscaling: {rule: adascale}\n",
        """\
etrain: line 7, column 17: rule: adascale requires that all workers have the same \
weight in the average, but the key weight makes their weights differ
    7 | scaling: {rule: adascale}
      |                 ^^^^^^^^
  write scaling: {rule: linear} or {rule: sqrt}""",
    ),
    "overflow that is kept": (
        GOOD + "compression: powersgd\nprecision: fp16\n",
        """\
etrain: line 5, column 14: compression: powersgd cannot be used with precision: fp16, \
because overflows of fp16 would remain in the residual of powersgd
    5 | compression: powersgd
      |              ^^^^^^^^
  write precision: bf16, or compression: fp16""",
    ),
    "decay above 1": (
        GOOD + "ema: 1.5\n",
        """\
etrain: line 5, column 6: ema must be a number between 0 and 1, not 1.5
    5 | ema: 1.5
      |      ^^^
  write for example ema: 0.999""",
    ),
    "ema without a decay": (
        GOOD + "ema: true\n",
        """\
etrain: line 5, column 6: ema must be a number between 0 and 1, not true
    5 | ema: true
      |      ^^^^
  write for example ema: 0.999""",
    ),
    "decay above 1 in a group": (
        GOOD + "ema: {decay: 2, warmup: false}\n",
        """\
etrain: line 5, column 14: ema.decay must be below 1, not 2
    5 | ema: {decay: 2, warmup: false}
      |              ^""",
    ),
    "sync_batchnorm with shards": (
        GOOD + "reproducible: true\nsync_batchnorm: true\n",
        """\
etrain: line 6, column 1: sync_batchnorm cannot be used with reproducible, which normalizes over each shard of a step by itself
    6 | sync_batchnorm: true
      | ^^^^^^^^^^^^^^
  write sync_batchnorm: false, or reproducible: false""",
    ),
    "sync_batchnorm with automatic passes": (
        GOOD + "batch: {micro: auto}\nsync_batchnorm: true\n",
        """\
etrain: line 6, column 1: sync_batchnorm cannot be used with batch.micro: auto: all workers need the same number of passes, but their memory may differ
    6 | sync_batchnorm: true
      | ^^^^^^^^^^^^^^
  write batch: {micro: 32}, or sync_batchnorm: false""",
    ),
    "ramp in time": (
        GOOD + "batch: {per_worker: 8}\nscaling: {ramp: 5 min}\n",
        """\
etrain: line 6, column 17: scaling.ramp is counted in steps, not '5 min'
    6 | scaling: {ramp: 5 min}
      |                 ^^^^^
  write for example '10 steps'""",
    ),
    "no precision": (
        GOOD + "precision: int8\n",
        """\
etrain: line 5, column 12: precision must be fp32, bf16 or fp16, not the text 'int8'
    5 | precision: int8
      |            ^^^^
  write precision: fp32, bf16 or fp16""",
    ),
    "groups of an optimizer that makes its own": (
        GOOD + "optimizer: {reference: make_optimizer, no_decay: auto}\n",
        """\
etrain: line 5, column 40: no_decay applies to a named optimizer only, not to a function
    5 | optimizer: {reference: make_optimizer, no_decay: auto}
      |                                        ^^^^^^^^
  create the parameter groups in the function, and remove the key""",
    ),
    "fewer shards than workers": (
        GOOD + "workers: {max: 4}\nreproducible: {shards: 2}\n",
        """\
etrain: line 6, column 24: reproducible.shards=2 leaves 2 of workers.max=4 workers without a shard
    6 | reproducible: {shards: 2}
      |                        ^
  write shards: 4 or more, or workers: {max: 2}""",
    ),
    "more shards than samples": (
        GOOD + "batch: {global: 4}\nreproducible: {shards: 8}\n",
        """\
etrain: line 6, column 24: reproducible.shards=8 leaves 4 shards of batch.global=4 without a sample
    6 | reproducible: {shards: 8}
      |                        ^
  write shards: 4 or less, or batch: {global: 8} or more""",
    ),
    "reproducible by a number": (
        GOOD + "reproducible: 8\n",
        """\
etrain: line 5, column 15: reproducible must be true, false or {shards: 8}, not the number 8
    5 | reproducible: 8
      |               ^
  write reproducible: true""",
    ),
    "store that there is none for": (
        GOOD + "checkpoint: {to: 'gs://bucket/run'}\n",
        """\
etrain: line 5, column 18: 'gs://bucket/run' is neither a folder nor an S3 URL
    5 | checkpoint: {to: 'gs://bucket/run'}
      |                  ^^^^^^^^^^^^^^^^^
  write a folder on this machine, or s3://bucket/prefix""",
    ),
    "bucket that cannot be": (
        GOOD + "checkpoint: {to: 's3://My_Bucket/run'}\n",
        """\
etrain: line 5, column 18: checkpoint.to names the bucket 'My_Bucket', but the name of a \
bucket has 3 to 63 lower-case letters, digits, dots and dashes
    5 | checkpoint: {to: 's3://My_Bucket/run'}
      |                  ^^^^^^^^^^^^^^^^^^^^
  write s3://bucket/prefix""",
    ),
    "pool without a name": (
        GOOD + "pool: ' '\n",
        """\
etrain: line 5, column 7: pool is empty
    5 | pool: ' '
      |       ^^^
  write pool: local, which is this machine""",
    ),
    "step beside loss": (
        GOOD + "step: loss\n",
        """\
etrain: line 5, column 1: step and loss are mutually exclusive: step returns the loss
    5 | step: loss
      | ^^^^
  remove one of the two lines""",
    ),
    "metrics beside step": (
        "model: Net()\ndata: {train: train_set}\nstep: loss\nmetrics: {accuracy: loss}\n",
        """\
etrain: line 5, column 1: metrics cannot be used with step: they need (output, target), which step does not return
    5 | metrics: {accuracy: loss}
      | ^^^^^^^
  return them from step: {"loss": loss, "accuracy": accuracy}""",
    ),
    "weight that is no function": (
        GOOD + "weight: train_set\n",
        """\
etrain: line 5, column 9: weight: 'train_set' is a list and cannot be called
    5 | weight: train_set
      |         ^^^^^^^^^
  name a function (batch) that returns a number""",
    ),
    "step that is no function": (
        "model: Net()\ndata: {train: train_set}\nstep: train_set\n",
        """\
etrain: line 4, column 7: step: 'train_set' is a list and cannot be called
    4 | step: train_set
      |       ^^^^^^^^^
  name a function (model, batch) that returns the loss; the job itself calls backward and updates the weights""",
    ),
    "no model": (
        "data: {train: train_set}\nloss: loss\n",
        """\
etrain: line 1, column 1: key 'model' is missing
    1 | %%etrain distributed --name digits
      | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  add for example 'model: Net()'""",
    ),
    "no data.train": (
        "model: Net()\ndata: {eval: train_set}\nloss: loss\n",
        """\
etrain: line 3, column 1: key 'data.train' is missing
    3 | data: {eval: train_set}
      | ^^^^
  add for example 'data: {train: train_set}'""",
    ),
    "empty cell": (
        "",
        """\
etrain: line 1, column 1: key 'model' is missing
    1 | %%etrain distributed --name digits
      | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  add for example 'model: Net()'""",
    ),
    "a list": (
        "- model\n",
        """\
etrain: line 2, column 1: the body must be lines of 'key: value', not a list
    2 | - model
      | ^^^^^^^
  %etrain template prints one""",
    ),
    "a key twice": (
        GOOD + "epochs: 3\nepochs: 4\n",
        """\
etrain: line 6, column 1: duplicate key 'epochs'
    6 | epochs: 4
      | ^^^^^^
  it is already on line 5: keep one of the two""",
    ),
    "no colon": (
        "model Net()\ndata: {train: train_set}\n",
        """\
etrain: line 2, column 1: this is not valid YAML: this line has no ':'
    2 | model Net()
      | ^
  write 'key: value', with a space after the colon""",
    ),
    "equals sign": (
        GOOD + "epochs = 20\nworkers: {max: 2}\n",
        """\
etrain: line 5, column 1: this is not valid YAML: this line has no ':'
    5 | epochs = 20
      | ^
  write 'epochs: 20'""",
    ),
    "ratio without a unit": (
        GOOD + "schedule: {warmup: 0.1}\n",
        """\
etrain: line 5, column 20: the number 0.1 needs a unit
    5 | schedule: {warmup: 0.1}
      |                    ^^^
  write '0.1 epochs'; to count in steps, write a whole number""",
    ),
    "option of the optimizer from another system": (
        GOOD + "optimizer: {name: AdamW, learning_rate: 0.1}\n",
        """\
etrain: line 5, column 26: optimizer AdamW has no option 'learning_rate'
    5 | optimizer: {name: AdamW, learning_rate: 0.1}
      |                          ^^^^^^^^^^^^^
  use 'lr'""",
    ),
    "key of the Trainer in a group": (
        GOOD + "batch: {per_device_train_batch_size: 8}\n",
        """\
etrain: line 5, column 9: unknown key 'per_device_train_batch_size' in 'batch'
    5 | batch: {per_device_train_batch_size: 8}
      |         ^^^^^^^^^^^^^^^^^^^^^^^^^^^
  use 'batch: {global: N}', the samples of one step over all workers""",
    ),
    "schedule of the Trainer": (
        GOOD + "schedule: {decay: cosine_with_restarts}\n",
        """\
etrain: line 5, column 19: schedule.decay must be none, linear or cosine, not the text 'cosine_with_restarts'
    5 | schedule: {decay: cosine_with_restarts}
      |                   ^^^^^^^^^^^^^^^^^^^^
  write decay: cosine""",
    ),
    "open bracket": (
        GOOD + "metrics: {a: [1\n",
        """\
etrain: line 5, column 14: this is not valid YAML: expected ',' or ']', but got '<stream end>'
    5 | metrics: {a: [1
      |              ^
  close the bracket, and put quotes around an expression in it that contains , : { or [""",
    ),
    "torn expression": (
        "model: Net()\ndata: {train: f(1, 2)}\nloss: loss\n",
        """\
etrain: line 3, column 20: unknown key '2)' in 'data'
    3 | data: {train: f(1, 2)}
      |                    ^^
  put quotes around the expression that starts with 'f(1': a comma ends a value here""",
    ),
    "misspelled notebook name": (
        "model: Nett(hidden=3)\ndata: {train: train_set}\nloss: loss\n",
        """\
etrain: line 2, column 8: model: 'Nett' is not defined in this notebook
    2 | model: Nett(hidden=3)
      |        ^^^^
  did you mean 'Net'?""",
    ),
    "misspelled name inside": (
        "model: Net(hidden=base_sed)\ndata: {train: train_set}\nloss: loss\n",
        """\
etrain: line 2, column 19: model: 'base_sed' is not defined in this notebook
    2 | model: Net(hidden=base_sed)
      |                   ^^^^^^^^
  did you mean 'base_seed'?""",
    ),
    "misspelled attribute": (
        "model: Net()\ndata: {train: train_set}\nloss: math.flor\n",
        """\
etrain: line 4, column 7: loss: module 'math' has no 'flor'
    4 | loss: math.flor
      |       ^^^^^^^^^
  did you mean 'math.floor' or 'math.log' or 'math.log2'?""",
    ),
    "misspelled argument": (
        "model: Net(hiden=3)\ndata: {train: train_set}\nloss: loss\n",
        """\
etrain: line 2, column 8: model: Net() got an unexpected keyword argument 'hiden'
    2 | model: Net(hiden=3)
      |        ^^^^^^^^^^^^
  it takes Net(hidden=128)""",
    ),
    "no Python": (
        "model: Net(\ndata: {train: train_set}\nloss: loss\n",
        """\
etrain: line 2, column 11: model: 'Net(' is not a valid Python expression ('(' was never closed)
    2 | model: Net(
      |           ^
  write an expression over this notebook's names, or package.module:attribute""",
    ),
    "model of None": (
        "model: nothing\ndata: {train: train_set}\nloss: loss\n",
        """\
etrain: line 2, column 8: model: the value of 'nothing' is None
    2 | model: nothing
      |        ^^^^^^^
  run the cell that builds it, or name a class or a function""",
    ),
    "model that is a number": (
        "model: number\ndata: {train: train_set}\nloss: loss\n",
        """\
etrain: line 2, column 8: model: 'number' is a number
    2 | model: number
      |        ^^^^^^
  name an nn.Module, its class, or a function that builds it""",
    ),
    "loss that is a number": (
        "model: Net()\ndata: {train: train_set}\nloss: number\n",
        """\
etrain: line 4, column 7: loss: 'number' is a number
    4 | loss: number
      |       ^^^^^^
  name a function (output, target) such as F.cross_entropy""",
    ),
    "empty data set": (
        "model: Net()\ndata: {train: empty}\nloss: loss\n",
        """\
etrain: line 3, column 15: data.train is empty: len(empty) is 0
    3 | data: {train: empty}
      |               ^^^^^
  run the cell that fills it""",
    ),
    "unknown module": (
        "model: nets.small:Net\ndata: {train: train_set}\nloss: loss\n",
        """\
etrain: line 2, column 8: model: module 'nets.small' was not found
    2 | model: nets.small:Net
      |        ^^^^^^^^^^^^^^
  install it, or put its file next to the notebook""",
    ),
    "metric called loss": (
        GOOD + "metrics: {loss: loss}\n",
        """\
etrain: line 5, column 11: a metric cannot be called 'loss': the history has a column of that name
    5 | metrics: {loss: loss}
      |           ^^^^
  write for example 'loss_metric: loss'""",
    ),
    "py that fails": (
        GOOD + "seed: !py 1 / 0\n",
        """\
etrain: line 5, column 7: !py 1 / 0 raised ZeroDivisionError: division by zero
    5 | seed: !py 1 / 0
      |       ^^^^^^^^^""",
    ),
    "best without an evaluation": (
        GOOD + "checkpoint: {best: {metric: loss}}\n",
        """\
etrain: line 5, column 14: checkpoint.best needs evaluations, but data.eval is not set
    5 | checkpoint: {best: {metric: loss}}
      |              ^^^^
  write data: {train: ..., eval: eval_set}, or remove the line""",
    ),
    "best of a misspelled metric": (
        EVALUATED + "checkpoint: {best: {metric: acuracy, mode: max}}\n",
        """\
etrain: line 6, column 29: checkpoint.best names the metric 'acuracy', which is not evaluated
    6 | checkpoint: {best: {metric: acuracy, mode: max}}
      |                             ^^^^^^^
  did you mean 'accuracy'?""",
    ),
    "best of a metric of which nobody knows whether more is better": (
        EVALUATED + "checkpoint: {best: {metric: accuracy}}\n",
        """\
etrain: line 6, column 20: mode is missing: is a lower or a higher accuracy better?
    6 | checkpoint: {best: {metric: accuracy}}
      |                    ^^^^^^^^^^^^^^^^^^
  write {metric: accuracy, mode: max}, or mode: min""",
    ),
    "early stopping by an unknown metric": (
        EVALUATED + "early_stopping: {metric: f1, mode: max}\n",
        """\
etrain: line 6, column 26: early_stopping names the metric 'f1', which is not evaluated
    6 | early_stopping: {metric: f1, mode: max}
      |                          ^^
  known metrics: loss, accuracy; define others in metrics""",
    ),
    "early stopping without an evaluation": (
        GOOD + "early_stopping: {metric: loss}\n",
        """\
etrain: line 5, column 1: early_stopping needs evaluations, but data.eval is not set
    5 | early_stopping: {metric: loss}
      | ^^^^^^^^^^^^^^
  write data: {train: ..., eval: eval_set}, or remove the line""",
    ),
    "early stopping without a metric": (
        EVALUATED + "early_stopping: {patience: 2}\n",
        """\
etrain: line 6, column 1: key 'early_stopping.metric' is missing
    6 | early_stopping: {patience: 2}
      | ^^^^^^^^^^^^^^
  add for example 'early_stopping: {metric: loss, patience: 3}'""",
    ),
    "misspelled key in a group that may be left out": (
        GOOD + "schedule: {warmpu: 3 steps}\n",
        """\
etrain: line 5, column 12: unknown key 'warmpu' in 'schedule'
    5 | schedule: {warmpu: 3 steps}
      |            ^^^^^^
  did you mean 'warmup'?""",
    ),
    "early stopping in lightning's words": (
        EVALUATED + "early_stopping: {monitor: loss}\n",
        """\
etrain: line 6, column 18: unknown key 'monitor' in 'early_stopping'
    6 | early_stopping: {monitor: loss}
      |                  ^^^^^^^
  use 'metric'""",
    ),
    "unknown target of the workers": (
        GOOD + "workers: {max: 4, target: throughput}\n",
        """\
etrain: line 5, column 27: workers.target must be max or goodput, not the text 'throughput'
    5 | workers: {max: 4, target: throughput}
      |                           ^^^^^^^^^^
  write target: goodput""",
    ),
    "unknown answer to a loss that is NaN": (
        GOOD + "on_nan_loss: skip\n",
        """\
etrain: line 5, column 14: on_nan_loss must be fail or pause, not the text 'skip'
    5 | on_nan_loss: skip
      |              ^^^^
  write on_nan_loss: pause""",
    ),
    "unknown tag": (
        GOOD + "seed: !env SEED\n",
        """\
etrain: line 5, column 7: unknown tag '!env'
    5 | seed: !env SEED
      |       ^^^^^^^^^
  the only tag here is !py; put quotes around a text that starts with '!'""",
    ),
}


@pytest.mark.parametrize("name", CELLS)
def test_wrong_cell_prints_the_expected_error(name: str) -> None:
    body, expected = CELLS[name]
    assert printed(body)[0] == expected


@pytest.mark.parametrize("line", ["", "step: loss", "weight: loss"])
def test_a_cell_without_loss_is_a_job(line: str) -> None:
    parse_cell(f"model: Net()\ndata: {{train: train_set}}\n{line}\n", namespace=NOTEBOOK)


@pytest.mark.parametrize(
    "line",
    [
        "compile: false",
        "reproducible: false",
        "pool: local",
        "scaling: null",
        "schedule: null",
        "checkpoint: {every: auto}",
    ],
)
def test_what_asks_for_nothing_more_than_the_default_passes(line: str) -> None:
    parse_cell(GOOD + line + "\n", namespace=NOTEBOOK)
