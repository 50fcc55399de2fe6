"""The CUDA build of torch for the GPUs of a pool."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.ec2.environment.torch_builds import (
    BUILDS,
    FAMILIES,
    capabilities_of,
    choose_build,
    installed_cuda,
    supports,
)


@pytest.mark.parametrize(
    ("version", "installed", "types", "label"),
    [
        ("2.13.0+cpu", "", ["m5.large"], None),
        ("2.13.0+cpu", "", ["g5.xlarge", "m5.large"], "cu126"),
        ("2.9.1+cpu", "", ["g5.xlarge"], "cu128"),
        ("2.9.1", "12.8", ["g5.xlarge", "p5.48xlarge"], None),
        ("2.9.1", "12.8", ["p3.2xlarge"], "cu126"),
        ("2.13.0+cpu", "", ["p6-b200.48xlarge"], "cu130"),
        ("2.13.0", "12.6", ["p6-b200.48xlarge"], "cu130"),
        ("9.0.0+cpu", "", ["g6.xlarge"], "cu126"),
    ],
)
def test_build_fits_the_gpus(
    version: str, installed: str, types: list[str], label: str | None
) -> None:
    build = choose_build(version, installed, capabilities_of(types))
    assert (build.label if build else None) == label


def test_gpus_without_a_common_build_are_refused() -> None:
    with pytest.raises(
        PoolError, match=r"no build of torch 2\.13\.0 .*7\.0, 10\.0.*capacity\.types"
    ):
        choose_build("2.13.0+cpu", "", capabilities_of(["p3.2xlarge", "p6-b200.48xlarge"]))


@given(st.sampled_from(sorted(BUILDS)), st.sets(st.sampled_from(sorted(FAMILIES)), min_size=1))
def test_chosen_build_has_code_for_every_gpu(release: tuple[int, int], families: set[str]) -> None:
    wanted = capabilities_of(f"{one}.xlarge" for one in families)
    try:
        build = choose_build("{}.{}.0+cpu".format(*release), "", wanted)
    except PoolError:
        assert not any(all(supports(label, one) for one in wanted) for label in BUILDS[release])
    else:
        assert build is not None
        assert all(supports(build.label, one) for one in wanted)


@pytest.mark.parametrize(
    ("line", "cuda"),
    [
        ("cuda: Optional[str] = '12.8'", "12.8"),
        ("cuda: Optional[str] = None", ""),
        ("cuda = '13.0'", "13.0"),
    ],
)
def test_cuda_version_is_read_without_importing_torch(tmp_path: Path, line: str, cuda: str) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.9.1'\n{line}\n")
    assert installed_cuda(tmp_path) == cuda
    assert installed_cuda(tmp_path / "nowhere") == ""
