"""The stack of a pool while CloudFormation works on it, and its failures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.ec2.account.site import POOL_TAG, Site
from etrain_jupyter.plugins.ec2.account.stack import Stack
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec

ID = "arn:aws:cloudformation:us-east-1:111122223333:stack/etrain-spot/1"
DENIED = "User: arn:aws:iam::1:user/ann is not authorized to perform: iam:CreateRole"


class Cloud:
    """CloudFormation with one stack, whose status changes with each description."""

    def __init__(self, *statuses: str) -> None:
        self.statuses = list(statuses)
        self.events: list[dict[str, Any]] = []
        self.changes: list[str] = []

    def describe_stacks(self, StackName: str) -> dict[str, Any]:
        if not self.statuses:
            error = {"Code": "ValidationError", "Message": f"Stack {StackName} does not exist"}
            raise ClientError({"Error": error}, "DescribeStacks")
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        tags = [{"Key": POOL_TAG, "Value": "spot@us-east-1"}]
        return {"Stacks": [{"StackId": ID, "StackStatus": status, "Tags": tags}]}

    def create_stack(self, **words: Any) -> dict[str, Any]:
        assert words["OnFailure"] == "DELETE"
        self.changes.append("create")
        self.statuses = ["CREATE_IN_PROGRESS", "DELETE_IN_PROGRESS", "DELETE_COMPLETE"]
        return {"StackId": ID}

    def delete_stack(self, **_: Any) -> None:
        self.changes.append("delete")
        self.statuses = ["DELETE_IN_PROGRESS", "DELETE_COMPLETE"]

    def get_paginator(self, _: str) -> Any:
        pages = [{"StackEvents": self.events[::-1]}]
        return SimpleNamespace(paginate=lambda StackName: pages)

    def add(self, status: str, type: str, name: str, reason: str = "") -> None:
        self.events.append(
            {
                "EventId": str(len(self.events)),
                "LogicalResourceId": name,
                "PhysicalResourceId": "",
                "ResourceType": type,
                "ResourceStatus": status,
                "ResourceStatusReason": reason,
            }
        )


def stack_of(cloud: Cloud, waits: list[float]) -> Stack:
    spec = AwsSpotSpec.parse({"region": "us-east-1", "bucket": "my-bucket", "owner": "me"})
    clients: Any = SimpleNamespace(cloudformation=cloud)
    site = Site(name="spot", spec=spec, clients=clients, account="111122223333")
    return Stack(site, pause=waits.append)


def test_refused_resource_is_named_with_its_reason_and_the_way_out() -> None:
    cloud, waits, lines = Cloud(), list[float](), list[str]()
    cloud.add("CREATE_COMPLETE", "AWS::EC2::SecurityGroup", "Group")
    cloud.add("CREATE_FAILED", "AWS::IAM::Role", "NodeRole", DENIED)
    cloud.add("CREATE_FAILED", "AWS::S3::Bucket", "Bucket", "Resource creation cancelled")
    with pytest.raises(PoolError) as caught:
        stack_of(cloud, waits).deploy({"Resources": {}}, lines.append)
    for part in ("etrain-spot could not be created: role NodeRole: User: arn", "not authorized",
                 "has undone the change", "--template FILE"):  # fmt: skip
        assert part in str(caught.value)
    assert lines == ["  created security group Group"], "each event is shown once"
    assert len(waits) == 2


def test_operation_in_progress_is_awaited() -> None:
    cloud, waits = (
        Cloud("UPDATE_IN_PROGRESS", "UPDATE_IN_PROGRESS", "UPDATE_COMPLETE"),
        list[float](),
    )
    assert stack_of(cloud, waits).describe()["StackStatus"] == "UPDATE_COMPLETE"
    assert len(waits) == 1


def test_stack_that_could_not_be_created_is_deleted_first() -> None:
    cloud = Cloud("ROLLBACK_COMPLETE")
    with pytest.raises(PoolError, match="it is DELETE_COMPLETE"):
        stack_of(cloud, []).deploy({"Resources": {}}, lambda line: None)
    assert cloud.changes == ["delete", "create"]


def test_operation_without_an_end_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etrain_jupyter.plugins.ec2.account.stack.OPERATION_S", -1.0)
    with pytest.raises(PoolError, match=r"is still UPDATE_IN_PROGRESS.*it waits for the end"):
        stack_of(Cloud("UPDATE_IN_PROGRESS"), []).describe()
