"""Gradients of a step, computed together by the ranks of one generation.

``averaged``: each rank has one share, and DistributedDataParallel sums the gradients. ``sharded``:
for a ``reproducible`` job, shards are summed in a fixed order. Both leave the gradient of the mean
loss over the step's samples in ``p.grad``, and update the running buffers identically on all ranks.
"""
