"""The run store in a bucket: a job's log as a chain of objects, and a local copy of it.

Read ``locations``, ``chain`` (the objects), ``local_copy`` (download), ``uploads`` (upload) and
``mirror`` (background upload while the job runs).
"""
