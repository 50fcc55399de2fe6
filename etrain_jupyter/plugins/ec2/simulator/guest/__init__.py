"""Programs inside a simulated instance: the first process, and the ``shutdown`` command.

Both are run as files, with ``python -I -S`` and the standard library only, so that a machine starts
quickly and independently of its user-data's environment.
"""
