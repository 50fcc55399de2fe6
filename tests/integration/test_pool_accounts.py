"""A pool from an empty account to a trained job and back, with IAM enforced in the fake cloud.

An administrator runs ``init`` and ``remove``. A user has only the policy that ``init`` has made,
checks the pool and trains on it.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest

from etrain_jupyter import cli
from etrain_jupyter.log.events import LogLine
from etrain_jupyter.notebook.commands.subcommands import run_line
from etrain_jupyter.plugins.ec2.account import check
from etrain_jupyter.plugins.ec2.simulator import Account, ApiFault, FakeAws
from etrain_jupyter.storage.objects import bucket_owners
from tests.capabilities import long

pytestmark = [pytest.mark.aws, pytest.mark.timeout(300)]

ADMIN = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Action": ["*"], "Resource": ["*"]}],
}
BUCKET = "etrain-spot-123456789012-us-east-1"
Run = Callable[..., tuple[int, str]]
Become = Callable[[str], None]


@pytest.fixture
def cloud(fresh_cloud: FakeAws) -> FakeAws:
    """Provide a cloud in which a test may leave the pool's own security group."""
    return fresh_cloud


def leftovers(cloud: FakeAws) -> dict[str, list[str]]:
    """Return what clusters have left behind, without the pool's security group."""
    return {kind: names for kind, names in cloud.leftovers().items() if kind != "security_groups"}


