"""State of a trainer: captured, sent to new ranks, saved, restored and compared.

``train_state`` holds it, ``capture`` and ``packing`` turn it into named tensors and JSON, and
``transfer`` sends it to new ranks. ``checkpointer`` saves it: ``checkpoint_policy`` decides when,
``state_copy`` copies, ``checkpoint_writer`` writes, and ``restoring`` loads it again.
``running_buffers`` are undone with a step, and ranks compare the ``weight_fingerprint``.
"""
