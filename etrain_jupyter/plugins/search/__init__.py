"""Search over hyper-parameters: ``%%etrain search`` and ``%etrain study``, with Optuna.

::

    kernel                                      scheduler                       journal
    commands ── cell, plan ── SubmitStudy ───▶  service ── driver ── optuna ──▶ optuna.journal
    study ◀──────────── reads ────────────────── trials are ordinary jobs ───── study.json
"""

from __future__ import annotations

from etrain_jupyter.plugin import CellCommand, Command, Plugin

_HERE = "etrain_jupyter.plugins.search"

PLUGIN = Plugin(
    cells={
        "search": CellCommand(
            run=f"{_HERE}.commands:run_cell",
            parser=f"{_HERE}.commands:make_search_parser",
            help=f"{_HERE}.commands:help_on_search",
            summary="train it with several values of its names, and find the best",
            group=f"{_HERE}.schema:GROUP",
        )
    },
    commands=(Command(run=f"{_HERE}.commands:study", after="plan"),),
    service=f"{_HERE}.service:Studies",
    public={
        "Study": f"{_HERE}.study:Study",
        "attach_study": f"{_HERE}.open_studies:attach_study",
        "search": f"{_HERE}.commands:search",
        "studies": f"{_HERE}.open_studies:studies",
    },
)
