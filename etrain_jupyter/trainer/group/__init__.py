"""Process group of one generation: forming it, its collectives, and aborting it.

``process_group`` is the interface. ``forming`` connects the ranks through the store in
``rendezvous``, with ``authentication`` and ``admission`` against strangers; ``backends``,
``gloo_device`` and ``transports`` carry the data; ``exchange`` and ``pending`` make every wait end
when the generation is aborted.
"""
