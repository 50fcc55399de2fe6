"""``pools.yaml``: precedence of files, pools, and errors with their position."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

from etrain_jupyter import cli
from etrain_jupyter.config import parse_cell
from etrain_jupyter.config.fields import Section
from etrain_jupyter.errors import CellError, ConfigError
from etrain_jupyter.notebook.job.runs import open_runs
from etrain_jupyter.pools.catalog import read_catalog
from etrain_jupyter.pools.registry import (
    find_pool,
    get_pool,
    pool_names,
    with_shared_checkpoints,
)


class Spec(Section):
    """Options of a test pool."""

    region: Annotated[str, Field(examples=["r"])]
    size: Annotated[int, Field(ge=1)] = 1


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a notebook; the user's own folder is next to it."""
    here = tmp_path / "notebooks"
    here.mkdir()
    (tmp_path / "config" / "etrain").mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("ETRAIN_POOLS", raising=False)
    return here


def write(text: str) -> None:
    Path("pools.yaml").write_text(text)


def test_without_a_file_only_the_local_pool_exists() -> None:
    assert pool_names() == ["local"]


def test_notebooks_folder_takes_precedence_over_the_users_own(tmp_path: Path) -> None:
    write("a: {kind: address, address: 'tcp://here:1'}\n")
    (tmp_path / "config/etrain/pools.yaml").write_text(
        "a: {kind: address, address: 'tcp://there:1'}\nb: {kind: address, address: 'tcp://b:1'}\n"
    )

    assert pool_names() == ["local", "a", "b"]
    assert read_catalog()["a"].values == {"address": "tcp://here:1"}


def test_environment_variable_replaces_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("a: {kind: address}\n")
    other = tmp_path / "mine.yaml"
    other.write_text("b: {kind: address}\n")
    monkeypatch.setenv("ETRAIN_POOLS", str(other))

    assert pool_names() == ["local", "b"]


def test_keys_are_validated_as_options_of_the_pool() -> None:
    write("# ours\na:\n  kind: x\n  region: eu\n  size: 3\n")

    spec = read_catalog()["a"].read_as(Spec)

    assert (spec.region, spec.size) == ("eu", 3)


@pytest.mark.parametrize(
    ("text", "drawing"),
    [
        (
            "a:\n  kind: x\n  region: eu\n  sise: 3\n",
            "line 4, column 3: unknown key 'sise'\n    4 |   sise: 3\n      |   ^^^^\n"
            "  did you mean 'size'?",
        ),
        (
            "b: {kind: x}\na:\n  kind: x\n  size: 3\n",
            "line 2, column 1: key 'region' is missing\n    2 | a:\n      | ^\n"
            "  add for example 'region'",
        ),
        (
            "a: {kind: x, region: eu, size: 0}\n",
            "line 1, column 32: size must be 1 or more, not 0\n"
            "    1 | a: {kind: x, region: eu, size: 0}\n"
            "      |                                ^",
        ),
    ],
)
def test_error_points_at_its_line_of_the_file(text: str, drawing: str) -> None:
    write(text)

    with pytest.raises(CellError) as caught:
        read_catalog()["a"].read_as(Spec)

    place = f"etrain: {Path('pools.yaml').absolute()}, "
    assert "\n".join(caught.value.render()) == place + drawing


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "the file must map pool names to pools, but it is a list"),
        ("a: 3\n", "pool 'a' must be a group of keys, but it is the number 3"),
        ("a: {region: eu}\n", "pool 'a' has no kind"),
        ("local: {kind: x}\n", "a pool cannot be called 'local'"),
        ("a: {kind: x, kind: y}\n", "duplicate key"),
        ("a: {kind: x\n", "expected"),
    ],
)
def test_invalid_file_is_rejected(text: str, message: str) -> None:
    write(text)

    with pytest.raises(ConfigError, match=message) as caught:
        read_catalog()
    assert "pools.yaml" in caught.value.render()[0]


PWN = "__import__('pathlib').Path('ran').touch()"


