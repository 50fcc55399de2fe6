"""Requests to EC2: retries, and the meaning of answers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from botocore.exceptions import ClientError, ConnectTimeoutError, EndpointConnectionError

from etrain_jupyter.errors import StoreError
from etrain_jupyter.plugins.ec2.aws_messages import kind_of, pool_error
from etrain_jupyter.plugins.ec2.capacity_spec import GpuSpec
from etrain_jupyter.plugins.ec2.ec2_api import (
    Clients,
    describe_types,
    find_gpu_types,
    list_instances,
    terminate,
)
from etrain_jupyter.plugins.ec2.fleet_launch import create_fleet
from etrain_jupyter.plugins.ec2.fleet_state import FleetResult, LaunchRequest
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.storage.objects import bucket_owners
from etrain_jupyter.storage.objects.bucket_owners import expected_owner

A, B = "us-east-1a", "us-east-1b"
REQUEST = LaunchRequest(
    token="c1-1-1",
    lifecycle="spot",
    num_nodes=2,
    workers_each=1,
    overrides=(("g5.xlarge", A), ("g6.xlarge", B)),
)
SUBNETS = {A: "subnet-a", B: "subnet-b"}


def error(code: str, status: int = 400, message: str = "") -> ClientError:
    told = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return ClientError(told, "CreateFleet")


class Fleet:
    """A client that answers in turn."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.calls: list[dict[str, Any]] = []

    def create_fleet(self, **arguments: Any) -> Any:
        self.calls.append(arguments)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def ask(client: Fleet, request: LaunchRequest = REQUEST) -> FleetResult | None:
    return create_fleet(
        client,
        request,
        template_id="lt-1",
        subnets=SUBNETS,
        allocation="price-capacity-optimized",
        tags={"etrain:cluster": "c1"},
        pause=lambda seconds: None,
    )


GRANTED = {
    "Instances": [
        {
            "InstanceIds": ["i-1"],
            "InstanceType": "g6.xlarge",
            "Lifecycle": "spot",
            "LaunchTemplateAndOverrides": {"Overrides": {"SubnetId": "subnet-b"}},
        }
    ],
    "Errors": [
        {
            "ErrorCode": "InsufficientInstanceCapacity",
            "ErrorMessage": "none",
            "LaunchTemplateAndOverrides": {
                "Overrides": {"InstanceType": "g5.xlarge", "AvailabilityZone": A}
            },
        }
    ],
}


def test_one_call_requests_all_types_and_subnets_with_its_token() -> None:
    client = Fleet(GRANTED)
    ask(client)
    (call,) = client.calls

    assert (call["Type"], call["ClientToken"]) == ("instant", "c1-1-1")
    assert call["LaunchTemplateConfigs"][0]["Overrides"] == [
        {"InstanceType": "g5.xlarge", "SubnetId": "subnet-a"},
        {"InstanceType": "g6.xlarge", "SubnetId": "subnet-b"},
    ]
    assert call["TargetCapacitySpecification"]["SpotTargetCapacity"] == 2
    assert call["SpotOptions"] == {"AllocationStrategy": "price-capacity-optimized"}
    assert "MaxPrice" not in str(call)


def test_result_names_launched_machines_and_pools_without_capacity() -> None:
    answer = ask(Fleet(GRANTED))

    assert answer is not None
    assert [(a.id, a.type, a.zone, a.lifecycle) for a in answer.acks] == [
        ("i-1", "g6.xlarge", B, "spot")
    ]
    assert [(r.type, r.zone, r.kind) for r in answer.refusals] == [("g5.xlarge", A, "capacity")]


@pytest.mark.parametrize(
    "trouble",
    [
        error("RequestLimitExceeded", 503),
        error("InternalError", 500),
        error("Strange", 502),
        EndpointConnectionError(endpoint_url="http://x"),
    ],
    ids=str,
)
def test_transient_error_is_retried_with_the_same_token(trouble: Exception) -> None:
    client = Fleet(trouble, trouble, GRANTED)

    assert ask(client) is not None
    assert [call["ClientToken"] for call in client.calls] == ["c1-1-1"] * 3


def test_result_is_unknown_after_the_last_attempt() -> None:
    client = Fleet(*[error("Unavailable", 503)] * 4)

    assert ask(client) is None
    assert len(client.calls) == 4


def test_missing_capacity_is_not_retried_although_it_is_a_server_error() -> None:
    client = Fleet(error("InsufficientInstanceCapacity", 500))
    answer = ask(client)

    assert answer is not None
    assert [one.kind for one in answer.refusals] == ["capacity"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("MaxSpotInstanceCountExceeded", "quota"),
        ("VcpuLimitExceeded", "quota"),
        ("Unsupported", "unsupported"),
        ("UnauthorizedOperation", "fatal"),
        ("InvalidAMIID.NotFound", "fatal"),
    ],
)
def test_refused_launch_is_not_retried(code: str, kind: str) -> None:
    answer = ask(Fleet(error(code)))

    assert answer is not None
    assert [one.kind for one in answer.refusals] == [kind]


def test_wrong_credentials_are_raised() -> None:
    with pytest.raises(ClientError):
        ask(Fleet(error("AuthFailure", 401)))
    assert kind_of(error("RequestExpired")) == "credentials"


