"""Trainer process: user code, process group and training loop.

``main`` starts a ``trainer``, which builds a ``workload`` and runs the ``loop``. The packages
depend on each other in one direction: ``loop`` (steps and evaluations) uses ``gradients`` (summing
over the ranks), ``scoring`` (scores of the whole evaluation set), ``state`` (the contents of
checkpoints and state transfers) and ``objective`` (loss and metrics). All of them use ``group``
(collectives) and ``control`` (messages, faults, errors).
"""
