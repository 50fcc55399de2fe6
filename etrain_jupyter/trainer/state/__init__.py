"""Everything that a rank knows and another one would need: taken, packed, sent, saved, compared.

``capture`` takes it and puts it back, ``packing`` and ``transfer`` bring it to newcomers,
``checkpointer`` to a store, with the ``model_config`` of a
``transformers`` model; ``moving_buffers`` are undone with a step, and ``weight_fingerprint`` is
what the ranks compare.
"""
