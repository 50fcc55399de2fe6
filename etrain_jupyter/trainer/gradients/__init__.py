"""How the ranks of one generation compute the gradient of a step together.

``averaged``: each rank has one share, and DistributedDataParallel adds up. ``sharded``: with
``reproducible``, shards that are added in an order of their own. Both leave in ``p.grad`` the
gradient of the mean loss over the step's samples, and the same moves of the buffers on all ranks.
"""
