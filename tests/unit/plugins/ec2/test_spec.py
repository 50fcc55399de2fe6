"""Keys of an aws-spot pool, and the hints for invalid ones."""

from __future__ import annotations

from typing import Any

import pytest

from etrain_jupyter.config.yaml_nodes import load_body
from etrain_jupyter.errors import CellError, ConfigError
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec

LEAST = {"region": "us-east-1", "bucket": "my-bucket"}


def parse(**keys: Any) -> AwsSpotSpec:
    return AwsSpotSpec.parse(LEAST | keys)


def test_region_and_bucket_are_enough() -> None:
    spec = AwsSpotSpec.parse(LEAST)

    assert (spec.workers.min, spec.workers.max) == (0, 4)
    assert spec.capacity.placement == "single-az"
    assert spec.capacity.on_demand.most == 0
    assert (spec.budget.max_hourly, spec.budget.max_total) == (None, None)
    assert spec.home("c1") == "s3://my-bucket/etrain/clusters/c1"


def test_all_keys_of_the_design_are_read() -> None:
    text = """
pool: aws-spot
region: us-east-1
bucket: my-bucket
workers: {min: 2, want: 4, max: 8}
capacity:
  types: [g5.xlarge, g6.xlarge, g4dn.xlarge]
  zones: auto
  placement: single-az
  on_shortage: shrink
  allocation: price-capacity-optimized
  on_demand: {base: 0, after: 120s, max: 2}
budget: {max_hourly: 6, max_total: 40.00, on_exceed: checkpoint-and-stop}
lifetime: {max: 12h, idle: 20m, lease_ttl: 5 min, boot: 15m, max_boot_failures: 3}
image: {ami: ami-0123456789abcdef0, python: /opt/py/bin/python, setup: [nvidia-smi]}
network: {subnets: auto, security_group: auto, public_ip: false, require_nitro_encryption: false}
iam: {instance_profile: etrain-node}
interruption: {imds_poll: 2s, on_rebalance: replace, drain: 90s, first_hour: wait-for-ec2}
environment: {TOKENIZERS_PARALLELISM: "false", OMP_NUM_THREADS: 4}
volume: {gib: 100, type: gp3}
"""
    data, source = load_body(text, namespace={})

    spec = AwsSpotSpec.parse(data, source)

    assert spec.lifetime.max == 43200.0
    assert spec.lifetime.lease_ttl == 300.0
    assert spec.capacity.on_demand.after == 120.0
    assert spec.budget.max_hourly == 6.0
    assert spec.image.setup == ("nvidia-smi",)
    assert spec.environment == {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "4"}


def test_spec_round_trips_through_json() -> None:
    spec = parse(
        capacity={"types": ["g5.xlarge"], "zones": ["us-east-1a"], "on_demand": {"after": "90s"}},
        lifetime={"max": "90 min"},
        budget={"max_total": 2},
        prefix="mine",
    )

    assert AwsSpotSpec.parse(spec.to_dict()) == spec
    assert spec.prefix == "mine/"


@pytest.mark.parametrize(
    ("image", "is_kernel", "interpreter"),
    [
        ({}, True, ""),
        ({"ami": "ami-12c6146b"}, True, ""),
        ({"environment": "kernel", "setup": ["apt-get install -y python3.12"]}, True, ""),
        ({"environment": {"exclude": ["jupyter*"]}}, True, ""),
        ({"python": "/opt/py/bin/python"}, False, "/opt/py/bin/python"),
        ({"setup": ["pip install x"]}, False, "/opt/pytorch/bin/python"),
        ({"archive": "s3://b1b/e.tar.gz"}, False, "/opt/pytorch/bin/python"),
    ],
)
def test_nodes_install_the_kernel_unless_the_image_has_an_interpreter(
    image: dict[str, Any], is_kernel: bool, interpreter: str
) -> None:
    spec = parse(image=image)
    assert spec.image.is_kernel is is_kernel
    if not is_kernel:
        assert spec.image.interpreter == interpreter
    assert AwsSpotSpec.parse(spec.to_dict()).image.is_kernel is is_kernel


def test_manifest_is_kept_for_later_heads_with_the_other_keys() -> None:
    spec = parse(image={"ami": "ami-12c6146b", "environment": {"exclude": ["a"]}})
    stored = AwsSpotSpec.parse(spec.with_manifest("ab" * 32).to_dict())
    assert stored.image.manifest == "ab" * 32
    assert stored.image.environment is not None
    assert stored.image.environment.exclude == ("a",)
    assert stored.image.ami == "ami-12c6146b"
    assert spec.image.manifest == ""


def test_deadline_allows_all_workers_on_demand_unless_a_maximum_is_given() -> None:
    keys = {"policy": "deadline", "finish_by": "6 h", "keep": 1}
    spec = parse(capacity=keys)
    capacity = spec.capacity
    limited = parse(capacity=keys | {"on_demand": {"max": 2}}).capacity

    assert (capacity.finish_by, capacity.keep) == (21600.0, 1.0)
    assert capacity.most_on_demand(8) == 8
    assert limited.most_on_demand(8) == 2
    assert AwsSpotSpec.parse(spec.to_dict()) == spec


