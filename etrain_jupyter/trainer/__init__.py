"""Trainer process: user code, process group and training loop.

``main`` starts a ``trainer``, which builds a ``workload`` and runs the ``loop``. The packages form
layers. ``loop`` (steps and evaluations) uses ``gradients`` (summing over the ranks), ``state`` (the
contents of checkpoints and state transfers) and ``objective`` (loss and metrics). All of these use
``group`` (collectives) and ``control`` (messages, faults, errors).
"""
