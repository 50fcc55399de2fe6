"""Write a job's log to tools that display experiments: TensorBoard, and those that plug-ins add.

``base`` defines the protocol ``Logger``, ``timeline`` derives records from events, and ``feed``
passes them to a logger. ``registry`` finds loggers by name, including those of other packages.
``process`` runs a logger next to the coordinator, in a process of its own.
"""
