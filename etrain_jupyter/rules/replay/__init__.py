"""Rebuild what a job's log implies for its policies."""
