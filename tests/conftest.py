"""For all tests: no test fails because a shared machine was slow for a moment."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("etrain", deadline=None)
settings.load_profile("etrain")
