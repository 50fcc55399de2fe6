"""Factories named in settings files, also in those of an earlier version."""

from __future__ import annotations

from pathlib import Path

import pytest

from etrain_jupyter.process.cluster_settings import ClusterSettings
from etrain_jupyter.process.entry import FORMER_NAMES, load_factory


def test_factory_is_named_by_module_and_attribute() -> None:
    assert load_factory("pathlib:Path") is Path


@pytest.mark.parametrize("former", FORMER_NAMES)
def test_settings_of_an_earlier_version_name_factories_that_still_load(former: str) -> None:
    assert load_factory(former) is load_factory(FORMER_NAMES[former])


def test_defaults_of_settings_load() -> None:
    settings = ClusterSettings()
    for name in (settings.coordinator, settings.supervisor, settings.nodes):
        assert callable(load_factory(name))