@pytest.fixture
def account(cloud: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Account:
    """Provide an account with an image and a spot market, and a folder for the user."""
    for name in ("ETRAIN_STATE", "ETRAIN_RUNS"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("ETRAIN_POOLS", str(tmp_path / "pools.yaml"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bucket_owners, "_registered", {})
    spot = {"zone": "us-east-1a", "capacity": 4, "price_usd": 0.036}
    cloud.set_market(
        [{"instance_type": name, **spot} for name in ("m5.large", "g4dn.xlarge")],
        [{"instance_type": name, "price_usd": 0.1} for name in ("m5.large", "g4dn.xlarge")],
    )
    return cloud.make_account()


@pytest.fixture
def become(account: Account, cloud: FakeAws, monkeypatch: pytest.MonkeyPatch) -> Become:
    """Provide a function that changes to the administrator, or to a user without permissions."""
    people = {"admin": cloud.make_user("admin", ADMIN), "ann": cloud.make_user("ann")}
    cloud.enforce_iam()

    def change(name: str) -> None:
        for variable, value in people[name].items():
            monkeypatch.setenv(variable, value)

    change("admin")
    return change


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Provide a function that runs a command in a terminal; it returns status and output."""

    def etrain(*words: str) -> tuple[int, str]:
        status = cli.main(words)
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return etrain


def init(run: Run, account: Account, *words: str, types: str = "m5.large") -> str:
    flags = ["--ami", account.image, "--python", sys.executable, "--types", types]
    status, text = run("pools", "init", "spot", "--region", account.region, *flags, "--yes", *words)
    assert status == 0, text
    return text


def shorten(cloud: FakeAws, tmp_path: Path) -> None:
    """Add the settings of the simulated cloud to the entry, as a user would edit it."""
    with (tmp_path / "pools.yaml").open("a") as stream:
        stream.write(
            f"  head_host: {cloud.host_address}\n  tick: 1 s\n"
            "  lifetime: {lease_ttl: 60 s, linger: 1 s, boot: 60 min}\n"
        )


def client(service: str) -> Any:
    # The default session would keep the credentials of the previous test.
    return boto3.Session().client(service)


def attach(policy: str, user: str) -> None:
    arn = f"arn:aws:iam::123456789012:policy/{policy}"
    client("iam").attach_user_policy(UserName=user, PolicyArn=arn)


def timed(figures: dict[str, float], name: str, act: Callable[[], Any]) -> Any:
    started_at = time.monotonic()
    result = act()
    figures[name] = round(time.monotonic() - started_at, 2)
    return result


PROBE = {
    "model": "etrain_jupyter.recipes.probe:Probe",
    "data": {"train": "etrain_jupyter.recipes.probe:samples"},
    "loss": "torch.nn.functional:cross_entropy",
    "batch": {"global": 4},
    "epochs": 3,
    "workers": {"min": 1, "max": 1},
    "pool": "spot",
}
NOT_NEEDED = [
    "jupyter*",
    "playwright",
    "pyarrow",
    "transformers",
    "scikit-learn",
    "pandas",
    "mlflow*",
]


def train() -> str:
    surface = cli.Terminal(None)
    job = surface.submit(PROBE)
    assert job.wait(120) == "finished", job
    assert job.audit().ok
    return run_line(surface, ["down", "spot"], prog="etrain")


def test_pool_from_an_empty_account_to_a_trained_job_and_back(
    cloud: FakeAws, account: Account, become: Become, run: Run, tmp_path: Path
) -> None:
    figures: dict[str, float] = {}
    cloud.set_faults()  # resets the counters of requests
    timed(figures, "init_s", lambda: init(run, account))
    figures["init_calls"] = sum(cloud.calls().values())
    shorten(cloud, tmp_path)
    attach("etrain-spot-launcher", "ann")

    become("ann")
    cloud.set_faults()
    status, text = timed(figures, "check_s", lambda: run("pools", "check", "spot"))
    figures["check_calls"] = sum(cloud.calls().values())
    assert status == 0, text
    assert "note " not in text
    for part in ("network, image and bucket", "64 vCPUs", "trained one step",
                 "boot, connect", "first step", "terminate", "cents"):  # fmt: skip
        assert part in text, text
    assert cloud.instances("pending", "running") == []
    assert leftovers(cloud) == {}
    denied = [str(request) for request, is_permitted in cloud.permissions() if not is_permitted]
    assert denied == []

    timed(figures, "train_s", train)

    become("admin")
    assert run("pools", "remove", "spot", "--yes")[0] == 0
    assert [one["Name"] for one in client("s3").list_buckets()["Buckets"]].count(BUCKET) == 1
    status, text = run("pools", "remove", "spot", "--yes", "--region", "us-east-1",
                       "--delete-objects")  # fmt: skip
    assert status == 0, text
    names = json.dumps(
        [client("s3").list_buckets()["Buckets"], client("iam").list_roles()["Roles"]],
        default=str,
    )
    assert "etrain-spot" not in names
    assert not (tmp_path / "pools.yaml").exists()
    assert cloud.leftovers() == {}
    print(f"figures of the simulated cloud: {json.dumps(figures)}")


@pytest.mark.timeout(900)
@long
def test_kernel_environment_travels_and_its_phases_are_in_the_log(
    cloud: FakeAws, account: Account, become: Become, run: Run, tmp_path: Path
) -> None:
    flags = ["--ami", account.image, "--types", "m5.large", "--region", account.region, "--yes"]
    assert run("pools", "init", "spot", *flags)[0] == 0
    shorten(cloud, tmp_path)
    written = (tmp_path / "pools.yaml").read_text()
    image = f"{{ami: {account.image}, environment: {{exclude: {NOT_NEEDED}}}}}"
    (tmp_path / "pools.yaml").write_text(re.sub(r"(?m)^  image: .*$", f"  image: {image}", written))
    # Without this checkout on its path, a node imports only what it has installed.
    cloud.set_variables({"PYTHONPATH": ""})
    surface = cli.Terminal(None)
    attach("etrain-spot-launcher", "ann")
    become("ann")
    job = surface.submit(PROBE)
    try:
        status = job.wait(600)
        lines = [one.text for one in job.events() if isinstance(one, LogLine)]
        assert status == "finished", lines
        notes = [line for line in lines if line.startswith("node i-")]
        for phase in ("boot", "download", "environment", "install", "hello"):
            assert any(f": {phase} " in line for line in notes), lines
    finally:
        cloud.set_variables({})
        run_line(surface, ["down", "spot"], prog="etrain")
    denied = [str(request) for request, is_permitted in cloud.permissions() if not is_permitted]
    assert denied == []


@long
def test_check_finds_an_image_without_a_driver_and_terminates_the_node(
    cloud: FakeAws, account: Account, become: Become, run: Run, tmp_path: Path
) -> None:
    init(run, account, types="g4dn.xlarge")
    shorten(cloud, tmp_path)
    status, text = run("pools", "check", "spot")
    assert status == 1
    assert "g4dn.xlarge has a GPU, but torch on the node sees none" in text
    assert "All that it launched was terminated" in text
    assert cloud.instances("pending", "running") == []


@long
def test_check_without_capacity_says_why_nothing_was_trained(
    cloud: FakeAws,
    account: Account,
    become: Become,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    init(run, account)
    shorten(cloud, tmp_path)
    cloud.set_capacity(0)
    wait = check._wait_for_step
    monkeypatch.setattr(check, "_wait_for_step", lambda job, **_: wait(job, timeout_s=6))
    status, text = run("pools", "check", "spot")
    assert status == 1
    assert "the check of pool spot failed: job check-spot" in text
    assert "is waiting" in text
    assert cloud.instances("pending", "running") == []
    assert leftovers(cloud) == {}


@pytest.fixture
def pool(account: Account, become: Become, run: Run) -> None:
    init(run, account, types="g4dn.xlarge")


def test_check_without_a_boot_finds_a_small_quota(cloud: FakeAws, pool: None, run: Run) -> None:
    status, text = run("pools", "check", "spot", "--no-boot")
    assert status == 0, text
    assert "(L-3819A6DF): 64 vCPUs" in text
    cloud.set_quota("L-3819A6DF", 8)
    status, text = run("pools", "check", "spot", "--no-boot")
    assert status == 0, text
    assert "enough for 2 g4dn.xlarge, not for workers.max 4" in text
    cloud.set_quota("L-3819A6DF", 0)
    status, text = run("pools", "check", "spot")
    assert status == 1
    for part in ("is 0 vCPUs", "request-service-quota-increase", "No node was launched"):
        assert part in text, text
    assert cloud.leftovers().keys() <= {"security_groups"}


def test_user_without_the_policy_gets_what_is_missing(
    cloud: FakeAws, pool: None, become: Become, run: Run
) -> None:
    become("ann")
    status, text = run("pools", "check", "spot")
    assert status == 1
    assert "pools policy" in text
    assert "No node was launched" in text
    become("admin")
    assert leftovers(cloud) == {}


@long
def test_refused_launch_ends_the_check_with_the_reason(
    cloud: FakeAws, account: Account, become: Become, run: Run, tmp_path: Path
) -> None:
    init(run, account)
    shorten(cloud, tmp_path)
    cloud.set_faults(ApiFault(action="CreateFleet", code="UnauthorizedOperation", status=403))
    status, text = run("pools", "check", "spot")
    assert status == 1
    assert "EC2 has refused 3 launches in a row" in text
    assert cloud.instances("pending", "running") == []


def test_organisation_that_forbids_roles_leads_to_the_template(
    cloud: FakeAws, account: Account, become: Become, run: Run, tmp_path: Path
) -> None:
    cloud.set_faults(
        ApiFault(service="cloudformation", action="CreateStack", code="AccessDenied", status=403)
    )
    flags = ("--region", account.region, "--types", "m5.large", "--ami", account.image, "--yes")
    status, text = run("pools", "init", "spot", *flags)
    assert status == 1
    for part in ("could not create stack etrain-spot", "--template FILE", "--role PROFILE"):
        assert part in text, text
    status, text = run("pools", "init", "spot", *flags, "--template", "spot.yaml")
    assert status == 0, text
    cloud.set_faults()
    # The administrator deploys the template, and the command of its outputs writes the entry.
    client("cloudformation").create_stack(
        StackName="etrain-spot",
        TemplateBody=(tmp_path / "spot.yaml").read_text(),
        Capabilities=["CAPABILITY_NAMED_IAM"],
        Tags=[{"Key": "etrain:made-for", "Value": "spot@us-east-1"}],
    )
    [stack] = client("cloudformation").describe_stacks(StackName="etrain-spot")["Stacks"]
    outputs = {one["OutputKey"]: one["OutputValue"] for one in stack["Outputs"]}
    status, text = run(*outputs["Command"].split()[1:], "--ami", account.image)
    assert status == 0, text
    assert outputs["Group"] in (tmp_path / "pools.yaml").read_text()
    assert run("pools", "remove", "spot", "--yes")[0] == 0
    assert cloud.leftovers() == {}
