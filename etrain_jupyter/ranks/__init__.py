"""The trainer process: user code, process group, training loop. The only place that imports torch.

``channel`` is the exception: the supervisor imports it too, so it imports no torch.
"""
