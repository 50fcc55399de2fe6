"""The scheduler process: Dask's scheduler with the coordinator as a plugin.

``main`` is the process, ``keeper`` its supervisor, ``coordinator`` assigns
workers to jobs, ``jobs`` runs one job, and the node sources provide workers.
"""
