"""Measurements of etrain-jupyter beside its peers: ``python -m benchmarks --help``."""
