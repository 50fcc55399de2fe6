"""Building blocks shared by all processes: cluster directory, locks, TLS, process control."""
