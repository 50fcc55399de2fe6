"""Lifecycle of a spot cluster under the documented IAM policies, with faults on the way.

All tests share one real cluster. Its launcher is a user with the launcher policy, its nodes have
the node policy, and IAM is enforced with every condition. First EC2 has no capacity; then a node's
metadata service hangs, the launcher's credentials expire and are renewed in the shared file, and
EC2 reclaims a node.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import etrain_jupyter
from etrain_jupyter import TrainingJob
from etrain_jupyter.log import events
from etrain_jupyter.notebook.audit.report import AuditReport
from etrain_jupyter.plugins.ec2.client.policy import launcher_policy, node_policy
from etrain_jupyter.plugins.ec2.simulator import ApiFault, FakeAws
from etrain_jupyter.plugins.ec2.simulator.fixtures import point_boto_at
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.pools import clusters, get_pool

pytestmark = [pytest.mark.aws, pytest.mark.timeout(400)]

PATIENCE_S = 150.0
STRANGERS_KEY = "etrain/clusters/other/keys/0123/worker.key"
ROOT = Path(__file__).parents[2]
KEYS = "[default]\naws_access_key_id = {AWS_ACCESS_KEY_ID}\n" + (
    "aws_secret_access_key = {AWS_SECRET_ACCESS_KEY}\n"
)


@dataclass
class Life:
    """Observations of the one run that all tests share."""

    waiting: str = ""
    """Status of the job while there was no capacity."""
    lines_before_training: list[str] = field(default_factory=list)
    """Log lines of the job until training began."""
    rights: dict[str, str] = field(default_factory=dict)
    """Result of each API call that a node tried, by description."""
    steps_hanging: int = 0
    """Steps completed while a metadata service hung."""
    expired: str = ""
    """Log line about the expired credentials."""
    steps_expired: int = 0
    """Steps completed while the credentials had expired."""
    lost_then: int = 0
    """Workers lost until the credentials were renewed."""
    noticed: str = ""
    """Worker that was reclaimed with a notice afterwards."""
    replaced_by: int = 0
    """Number of machines launched to replace it."""
    audit: AuditReport | None = None
    checkpoints: list[str] = field(default_factory=list)
    """Keys of the checkpoint manifests in the bucket."""
    leftovers: dict[str, list[str]] = field(default_factory=dict)


def make_data(bucket: str, cluster_id: str, region: str, image: str) -> Callable[[], Any]:
    """Return the training data factory; on the worker it first tries forbidden API calls."""

    def try_rights() -> dict[str, str]:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import ClientError

        def client(service: str) -> Any:
            return boto3.client(service, region_name=region, config=Config(retries={}))

        s3, ec2 = client("s3"), client("ec2")
        home, job = f"etrain/clusters/{cluster_id}", "etrain/runs/rights"
        runs = f"{job}/checkpoints"

        def put(key: str) -> Callable[[], Any]:
            return lambda: s3.put_object(Bucket=bucket, Key=key, Body=b"x")

        def get(key: str) -> Callable[[], Any]:
            return lambda: s3.get_object(Bucket=bucket, Key=key)

        tries: dict[str, Callable[[], Any]] = {
            "write a checkpoint": put(f"{runs}/part"),
            "read the lease": get(f"{home}/lease.json"),
            "renew the lease": put(f"{home}/lease.json"),
            "replace a job's record": put(f"{job}/job.json"),
            "replace a job's bundle": put(f"{job}/bundle"),
            "write a job's log": put(f"{job}/log/000000000001.jsonl"),
            "list jobs": lambda: s3.list_objects_v2(Bucket=bucket, Prefix="etrain/runs/"),
            "replace a key": put(f"{home}/keys/worker.key"),
            "change the configuration": put(f"{home}/config.json"),
            "remove a key": lambda: s3.delete_object(Bucket=bucket, Key=f"{home}/keys/ca.pem"),
            "read the keys of a head": get(f"{home}/tls-head/client.key"),
            "find another cluster's keys": lambda: s3.list_objects_v2(
                Bucket=bucket, Prefix="etrain/clusters/other/keys/"
            ),
            "change the ledger": put(f"etrain/ledgers/{cluster_id}.json"),
            "read something else": get("payroll.csv"),
            "see machines": lambda: ec2.describe_instances(),
            "end machines": lambda: ec2.terminate_instances(InstanceIds=["i-0123456789abcdef0"]),
            "launch a machine": lambda: ec2.run_instances(
                ImageId=image, InstanceType="t3.small", MinCount=1, MaxCount=1
            ),
            "tag machines": lambda: ec2.create_tags(
                Resources=["i-0123456789abcdef0"], Tags=[{"Key": "etrain:cluster", "Value": "x"}]
            ),
            "see roles": lambda: client("iam").list_roles(),
            "read a parameter": lambda: client("ssm").get_parameter(Name="/etrain/node-image"),
        }
        answers = {}
        for what, act in tries.items():
            try:
                act()
                answers[what] = "allowed"
            except ClientError as exc:
                answers[what] = exc.response["Error"]["Code"]
        s3.put_object(Bucket=bucket, Key=f"{runs}/answers.json", Body=json.dumps(answers).encode())
        return answers

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        try_rights()
        points = torch.randn(960, 8, generator=torch.Generator().manual_seed(3))
        return points, (points.sum(1) > 0).long()

    return make


def slow_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    time.sleep(0.05)
    return F.cross_entropy(outputs, labels)


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    """Run the lifecycle once; each test asserts a part of it."""
    folder = tmp_path_factory.mktemp("spot")
    with pytest.MonkeyPatch.context() as patch, FakeAws(minute_s=1.0) as cloud:
        point_boto_at(cloud, patch, folder)
        for name in ("STATE", "RUNS"):
            patch.setenv(f"ETRAIN_{name}", str(folder / name.lower()))
        patch.setenv("ETRAIN_POOLS", str(folder / "pools.yaml"))
        patch.setenv("OMP_NUM_THREADS", "1")
        keys = make_pool(cloud, folder)
        spec = AwsSpotSpec.parse(keys)
        cloud.make_account(role_policy=node_policy(spec))
        launcher = launcher_policy(spec)

        def sign_in() -> str:
            user = cloud.make_user("launcher", launcher)
            (folder / "aws_credentials").write_text(KEYS.format(**user))
            return user["AWS_ACCESS_KEY_ID"]

        first_key = sign_in()
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.delenv(name)
        for key in (STRANGERS_KEY, "payroll.csv"):
            cloud.s3.write(keys["bucket"], key, b"secret")
        cloud.enforce_iam()
        seen = Life()
        try:
            live(cloud, keys, seen, first_key=first_key, sign_in=sign_in)
        finally:
            cloud.set_faults()
            clusters.down(all_clusters=True)
            seen.leftovers = cloud.leftovers()
            seen.leftovers.pop("objects", None) if seen.leftovers.get("objects") == [
                f"s3://{keys['bucket']}/{STRANGERS_KEY}"
            ] else None
        yield seen


def make_pool(cloud: FakeAws, folder: Path) -> dict[str, Any]:
    account = cloud.make_account()
    keys: dict[str, Any] = {
        "region": account.region,
        "bucket": account.bucket,
        "head_host": cloud.host_address,
        "workers": {"max": 2},
        "tick": "1 s",
        "capacity": {"types": ["g6.xlarge"], "zones": ["us-east-1a"]},
        "image": {"ami": account.image, "python": sys.executable},
        "environment": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        "lifetime": {"lease_ttl": "120 s", "boot": "120 min", "idle": "300 s", "linger": "5 s"},
        "interruption": {"imds_poll": "1 s", "drain": "5 s"},
    }
    (folder / "pools.yaml").write_text(json.dumps({"spot": {"kind": "aws-spot", **keys}}))
    return keys


def live(
    cloud: FakeAws,
    keys: dict[str, Any],
    seen: Life,
    *,
    first_key: str,
    sign_in: Callable[[], str],
) -> None:
    cloud.set_capacity(0)
    address = get_pool("spot").up()
    job = etrain_jupyter.distributed(
        {
            "model": lambda: nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2)),
            "data": {
                "train": make_data(
                    keys["bucket"], address.cluster_id, keys["region"], keys["image"]["ami"]
                )
            },
            "loss": slow_loss,
            "batch": {"global": 16},
            "steps": 1_000_000,
            "workers": {"min": 1, "max": 2},
            "checkpoint": {"every": "20 steps"},
            "pool": "spot",
        }
    )

    def lines() -> list[str]:
        return [event.text for event in job.events() if isinstance(event, events.LogLine)]

    def until(is_true: Callable[[], Any], what: str) -> Any:
        ends_at = time.monotonic() + PATIENCE_S
        while not (found := is_true()):
            job.raise_for_status()
            assert time.monotonic() < ends_at, (what, str(job), lines(), cloud.instances())
            time.sleep(0.05)
        return found

    until(
        lambda: any("no capacity" in line for line in lines()), "the warning about missing capacity"
    )
    seen.waiting, seen.lines_before_training = job.status, lines()
    cloud.set_capacity(4)
    until(lambda: job.world_size == 2 and job.step > 5, "training on two workers")
    found = "etrain/runs/rights/checkpoints/answers.json"
    until(
        lambda: found in cloud.s3.list_keys(keys["bucket"], "etrain/runs/rights"),
        "the answers about the rights",
    )
    seen.rights = json.loads(cloud.s3.read(keys["bucket"], found))

    victim = cloud.instances("running")[0].instance_id
    seen.steps_hanging = hang(cloud, job, victim, until)
    cloud.set_faults(ApiFault(service="", code="ExpiredToken", match=first_key))
    # The thread that renews the lease may warn before the one that lists the machines.
    seen.expired = until(
        lambda: next((line for line in lines() if "EC2 cannot be reached" in line), ""), "expired"
    )
    first = job.step
    until(lambda: job.step > first + 10, "more steps")
    seen.steps_expired = job.step - first
    seen.lost_then = sum(isinstance(event, events.WorkerLost) for event in job.events())
    sign_in()

    num_before = len(cloud.instances())
    cloud.preempt(victim, notice_s=15, rebalance_s=2)
    until(lambda: len(cloud.instances()) > num_before, "another machine")
    until(
        lambda: victim not in {worker["worker"] for worker in job.workers()},
        "the departure of the worker",
    )
    until(lambda: job.world_size == 2, "two workers again")
    seen.noticed = next(
        (event.worker for event in job.events() if isinstance(event, events.PreemptionNoticed)), ""
    )
    seen.replaced_by = len(cloud.instances()) - num_before
    assert seen.noticed == victim
    job.stop()
    job.wait(timeout=PATIENCE_S)
    seen.audit = job.audit()
    stored = cloud.s3.list_keys(keys["bucket"], "etrain/runs/")
    seen.checkpoints = [key for key in stored if "/manifests/" in key]


def hang(cloud: FakeAws, job: TrainingJob, node: str, until: Callable[..., Any]) -> int:
    """Make a node's metadata service hang for several polls; return the steps completed then."""
    cloud.break_imds(node, "hang")
    first, asked = job.step, len(cloud.imds_requests(node))
    until(lambda: job.step > first + 20, "training while the service hangs")
    cloud.break_imds(node, "")
    until(lambda: len(cloud.imds_requests(node)) > asked + 1, "polls of the service")
    return job.step - first


