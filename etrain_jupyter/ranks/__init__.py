"""The trainer process: user code, process group, training loop. The only place that imports torch.

``channel`` and ``progress`` are the exceptions: the supervisor imports them too, so they import no
torch.
"""
