"""Shipped helpers for tests: contract suites, faults as data, in-memory twins.

Nothing of the package imports this.
"""
