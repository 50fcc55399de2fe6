"""The fake cloud answers boto3 as AWS does, for the API calls that a spot cluster uses."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError, ConnectionClosedError

from etrain_jupyter.plugins.ec2.simulator import ApiFault, FakeAws
from etrain_jupyter.testing.s3_faults import S3Fault
from tests.contract.fleets import (
    client,
    create_fleet,
    described,
    ec2,
    fleet_request,
    ids_of,
    make_template,
)


@pytest.fixture(autouse=True)
def nothing_boots(fresh_cloud: FakeAws) -> None:
    """Keep instances from booting: these tests check API responses only."""
    fresh_cloud.set_boot(1000)


def error_of(act: Callable[..., Any], *args: Any, **words: Any) -> tuple[str, int]:
    """Return the code and the status of the error with which a call fails."""
    with pytest.raises(ClientError) as caught:
        act(*args, **words)
    response = caught.value.response
    return response["Error"]["Code"], response["ResponseMetadata"]["HTTPStatusCode"]


def code_of(act: Callable[..., Any], *args: Any, **words: Any) -> str:
    return error_of(act, *args, **words)[0]


def test_same_client_token_returns_the_same_machines(fresh_cloud: FakeAws) -> None:
    template = make_template(fresh_cloud)

    first = create_fleet(template, 2, ClientToken="c-1-7")
    again = create_fleet(template, 2, ClientToken="c-1-7")

    assert ids_of(first) == ids_of(again)
    assert len(described()) == 2
    caught = code_of(create_fleet, template, 3, ClientToken="c-1-7")
    assert caught == "IdempotentParameterMismatch"


def test_same_client_token_returns_the_same_instance(fresh_cloud: FakeAws) -> None:
    image = fresh_cloud.make_account().image
    words = {"ImageId": image, "InstanceType": "m5.large", "MinCount": 1, "MaxCount": 1}

    runs = [ec2().run_instances(ClientToken="head-1", **words) for _ in range(2)]

    assert len({run["Instances"][0]["InstanceId"] for run in runs}) == 1
    assert len(described()) == 1


def test_lost_response_is_repeated_for_the_same_client_token(fresh_cloud: FakeAws) -> None:
    template = make_template(fresh_cloud)
    fresh_cloud.set_faults(ApiFault(action="CreateFleet", is_answer_lost=True, count=1))
    with pytest.raises(ConnectionClosedError):
        create_fleet(template, ClientToken="c-1-8")

    got = create_fleet(template, ClientToken="c-1-8")

    assert list(described()) == ids_of(got)


def test_faults_apply_to_one_action_for_a_number_of_calls(fresh_cloud: FakeAws) -> None:
    template = make_template(fresh_cloud)
    fresh_cloud.set_faults(
        ApiFault(action="CreateFleet", code="RequestLimitExceeded", count=2),
        ApiFault(action="CreateFleet", code="InternalError", skip=2, count=1),
    )

    errors = [error_of(create_fleet, template) for _ in range(3)]

    assert errors == [("RequestLimitExceeded", 503)] * 2 + [("InternalError", 500)]
    assert len(ids_of(create_fleet(template))) == 1
    assert fresh_cloud.calls()["ec2.CreateFleet"] == 4


@pytest.mark.parametrize(
    ("service", "action", "code"),
    [
        ("ec2", "describe_instances", "UnauthorizedOperation"),
        ("ec2", "describe_instances", "AuthFailure"),
        ("sts", "get_caller_identity", "ExpiredToken"),
        ("ssm", "describe_parameters", "ThrottlingException"),
        ("s3", "list_buckets", "ExpiredToken"),
    ],
)
def test_every_service_returns_errors_in_its_own_format(
    fresh_cloud: FakeAws, service: str, action: str, code: str
) -> None:
    fresh_cloud.set_faults(ApiFault(service=service, code=code))

    assert code_of(getattr(client(service), action)) == code


def test_s3_faults_apply_to_the_same_process(fresh_cloud: FakeAws) -> None:
    bucket = fresh_cloud.make_account().bucket
    s3 = client("s3")
    fresh_cloud.set_faults(S3Fault(kind="slow_down", match="/lease.json", count=1))

    caught = code_of(s3.put_object, Bucket=bucket, Key="a/lease.json", Body=b"1")
    s3.put_object(Bucket=bucket, Key="a/lease.json", Body=b"2")

    assert caught == "SlowDown"
    assert fresh_cloud.s3.read(bucket, "a/lease.json") == b"2"
    caught = code_of(s3.put_object, Bucket=bucket, Key="a/lease.json", Body=b"3", IfNoneMatch="*")
    assert caught == "PreconditionFailed"


def test_unknown_image_is_rejected_by_name(fresh_cloud: FakeAws) -> None:
    words = {"ImageId": "ami-0badbad", "InstanceType": "m5.large", "MinCount": 1, "MaxCount": 1}
    assert code_of(ec2().run_instances, **words) == "InvalidAMIID.NotFound"

    got = create_fleet(make_template(fresh_cloud, ImageId="ami-0badbad"))

    assert ids_of(got) == []
    assert {one["ErrorCode"] for one in got["Errors"]} == {"InvalidAMIID.NotFound"}


def test_images_are_found_by_ssm_parameter(fresh_cloud: FakeAws) -> None:
    account = fresh_cloud.make_account()
    ssm = client("ssm")
    public = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64"

    own = ssm.get_parameter(Name=account.image_parameter)["Parameter"]["Value"]
    theirs = ssm.get_parameter(Name=public)["Parameter"]["Value"]

    assert own == account.image
    ran = ec2().run_instances(ImageId=theirs, InstanceType="m5.large", MinCount=1, MaxCount=1)
    assert ran["Instances"][0]["ImageId"] == theirs


def test_run_instances_fails_without_capacity(fresh_cloud: FakeAws) -> None:
    image = fresh_cloud.make_account().image
    fresh_cloud.set_on_demand(instance_type="m5.large", capacity=1)
    words = {"ImageId": image, "InstanceType": "m5.large", "MinCount": 1, "MaxCount": 1}
    ec2().run_instances(**words)

    assert error_of(ec2().run_instances, **words) == ("InsufficientInstanceCapacity", 500)


def test_spot_price_history_follows_the_market(fresh_cloud: FakeAws) -> None:
    words: dict[str, Any] = {
        "InstanceTypes": ["g5.xlarge"],
        "AvailabilityZone": "us-east-1a",
        "ProductDescriptions": ["Linux/UNIX"],
    }
    before = ec2().describe_spot_price_history(**words)["SpotPriceHistory"]
    fresh_cloud.set_price(0.77, instance_type="g5.xlarge", zone="us-east-1a")

    both = ec2().describe_spot_price_history(**words)["SpotPriceHistory"]
    in_force = ec2().describe_spot_price_history(StartTime=time.time() + 1, **words)

    assert [row["SpotPrice"] for row in both] == ["0.770000", before[0]["SpotPrice"]]
    assert [row["SpotPrice"] for row in in_force["SpotPriceHistory"]] == ["0.770000"]


def test_placement_scores_reflect_capacity(fresh_cloud: FakeAws) -> None:
    names = ["g4dn.xlarge", "g5.xlarge", "g6.xlarge"]
    fresh_cloud.set_capacity(0, zone="us-east-1b")

    answer = ec2().get_spot_placement_scores(
        InstanceTypes=names,
        TargetCapacity=4,
        SingleAvailabilityZone=True,
        RegionNames=["us-east-1"],
    )

    scores = {one["AvailabilityZoneId"]: one["Score"] for one in answer["SpotPlacementScores"]}
    zones = {one["ZoneName"]: one["ZoneId"] for one in _zones()}
    assert scores[zones["us-east-1a"]] == 10
    assert scores[zones["us-east-1b"]] == 1


def _zones() -> list[dict[str, Any]]:
    zones: list[dict[str, Any]] = ec2().describe_availability_zones()["AvailabilityZones"]
    return zones


def test_pricing_api_returns_on_demand_rates(fresh_cloud: FakeAws) -> None:
    fresh_cloud.set_on_demand(instance_type="g5.xlarge", price_usd=1.25)
    wanted = {
        "instanceType": "g5.xlarge",
        "regionCode": "us-east-1",
        "operatingSystem": "Linux",
        "preInstalledSw": "NA",
        "tenancy": "Shared",
        "capacitystatus": "Used",
    }
    filters = [
        {"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in wanted.items()
    ]

    answer = client("pricing").get_products(ServiceCode="AmazonEC2", Filters=filters)

    product = json.loads(answer["PriceList"][0])
    (term,) = product["terms"]["OnDemand"].values()
    (rate,) = term["priceDimensions"].values()
    assert len(answer["PriceList"]) == 1
    assert (float(rate["pricePerUnit"]["USD"]), rate["unit"]) == (1.25, "Hrs")
    assert product["publicationDate"] == "2026-01-01T00:00:00Z"


def test_new_instances_are_listed_with_a_lag(fresh_cloud: FakeAws) -> None:
    template = make_template(fresh_cloud)
    create_fleet(template)
    (old,) = described()
    fresh_cloud.set_lag(1000)
    (young,) = ids_of(create_fleet(template))

    fresh_cloud.set_lag(1000)
    hidden = set(described())
    caught = code_of(ec2().describe_instances, InstanceIds=[young])
    fresh_cloud.set_lag(0)

    assert caught == "InvalidInstanceID.NotFound"
    assert young not in hidden
    assert set(described()) == {old, young}


def test_object_age_is_correct_although_the_s3_clock_is_ahead(fresh_cloud: FakeAws) -> None:
    bucket = fresh_cloud.make_account().bucket
    fresh_cloud.set_clock_skew(600)
    s3 = client("s3")
    s3.put_object(Bucket=bucket, Key="lease.json", Body=b"1")

    head = s3.head_object(Bucket=bucket, Key="lease.json")
    (shown,) = s3.list_objects_v2(Bucket=bucket)["Contents"]

    date = head["ResponseMetadata"]["HTTPHeaders"]["date"]
    at = time.mktime(time.strptime(date, "%a, %d %b %Y %H:%M:%S GMT")) - time.timezone
    assert 500 < at - time.time() <= 601
    assert 0 <= at - head["LastModified"].timestamp() < 100
    assert abs(shown["LastModified"].timestamp() - head["LastModified"].timestamp()) <= 1


def test_request_with_a_large_clock_skew_is_rejected(fresh_cloud: FakeAws) -> None:
    fresh_cloud.set_clock_skew(3600)

    assert code_of(client("s3").list_buckets) == "RequestTimeTooSkewed"
    assert code_of(ec2().describe_instances) == "RequestExpired"


def test_instance_types_report_gpus_and_encryption_in_transit(fresh_cloud: FakeAws) -> None:
    names = ["g4dn.12xlarge", "t3.medium"]
    described_types = ec2().describe_instance_types(InstanceTypes=names)["InstanceTypes"]

    types = {one["InstanceType"]: one for one in described_types}

    assert types["g4dn.12xlarge"]["GpuInfo"]["Gpus"][0]["Count"] == 4
    assert types["g4dn.12xlarge"]["NetworkInfo"]["EncryptionInTransitSupported"] is True
    assert "GpuInfo" not in types["t3.medium"]


def test_unsupported_action_returns_an_error_that_boto_parses(
    fresh_cloud: FakeAws,
) -> None:
    assert code_of(ec2().describe_capacity_reservations) == "InvalidAction"


def test_dry_run_launches_nothing(fresh_cloud: FakeAws) -> None:
    assert code_of(create_fleet, make_template(fresh_cloud), DryRun=True) == "DryRunOperation"
    assert described() == {}


def allow(*actions: str, resource: str = "*") -> dict[str, Any]:
    statement = {"Effect": "Allow", "Action": list(actions), "Resource": resource}
    return {"Version": "2012-10-17", "Statement": [statement]}


def test_iam_policies_are_enforced_when_enabled(
    fresh_cloud: FakeAws, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = make_template(fresh_cloud)
    fleets = ("ec2:CreateFleet", "ec2:RunInstances", "ec2:CreateTags", "iam:PassRole")
    put = allow("s3:PutObject", resource="arn:aws:s3:::etrain-bucket/ok/*")
    may = fresh_cloud.make_user("may", allow(*fleets, "ec2:DescribeInstances"), put)
    may_not = fresh_cloud.make_user("may-not", allow("ec2:CreateFleet", "ec2:DescribeInstances"))
    bucket = fresh_cloud.make_account().bucket
    fresh_cloud.enforce_iam()

    stranger = code_of(ec2().describe_instances)
    for name, value in may_not.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ClientError, match=r"\(UnauthorizedOperation\).*RunInstances"):
        ec2().create_fleet(**fleet_request(template))
    denied = code_of(ec2().describe_volumes)
    for name, value in may.items():
        monkeypatch.setenv(name, value)
    got = create_fleet(template)
    s3 = client("s3")
    s3.put_object(Bucket=bucket, Key="ok/a", Body=b"1")
    elsewhere = code_of(s3.put_object, Bucket=bucket, Key="other/a", Body=b"1")

    assert (stranger, denied) == ("AuthFailure", "UnauthorizedOperation")
    assert fresh_cloud.s3.list_keys(bucket) == ["ok/a"]
    assert list(described()) == ids_of(got)
    assert elsewhere == "AccessDenied"


def test_invalid_arguments_of_test_controls_are_errors(fresh_cloud: FakeAws) -> None:
    with pytest.raises(ValueError, match="Instance i-0 is not running"):
        fresh_cloud.preempt("i-0")
    with pytest.raises(ValueError, match=r"no pool with instance_type='g5\.huge'"):
        fresh_cloud.set_capacity(1, instance_type="g5.huge")
