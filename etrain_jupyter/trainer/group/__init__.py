"""Process group of one generation: forming it, its collectives, and aborting it.

``process_group`` is the interface. ``forming`` connects the ranks through the store in
``rendezvous``; ``authentication`` refuses strangers; ``backends``, ``gloo_device`` and
``transports`` carry the data; ``pending`` ends every wait when the generation is aborted.
"""
