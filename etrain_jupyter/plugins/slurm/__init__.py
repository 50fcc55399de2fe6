"""Pool ``slurm``: each worker is one SLURM job, submitted by the cluster's head.

Read ``pool`` first (seen from a kernel), then ``nodes`` (in the head) and ``job_worker`` (in a
job).
"""

from __future__ import annotations

from etrain_jupyter.plugin import Plugin, PoolKind

_HERE = "etrain_jupyter.plugins.slurm"

PLUGIN = Plugin(
    pools={
        "slurm": PoolKind(
            make=f"{_HERE}.pool:SlurmPool.from_entry",
            prefix="slurm",
            of_cluster=f"{_HERE}.pool:SlurmPool.of_cluster",
            down_s=240.0,  # jobs save their checkpoints, and leave the queue
        )
    }
)
