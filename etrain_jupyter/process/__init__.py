"""Building blocks of every process: cluster directory, locks, TLS, process control."""
