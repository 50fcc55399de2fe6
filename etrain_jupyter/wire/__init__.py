"""The interface between processes: messages, their channel, the shared progress page, and versions.

Every process imports this package; it imports no other process's code.
"""
