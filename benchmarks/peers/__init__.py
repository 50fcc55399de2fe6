"""The same workloads on other systems, one script per system."""
