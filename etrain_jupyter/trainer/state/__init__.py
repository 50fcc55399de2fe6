"""State of a trainer: capturing, sending, saving, restoring and comparing it.

``train_state`` holds the state, ``capture`` and ``packing`` turn it into named tensors and JSON,
and ``transfer`` sends it to new ranks. ``checkpointer`` saves it: ``checkpoint_policy`` decides
when, ``state_copy`` makes a copy, ``checkpoint_writer`` writes it, and ``restoring`` loads it
again. ``running_buffers`` are restored if a step is undone, and ranks compare the
``weight_fingerprint``.
"""
