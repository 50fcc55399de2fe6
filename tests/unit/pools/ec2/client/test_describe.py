"""The documentation contains the table of the spec's keys."""

from __future__ import annotations

from pathlib import Path

from etrain_jupyter.pools.ec2.client.describe import keys_as_table

DOCS = Path(__file__).parents[5] / "docs" / "pools.md"


def test_document_has_the_table_of_all_keys() -> None:
    """If it does not, replace its table with what ``keys_as_table`` returns."""
    assert keys_as_table() in DOCS.read_text(encoding="utf-8")


def test_every_key_of_the_table_says_what_it_means() -> None:
    rows = [row.split(" | ") for row in keys_as_table().splitlines()[2:]]

    assert [key for key, _, meaning in rows if len(meaning) < 10] == []


def test_keys_of_groups_have_defaults_in_yaml_format() -> None:
    rows = {
        key.strip("| `"): default
        for key, default, _ in (row.split(" | ") for row in keys_as_table().splitlines()[2:])
    }

    assert rows["region"] == "required"
    assert rows["lifetime.max"] == "12 h"
    assert rows["capacity.on_demand.after"] == "2 min"
    assert rows["capacity.gpu.count"] == "1"
    assert rows["network.public_ip"] == "false"
    assert rows["capacity.types"] == "[g5.xlarge, g6.xlarge, g4dn.xlarge]"
    assert rows["head_host"] == ""
