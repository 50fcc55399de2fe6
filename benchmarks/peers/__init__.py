"""The same work done by other systems, one script each."""