def test_gpu_requirement_can_replace_types() -> None:
    spec = parse(capacity={"gpu": {"memory_gib": ">=16", "count": 4}})

    assert spec.capacity.gpu is not None
    assert (spec.capacity.gpu.memory_gib, spec.capacity.gpu.count) == (16.0, 4)


@pytest.mark.parametrize(
    ("keys", "message", "hint"),
    [
        ({"regoin": "x"}, "unknown key 'regoin'", "'region'"),
        ({"max": 3}, "unknown key 'max'", "belongs in 'workers'"),
        ({"lifetime": {"idel": "1h"}}, "unknown key 'idel' in 'lifetime'", "'idle'"),
        ({"lifetime": {"max": 12}}, "the number 12 needs a unit", "12 min"),
        (
            {"lifetime": {"max": "3 epochs"}},
            "lifetime.max must be a duration, not '3 epochs'",
            "5 min",
        ),
        ({"lifetime": {"boot": "10 s"}}, "lifetime.boot must be 60 or more", ""),
        ({"budget": {"max_total": "$40"}}, "budget.max_total must be a number", "6.00"),
        ({"budget": {"max_hourly": 0}}, "budget.max_hourly must be above 0, not 0", ""),
        ({"workers": {"min": 5, "max": 2}}, "workers.min=5 is more than workers.max=2", "max: 5"),
        ({"region": "us-east-1a"}, "'us-east-1a' is not a region", "write us-east-1"),
        ({"bucket": "s3://b/x"}, "bucket", ""),
        ({"capacity": {"types": ["g5"]}}, "'g5' is not a machine type", "g5.xlarge"),
        ({"capacity": {"placement": "single"}}, "capacity.placement must be", "single-az"),
        ({"capacity": {"zones": "us-east-1a"}}, "capacity.zones must be auto or a list", ""),
        ({"capacity": {"types": ["a.b"], "gpu": {"count": 1}}}, "mutually exclusive", "keep types"),
        ({"capacity": {"policy": "deadline"}}, "needs capacity.finish_by", "finish_by: 6 h"),
        ({"capacity": {"finish_by": "6 h"}}, "only with capacity.policy: deadline", "policy"),
        (
            {"capacity": {"policy": "deadline", "finish_by": 6}},
            "the number 6 needs a unit",
            "6 min",
        ),
        ({"capacity": {"policy": "cheap"}}, "capacity.policy must be spot or deadline", "deadline"),
        ({"capacity": {"keep": 1.5}}, "capacity.keep must be between 0 and 1", "keep: 0.5"),
        ({"capacity": {"spares": "many"}}, "capacity.spares must be auto or a number", "spares: 1"),
        ({"capacity": {"spares": -1}}, "capacity.spares must be auto or a number", "auto"),
        ({"capacity": {"on_shortage": "wait"}}, "capacity.on_shortage must be", "shrink"),
        ({"image": {"ami": "ubuntu"}}, "image.ami 'ubuntu' is not an image", "ami-0"),
        ({"image": {"archive": "/tmp/x.tar.gz"}}, "image.archive is not s3://", "s3://"),
        ({"image": {"archive_sha256": "12"}}, "64 hexadecimal digits", "sha256sum"),
        ({"image": {"archive_sha256": "ab" * 32}}, "image.archive is not", "set image.archive"),
        ({"image": {"environment": "conda"}}, "image.environment must be kernel", "exclude"),
        (
            {"image": {"environment": "kernel", "python": "/opt/py/bin/python"}},
            "image.environment and image.python (/opt/py/bin/python) are both set",
            "remove python",
        ),
        (
            {"image": {"environment": {"manifest": "latest"}}},
            "image.environment.manifest must be a SHA-256",
            "remove the key",
        ),
        ({"image": {"environment": {"exclud": ["a"]}}}, "unknown key 'exclud'", "'exclude'"),
        ({"bucket_owner": 1234}, "bucket_owner must be the 12 digits", "'111122223333'"),
        ({"head": "spot"}, "head must be notebook or on-demand", ""),
        ({"lifetime": {"lease_ttl": "10 s"}}, "lease_ttl of 10 s is too short", "20 s"),
    ],
)
def test_invalid_keys_have_a_hint(keys: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AwsSpotSpec.parse(LEAST | keys)

    assert message in str(caught.value)
    assert hint in caught.value.hint


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="key 'bucket' is missing"):
        AwsSpotSpec.parse({"region": "us-east-1"})


def test_errors_point_into_the_file() -> None:
    data, source = load_body(
        "region: us-east-1\nbucket: b1b\nworkers: {max: three}\n", namespace={}
    )

    with pytest.raises(CellError) as caught:
        AwsSpotSpec.parse(data, source)

    assert (caught.value.line, caught.value.column) == (4, 16)
