"""From an empty account to a pool and back, also when the process is killed at any stage."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, NoCredentialsError

from etrain_jupyter.errors import ConfigError, PoolError
from etrain_jupyter.plugins.ec2.account import init as init_module
from etrain_jupyter.plugins.ec2.account.init import init
from etrain_jupyter.plugins.ec2.account.options import InitOptions
from etrain_jupyter.plugins.ec2.account.removal import remove_pool
from etrain_jupyter.plugins.ec2.account.site import Dialog
from etrain_jupyter.plugins.ec2.client.policy import launcher_policy, node_policy
from etrain_jupyter.plugins.ec2.ec2_api import Clients
from etrain_jupyter.plugins.ec2.simulator.stacks import teach_moto
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.pools.catalog import read_catalog
from tests.unit.plugins.ec2.conftest import AMI

REGION = "us-east-1"
ACCOUNT = "123456789012"
BUCKET = f"etrain-spot-{ACCOUNT}-{REGION}"
OPTIONS = InitOptions(region=REGION, types=("g4dn.xlarge",), ami=AMI)
READS = ("Describe", "Get", "List", "Head")
SERVICES = ("cloudformation", "ec2", "iam", "s3", "ssm", "sts")


class Killed(BaseException):
    """Ends a command like SIGKILL: no handler of the command sees it."""


class Requests:
    """Counts the requests that change the account, and kills the command at one of them."""

    def __init__(self) -> None:
        self.changes: list[str] = []
        self.num_all = 0
        self.kill_at = -1
        self.is_executed = False
        """Kill after the request was executed, instead of before."""

    def before(self, model: Any, **_: Any) -> None:
        self.num_all += 1
        if model.name.startswith(READS):
            return
        self.changes.append(model.name)
        if not self.is_executed:
            self._kill()

    def after(self, model: Any, **_: Any) -> None:
        if not model.name.startswith(READS) and self.is_executed:
            self._kill()

    def _kill(self) -> None:
        if len(self.changes) - 1 == self.kill_at:
            raise Killed


@pytest.fixture(autouse=True)
def places(aws: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Provide the path of pools.yaml; moto has no prices, and no network either."""
    monkeypatch.setenv("ETRAIN_POOLS", str(tmp_path / "pools.yaml"))
    monkeypatch.setenv("ETRAIN_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(init_module, "describe_price", lambda *_: "at worst $4.21 an hour")
    teach_moto()
    return tmp_path / "pools.yaml"


@pytest.fixture(autouse=True)
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[Requests]:
    """Watch the requests of the commands, which share one client for each service."""
    seen = Requests()
    monkeypatch.setattr(Clients, "_client", lambda self, service, *_: clients[service])
    clients = {name: watched(name) for name in SERVICES}
    before = lambda **words: seen.before(**words)  # noqa: E731  (tests replace the method)
    for made in clients.values():
        made.meta.events.register("before-call", before)
        made.meta.events.register("after-call", seen.after)
    yield seen
    for made in clients.values():
        made.meta.events.unregister("before-call", before)
        made.meta.events.unregister("after-call", seen.after)


@functools.cache  # creating a client takes 0.1 s
def watched(service: str) -> Any:
    once = Config(retries={"mode": "standard", "total_max_attempts": 1})
    return boto3.Session().client(service, region_name=REGION, config=once)


@functools.cache
def client(service: str) -> Any:
    return boto3.client(service, region_name=REGION)


def refuse(question: str) -> str:
    raise AssertionError(f"asked: {question}")


def run(command: Callable[..., str], lines: list[str] | None, words: dict[str, Any]) -> str:
    say = (lines if lines is not None else []).append
    is_dry_run = words.pop("is_dry_run", False)
    dialog = Dialog(ask=refuse, say=say, is_confirmed=True, is_dry_run=is_dry_run)
    return command("spot", words.pop("options"), dialog, **words)


def run_init(lines: list[str] | None = None, **words: Any) -> str:
    return run(init, lines, {"options": OPTIONS, **words})


def run_remove(lines: list[str] | None = None, **words: Any) -> str:
    return run(remove_pool, lines, {"options": InitOptions(), **words})


def inventory() -> dict[str, list[str]]:
    """Return everything in the account that a new one does not have."""
    iam, ec2, s3 = client("iam"), client("ec2"), client("s3")
    groups = ec2.describe_security_groups()["SecurityGroups"]
    found = {
        "buckets": [one["Name"] for one in s3.list_buckets()["Buckets"]],
        "roles": [one["RoleName"] for one in iam.list_roles()["Roles"]],
        "profiles": [
            one["InstanceProfileName"] for one in iam.list_instance_profiles()["InstanceProfiles"]
        ],
        "policies": [one["PolicyName"] for one in iam.list_policies(Scope="Local")["Policies"]],
        "groups": [one["GroupName"] for one in groups if one["GroupName"] != "default"],
        "stacks": [
            one["StackName"] for one in client("cloudformation").describe_stacks()["Stacks"]
        ],
    }
    return {kind: names for kind, names in found.items() if names}


COMPLETE = {
    "buckets": [BUCKET],
    "roles": ["etrain-spot-node"],
    "profiles": ["etrain-spot-node"],
    "policies": ["etrain-spot-launcher"],
    "groups": ["etrain-spot"],
    "stacks": ["etrain-spot"],
}


def spec() -> AwsSpotSpec:
    return read_catalog()["spot"].read_as(AwsSpotSpec)


def check_complete() -> None:
    """Check every setting of every resource, and that they agree with pools.yaml."""
    assert inventory() == COMPLETE
    s3, iam, ec2 = client("s3"), client("iam"), client("ec2")
    # moto ignores the other settings of a template's bucket.
    assert s3.get_bucket_encryption(Bucket=BUCKET)["ServerSideEncryptionConfiguration"]["Rules"]
    mark = {"Key": "etrain:made-for", "Value": "spot@us-east-1"}
    assert mark in s3.get_bucket_tagging(Bucket=BUCKET)["TagSet"]
    role = iam.get_role(RoleName="etrain-spot-node")["Role"]
    assert mark in role["Tags"]
    inline = iam.get_role_policy(RoleName="etrain-spot-node", PolicyName="etrain")
    assert inline["PolicyDocument"] == node_policy(spec())
    profile = iam.get_instance_profile(InstanceProfileName="etrain-spot-node")["InstanceProfile"]
    assert [one["RoleName"] for one in profile["Roles"]] == ["etrain-spot-node"]
    [group] = ec2.describe_security_groups(GroupNames=["etrain-spot"])["SecurityGroups"]
    assert spec().network.security_group == group["GroupId"]
    [rule] = group["IpPermissions"]
    assert [pair["GroupId"] for pair in rule["UserIdGroupPairs"]] == [group["GroupId"]]
    assert rule["IpRanges"] == []
    policy = iam.get_policy(PolicyArn=f"arn:aws:iam::{ACCOUNT}:policy/etrain-spot-launcher")
    version = iam.get_policy_version(
        PolicyArn=policy["Policy"]["Arn"], VersionId=policy["Policy"]["DefaultVersionId"]
    )
    assert version["PolicyVersion"]["Document"] == launcher_policy(
        spec(), node_role="etrain-spot-node", account=ACCOUNT
    )


def test_init_creates_everything_once_and_remove_takes_it_back(
    places: Path, requests: Requests
) -> None:
    lines: list[str] = []
    text = run_init(lines)
    check_complete()
    assert "attach-user-policy" in text
    assert any("at worst $4.21" in line for line in lines)
    creations = list(requests.changes)
    assert creations == ["CreateStack"]
    assert "  created role etrain-spot-node" in lines

    assert "is complete" in run_init(options=InitOptions(region=REGION))
    assert requests.changes == creations, "the second run changes nothing"

    assert run_remove() == "pool spot was removed"
    assert inventory() == {}
    assert not places.exists()
    # Figures for the report: pytest -s shows them.
    print(f"init and remove: {len(requests.changes)} changes, {requests.num_all} requests")


@pytest.mark.parametrize("is_executed", [False, True], ids=["before", "after"])
def test_init_killed_at_any_request_is_finished_by_the_next_run(
    places: Path, requests: Requests, is_executed: bool
) -> None:
    requests.kill_at, requests.is_executed = 0, is_executed
    with pytest.raises(Killed):
        run_init()
    assert not places.exists(), "the entry is written last"
    requests.kill_at = -1

    run_init()
    check_complete()
    # A request that was killed before it was executed is counted, and then repeated.
    assert requests.changes == ["CreateStack"] * (1 if is_executed else 2)

    run_remove()
    assert inventory() == {}


@pytest.mark.parametrize("is_executed", [False, True], ids=["before", "after"])
def test_remove_killed_at_any_request_is_finished_by_the_next_run(
    places: Path, requests: Requests, is_executed: bool
) -> None:
    run_init()
    requests.changes = []
    run_remove()
    assert requests.changes == ["DeleteStack", "DeleteBucket"]
    total = len(requests.changes)
    for stage in range(total):
        run_init()
        requests.changes, requests.kill_at, requests.is_executed = [], stage, is_executed
        with pytest.raises(Killed):
            run_remove()
        requests.kill_at = -1
        assert places.exists(), "the entry is removed last"
        run_remove()
        assert inventory() == {}
        assert not places.exists()


def test_killed_init_can_be_removed_without_finishing_it(requests: Requests) -> None:
    requests.kill_at, requests.is_executed = 0, True
    with pytest.raises(Killed):
        run_init()
    requests.kill_at = -1
    run_remove(options=InitOptions(region=REGION))
    assert inventory() == {}


def test_dry_run_and_the_answer_no_create_nothing(requests: Requests, places: Path) -> None:
    lines: list[str] = []
    assert "Nothing was created" in run_init(lines, is_dry_run=True)
    assert sum(line.startswith("    create ") for line in lines) == 6
    answers = iter(["", "g4dn.xlarge", "2", "10", "n"])
    text = init("spot", InitOptions(ami=AMI), Dialog(ask=lambda _: next(answers), say=lines.append))
    assert text == "Nothing was created."
    assert requests.changes == []
    assert inventory() == {}
    assert not places.exists()


def test_answers_become_the_entry(places: Path) -> None:
    answers = iter(["", "g4dn.xlarge, g5.xlarge", "2", "7.5", "yes"])
    init("spot", InitOptions(ami=AMI), Dialog(ask=lambda _: next(answers), say=str))
    made = spec()
    assert (made.region, made.workers.max) == (REGION, 2)
    assert made.capacity.types == ("g4dn.xlarge", "g5.xlarge")
    assert made.budget.max_total == 7.5
    assert all("  # " in line for line in places.read_text().splitlines())


def test_entries_and_comments_of_the_user_stay(places: Path) -> None:
    own = "# mine\nlab:  # downstairs\n  kind: address\n  address: tls://h:1\n"
    places.write_text(own)
    run_init()
    assert places.read_text().startswith(own)
    run_remove()
    assert places.read_text().strip() == own.strip()


def test_changed_entry_updates_the_policies_only(places: Path, requests: Requests) -> None:
    run_init()
    places.write_text(places.read_text().replace("g4dn.xlarge", "g5.xlarge"))
    requests.changes = []
    lines: list[str] = []
    for _ in range(2):
        run_init(lines, options=InitOptions(region=REGION))
    assert [line for line in lines if line.startswith("    ")] == [
        "    update policy etrain-spot-launcher"
    ]
    assert requests.changes == ["UpdateStack"]
    check_complete()


def test_flags_that_contradict_the_entry_are_refused(requests: Requests) -> None:
    run_init()
    requests.changes = []
    for options, key in (
        (InitOptions(region=REGION, workers=9), "workers"),
        (InitOptions(region=REGION, ami="ami-0123456789abcdef0"), "image"),
        (InitOptions(region=REGION, role="other"), "iam"),
        (InitOptions(region=REGION, subnets=("subnet-1",)), "network"),
        (InitOptions(region="eu-west-1"), "region"),
    ):
        with pytest.raises(ConfigError, match=f"another {key}") as caught:
            run_init(options=options)
        assert "change the file" in caught.value.hint
    assert "is complete" in run_init(), "the same flags again"
    assert requests.changes == []


def test_existing_bucket_group_and_profile_are_used_and_left_alone(places: Path) -> None:
    s3, ec2 = client("s3"), client("ec2")
    s3.create_bucket(Bucket="ours")
    [vpc] = {one["VpcId"] for one in ec2.describe_subnets()["Subnets"]}
    group = ec2.create_security_group(GroupName="team", Description="x", VpcId=vpc)["GroupId"]
    lines: list[str] = []
    run_init(
        lines,
        options=InitOptions(
            region=REGION, bucket="ours", security_group=group, role="team-node", ami=AMI,
            types=("g4dn.xlarge",),
        ),
    )  # fmt: skip
    assert inventory() == {"buckets": ["ours"], "groups": ["team"]}
    assert any("used without changes" in line for line in lines)
    assert spec().iam.instance_profile == "team-node"
    assert spec().network.security_group == group

    # Without the flags, the entry names them.
    assert "is complete" in run_init(options=InitOptions(region=REGION))
    assert inventory() == {"buckets": ["ours"], "groups": ["team"]}

    run_remove(lines)
    assert inventory() == {"buckets": ["ours"], "groups": ["team"]}
    assert any("bucket ours stays: it was not made by" in line for line in lines)
    assert not places.exists()


def test_bucket_with_objects_stays_until_a_flag_deletes_it(places: Path) -> None:
    run_init()
    s3 = client("s3")
    s3.put_object(Bucket=BUCKET, Key="etrain/runs/digits/checkpoints/step_1", Body=b"weights")
    lines: list[str] = []
    run_remove(lines)
    assert inventory() == {"buckets": [BUCKET]}
    assert any("contains 1 objects" in line and "--delete-objects" in line for line in lines)

    run_remove(options=InitOptions(region=REGION), deletes_objects=True)
    assert inventory() == {}


def test_versions_of_objects_are_deleted_too(places: Path) -> None:
    run_init()
    s3 = client("s3")
    s3.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})
    for _ in range(2):
        s3.put_object(Bucket=BUCKET, Key="etrain/key", Body=b"1")
    s3.delete_object(Bucket=BUCKET, Key="etrain/key")
    run_remove(deletes_objects=True)
    assert inventory() == {}


