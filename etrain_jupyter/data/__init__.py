"""Data sets that are larger than memory: read them in shards, and write them."""

from etrain_jupyter.data.batch_key import BatchKey, batch_key
from etrain_jupyter.data.shards import Shards
from etrain_jupyter.data.writing import write_shards

__all__ = ["BatchKey", "Shards", "batch_key", "write_shards"]