def test_on_demand_request_has_on_demand_options() -> None:
    client = Fleet(GRANTED)
    ask(client, dataclasses.replace(REQUEST, lifecycle="on-demand"))
    (call,) = client.calls

    assert call["TargetCapacitySpecification"] == {
        "TotalTargetCapacity": 2,
        "OnDemandTargetCapacity": 2,
        "SpotTargetCapacity": 0,
        "DefaultTargetCapacityType": "on-demand",
    }
    assert "SpotOptions" not in call


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("UnauthorizedOperation", "%etrain pools policy"),
        ("AuthFailure", "Renew them where the cluster's head runs"),
        ("ExpiredToken", "the credentials have expired"),
        ("InvalidAMIID.NotFound", "Correct image.ami"),
        ("InvalidIamInstanceProfileName.NotFound", "iam.instance_profile"),
        ("MaxSpotInstanceCountExceeded", "L-3819A6DF"),
        ("VcpuLimitExceeded", "lower capacity.on_demand.max"),
    ],
)
def test_errors_name_the_cause_the_consequence_and_the_remedy(code: str, words: str) -> None:
    text = str(pool_error("the fleet of c1", error(code), "Nothing was launched."))

    assert text.startswith("the fleet of c1: ")
    assert words in text
    assert f"({code})" in text
    assert "Nothing was launched." in text
    assert text.endswith(".")


def test_unknown_errors_show_no_secrets() -> None:
    text = str(pool_error("x", error("Odd", message="key AKIAABCDEFGHIJKLMNOP is odd"), "Nothing."))

    assert "AKIA" not in text


@pytest.mark.aws
def test_machines_are_found_by_their_tag_in_every_state(clients: Clients) -> None:
    ids = {}
    for cluster in ("c1", "c2", ""):
        tags = [{"Key": "etrain:cluster", "Value": cluster}] if cluster else []
        told = {"TagSpecifications": [{"ResourceType": "instance", "Tags": tags}]} if tags else {}
        made = clients.ec2.run_instances(
            ImageId="ami-12c6146b", MinCount=1, MaxCount=1, InstanceType="g5.xlarge", **told
        )
        ids[cluster] = made["Instances"][0]["InstanceId"]

    (one,) = list_instances(clients.ec2, cluster_id="c1")
    assert (one.id, one.type, one.lifecycle, one.is_living) == (
        ids["c1"],
        "g5.xlarge",
        "on-demand",
        True,
    )
    assert {one.id for one in list_instances(clients.ec2)} == {ids["c1"], ids["c2"]}
    terminate(clients.ec2, ["i-0123456789abcdef0", ids["c1"]])
    (one,) = list_instances(clients.ec2, cluster_id="c1")
    assert (one.state, one.reason) == ("terminated", "Client.UserInitiatedShutdown")
    assert one.ended_at is not None
    assert list_instances(clients.ec2, ids=[ids["c2"], "i-0123456789abcdef0"])[0].id == ids["c2"]


@pytest.mark.aws
def test_instance_types_are_described_and_found_by_their_gpus(clients: Clients) -> None:
    facts = describe_types(clients.ec2, ["g5.xlarge", "g5.12xlarge", "t3.small", "x9.none"])

    assert {name: one.gpus for name, one in facts.items()} == {
        "g5.xlarge": 1,
        "g5.12xlarge": 4,
        "t3.small": 0,
    }
    assert facts["g5.xlarge"].encrypts_traffic
    found = find_gpu_types(clients.ec2, GpuSpec(memory_gib=24, count=1))
    assert "g5.xlarge" in found
    assert not {"g4dn.xlarge", "g5.12xlarge", "t3.small"} & set(found)


# --- the bucket's owner ---


def account_calls(clients: Clients, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list with an entry for each request to STS."""
    calls: list[str] = []
    make = clients._client

    def client(service: str, *words: Any, **named: Any) -> Any:
        if service == "sts":
            calls.append(service)
        return make(service, *words, **named)

    monkeypatch.setattr(clients, "_client", client)
    return calls


def test_owner_of_the_pools_bucket_is_requested_once(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Review S7."""
    monkeypatch.setattr(bucket_owners, "_registered", {})
    calls = account_calls(clients, monkeypatch)
    for _ in range(3):
        clients.bucket.put("x", b"1", "test")
    clients.forget()  # as after credentials have expired
    assert clients.bucket.get("x", "test") == b"1"

    assert calls == ["sts"]
    assert expected_owner("my-bucket") == "123456789012"  # of a run store there, too


@pytest.mark.parametrize(("named", "expected"), [("111122223333", "111122223333"), ("any", "")])
def test_configured_owner_is_not_requested(
    clients: Clients,
    spec: AwsSpotSpec,
    monkeypatch: pytest.MonkeyPatch,
    named: str,
    expected: str,
) -> None:
    monkeypatch.setattr(bucket_owners, "_registered", {})
    own = Clients(spec.model_copy(update={"bucket_owner": named}))
    calls = account_calls(own, monkeypatch)

    assert own.bucket_owner() == expected
    assert calls == []


def test_error_for_unresponsive_sts_names_the_key_to_set(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_owners, "_registered", {})

    class Silent:
        def get_caller_identity(self) -> Any:
            raise ConnectTimeoutError(endpoint_url="https://sts.us-east-1.amazonaws.com")

    monkeypatch.setattr(clients, "_client", lambda *words, **named: Silent())
    with pytest.raises(StoreError, match=r"STS: .*Write bucket_owner: '111122223333'"):
        clients.bucket.get("x", "test")
