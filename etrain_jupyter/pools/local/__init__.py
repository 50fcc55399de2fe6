"""The embedded pool: worker processes on this machine."""
