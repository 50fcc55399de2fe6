"""Questions about jobs, answered from their logs: tables, curves and scaling efficiency."""
