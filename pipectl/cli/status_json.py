"""The state of a run for programs."""

from __future__ import annotations

from typing import Any

from pipectl.jobs.status import RunStatus


def status_json(status: RunStatus) -> dict[str, Any]:
    """Everything about one run, for programs."""
    found, job, fault = status.measured, status.job, status.culprit
    return {
        "run": status.run.name,
        "directory": str(status.run.path),
        "kind": status.record.kind if status.record else None,
        "sweep": _sweep_json(status),
        "scheduler": status.record.scheduler if status.record else None,
        "job_id": status.record.job_id if status.record else None,
        "state": job.state.value,
        "reason": job.reason,
        "source": job.source,
        "nodes": job.nodes,
        "exit_code": job.exit_code,
        "submitted_at": status.record.submitted_at if status.record else None,
        "phase": status.phase,
        "stalled": status.stalled or None,
        "restarts": status.restarts,
        "expected_start": job.start if job.state.waits else None,
        "step": found.step,
        "steps": status.steps,
        "first_loss": found.first_loss,
        "last_loss": found.last_loss,
        "samples_per_s": found.samples_per_s,
        "step_time_s": found.step_time_s,
        "predicted_step_time_s": status.predicted_step_s,
        "measured_over_predicted": status.prediction_ratio,
        "efficiency": status.efficiency,
        "remaining_s": found.remaining_s,
        "not_finite_steps": list(found.not_finite),
        "evaluation_step": found.evaluation_step,
        "evaluation": dict(found.evaluation),
        "waits_for": None if status.laggard is None else status.laggard._asdict(),
        "ranks": [dict(rank) for rank in status.ranks],
        "peaks": [peak._asdict() for peak in status.peaks],
        "error": None if fault is None else {"where": fault.where, "message": fault.message},
    }


def _sweep_json(status: RunStatus) -> dict[str, Any] | None:
    sweep = status.record.sweep if status.record else None
    return None if sweep is None else {"name": sweep.name, "values": dict(sweep.values)}
