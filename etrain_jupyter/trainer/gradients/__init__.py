"""Gradients of a step, computed together by the ranks of one generation.

In ``averaged``, each rank has one share, and DistributedDataParallel sums the gradients. In
``sharded``, for ``reproducible`` jobs, shards are summed in a fixed order. Both leave the gradient
of the mean loss over the step's samples in ``p.grad``, and update the running buffers identically
on all ranks.
"""
