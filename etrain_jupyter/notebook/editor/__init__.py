"""What an editor asks while a cell is being written: what may stand here, and what this means.

``complete`` and ``inspect`` are functions of the text, the cursor and the ``Facts`` of a notebook;
they change nothing and start nothing. ``hooks`` puts them into IPython's completer and into the
kernel's answer to Shift-Tab.
"""
