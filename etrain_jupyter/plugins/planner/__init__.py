"""Plan jobs and simulate capacity policies: ``%etrain plan`` and ``%etrain simulate``.

The plans use EC2's machine types, prices and fleet rules, so this plug-in needs the EC2 plug-in.
"""

from __future__ import annotations

from etrain_jupyter.plugin import Command, Plugin

_HERE = "etrain_jupyter.plugins.planner"

PLUGIN = Plugin(
    commands=(
        Command(run=f"{_HERE}.commands:plan", after="diagnose", cell=f"{_HERE}.commands:plan_cell"),
        Command(run=f"{_HERE}.commands:simulate", after="template"),
    ),
    words=f"{_HERE}.commands:WORDS",
    public={"plan": f"{_HERE}.planning.line:plan"},
)