def test_policy_is_detached_from_the_users_who_have_it(places: Path) -> None:
    run_init()
    iam = client("iam")
    iam.create_user(UserName="ann")
    arn = f"arn:aws:iam::{ACCOUNT}:policy/etrain-spot-launcher"
    iam.attach_user_policy(UserName="ann", PolicyArn=arn)
    lines: list[str] = []
    run_remove(lines)
    assert "    detach policy etrain-spot-launcher from user ann" in lines
    assert inventory() == {}
    assert iam.list_attached_user_policies(UserName="ann")["AttachedPolicies"] == []


def test_role_of_someone_else_undoes_the_stack_and_is_named(requests: Requests) -> None:
    client("iam").create_role(RoleName="etrain-spot-node", AssumeRolePolicyDocument="{}")
    with pytest.raises(PoolError, match=r"stack etrain-spot could not be created") as caught:
        run_init()
    for part in ("role NodeRole: ", "etrain-spot-node", "has undone", "--role PROFILE"):
        assert part in str(caught.value)
    assert inventory() == {"roles": ["etrain-spot-node"]}
    assert "Nothing of pool spot" in run_remove(options=InitOptions(region=REGION))
    assert inventory() == {"roles": ["etrain-spot-node"]}


def test_stack_of_someone_else_is_left_alone(requests: Requests) -> None:
    topic = {"Resources": {"Topic": {"Type": "AWS::SNS::Topic"}}}
    client("cloudformation").create_stack(StackName="etrain-spot", TemplateBody=json.dumps(topic))
    for run in (run_init, lambda: run_remove(options=InitOptions(region=REGION))):
        with pytest.raises(PoolError, match="was not made for pool spot@us-east-1"):
            run()
    assert requests.changes == []


