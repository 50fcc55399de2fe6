"""The generated policies against what boto3 and our code really ask for, conditions included.

Each call is turned into all that AWS would ask IAM (``ec2.simulator.permissions``). Review S5.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.ec2.bootstrap import config_of
from etrain_jupyter.plugins.ec2.client.check import check_account
from etrain_jupyter.plugins.ec2.client.policy import head_policy, launcher_policy
from etrain_jupyter.plugins.ec2.ec2_api import Clients, list_instances, tag_list
from etrain_jupyter.plugins.ec2.fleet_launch import create_fleet
from etrain_jupyter.plugins.ec2.fleet_state import LaunchRequest
from etrain_jupyter.plugins.ec2.launch_context import LaunchContext, set_up
from etrain_jupyter.plugins.ec2.reaping import remove
from etrain_jupyter.plugins.ec2.simulator import FakeAws
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.process.tls import mint_certificates, write_certificates
from etrain_jupyter.storage.objects import bucket_owners

pytestmark = pytest.mark.aws
ID = "aws-0a1b2c-000001"


@pytest.fixture
def spec(fresh_cloud: FakeAws, monkeypatch: pytest.MonkeyPatch) -> AwsSpotSpec:
    monkeypatch.setattr(bucket_owners, "_registered", {})
    account = fresh_cloud.make_account()
    for role in ("etrain-head", "stranger"):
        fresh_cloud.make_account(role=role)
    return AwsSpotSpec.parse(
        {
            "region": account.region,
            "bucket": account.bucket,
            "capacity": {"types": ["g6.xlarge"]},
            "image": {"ami": account.image, "setup": ["sleep 60"]},
        }
    )


@pytest.fixture
def become(
    fresh_cloud: FakeAws, spec: AwsSpotSpec, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Clients]:
    """Become the user with a policy, whom IAM watches."""
    policies = {"launcher": launcher_policy(spec), "head": head_policy(spec)}

    def change(name: str) -> Clients:
        for variable, value in fresh_cloud.make_user(name, policies[name]).items():
            monkeypatch.setenv(variable, value)
        fresh_cloud.enforce_iam()
        return Clients(spec)

    return change


@pytest.fixture
def tls(tmp_path: Path) -> Path:
    write_certificates(tmp_path / "tls", mint_certificates(ID))
    return tmp_path / "tls"


def launch(clients: Clients, spec: AwsSpotSpec, around: LaunchContext, type: str) -> Any:
    [zone] = sorted(around.subnets)[:1]
    return create_fleet(
        clients.launcher,
        LaunchRequest(
            token=str(time.time_ns()),
            lifecycle="spot",
            num_nodes=1,
            workers_each=1,
            overrides=((type, zone),),
        ),
        template_id=around.template_id,
        subnets=around.subnets,
        allocation="price-capacity-optimized",
        tags=around.tags,
    )


def code_of(act: Callable[[], Any]) -> str:
    try:
        act()
    except ClientError as exc:
        return str(exc.response["Error"]["Code"])
    return "allowed"


def live(clients: Clients, spec: AwsSpotSpec, tls: Path) -> LaunchContext:
    """Set a cluster up, launch a node, keep it and end it; return what it was launched with."""
    around = set_up(clients, spec, ID, tls, config_of(spec, ID))
    answer = launch(clients, spec, around, "g6.xlarge")
    assert answer is not None
    assert answer.refusals == ()
    [ack] = answer.acks
    clients.ec2.create_tags(
        Resources=[ack.id, around.template_id, around.network.security_group],
        Tags=tag_list({"etrain:expires": "1800000000"}),
    )
    assert clients.ec2.get_console_output(InstanceId=ack.id)["InstanceId"] == ack.id
    return around


def denied(cloud: FakeAws) -> list[str]:
    return [str(request) for request, is_permitted in cloud.permissions() if not is_permitted]


def test_launcher_policy_is_sufficient_for_a_cluster(
    cloud: FakeAws, spec: AwsSpotSpec, become: Callable[[str], Clients], tls: Path
) -> None:
    clients = become("launcher")
    check_account(clients, spec)
    live(clients, spec, tls)
    assert not remove(clients, spec.region, ID, pause=time.sleep)

    assert denied(cloud) == []
    asked = {
        (one.action, one.resource.split(":")[-1].split("/")[0]) for one, _ in cloud.permissions()
    }
    assert {
        ("ec2:RunInstances", "instance"),
        ("ec2:RunInstances", "network-interface"),
        ("ec2:CreateTags", "fleet"),
        ("iam:PassRole", "role"),
    } <= asked


def test_head_policy_is_sufficient_after_the_set_up_by_its_launcher(
    cloud: FakeAws, spec: AwsSpotSpec, become: Callable[[str], Clients], tls: Path
) -> None:
    """A head on a machine of its own could not start: it tried to make template and group again."""
    set_up(become("launcher"), spec, ID, tls, config_of(spec, ID))
    clients = become("head")
    live(clients, spec, tls)
    left = remove(clients, spec.region, ID, spares_head=True, pause=time.sleep)
    assert denied(cloud) == []
    assert not left

    other = "aws-0a1b2c-000002"
    with pytest.raises(PoolError, match="does not allow it"):
        set_up(clients, spec, other, tls, config_of(spec, other))
    launcher = become("launcher")
    for name in (ID, other):
        assert not remove(launcher, spec.region, name, home=spec.home(name), pause=time.sleep)


def test_launcher_policy_allows_no_other_launch(
    fresh_cloud: FakeAws, spec: AwsSpotSpec, become: Callable[[str], Clients], tls: Path
) -> None:
    [stranger] = boto3.client("ec2").run_instances(
        ImageId=spec.image.ami, InstanceType="m5.large", MinCount=1, MaxCount=1
    )["Instances"]
    clients = become("launcher")
    around = set_up(clients, spec, ID, tls, config_of(spec, ID))
    ec2 = clients.ec2
    tags = [{"ResourceType": k, "Tags": tag_list(around.tags)} for k in ("instance", "volume")]
    template = {"LaunchTemplateId": around.template_id}
    one = {"MinCount": 1, "MaxCount": 1, "TagSpecifications": tags}

    def run(**words: Any) -> Callable[[], Any]:
        return lambda: ec2.run_instances(**{"InstanceType": "g6.xlarge", **one, **words})

    made = {"IamInstanceProfile": {"Name": "stranger"}, "LaunchTemplate": template}
    tried = {
        "as the product does": run(LaunchTemplate=template),
        "no template": run(ImageId=spec.image.ami, MetadataOptions={"HttpTokens": "required"}),
        "another type": run(LaunchTemplate=template, InstanceType="p5.48xlarge"),
        "IMDSv1": run(LaunchTemplate=template, MetadataOptions={"HttpTokens": "optional"}),
        "another role": run(**made),
        "another image": run(LaunchTemplate=template, ImageId="ami-12c6146b"),
        "a stranger's machine": lambda: ec2.terminate_instances(
            InstanceIds=[stranger["InstanceId"]]
        ),
        "a stop of ours": lambda: ec2.stop_instances(InstanceIds=[stranger["InstanceId"]]),
        "our tag for a stranger's": lambda: ec2.create_tags(
            Resources=[stranger["InstanceId"]], Tags=tag_list(around.tags)
        ),
        "an untagged template": lambda: ec2.create_launch_template(
            LaunchTemplateName="x", LaunchTemplateData={"ImageId": spec.image.ami}
        ),
    }

    answers = {what: code_of(act) for what, act in tried.items()}

    refused = dict.fromkeys(tried, "UnauthorizedOperation")
    assert answers == refused | {"as the product does": "allowed"}
    refused_type = launch(clients, spec, around, "p5.48xlarge")
    assert {one.code for one in refused_type.refusals} == {"UnauthorizedOperation"}
    assert len(list_instances(ec2, cluster_id=ID)) == 1
    assert fresh_cloud.instances("pending", "running")[0].instance_id == stranger["InstanceId"]
