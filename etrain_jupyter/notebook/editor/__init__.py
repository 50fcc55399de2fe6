"""Completion and inline help for ``%etrain`` lines and cells.

``complete`` and ``inspect`` are functions of the text, the cursor and the ``Facts`` of a notebook;
they have no side effects. ``hooks`` installs them in IPython's completer and in the kernel's reply
to Shift-Tab.
"""
