"""The life of an instance of the fake cloud: it runs, is told, ends and is charged as on EC2."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from etrain_jupyter.testing.fakeaws import FakeAws
from etrain_jupyter.testing.fakeaws.fixtures import point_boto_at
from etrain_jupyter.testing.fakeaws.networks import (
    PREFIX,
    remove_dead_bridges,
    why_no_namespaces,
)
from tests.contract.fleets import client, create_fleet, described, ec2, ids_of, make_template

NO_NAMESPACES = why_no_namespaces()
needs_namespaces = pytest.mark.skipif(bool(NO_NAMESPACES), reason=NO_NAMESPACES)

HELLO = "#!/bin/bash\necho hello\nexec sleep 1000\n"
WHO_AM_I = f"""#!/bin/bash
exec {sys.executable} - <<'END'
import json, os, urllib.request, boto3
base = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254")
def ask(path, method="GET", **headers):
    request = urllib.request.Request(base + "/latest/" + path, headers=headers, method=method)
    return urllib.request.urlopen(request, timeout=30).read().decode()
token = ask("api/token", "PUT", **{{"X-aws-ec2-metadata-token-ttl-seconds": "60"}})
def tell(path):
    return ask("meta-data/" + path, **{{"X-aws-ec2-metadata-token": token}})
region = tell("placement/region")
arn = boto3.client("sts", region_name=region).get_caller_identity()["Arn"]
s3 = boto3.client("s3", region_name=region)
s3.put_object(Bucket="etrain-bucket", Key="from-the-node", Body=b"1")
print(json.dumps({{
    "id": tell("instance-id"), "ip": tell("local-ipv4"), "life": tell("instance-life-cycle"),
    "cluster": tell("tags/instance/etrain:cluster"), "region": region, "arn": arn,
    "given": sorted(name for name in os.environ if name.startswith("AWS_")),
}}), flush=True)
END
"""


@pytest.fixture(params=["loopback", pytest.param("namespaces", marks=needs_namespaces)])
def either(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[FakeAws]:
    """A cloud of each mode, as new, with nothing left afterwards."""
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


def launch(cloud: FakeAws, user_data: str = HELLO, **words: int) -> str:
    (instance_id,) = ids_of(create_fleet(make_template(cloud, user_data), **words))
    return instance_id


def wait_for_text(cloud: FakeAws, instance_id: str, text: str) -> str:
    cloud.wait_until(lambda: text in cloud.console(instance_id))
    return cloud.console(instance_id)


def wait_for_end(cloud: FakeAws, instance_id: str) -> str:
    """Wait until it is terminated; return why."""
    cloud.wait_until(lambda: described()[instance_id]["State"]["Name"] == "terminated")
    return str(described()[instance_id]["StateReason"]["Code"])


def test_an_instance_runs_its_user_data_and_acts_with_its_role(either: FakeAws) -> None:
    instance_id = launch(either, WHO_AM_I)

    told = json.loads(wait_for_text(either, instance_id, "}").strip().splitlines()[-1])

    shown = described()[instance_id]
    assert (told["id"], told["life"], told["region"]) == (instance_id, "spot", "us-east-1")
    assert told["ip"] == shown["PrivateIpAddress"]
    assert told["cluster"] == "c-1"
    assert told["arn"].endswith(f"assumed-role/etrain-node/{instance_id}")
    endpoint = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
    assert set(told["given"]) - {endpoint} == {"AWS_ENDPOINT_URL"}
    assert either.s3.read("etrain-bucket", "from-the-node") == b"1"
    client("s3").delete_object(Bucket="etrain-bucket", Key="from-the-node")


def test_what_an_instance_printed_is_its_console_output(either: FakeAws) -> None:
    instance_id = launch(either, "#!/bin/sh\necho no such python >&2\nexit 1\n")
    wait_for_text(either, instance_id, "no such python")

    told = ec2().get_console_output(InstanceId=instance_id)

    assert told["Output"] == "no such python\n"
    # A user-data that failed is no reason for EC2 to end the machine.
    assert described()[instance_id]["State"]["Name"] == "running"


def test_a_shutdown_from_inside_terminates_it(either: FakeAws) -> None:
    instance_id = launch(either, "#!/bin/bash\nshutdown -h now\nsleep 1000\n")

    assert wait_for_end(either, instance_id) == "Client.InstanceInitiatedShutdown"


def test_a_timer_goes_off_unless_it_is_cancelled(either: FakeAws) -> None:
    # A minute of this cloud is a second.
    kept = launch(either, "#!/bin/bash\nshutdown -h +2; shutdown -c; echo kept; sleep 1000\n")
    ended = launch(either, "#!/bin/bash\nshutdown -h +2\necho armed\n")
    wait_for_text(either, kept, "kept")

    assert wait_for_end(either, ended) == "Client.InstanceInitiatedShutdown"
    assert "Shutdown scheduled for" in either.console(ended)
    assert described()[kept]["State"]["Name"] == "running"


def test_without_the_behaviour_terminate_a_shutdown_leaves_a_disk_that_costs(
    either: FakeAws,
) -> None:
    script = "#!/bin/bash\nshutdown -h now\n"
    template = make_template(either, script, InstanceInitiatedShutdownBehavior="stop")
    (instance_id,) = ids_of(create_fleet(template, 0, num_on_demand=1))

    either.wait_until(lambda: described()[instance_id]["State"]["Name"] == "stopped")

    assert list(either.leftovers("c-1")) == ["instances", "volumes"]


def test_terminating_ends_every_process_of_it_and_no_other(either: FakeAws) -> None:
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


def test_an_interruption_is_told_ahead_and_kept(either: FakeAws) -> None:
    watch = WHO_AM_I.split("region =")[0] + (
        "import time, urllib.error\n"
        "for path in ('events/recommendations/rebalance', 'spot/instance-action'):\n"
        "    while True:\n"
        "        try:\n"
        "            print(path, tell(path), flush=True)\n"
        "            break\n"
        "        except urllib.error.HTTPError as exc:\n"
        "            assert exc.code == 404\n"
        "            time.sleep(0.05)\n"
        "time.sleep(1000)\n"
        "END\n"
    )
    instance_id = launch(either, watch)
    either.wait_until(
        lambda: "meta-data/events/recommendations/rebalance" in either.imds_requests(instance_id)
    )
    before = time.time()

    either.preempt(instance_id, notice_s=3, rebalance_s=1)

    assert wait_for_end(either, instance_id) == "Server.SpotInstanceTermination"
    lines = either.console(instance_id).splitlines()
    assert [line.split()[0] for line in lines] == [
        "events/recommendations/rebalance",
        "spot/instance-action",
    ]
    (record,) = either.instances()
    assert record.ended_at is not None
    assert record.ended_at - before >= 4


def test_a_silent_end_takes_the_capacity_with_it(either: FakeAws) -> None:
    zone = {"instance_type": "g5.xlarge", "zone": "us-east-1a", "capacity": 1, "price_usd": 0.3}
    either.set_market([zone])
    instance_id = launch(either)
    wait_for_text(either, instance_id, "hello")

    either.preempt(instance_id, silent=True)

    assert described()[instance_id]["StateReason"]["Code"] == "Server.SpotInstanceTermination"
    assert ids_of(create_fleet(make_template(either))) == []


def test_an_on_demand_instance_gets_no_notice_but_its_host_may_fail(either: FakeAws) -> None:
    instance_id = launch(either, num_spot=0, num_on_demand=1)
    wait_for_text(either, instance_id, "hello")

    with pytest.raises(ValueError, match="on-demand: EC2 gives no notice"):
        either.preempt(instance_id, notice_s=10)
    either.preempt(instance_id, silent=True)

    assert described()[instance_id]["StateReason"]["Code"] == "Server.InternalError"


def test_a_pending_instance_that_is_terminated_never_runs(either: FakeAws) -> None:
    either.set_boot(1000)
    instance_id = launch(either)
    pending = described()[instance_id]["State"]["Name"]

    ec2().terminate_instances(InstanceIds=[instance_id])
    wait_for_end(either, instance_id)
    either.set_boot(0)

    assert pending == "pending"
    assert either.console(instance_id) == ""


def test_the_bill_charges_a_minute_at_least_and_waives_what_ec2_took(either: FakeAws) -> None:
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


def test_a_killed_first_process_is_a_failed_host_and_leaves_nothing(either: FakeAws) -> None:
    instance_id = launch(either, "#!/bin/bash\nsetsid sleep 1003 &\necho hello\nsleep 1004\n")
    wait_for_text(either, instance_id, "hello")
    (record,) = either.instances()
    assert record.pid is not None

    os.kill(record.pid, signal.SIGKILL)

    assert wait_for_end(either, instance_id) == "Server.InternalError"
    either.wait_until(lambda: "processes" not in either.leftovers())


def test_instances_reach_this_machine_and_each_other(either: FakeAws) -> None:
    serve = (
        f"#!/bin/bash\nexec {sys.executable} - <<'END'\n"
        "import os, socket\n"
        "listener = socket.create_server((os.environ['WHERE'], 8786))\n"
        "print('serving', flush=True)\n"
        "while True:\n    listener.accept()[0].close()\nEND\n"
    )
    with socket.create_server((either.host_address, 0)) as here:
        port = here.getsockname()[1]
        # The address is told when it is known; the first instance asks its metadata.
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
def test_a_machine_without_power_closes_no_connection(cloud: FakeAws) -> None:
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
    for one in ec2().describe_launch_templates()["LaunchTemplates"]:
        ec2().delete_launch_template(LaunchTemplateId=one["LaunchTemplateId"])


HOLDER = """
import sys, time
from etrain_jupyter.testing.fakeaws import FakeAws
cloud = FakeAws(sys.argv[1])
print(cloud.pid, cloud.folder, cloud.bridge, cloud.url, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("mode", ["loopback", pytest.param("namespaces", marks=needs_namespaces)])
@pytest.mark.parametrize("victim", ["harness", "holder"])
def test_nothing_is_left_when_it_is_killed(
    mode: str, victim: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, mode], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    words = holder.stdout.readline().rstrip("\n").split(" ")
    pid, folder, bridge, url = int(words[0]), Path(words[1]), words[2], words[3]
    try:
        beside = FakeAws("loopback")
        with beside:
            marks = _start_instance_at(url, beside, monkeypatch, tmp_path)
            assert marks

            os.kill(pid if victim == "harness" else holder.pid, signal.SIGKILL)

            _wait(lambda: (not folder.exists() and not psutil.pid_exists(pid)) or _is_zombie(pid))
            _wait(lambda: not any(psutil.pid_exists(one) for one in marks))
            _wait(lambda: not bridge or not Path(f"/sys/class/net/{bridge}").exists())
            _wait(lambda: not folder.exists())
            # The other one is as it was.
            assert beside.instances() == []
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def _start_instance_at(
    url: str, face: FakeAws, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> list[int]:
    """Start an instance with children in the cloud of another process; return its processes."""
    monkeypatch.setattr(face, "url", url)
    point_boto_at(face, monkeypatch, tmp_path)
    instance_id = launch(face, "#!/bin/bash\nsetsid sleep 1005 &\necho hello\nsleep 1006\n")
    wait_for_text(face, instance_id, "hello")
    (record,) = face.instances()
    monkeypatch.undo()
    assert record.pid is not None
    first = psutil.Process(record.pid)
    return [first.pid, *(one.pid for one in first.children(recursive=True))]


def _is_zombie(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _wait(is_true: object) -> None:
    assert callable(is_true)
    ends_at = time.monotonic() + 90
    while not is_true():
        assert time.monotonic() < ends_at
        time.sleep(0.05)


@needs_namespaces
def test_a_bridge_that_a_dead_harness_left_is_removed_by_the_next() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    bridge = f"{PREFIX}{done.pid}"
    subprocess.run(["ip", "link", "add", bridge, "type", "bridge"], check=True)

    removed = remove_dead_bridges()

    assert bridge in removed
    assert not Path(f"/sys/class/net/{bridge}").exists()


@pytest.mark.skipif(not NO_NAMESPACES, reason="this machine can make namespaces")
def test_namespaces_that_cannot_be_had_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="did not start"):
        FakeAws("namespaces")
    assert "Use mode='loopback'" in capfd.readouterr().err
