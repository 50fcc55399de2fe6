"""Entries of pools.yaml are added and removed without a change to the rest of the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.config.yaml_nodes import load_file
from etrain_jupyter.errors import ConfigError, PoolError
from etrain_jupyter.plugins.ec2.account.pools_file import (
    add_entry,
    entry_text,
    has_mark,
    remove_entry,
)

KEYS = [
    ("kind", "aws-spot", "EC2 spot instances"),
    ("bucket_owner", "012345678901", "digits that must stay text"),
    ("capacity", {"types": ["g5.xlarge", "g6.xlarge"]}, "machine types"),
    ("budget", {"max_total": 20.0}, "US dollars"),
]
ENTRY = entry_text("spot", KEYS)
OTHERS = (
    "# my pools\nlab:   # the cluster downstairs\n    kind: address\n"
    "    address: tls://10.0.0.5:8786\n\n    # do not touch\n",
    "lab:\n  kind: aws-spot\n  image:\n    setup:\n    - |\n      echo one\n      echo two\n",
    "lab: {kind: address, address: 'tls://h:1'}  # short\n",
    "? lab\n: kind: address\n  address: tls://h:1\n",
    "# only a comment\n",
    "",
)


def test_entry_has_a_comment_on_every_line_and_reads_back(tmp_path: Path) -> None:
    assert all("  # " in line for line in ENTRY.splitlines())
    data, _ = load_file(ENTRY)
    assert data == {"spot": {key: value for key, value, _ in KEYS}}


@given(before=st.sampled_from(OTHERS), after=st.sampled_from(("", "late:\n  kind: address\n")))
def test_add_and_remove_leave_every_other_byte(
    tmp_path_factory: pytest.TempPathFactory, before: str, after: str
) -> None:
    file = tmp_path_factory.mktemp("pools") / "pools.yaml"
    file.write_text(before)
    add_entry(file, "spot", ENTRY)
    assert file.read_text().startswith(before)
    assert has_mark(file, "spot")
    with file.open("a") as stream:
        stream.write(after)

    remove_entry(file, "spot")

    rest = file.read_text() if file.exists() else ""
    assert rest.replace("\n", "") == (before + after).replace("\n", "")
    assert rest.startswith(before)


def test_add_is_idempotent_and_keeps_an_entry_of_the_user(tmp_path: Path) -> None:
    file = tmp_path / "new" / "pools.yaml"
    add_entry(file, "spot", ENTRY)
    add_entry(file, "spot", ENTRY)
    assert file.read_text() == ENTRY

    own = "spot:\n  kind: aws-spot\n"
    file.write_text(own)
    add_entry(file, "spot", ENTRY)
    assert file.read_text() == own
    assert not has_mark(file, "spot")


def test_comments_of_the_next_entry_survive_the_removal(tmp_path: Path) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text(f"{ENTRY}\n# about lab\nlab:\n  kind: address\n")

    remove_entry(file, "spot")

    assert file.read_text() == "# about lab\nlab:\n  kind: address\n"


def test_removing_the_only_entry_deletes_the_file(tmp_path: Path) -> None:
    file = tmp_path / "pools.yaml"
    add_entry(file, "spot", ENTRY)
    remove_entry(file, "spot")
    remove_entry(file, "spot")
    assert not file.exists()


def test_link_and_mode_of_the_file_are_kept(tmp_path: Path) -> None:
    target = tmp_path / "dotfiles" / "pools.yaml"
    target.parent.mkdir()
    target.write_text("# mine\n")
    target.chmod(0o600)
    link = tmp_path / "pools.yaml"
    link.symlink_to(target)

    add_entry(link, "spot", ENTRY)

    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o600
    assert target.read_text() == "# mine\n\n" + ENTRY


def test_pools_in_braces_are_refused_with_the_file_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text("{lab: {kind: address}}\n")
    with pytest.raises(ConfigError, match="not written as one block"):
        add_entry(file, "spot", ENTRY)
    assert file.read_text() == "{lab: {kind: address}}\n"


def test_file_that_cannot_be_written_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    with pytest.raises(PoolError, match="--file"):
        add_entry(tmp_path / "plain" / "pools.yaml", "spot", ENTRY)
