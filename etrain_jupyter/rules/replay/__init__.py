"""Rebuild a job's state from its log."""
