"""Benchmarks of etrain-jupyter and its peers: ``python -m benchmarks --help``."""
