"""Messages about packages that cannot be sent, without secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from etrain_jupyter.plugins.ec2.environment.packages import Package, without_credentials
from etrain_jupyter.plugins.ec2.environment.sources import (
    Missing,
    MissingWheelsError,
    NoWheelError,
    Sources,
    _error_of,
)
from etrain_jupyter.plugins.ec2.environment.wheels import Platform


def test_error_of_pip_is_shown_without_the_password_of_an_index() -> None:
    script = """
      echo "WARNING: retrying" >&2
      echo "ERROR: no version in https://ann:secret@host/simple, http://token@other/" >&2
      echo "note: something else" >&2
      exit 1
    """
    error = _error_of(["sh", "-c", script], {})
    assert error == "ERROR: no version in https://host/simple, http://other/"
    assert _error_of(["sh", "-c", "echo fine"], {}) == ""
    assert "no-such-program" in _error_of(["no-such-program"], {})


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://me:secret@host:8443/a.whl?token=1#x", "https://host:8443/a.whl"),
        ("git+ssh://git@github.com/me/a", "git+ssh://github.com/me/a"),
        ("file:///srv/a", "file:///srv/a"),
    ],
)
def test_urls_are_shown_without_credentials(url: str, shown: str) -> None:
    assert without_credentials(url) == shown


def test_all_missing_packages_are_named_with_what_to_type() -> None:
    packages = [Package(name=name, version="1.0", url="https://me:x@host/a")
                for name in ("my-lib", "other")]  # fmt: skip
    error = MissingWheelsError([Missing(package=one, reason="not found") for one in packages])
    for part in ("2 packages", "my-lib 1.0 (https://host/a): not found", "exclude: [my-lib, other]",
                 "my_lib-1.0-...whl", "wheels: FOLDER"):  # fmt: skip
        assert part in str(error)


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("moved", r"moved does not exist any more"),
        ("a-1-cp311-cp311-win_amd64.whl", r"a-1-cp311-cp311-win_amd64\.whl is not for Linux"),
    ],
)
def test_project_without_a_wheel_for_the_nodes_is_refused(
    tmp_path: Path, file: str, reason: str
) -> None:
    (tmp_path / "a-1-cp311-cp311-win_amd64.whl").touch()
    sources = Sources(platform=Platform(python=(3, 11)))
    with pytest.raises(NoWheelError, match=reason):
        sources.find_here(Package(name="a", version="1", project=tmp_path / file), tmp_path)
