"""What a person sees of a job, drawn from its events alone.

Read in this order: ``series`` (growable columns, thinning), ``words`` (an event as a sentence),
``entries``, ``waiting``, ``workers``, ``controls``, ``pace`` and ``snapshot`` (the pure fold:
events in, one JSON-able picture out), ``html`` (that picture without JavaScript), ``feed`` (what a
view is told), ``row`` and ``side_panel`` (all jobs of this kernel as a list), ``browser`` and
``link`` (the ways there) and ``widget`` (``Dashboard``: the fold, kept on the screen).

The front end in ``labextension/`` gets the picture and sends requests; it decides nothing. Since
nothing but events goes in, a replay of the log shows the same screen as the run itself (invariant
I9 of the design).
"""
