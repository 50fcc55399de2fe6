"""Lifecycle of a fake instance: it runs, gets notices, terminates and is charged as on EC2."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from etrain_jupyter.plugins.ec2.simulator import FakeAws
from etrain_jupyter.plugins.ec2.simulator.fixtures import point_boto_at
from tests.capabilities import needs
from tests.contract.fleets import (
    client,
    create_fleet,
    described,
    ec2,
    ids_of,
    launch,
    links_of,
    make_template,
    wait_for_text,
)

needs_namespaces = needs("namespaces")

WHO_AM_I = f"""#!/bin/bash
exec {sys.executable} - <<'END'
import json, os, urllib.request, boto3
base = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254")
def ask(path, method="GET", **headers):
    request = urllib.request.Request(base + "/latest/" + path, headers=headers, method=method)
    return urllib.request.urlopen(request, timeout=30).read().decode()
token = ask("api/token", "PUT", **{{"X-aws-ec2-metadata-token-ttl-seconds": "60"}})
def read(path):
    return ask("meta-data/" + path, **{{"X-aws-ec2-metadata-token": token}})
region = read("placement/region")
arn = boto3.client("sts", region_name=region).get_caller_identity()["Arn"]
s3 = boto3.client("s3", region_name=region)
s3.put_object(Bucket="etrain-bucket", Key="from-the-node", Body=b"1")
print(json.dumps({{
    "id": read("instance-id"), "ip": read("local-ipv4"), "life": read("instance-life-cycle"),
    "cluster": read("tags/instance/etrain:cluster"), "region": region, "arn": arn,
    "given": sorted(name for name in os.environ if name.startswith("AWS_")),
}}), flush=True)
END
"""


@pytest.fixture(params=["loopback", pytest.param("namespaces", marks=needs_namespaces)])
def either(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[FakeAws]:
    """Provide a reset cloud in each mode; assert at the end that nothing is left."""
    loopback = request.param == "loopback"
    name = "loopback_cloud_process" if loopback else "cloud_process"
    cloud: FakeAws = request.getfixturevalue(name)
    cloud.reset()
    point_boto_at(cloud, monkeypatch, tmp_path)
    yield cloud
    for one in cloud.instances("pending", "running", "stopped"):
        ec2().terminate_instances(InstanceIds=[one.instance_id])
    for one in ec2().describe_launch_templates()["LaunchTemplates"]:
        ec2().delete_launch_template(LaunchTemplateId=one["LaunchTemplateId"])
    assert cloud.leftovers() == {}


def wait_for_end(cloud: FakeAws, instance_id: str) -> str:
    """Wait until it is terminated; return the reason."""
    cloud.wait_until(lambda: described()[instance_id]["State"]["Name"] == "terminated")
    return str(described()[instance_id]["StateReason"]["Code"])


def test_instance_runs_its_user_data_with_its_role(either: FakeAws) -> None:
    instance_id = launch(either, WHO_AM_I)

    output = json.loads(wait_for_text(either, instance_id, "}").strip().splitlines()[-1])

    shown = described()[instance_id]
    assert (output["id"], output["life"], output["region"]) == (instance_id, "spot", "us-east-1")
    assert output["ip"] == shown["PrivateIpAddress"]
    assert output["cluster"] == "c-1"
    assert output["arn"].endswith(f"assumed-role/etrain-node/{instance_id}")
    endpoint = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
    assert set(output["given"]) - {endpoint} == {"AWS_ENDPOINT_URL"}
    assert either.s3.read("etrain-bucket", "from-the-node") == b"1"
    client("s3").delete_object(Bucket="etrain-bucket", Key="from-the-node")


def test_role_is_limited_to_its_policy(either: FakeAws) -> None:
    arn = "arn:aws:s3:::etrain-bucket/nodes/*"
    statement = {"Effect": "Allow", "Action": "s3:PutObject", "Resource": arn}
    policy = {"Version": "2012-10-17", "Statement": [statement]}
    script = (
        f"#!/bin/bash\nexec {sys.executable} - <<'END'\n"
        "import boto3\n"
        "s3 = boto3.client('s3', region_name='us-east-1')\n"
        "for key in ('nodes/1', 'lease.json'):\n"
        "    try:\n"
        "        s3.put_object(Bucket='etrain-bucket', Key=key, Body=b'1')\n"
        "        print('may', key, flush=True)\n"
        "    except Exception as exc:\n"
        "        print('may not', key, exc, flush=True)\n"
        "END\n"
    )
    template = make_template(either, script)
    either.make_account(role_policy=policy)
    (instance_id,) = ids_of(create_fleet(template))
    either.enforce_iam()

    output = wait_for_text(either, instance_id, "lease.json")

    either.enforce_iam(False)
    assert "may nodes/1" in output
    assert "may not lease.json" in output
    assert "AccessDenied" in output


def test_console_output_is_what_the_instance_printed(either: FakeAws) -> None:
    instance_id = launch(either, "#!/bin/sh\necho no such python >&2\nexit 1\n")
    wait_for_text(either, instance_id, "no such python")

    output = ec2().get_console_output(InstanceId=instance_id)

    assert output["Output"] == "no such python\n"
    # EC2 does not terminate a machine because its user data failed.
    assert described()[instance_id]["State"]["Name"] == "running"


def test_shutdown_from_inside_terminates_the_instance(either: FakeAws) -> None:
    words = ("shutdown -h now", "poweroff -f", "systemctl poweroff --force")
    ended = [launch(either, f"#!/bin/bash\n{command}\nsleep 1000\n") for command in words]

    for instance_id in ended:
        assert wait_for_end(either, instance_id) == "Client.InstanceInitiatedShutdown"


def test_instance_cannot_run_power_commands_of_the_host(either: FakeAws) -> None:
    instance_id = launch(
        either, "#!/bin/bash\nreboot\nsystemctl stop x\nshutdown -r now\necho on\n"
    )

    output = wait_for_text(either, instance_id, "on\n")

    assert output.count("not in a fake instance") == 2
    assert "unsupported option -r" in output
    assert described()[instance_id]["State"]["Name"] == "running"


def test_shutdown_timer_fires_unless_cancelled(either: FakeAws) -> None:
    # A minute of this cloud takes one second.
    armed = launch(either, "#!/bin/bash\nshutdown -h +900; shutdown -h +1000; echo armed\n")
    kept = launch(either, "#!/bin/bash\nshutdown -h +1000; shutdown -c; echo kept\n")
    ended = launch(either, "#!/bin/bash\nshutdown -h +1\n")
    wait_for_text(either, armed, "armed")
    wait_for_text(either, kept, "kept")

    assert wait_for_end(either, ended) == "Client.InstanceInitiatedShutdown"
    assert either.console(armed).count("Shutdown scheduled for") == 2
    records = {one.instance_id: one for one in either.instances()}
    off_at = records[armed].off_at
    assert off_at is not None
    assert 900 < off_at - records[armed].launched_at <= 1100
    assert (records[kept].off_at, records[kept].state) == (None, "running")


def test_shutdown_without_terminate_behavior_leaves_a_charged_disk(
    either: FakeAws,
) -> None:
    script = "#!/bin/bash\nshutdown -h now\n"
    template = make_template(either, script, InstanceInitiatedShutdownBehavior="stop")
    (instance_id,) = ids_of(create_fleet(template, 0, num_on_demand=1))

    either.wait_until(lambda: described()[instance_id]["State"]["Name"] == "stopped")

    assert list(either.leftovers("c-1")) == ["instances", "volumes"]


def test_termination_kills_all_processes_of_the_instance_and_no_other(either: FakeAws) -> None:
    script = "#!/bin/bash\nsetsid sleep 1001 &\nnohup sleep 1002 &\ndisown -a\necho hello\n"
    other, instance_id = launch(either), launch(either, script)
    wait_for_text(either, instance_id, "hello")
    wait_for_text(either, other, "hello")

    ec2().terminate_instances(InstanceIds=[instance_id])
    reason = wait_for_end(either, instance_id)

    assert "processes" not in either.leftovers()
    assert reason == "Client.UserInitiatedShutdown"
    assert either.leftovers()["instances"] == [other]
    assert [one.pid is None for one in either.instances()] == [False, True]


def test_interruption_is_announced_and_carried_out(either: FakeAws) -> None:
    watch = WHO_AM_I.split("region =")[0] + (
        "import time, urllib.error\n"
        "for path in ('events/recommendations/rebalance', 'spot/instance-action'):\n"
        "    while True:\n"
        "        try:\n"
        "            print(path, read(path), flush=True)\n"
        "            break\n"
        "        except urllib.error.HTTPError as exc:\n"
        "            assert exc.code == 404\n"
        "            time.sleep(0.05)\n"
        "time.sleep(1000)\n"
        "END\n"
    )
    instance_id = launch(either, watch)
    path = "meta-data/events/recommendations/rebalance"
    either.wait_until(lambda: described()[instance_id]["State"]["Name"] == "running")
    either.wait_until(lambda: path in either.imds_requests(instance_id))
    before = time.time()

    either.preempt(instance_id, notice_s=5, rebalance_s=1)

    assert wait_for_end(either, instance_id) == "Server.SpotInstanceTermination"
    lines = either.console(instance_id).splitlines()
    assert [line.split()[0] for line in lines] == [
        "events/recommendations/rebalance",
        "spot/instance-action",
    ]
    (record,) = either.instances()
    assert record.ended_at is not None
    assert record.ended_at - before >= 6


def test_silent_interruption_removes_the_capacity(either: FakeAws) -> None:
    zone = {"instance_type": "g5.xlarge", "zone": "us-east-1a", "capacity": 1, "price_usd": 0.3}
    either.set_market([zone])
    instance_id = launch(either)
    wait_for_text(either, instance_id, "hello")

    either.preempt(instance_id, silent=True)

    assert described()[instance_id]["StateReason"]["Code"] == "Server.SpotInstanceTermination"
    assert ids_of(create_fleet(make_template(either))) == []


def test_on_demand_instance_gets_no_notice_but_its_host_may_fail(either: FakeAws) -> None:
    instance_id = launch(either, num_spot=0, num_on_demand=1)
    wait_for_text(either, instance_id, "hello")

    with pytest.raises(ValueError, match="on-demand: EC2 never interrupts it"):
        either.preempt(instance_id, notice_s=10)
    either.preempt(instance_id, silent=True)

    assert described()[instance_id]["StateReason"]["Code"] == "Server.InternalError"


def test_instance_terminated_while_pending_never_runs(either: FakeAws) -> None:
    either.set_boot(1000)
    instance_id = launch(either)
    pending = described()[instance_id]["State"]["Name"]

    ec2().terminate_instances(InstanceIds=[instance_id])
    wait_for_end(either, instance_id)
    either.set_boot(0)

    assert pending == "pending"
    assert either.console(instance_id) == ""


def test_bill_charges_at_least_a_minute_and_waives_interrupted_instances(either: FakeAws) -> None:
    either.set_price(3.6)
    either.set_on_demand(price_usd=7.2)
    taken, ended = launch(either), launch(either)
    dear = launch(either, num_spot=0, num_on_demand=1)
    for instance_id in (taken, ended, dear):
        wait_for_text(either, instance_id, "hello")

    either.preempt(taken, silent=True)
    ec2().terminate_instances(InstanceIds=[ended, dear])
    wait_for_end(either, ended)
    rows = {row.instance_id: row for row in either.bill().rows}

    assert (rows[taken].compute_usd, round(rows[taken].waived_usd, 6)) == (0.0, 0.06)
    assert round(rows[ended].compute_usd, 6) == 0.06
    assert round(rows[dear].compute_usd, 6) == 0.12
    assert round(rows[ended].on_demand_usd, 6) == 0.12
    assert all(row.disk_usd > 0 for row in rows.values())
    assert either.bill().num_alive == 0


def test_killed_init_process_is_a_host_failure_and_leaves_no_process(either: FakeAws) -> None:
    instance_id = launch(either, "#!/bin/bash\nsetsid sleep 1003 &\necho hello\nsleep 1004\n")
    wait_for_text(either, instance_id, "hello")
    (record,) = either.instances()
    assert record.pid is not None

    os.kill(record.pid, signal.SIGKILL)

    assert wait_for_end(either, instance_id) == "Server.InternalError"
    either.wait_until(lambda: "processes" not in either.leftovers())


def test_instances_reach_the_host_and_each_other(either: FakeAws) -> None:
    serve = (
        f"#!/bin/bash\nexec {sys.executable} - <<'END'\n"
        "import os, socket\n"
        "listener = socket.create_server((os.environ['WHERE'], 8786))\n"
        "print('serving', flush=True)\n"
        "while True:\n    listener.accept()[0].close()\nEND\n"
    )
    with socket.create_server((either.host_address, 0)) as here:
        port = here.getsockname()[1]
        # The address is known only after the launch, so the first instance listens on all.
        first = launch(either, serve.replace("os.environ['WHERE']", "''"))
        wait_for_text(either, first, "serving")
        address = described()[first]["PrivateIpAddress"]
        reach = (
            "#!/bin/bash\n"
            f"exec 3<>/dev/tcp/{either.host_address}/{port} && echo host\n"
            f"exec 4<>/dev/tcp/{address}/8786 && echo peer\n"
        )
        second = launch(either, reach)
        wait_for_text(either, second, "peer")

        assert "host\n" in either.console(second)


@needs_namespaces
def test_machine_that_loses_power_closes_no_connection(cloud: FakeAws) -> None:
    with socket.create_server((cloud.host_address, 0)) as here:
        port = here.getsockname()[1]
        instance_id = launch(
            cloud,
            f"#!/bin/bash\nexec 3<>/dev/tcp/{cloud.host_address}/{port}\necho up >&3\nsleep 1000\n",
        )
        connection, _ = here.accept()
        with connection:
            assert connection.recv(3) == b"up\n"

            cloud.preempt(instance_id, silent=True)

            assert cloud.instances()[0].pid is None
            connection.settimeout(0.5)
            with pytest.raises(TimeoutError):
                connection.recv(1)
    assert links_of(cloud.pid) == [cloud.bridge]
    for one in ec2().describe_launch_templates()["LaunchTemplates"]:
        ec2().delete_launch_template(LaunchTemplateId=one["LaunchTemplateId"])
