"""A simulated SLURM: sbatch, squeue and scancel that run jobs as processes on this machine.

``FakeSlurm`` starts the controller and puts the commands into PATH. ``controller`` queues the jobs,
runs their scripts and sends SLURM's signals; ``command`` is the client of the three commands.

Not simulated: several nodes' file systems, GPUs, fair shares, arrays, steps (``srun``).
"""

from __future__ import annotations

from etrain_jupyter.plugins.slurm.simulator.slurm import FakeSlurm

__all__ = ["FakeSlurm"]
