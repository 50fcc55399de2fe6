"""Pool ``slurm``: each worker is one SLURM job, submitted by the cluster's head.

Read ``pool`` first (seen from a kernel), then ``nodes`` (in the head) and ``job_worker`` (in a
job).
"""
