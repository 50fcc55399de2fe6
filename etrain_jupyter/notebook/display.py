"""Show jobs: the dashboard under a cell, and JupyterLab's side panel."""

from __future__ import annotations

from etrain_jupyter.config import template
from etrain_jupyter.errors import EtrainError
from etrain_jupyter.log.exhibits import Content
from etrain_jupyter.notebook.commands.other_jobs import find_other_jobs
from etrain_jupyter.notebook.dashboard.browser import has_front_end
from etrain_jupyter.notebook.dashboard.link import link
from etrain_jupyter.notebook.dashboard.widget import Dashboard
from etrain_jupyter.notebook.job.open_jobs import compare, hold
from etrain_jupyter.notebook.job.runs import open_runs
from etrain_jupyter.notebook.job.training_job import Screen, TrainingJob

HISTORY_S = 2.0
"""Maximum time to wait for a job's history before drawing its dashboard, in seconds."""


def show(job: TrainingJob) -> None:
    """Display a job's dashboard; every cell that shows the job displays the same one."""
    follow(job).show()


def follow(job: TrainingJob) -> Screen:
    """List a job in JupyterLab's side panel, displayed or not, and return its dashboard."""
    if job.screen is None:
        screen = Dashboard(
            job_id=job.id,
            on_request=job.handle_request,
            read_exhibit=lambda name, step: _read_exhibit(job, name, step),
        )
        # The first rendering should include the history, but must not wait for a slow disk.
        job.subscribe(screen.add_events).wait(HISTORY_S)
        screen.follow()
        job.screen = screen
    return job.screen


def _read_exhibit(job: TrainingJob, name: str, step: int) -> Content:
    for exhibit in job.exhibits(name):
        if exhibit.step == step:
            return exhibit.read()
    raise EtrainError(f"job {job.id} has no exhibit {name!r} of step {step}, or it was removed.")


def open_panel() -> None:
    """Connect this kernel to JupyterLab's side panel, and serve its requests."""
    if not has_front_end():
        return

    def attach_quietly(job_id: str) -> str:
        # Do not use `attach`, because a click in the panel must not change the most recently used
        # job, which is the job that `%etrain stop` without a name stops.
        follow(hold(open_runs().find(job_id)))
        return ""

    link().panel.serve(
        look=lambda ids, is_asked: find_other_jobs(open_runs(), ids, is_asked=is_asked),
        attach=attach_quietly,
        template=lambda: f"%%etrain distributed\n{template()}",
        compare=lambda job_ids: compare(job_ids, store=open_runs()).to_html(),
    )
    link().open()