def test_job_waits_without_capacity_and_logs_the_next_attempt(life: Life) -> None:
    (text,) = [line for line in life.lines_before_training if "no capacity" in line]

    assert life.waiting == "waiting"
    assert "no capacity for" in text
    assert "(g6.xlarge in us-east-1a)" in text
    assert "The next attempt is in" in text
    assert "Launches are retried until it has" in text


def test_launcher_policy_is_sufficient_from_launch_to_down(life: Life) -> None:
    assert life.replaced_by == 1
    assert life.leftovers == {}


def test_node_policy_is_sufficient_for_checkpoints_in_the_bucket(life: Life) -> None:
    assert life.rights["write a checkpoint"] == "allowed"
    assert life.rights["read the lease"] == "allowed"
    assert life.checkpoints


def test_node_policy_allows_no_other_call(life: Life) -> None:
    allowed = {what for what, answer in life.rights.items() if answer == "allowed"}

    assert allowed == {"write a checkpoint", "read the lease"}
    denied = {answer for answer in life.rights.values() if answer != "allowed"}
    assert denied <= {"AccessDenied", "UnauthorizedOperation", "403"}
    assert len(life.rights) == 20


def test_hanging_metadata_service_does_not_block_training(life: Life) -> None:
    assert life.steps_hanging > 20
    assert life.noticed


def test_job_keeps_training_with_expired_credentials_and_logs_the_remedy(life: Life) -> None:
    assert "the credentials have expired" in life.expired
    assert "aws sso login" in life.expired
    assert "Nodes keep running" in life.expired
    assert life.steps_expired > 10
    assert life.lost_then == 0


def test_every_sample_is_trained_once(life: Life) -> None:
    assert life.audit is not None
    assert life.audit.ok, str(life.audit)
    assert life.audit.steps_rolled_back == 0
