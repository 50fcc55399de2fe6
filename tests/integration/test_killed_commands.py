"""``pools check`` and the quickstart's kernel, killed at each stage and run again.

Each test begins and ends with an empty account, with IAM enforced in the fake cloud. `make
endurance` runs all stages; `benchmarks account` also does so with the kernel's environment.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.cloud.account import STAGES, UPLOAD, Stage, killed_and_run_again
from benchmarks.cloud.empty_account import User, user_of
from etrain_jupyter.plugins.ec2.simulator import FakeAws
from etrain_jupyter.storage.objects import bucket_owners
from tests.capabilities import LONG, long

pytestmark = [pytest.mark.aws, pytest.mark.timeout(400)]


@pytest.fixture
def user(fresh_cloud: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[User]:
    """Provide a user whose nodes use the interpreter of these tests."""
    monkeypatch.setattr(bucket_owners, "_registered", {})
    with user_of(fresh_cloud, tmp_path) as account:
        image = f"{{ami: {account.image}, python: {sys.executable}}}"
        with closing(User(fresh_cloud, account, image=image)) as one:
            one.init()
            one.prepare()
            yield one


def stages(command: str, *always: str) -> list[object]:
    """Return the stages after the upload, which these nodes do not need."""
    return [
        pytest.param(one, id=one.name, marks=() if one.name in always else LONG)
        for one in STAGES[command]
        if one is not UPLOAD
    ]


@pytest.mark.parametrize("stage", stages("check", "booting"))
@long
def test_killed_check_is_run_again_and_leaves_nothing(user: User, stage: Stage) -> None:
    found = killed_and_run_again(user, "check", stage)

    assert found["orphans"] == []
    assert found["running_after"] == 0
    assert found["machines"] <= 2
    assert found["left"] == "nothing"


@pytest.mark.parametrize("stage", stages("cell", "booting"))
@long
def test_cell_of_a_killed_kernel_is_run_again_on_the_same_cluster(user: User, stage: Stage) -> None:
    found = killed_and_run_again(user, "cell", stage, finishes=False)

    assert found["clusters"] == 1
    assert found["machines"] <= 4
    assert found["orphans"] == []
    assert found["left"] == "nothing"
