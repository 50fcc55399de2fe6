"""Trainer process: user code, process group and training loop.

``main`` starts a ``trainer``, which builds a ``workload`` and runs the ``loop``. The packages
depend on each other in one direction: ``loop`` (steps and evaluations) on ``gradients`` (how the
ranks sum them), ``state`` (what a checkpoint or a new rank gets) and ``objective`` (loss and
metrics), and all of them on ``group`` (collectives) and ``control`` (messages, faults and errors).
"""
