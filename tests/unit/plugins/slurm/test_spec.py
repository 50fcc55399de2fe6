"""Keys of a slurm pool, and the hints for invalid ones."""

from __future__ import annotations

from typing import Any

import pytest

from etrain_jupyter.config.yaml_nodes import load_body
from etrain_jupyter.errors import CellError, ConfigError
from etrain_jupyter.plugins.slurm.spec import SlurmSpec


def test_every_key_has_a_default() -> None:
    spec = SlurmSpec.parse({})

    assert (spec.workers.min, spec.workers.max) == (0, 4)
    assert (spec.walltime, spec.notice, spec.ahead_s) == (3600.0, 120.0, 900.0)
    assert spec.device == "cpu"
    assert spec.directives == ["--signal=B:USR1@120", "--no-requeue"]


def test_keys_of_an_entry_are_read() -> None:
    text = """
queue: gpu
account: my-project
cores: 8
memory: 32 GiB
gpus: 1
gpu_type: a100
walltime: 4 h
job_extra_directives: [--constraint=ib, "--mail-type=END"]
prologue: [module load cuda]
environment: {OMP_NUM_THREADS: 4}
workers: {min: 2, max: 8}
price: 2
lifetime: {idle: 1 h, away: 10 min}
"""
    data, source = load_body(text, namespace={})

    spec = SlurmSpec.parse(data, source)

    assert spec.walltime == 14400.0
    assert spec.price == 2.0
    assert spec.device == "cuda:0"
    assert spec.environment == {"OMP_NUM_THREADS": "4"}
    assert spec.directives == [
        "--gres=gpu:a100:1",
        "--signal=B:USR1@120",
        "--no-requeue",
        "--constraint=ib",
        "--mail-type=END",
    ]


def test_spec_round_trips_through_json() -> None:
    spec = SlurmSpec.parse({"walltime": "90 min", "workers": {"max": 2}, "prologue": ["a"]})

    assert SlurmSpec.parse(spec.to_dict()) == spec


@pytest.mark.parametrize(
    ("keys", "ahead_s"),
    [
        ({"walltime": "10 min"}, 150.0),  # a quarter
        ({"walltime": "5 min"}, 120.0),  # not later than the notice
        ({"walltime": "24 h"}, 900.0),
        ({"walltime": "24 h", "replace_ahead": "2 h"}, 7200.0),
    ],
)
def test_replacement_is_submitted_ahead(keys: dict[str, Any], ahead_s: float) -> None:
    assert SlurmSpec.parse(keys).ahead_s == ahead_s


@pytest.mark.parametrize(
    ("keys", "message", "hint"),
    [
        ({"quue": "x"}, "unknown key 'quue'", "'queue'"),
        ({"walltime": 4}, "the number 4 needs a unit", "4 min"),
        ({"walltime": "2 min"}, "notice of 120 s is more than half of walltime", "240 s"),
        (
            {"replace_ahead": "50 min"},
            "replace_ahead of 3000 s is more than half of walltime (3600 s)",
            "6000 s",
        ),
        ({"gpus": 4}, "gpus must be 0 or 1, not 4: each job is one worker", "{max: 4}"),
        ({"gpu_type": "a100"}, "gpu_type is set, but gpus is 0", "gpus: 1"),
        ({"memory": "much"}, "memory 'much' is not a size", "32 GiB"),
        ({"queue": "a b"}, "queue 'a b' must be one word", ""),
        ({"queue": "a\nb"}, "must be one word", ""),
        ({"python": "python3"}, "is not the path of an interpreter", "/shared/env"),
        ({"job_extra_directives": ["--requeue"]}, "the pool sets --requeue itself", "new job"),
        ({"job_extra_directives": ["--time=1:00"]}, "the pool sets --time itself", "walltime"),
        ({"job_extra_directives": ["-Jx"]}, "the pool sets -Jx itself", "names"),
        ({"job_extra_directives": ["#SBATCH -x"]}, "is not an option of sbatch", "#SBATCH"),
        ({"job_extra_directives": ["--x\nrm -r ."]}, "is not an option of sbatch", ""),
        ({"prologue": ["a\nb"]}, "one command per item", ""),
        ({"environment": {"A-B": "x"}}, "'A-B' is not the name of a variable", ""),
        ({"environment": {"A": True}}, "environment.A must be a text or a number", ""),
        ({"workers": {"min": 5, "max": 2}}, "workers.min=5 is more than workers.max=2", "max: 5"),
        ({"price": "$2"}, "price must be a number of US dollars", "6.00"),
    ],
)
def test_invalid_key_is_refused_with_a_hint(keys: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises((ConfigError, CellError)) as caught:
        SlurmSpec.parse(keys)

    assert message in str(caught.value)
    assert hint in caught.value.hint
