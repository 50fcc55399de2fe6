"""Studies in the kernel: submit, follow, display, stop and resume a search."""