@pytest.mark.parametrize("tag", ["!py", "!other", "!!python/object/apply:os.system"])
def test_tags_of_a_file_are_not_evaluated(tag: str) -> None:
    write(f'a: {{kind: address}}\nb:\n  kind: address\n  address: {tag} "{PWN}"\n')

    with pytest.raises(CellError) as caught:
        read_catalog()

    lines = caught.value.render()
    assert lines[0].startswith(f"etrain: {Path('pools.yaml').absolute()}, line 4, column 12: ")
    assert not Path("ran").exists()
    if tag.startswith("!py"):
        assert "!py is not evaluated in a file" in lines[0]
        assert lines[-1] == "  write the value itself; !py works in cells only"


@pytest.mark.plugins
@pytest.mark.parametrize(
    "command", ["pools", "pools policy a", "doctor", "ls --all", "down a", "up a", "reap"]
)
def test_commands_do_not_run_code_of_a_file(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ETRAIN_STATE", str(tmp_path / "state"))
    write(f'a:\n  kind: !py "{PWN}"\n')

    cli.main(command.split())

    printed = capsys.readouterr()
    assert "!py is not evaluated in a file" in printed.out + printed.err
    assert not Path("ran").exists()


def test_completion_reads_a_file_without_running_it(tmp_path: Path) -> None:
    write(f'a: !py "{PWN}"\n')

    with pytest.raises(ConfigError):
        pool_names()  # completion then offers 'local' alone
    assert not Path("ran").exists()


def test_pipe_and_huge_file_are_rejected(tmp_path: Path) -> None:
    os.mkfifo("pools.yaml")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_catalog()

    Path("pools.yaml").unlink()
    write("#" * 1_000_001)
    with pytest.raises(ConfigError, match="larger than 1,000,000 bytes"):
        read_catalog()


def test_nested_aliases_are_limited() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    write("\n".join(lines))

    with pytest.raises(ConfigError, match="more than 50,000 values"):
        read_catalog()


def test_file_may_be_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("a: {kind: address}\n")
    Path("pools.yaml").symlink_to(tmp_path / "mine.yaml")

    assert pool_names() == ["local", "a"]


@pytest.mark.plugins
def test_error_for_an_unknown_kind_suggests_the_nearest() -> None:
    write("a: {kind: aws_spot}\n")

    with pytest.raises(ConfigError, match="unknown kind 'aws_spot'") as caught:
        get_pool("a")
    assert caught.value.hint == "did you mean 'aws-spot'?"


def test_error_points_at_an_unknown_pool_of_a_cell() -> None:
    write("spot-p3: {kind: aws-spot}\n")
    body = "model: Net\ndata: {train: d}\nloss: f\npool: spot-p2\n"
    parsed = parse_cell(body, namespace={})

    with pytest.raises(CellError) as caught:
        find_pool(parsed)

    assert caught.value.render() == [
        "etrain: line 5, column 7: there is no pool 'spot-p2'. Known pools: local, spot-p3",
        "    5 | pool: spot-p2",
        "      |       ^^^^^^^",
        "  did you mean 'spot-p3'?",
    ]


SPOT = "spot: {kind: aws-spot, region: us-east-1, bucket: mine}\n"


def checkpoints_of(body: str) -> str | None:
    config = parse_cell(f"model: Net\ndata: {{train: d}}\nloss: f\n{body}", namespace={}).config
    pool, has_bucket = get_pool(config.pool), open_runs().is_remote
    shared, warnings = with_shared_checkpoints(config, pool, has_bucket=has_bucket)
    print(*warnings, end="")
    return shared.checkpoint.to


@pytest.mark.plugins
def test_remote_machines_get_a_shared_checkpoint_location(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(SPOT)
    monkeypatch.delenv("ETRAIN_RUNS", raising=False)

    assert checkpoints_of("pool: local\n") is None
    assert checkpoints_of("pool: spot\n") == "s3://mine/etrain/runs"
    assert checkpoints_of("pool: spot\ncheckpoint: {to: s3://my-bucket/c}\n") == "s3://my-bucket/c"
    assert capsys.readouterr().out == ""

    assert checkpoints_of("pool: spot\ncheckpoint: {to: /mnt/efs}\n") == "/mnt/efs"
    assert "must share that disk" in capsys.readouterr().out

    monkeypatch.setenv("ETRAIN_RUNS", "s3://my-runs/here")
    assert checkpoints_of("pool: spot\n") is None
