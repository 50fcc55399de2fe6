"""Worker process: it connects to a scheduler, and its supervisor runs the trainers.

Start with ``lifecycle`` (connect, reconnect, shut down), then read ``supervisor`` (messages from
the coordinator) and ``trainer_process`` (one trainer). ``preemption_watch`` watches for
interruptions.
"""
