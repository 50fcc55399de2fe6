"""The coordinator: a plugin of the scheduler that owns the jobs and assigns workers to them.

::

    coordinator (scheduler plugin) -etrain_message-> supervisor (worker plugin) --channel--> trainer
                                   <-etrain_report--                            <-channel---

Imports no torch and never unpickles user code, so bundles pass through as bytes.
"""
