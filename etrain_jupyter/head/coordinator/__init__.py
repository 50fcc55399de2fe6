"""The coordinator in the scheduler, the supervisor in each worker, and what they say to each other.

::

    coordinator (scheduler plugin) --etrain_order--> supervisor (worker plugin) --channel--> trainer
                                   <-etrain_report--                            <-channel---

Imports no torch and never unpickles user code: bundles pass through as bytes.
"""
