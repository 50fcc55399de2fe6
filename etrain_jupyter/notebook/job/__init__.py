"""The notebook's side of a job.

Start with ``run_store`` (the folders of jobs), ``link`` (the connection to a cluster), ``feed``
(ordered events), ``history`` (values derived from them), ``followed_job`` and ``training_job`` (the
user's object), ``open_jobs`` (submit and attach) and ``weights``.
"""
