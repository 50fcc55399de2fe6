"""What fits, what does not, and what is only worth a word."""

from __future__ import annotations

import platform

import pytest

from etrain_jupyter import __version__
from etrain_jupyter.wire.versions import NAMES, compare, read_fingerprint

KERNEL = {
    "protocol": "1",
    "etrain": "0.1.0",
    "python": "3.12.4",
    "torch": "2.13.0",
    "numpy": "2.1.0",
    "cloudpickle": "3.1.0",
    "distributed": "2026.8.0",
}


def check(**theirs):
    return compare(KERNEL | theirs, KERNEL, at="w1", here="this notebook")


def test_own_fingerprint_is_compatible_with_itself():
    own = read_fingerprint()
    assert set(own) == set(NAMES)
    assert (own["python"], own["etrain"]) == (platform.python_version(), __version__)
    assert own["torch"]
    found = compare(own, own, at="w1", here="here")
    assert (found.fits, found.notes) == (True, ())


@pytest.mark.parametrize(
    ("theirs", "words", "remedy"),
    [
        (
            {"protocol": "2"},
            "protocol 2 on w1, 1 in this notebook",
            "the same version of etrain-jupyter",
        ),
        (
            {"etrain": "0.2.0"},
            "etrain-jupyter 0.2.0 on w1, 0.1.0 in this notebook",
            "etrain-jupyter==0.1.0",
        ),
        ({"python": "3.11.9"}, "Python 3.11.9 on w1, 3.12.4 in this notebook", "Python 3.12"),
        (
            {"torch": "2.12.1+cu130"},
            "torch 2.12.1+cu130 on w1, 2.13.0 in this notebook",
            "torch==2.13.0",
        ),
        ({"torch": ""}, "no torch on w1, 2.13.0 in this notebook", "torch==2.13.0"),
    ],
)
def test_incompatible_version_is_refused_with_both_versions_and_a_remedy(theirs, words, remedy):
    found = check(**theirs)
    assert not found.fits
    assert (found.wrong, found.remedies, found.notes) == ((words,), (remedy,), ())


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"python": "3.12.1"}, "Python 3.12.1 on w1, 3.12.4 in this notebook"),
        ({"torch": "2.13.1"}, "torch 2.13.1 on w1, 2.13.0 in this notebook"),
        ({"numpy": "1.26.4"}, "numpy 1.26.4 on w1, 2.1.0 in this notebook"),
    ],
)
def test_other_patch_version_or_library_only_causes_a_note(theirs, words):
    found = check(**theirs)
    assert found.fits
    assert found.notes == (words,)


@pytest.mark.parametrize("theirs", [{"torch": "2.13.0+cpu"}, {"future": "1"}, {}])
def test_device_builds_and_unknown_keys_are_not_differences(theirs):
    found = check(**theirs)
    assert (found.fits, found.notes) == (True, ())


def test_missing_versions_are_not_compared():
    assert compare({}, KERNEL, at="w1", here="here").fits
    assert compare(KERNEL, KERNEL | {"torch": ""}, at="w1", here="here").fits