def test_role_in_use_is_named_and_the_stack_is_deleted_by_the_next_run(places: Path) -> None:
    run_init()
    iam = client("iam")
    document = json.dumps(node_policy(spec()))
    arn = iam.create_policy(PolicyName="extra", PolicyDocument=document)["Policy"]["Arn"]
    iam.attach_role_policy(RoleName="etrain-spot-node", PolicyArn=arn)
    with pytest.raises(PoolError, match=r"deleted: role etrain-spot-node: .*Detach it") as caught:
        run_remove()
    assert "has undone" not in str(caught.value)
    assert places.exists()
    iam.detach_role_policy(RoleName="etrain-spot-node", PolicyArn=arn)
    iam.delete_policy(PolicyArn=arn)
    run_remove()
    assert inventory() == {}


def test_entry_written_by_hand_stays(places: Path) -> None:
    run_init()
    places.write_text(places.read_text().replace("  # made by `etrain pools init`", ""))
    lines: list[str] = []
    run_remove(lines)
    assert "spot" in read_catalog()
    assert any("did not write it" in line for line in lines)


def test_head_on_its_own_machine_has_its_own_role(places: Path) -> None:
    run_init(options=InitOptions(region=REGION, types=("g4dn.xlarge",), ami=AMI, head="on-demand"))
    assert sorted(inventory()["roles"]) == ["etrain-spot-head", "etrain-spot-node"]
    assert spec().iam.head_profile == "etrain-spot-head"
    run_remove()
    assert inventory() == {}


