"""Write a job's log to tools that display experiments: TensorBoard, and those of plug-ins.

``base`` defines the protocol ``Logger``, ``timeline`` derives records from events, and ``feed``
passes them to a logger. ``registry`` finds loggers by name, also those of other packages.
``process`` runs a logger next to the coordinator, in a process of its own.
"""
