"""The kernel's environment on the nodes: its packages as wheels, in the pool's bucket."""
