"""What runs inside a fake instance: the first process, and the ``shutdown`` command.

Both are started as files, with ``python -I -S``: nothing but the standard library, so that a
machine is up within a moment whatever the environment of its user-data is.
"""
