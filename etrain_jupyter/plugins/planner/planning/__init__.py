"""Plan a job: predict time and cost on other numbers and types of machines from its log.

::

    the job's log        -> measured.py  -> points of the step time, samples left
    pools.yaml, EC2      -> offers.py    -> machine types with prices
    rules.sizing.step_time, both of them -> options.py -> options, Pareto front
                                            advice.py  -> the recommendation
"""
