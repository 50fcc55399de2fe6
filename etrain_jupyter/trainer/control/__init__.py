"""Commands to a trainer, its reports to the supervisor, error classification and fault injection.

``commands`` acts on messages while a step runs. ``reporter`` sends the reports and keeps the
records of the latest steps. ``error_origin`` determines the cause of an error, and ``failures``
describes it. ``faults`` injects planned faults.
"""
