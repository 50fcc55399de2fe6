"""The table of a pool's keys for the documentation."""

from __future__ import annotations

from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.pools.describe import keys_as_table


def test_every_key_of_the_table_has_a_meaning() -> None:
    rows = [row.split(" | ") for row in keys_as_table(AwsSpotSpec).splitlines()[2:]]

    assert [key for key, _, meaning in rows if len(meaning) < 10] == []


def test_keys_of_groups_have_defaults_in_yaml_format() -> None:
    rows = {
        key.strip("| `"): default
        for key, default, _ in (
            row.split(" | ") for row in keys_as_table(AwsSpotSpec).splitlines()[2:]
        )
    }

    assert rows["region"] == "required"
    assert rows["lifetime.max"] == "12 h"
    assert rows["capacity.on_demand.after"] == "2 min"
    assert rows["capacity.gpu.count"] == "1"
    assert rows["network.public_ip"] == "false"
    assert rows["capacity.types"] == "[g5.xlarge, g6.xlarge, g4dn.xlarge]"
    assert rows["head_host"] == ""
