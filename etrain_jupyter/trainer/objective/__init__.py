"""Objective of a job: the notebook's loss, step function, weight and metrics.

``batches`` splits a batch into the model's arguments, ``one_pass`` runs one forward pass,
``weight`` and ``measures`` average over passes, and ``whole_set`` computes metrics over all of
data.eval.
"""
