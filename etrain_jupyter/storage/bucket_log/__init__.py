"""The run store in a bucket: a job's log as a chain of objects, and this machine's copy of it.

Read ``place`` (where things lie), ``chain`` (the objects), ``local_copy`` (from there to here),
``uploads`` (from here to there), ``mirror`` (the same in the background, while the job lives).
"""
