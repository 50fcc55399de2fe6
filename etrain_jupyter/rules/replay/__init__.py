"""Rebuild the inputs of policies from a job's log."""
