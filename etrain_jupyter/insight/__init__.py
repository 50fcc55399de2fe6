"""Questions about jobs, answered from their logs, recorded markets and models."""
