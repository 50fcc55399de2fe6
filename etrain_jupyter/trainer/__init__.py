"""The trainer process: user code, process group, training loop. The only place that imports torch.

``main`` starts a ``trainer``, which builds a ``workload`` and runs its ``train_loop``. Around it:
``group`` (who talks to whom), ``gradients`` (what a step adds up), ``state`` (what a newcomer and a
checkpoint get) and ``control`` (what the supervisor hears). ``control.channel`` and
``control.progress`` are imported by the supervisor too, so they import no torch.
"""
