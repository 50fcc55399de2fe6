"""Source of a SLURM cluster's workers, in the scheduler process."""
