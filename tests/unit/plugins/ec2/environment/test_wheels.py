"""The choice of a wheel for the nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.tags import Tag

from etrain_jupyter.plugins.ec2.environment.wheels import Platform, choose_wheel

NODE = Platform(python=(3, 11))


@pytest.mark.parametrize(
    ("tags", "is_accepted"),
    [
        (["py3-none-any"], True),
        (["py2.py3-none-any"], True),
        (["cp311-cp311-manylinux_2_28_x86_64"], True),
        (["cp39-abi3-manylinux2014_x86_64"], True),
        (["cp311-cp311-linux_x86_64"], True),
        (["cp310-cp310-manylinux_2_28_x86_64"], False),
        (["cp311-cp311-manylinux_2_39_x86_64"], False),
        (["cp311-cp311-manylinux_2_28_aarch64"], False),
        (["cp311-cp311-macosx_14_0_arm64"], False),
        ([], False),
    ],
)
def test_platform_accepts_what_runs_there(tags: list[str], is_accepted: bool) -> None:
    assert NODE.accepts(tags) is is_accepted


def test_best_wheel_is_chosen() -> None:
    files = [
        "a-1-py3-none-any.whl",
        "a-1-cp311-cp311-manylinux2014_x86_64.whl",
        "a-1-cp311-cp311-manylinux_2_28_x86_64.whl",
        "a-1-cp312-cp312-manylinux_2_28_x86_64.whl",
        "a-2-cp311-cp311-manylinux_2_28_x86_64.whl",
        "a-1.tar.gz",
    ]
    assert choose_wheel(files, "A", "1.0", NODE) == files[2]
    assert choose_wheel(files[3:], "a", "1", NODE) is None


PARTS = st.sampled_from(["cp310", "cp311", "cp39", "py3"])
ABIS = st.sampled_from(["cp311", "abi3", "none"])
PLATFORMS = st.sampled_from(["any", "linux_x86_64", "manylinux_2_17_x86_64", "win_amd64"])


@given(st.lists(st.tuples(PARTS, ABIS, PLATFORMS), unique=True))
def test_chosen_wheel_fits_and_does_not_depend_on_the_order(
    tags: list[tuple[str, str, str]],
) -> None:
    files = [f"a-1-{'-'.join(tag)}.whl" for tag in tags]
    chosen = choose_wheel(files, "a", "1", NODE)
    assert choose_wheel(files[::-1], "a", "1", NODE) == chosen
    fitting = [tag for tag in tags if Tag(*tag) in NODE.tags()]
    assert (chosen is None) == (not fitting)
    if chosen is not None:
        assert NODE.accepts([chosen.removeprefix("a-1-").removesuffix(".whl")])
