"""The CloudFormation template describes what ``init`` creates, and CloudFormation accepts it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from etrain_jupyter.plugins.ec2.account.cloudformation import (
    MAX_POLICY,
    split_policy,
    template_of,
    text_of,
)
from etrain_jupyter.plugins.ec2.account.options import node_name
from etrain_jupyter.plugins.ec2.account.site import Site
from etrain_jupyter.plugins.ec2.client.policy import launcher_policy, node_policy
from etrain_jupyter.plugins.ec2.ec2_api import Clients
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec

ACCOUNT = "111122223333"


def site(**keys: Any) -> Site:
    spec = AwsSpotSpec.parse(
        {
            "region": "us-east-1",
            "bucket": "etrain-spot-111122223333-us-east-1",
            "iam": {"instance_profile": node_name("spot"), "head_profile": "etrain-spot-head"},
            "owner": "ann",
            **keys,
        }
    )
    return Site(name="spot", spec=spec, clients=Clients(spec), account=ACCOUNT)


HEAD = {"head": "on-demand", "head_tunnel": "ssm"}


@pytest.mark.parametrize("keys", [{}, HEAD], ids=["notebook", "head"])
def test_template_passes_the_linter(keys: dict[str, Any]) -> None:
    api = pytest.importorskip("cfnlint.api", reason="cfn-lint is not installed")
    made = template_of(site(**keys), vpc="vpc-0a1b2c3d", subnets=("subnet-1", "subnet-2"))
    text = text_of(made)
    # Informational findings, which begin with I, ask for remarks about the architecture.
    assert [str(one) for one in api.lint_all(text) if not str(one).startswith("[I")] == []


def test_policies_are_those_of_init() -> None:
    place = site()
    made = template_of(place, vpc="")
    resources = made["Resources"]
    assert "Default" not in made["Parameters"]["VpcId"]
    [policy] = resources["NodeRole"]["Properties"]["Policies"]
    assert policy["PolicyDocument"] == node_policy(place.spec)
    grouped = place.spec.network.model_copy(update={"security_group": "${Group.GroupId}"})
    wanted = launcher_policy(
        place.spec.model_copy(update={"network": grouped}),
        node_role="etrain-spot-node",
        account=ACCOUNT,
    )
    parts = [resources[key]["Properties"] for key in resources if key.startswith("Launcher")]
    assert [
        unsubstituted(statement)
        for part in parts
        for statement in part["PolicyDocument"]["Statement"]
    ] == wanted["Statement"]


def unsubstituted(value: Any) -> Any:
    """Replace ``Fn::Sub`` with its text."""
    if isinstance(value, dict):
        if set(value) == {"Fn::Sub"}:
            return value["Fn::Sub"]
        return {key: unsubstituted(inner) for key, inner in value.items()}
    return [unsubstituted(one) for one in value] if isinstance(value, list) else value


def test_stack_has_the_tags_and_keeps_the_bucket() -> None:
    resources = template_of(site(), vpc="")["Resources"]
    bucket = resources["Bucket"]
    assert bucket["DeletionPolicy"] == "RetainExceptOnCreate"
    assert set(bucket["Properties"]["PublicAccessBlockConfiguration"].values()) == {True}
    rules = bucket["Properties"]["LifecycleConfiguration"]["Rules"]
    assert [one["Id"] for one in rules] == ["etrain-aborted-uploads", "etrain-dead-clusters"]
    assert all(one["Prefix"].startswith("etrain/") for one in rules)
    mark = {"Key": "etrain:made-for", "Value": "spot@us-east-1"}
    for name in ("Bucket", "Group", "NodeRole"):
        assert mark in resources[name]["Properties"]["Tags"], name


def test_parts_that_exist_already_are_left_out() -> None:
    place = site(network={"security_group": "sg-1"})
    made = template_of(place, vpc="vpc-1", parts={"roles"})
    assert sorted(made["Resources"]) == ["Launcher", "NodeProfile", "NodeRole"]
    assert "Parameters" not in made
    assert "security-group/sg-1" in json.dumps(made["Resources"])
    assert "${Group" not in json.dumps(made)


def test_command_of_the_outputs_is_complete() -> None:
    made = template_of(site(**HEAD), vpc="", subnets=("subnet-1",))
    command = made["Outputs"]["Command"]["Value"]["Fn::Sub"]
    for part in ("--role etrain-spot-node", "--security-group ${Group.GroupId}",
                 "--subnet subnet-1", "--head on-demand", "--yes"):  # fmt: skip
        assert part in command


@pytest.mark.parametrize("most", [MAX_POLICY, 2000])
def test_split_policies_keep_every_statement_within_the_limit(most: int) -> None:
    place = site(**HEAD)
    whole = launcher_policy(place.spec, account=ACCOUNT, head_role="etrain-spot-head")
    parts = split_policy(whole, most=most)
    assert [one for part in parts for one in part["Statement"]] == whole["Statement"]
    assert all(len(json.dumps(part, separators=(",", ":"))) <= most for part in parts)
    assert len(parts) > 1
