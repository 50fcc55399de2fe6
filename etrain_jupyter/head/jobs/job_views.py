"""Describe a job for kernels and pools."""

from __future__ import annotations

from typing import Any

from etrain_jupyter.head.coordinator.nodes import JobProgress
from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.rules.costs import rates_by_type
from etrain_jupyter.rules.sizing.step_time import exchange_of


def summarize_job(job: HostedJob) -> dict[str, Any]:
    """Return the job's row in the list of jobs."""
    state = job.state
    plan = job.record.plan if job.record.is_planned else None
    return {
        "job_id": state.job_id,
        "name": job.spec.name,
        "status": state.status,
        "step": state.step,
        "total_steps": plan.total_steps if plan is not None else 0,
        "world_size": state.members.num_in("ranked", "reported"),
        "generation": state.generation,
        "run_dir": str(job.spec.run_dir),
    }


def list_members(job: HostedJob) -> list[dict[str, Any]]:
    """Return one record per member: worker, rank, state, device, trainer_pid."""
    records = []
    ranks = {name: rank for rank, name in enumerate(job.messages.step_clock.ranks)}
    for member in job.state.in_phase("ranked", "reported", "warm", "starting"):
        facts = job.trainers[member.trainer]
        is_ranked = member.phase == "ranked"
        records.append(
            {
                "worker": member.worker,
                "rank": ranks.get(member.trainer) if is_ranked else None,
                "state": "training" if is_ranked else member.phase,
                "device": facts.device,
                "trainer_pid": facts.pid,
                "leaving": member.leaving,
            }
        )
    return records


def report_progress(job: HostedJob) -> JobProgress:
    """Return the job's progress, for a pool that plans for deadlines."""
    record, state = job.record, job.state
    plan, gradient_bytes = record.plan, 0.0
    if plan is not None and plan.num_parameters:
        gradient_bytes = exchange_of(
            num_parameters=plan.num_trained_parameters,
            compression=str(job.spec.config.get("compression") or "none"),
            passes=1,
        ).num_bytes
    return JobProgress(
        job_id=state.job_id,
        attempt_at=record.attempt_at,
        first_step=record.attempt_step,
        step=record.step,
        total_steps=record.total_steps if record.is_planned else 0,
        num_workers=state.members.num_in("ranked") if state.status == "running" else 0,
        min_workers=state.min_workers,
        max_workers=job.tuning.wanted_workers(state),
        is_paused=state.status == "paused",
        gradient_bytes=gradient_bytes,
        steps_per_s=1 / record.step_s if record.step_s else 0.0,
        type_rates=rates_by_type(record.work) if job.spec.splits_by_speed else {},
    )