# --- bad input ---


def wrong(options: InitOptions = OPTIONS) -> str:
    with pytest.raises((PoolError, ConfigError)) as caught:
        run_init(options=options)
    assert inventory() == {}
    assert "Nothing was created" in str(caught.value) or "Nothing was changed" in str(caught.value)
    return f"{caught.value} {getattr(caught.value, 'hint', '')}"


def test_missing_credentials_name_the_command_that_signs_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Clients, "caller", raising(NoCredentialsError()))
        with pytest.raises(PoolError, match=r"no AWS credentials.*aws sso login"):
            run_init()
    assert inventory() == {}


def test_account_without_default_vpc_lists_its_subnets() -> None:
    ec2 = client("ec2")
    defaults = ec2.describe_subnets()["Subnets"]
    vpc = ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    # moto calls the first subnet of a zone its default one, so create this one first.
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.9.1.0/24")["Subnet"]["SubnetId"]
    for one in defaults:
        ec2.delete_subnet(SubnetId=one["SubnetId"])
    assert f"--subnet {subnet}" in wrong()

    run_init(options=InitOptions(region=REGION, types=("g4dn.xlarge",), ami=AMI, subnets=(subnet,)))
    assert spec().network.subnets == (subnet,)
    [group] = ec2.describe_security_groups(GroupNames=["etrain-spot"])["SecurityGroups"]
    assert group["VpcId"] == vpc


