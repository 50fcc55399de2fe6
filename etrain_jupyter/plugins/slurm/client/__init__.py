"""Pool of SLURM jobs, as seen from a kernel or a terminal."""
