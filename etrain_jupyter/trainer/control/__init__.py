"""Reports from a trainer to its supervisor, error classification and fault injection.

``reporter`` sends the reports and keeps the records of the latest steps. ``error_origin``
determines the cause of an error. ``faults`` injects planned faults.
"""