def test_unknown_type_suggests_a_known_one() -> None:
    text = wrong(InitOptions(region=REGION, types=("g5.xlrage",), ami=AMI))
    assert "g5.xlrage" in text
    assert "g5.xlarge" in text


def test_image_for_another_architecture_is_refused() -> None:
    text = wrong(InitOptions(region=REGION, types=("g5g.xlarge",), ami=AMI))
    assert "for x86_64, but g5g.xlarge is a machine for arm64" in text


def test_unknown_image_is_refused() -> None:
    assert "--ami" in wrong(
        InitOptions(region=REGION, types=("g4dn.xlarge",), ami="ami-00000000000000000")
    )


def test_bucket_in_another_region_is_refused() -> None:
    s3 = boto3.client("s3", region_name="eu-west-1")
    place = {"LocationConstraint": "eu-west-1"}
    s3.create_bucket(Bucket="far", CreateBucketConfiguration=place)
    with pytest.raises(PoolError, match=r"bucket far is in eu-west-1.*--region eu-west-1"):
        run_init(options=InitOptions(region=REGION, bucket="far", types=("g4dn.xlarge",), ami=AMI))
    assert inventory() == {"buckets": ["far"]}


@pytest.mark.parametrize("name", ["local", "Spot", "a" * 25, "-x", "x_y"])
def test_name_that_cannot_be_part_of_a_bucket_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be called"):
        init(name, OPTIONS, Dialog(ask=refuse, say=refuse))


def raising(error: Exception) -> Callable[..., Any]:
    def refuse_all(*_: Any) -> Any:
        raise error

    return refuse_all


def denying(*operations: str, code: str = "AccessDenied") -> Callable[..., Any]:
    def answer(model: Any, **_: Any) -> Any:
        if model.name in operations:
            error = {"Error": {"Code": code, "Message": "no"}}
            raise ClientError(error, model.name)

    return answer


@pytest.mark.parametrize("operation", ["CreateStack", "DescribeStacks"])
def test_refused_request_names_the_way_out(requests: Requests, operation: str) -> None:
    is_refused = [True]
    refusal = denying(operation)
    before = requests.before

    def watch(model: Any, **words: Any) -> None:
        if is_refused[0]:
            refusal(model)
        before(model, **words)

    requests.before = watch  # type: ignore[method-assign]
    with pytest.raises(PoolError, match="--template FILE"):
        run_init()

    is_refused[0] = False
    run_init()
    check_complete()


def test_taken_bucket_is_refused(requests: Requests) -> None:
    before = requests.before

    def watch(model: Any, **words: Any) -> None:
        denying("HeadBucket", code="403")(model)
        before(model, **words)

    requests.before = watch  # type: ignore[method-assign]
    with pytest.raises(PoolError, match=r"belongs to another AWS account.*--bucket NAME"):
        run_init()


def test_template_creates_nothing_and_names_the_next_command(tmp_path: Path) -> None:
    file = tmp_path / "pool.yaml"
    text = run_init(template=file)
    assert "aws cloudformation deploy" in text
    assert file.exists()
    assert inventory() == {}


def test_policy_documents_are_valid_json_after_a_round_trip() -> None:
    run_init()
    assert json.loads(json.dumps(node_policy(spec()))) == node_policy(spec())
