"""The notebook's hold on a job.

Read ``run_store`` (folders), ``link`` (the line to a cluster), ``feed`` (its events, in order),
``history`` (what they add up to), ``training_job`` (what the user holds), ``held_jobs`` (submit and
attach), ``weights`` and ``audit``.
"""
