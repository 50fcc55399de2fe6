"""Optimizer state in shards, each on two ranks, for ``shard: optimizer``."""
