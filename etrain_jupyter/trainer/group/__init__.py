"""The process group of one generation: how its ranks find each other, talk, and are freed.

``process_group`` holds it, ``rendezvous`` is its store, ``backends`` and ``gloo_device`` make what
it talks through; ``exchange`` and ``pending`` wait for messages so that an abort frees them.
"""
