"""Reports of a trainer to its supervisor, error classification and fault injection.

``reporter`` sends the reports and keeps the records of the latest steps. ``device_errors`` and
``error_origin`` decide who caused an error. ``faults`` injects the faults of a plan.
"""
