"""The display of a job, derived from its events alone.

Read in this order: ``series`` (growing columns, thinning), ``event_text`` (an event as a line),
``snapshot`` (the state that the front end draws), ``entries``, ``waiting``, ``workers``,
``controls``, ``pace``, ``freshness`` and ``curves`` (the parts of the fold), ``job_view`` (the pure
fold: events in, snapshot and curves out), ``html`` (a snapshot without JavaScript), ``feed`` (the
messages to a view), ``row`` and ``side_panel`` (the jobs of this kernel as a list), ``browser`` and
``link`` (the channels to the browser) and ``widget`` (``Dashboard``: the fold, kept on display).

The front end in ``labextension/`` receives snapshots and sends requests; it decides nothing. Since
events are the only input, a replay of the log shows the same display as the run itself (invariant
I9 of the design).
"""
