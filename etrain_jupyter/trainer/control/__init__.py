"""Reports from a trainer to its supervisor, error classification and fault injection.

``reporter`` sends the reports and keeps the records of the latest steps. ``device_errors``,
``hub_errors`` and ``error_origin`` determine the cause of an error. ``faults`` injects planned
faults.
"""
