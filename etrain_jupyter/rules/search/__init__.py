"""Decisions of a search: rungs, shares of the workers, and when a study ends."""
