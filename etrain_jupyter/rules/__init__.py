"""Pure rules: who trains what, and what happens next.

No I/O, no threads and no torch; time is an argument.
"""
