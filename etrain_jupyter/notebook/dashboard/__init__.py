"""The display of a job, derived from its events alone.

Start with ``job_view``, which folds events into a ``snapshot`` and curves. Its parts are
``curves``, ``event_list``, ``event_text``, ``workers`` and ``pace``. ``feed`` sends the changes to
a view, ``html`` renders a snapshot without JavaScript, ``side_panel`` lists the jobs of this
kernel, and ``browser`` and ``link`` are the channels to the browser. ``widget.Dashboard`` combines
them.

The front end in ``labextension/`` only draws snapshots and sends requests. It contains no
decisions. Events are the only input, so a replay of the log shows the same display as the run
(invariant I9).
"""
