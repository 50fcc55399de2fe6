"""Everything of this package that needs pyarrow, which is imported on first use."""

from etrain_jupyter.data import columns
from etrain_jupyter.data.opening import index_place
from etrain_jupyter.data.reader import ShardReader

__all__ = ["ShardReader", "columns", "index_place"]
