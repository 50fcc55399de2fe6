"""Worker process of a SLURM job."""
