"""The ``%etrain`` line commands."""
