"""The state of runs for people: a table of all, everything about one, and both as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from rich.text import Text

from pipectl.batch import JobState, JobStatus
from pipectl.cli.console import joined, output, plain, short
from pipectl.cli.plan_view import headline
from pipectl.cli.rows import Rows
from pipectl.cli.sweep_values import values_text
from pipectl.jobs.status import Laggard, Peak, RunStatus
from pipectl.runs import PROFILING, last_checkpoint, step_of
from pipectl.units import format_bytes, format_time

_SHOWN_PEAKS = 4
_REASON = 40
"""Characters of a reason that a table has room for."""
_GAP = Text("  ")
_FIGURES = (
    "step", "loss", "a step", "predicted", "efficiency", "memory", "restarts", "remaining",
)  # fmt: skip
_HEADS = ("run", "values", "state", "on", *_FIGURES, "waits for")
_OPTIONAL = (  # the least important first
    "predicted", "memory", "efficiency", "on", "restarts", "waits for", "remaining", "a step",
    "values",
)  # fmt: skip
_STYLES = {
    JobState.COMPLETED: "green",
    JobState.RUNNING: "cyan",
    JobState.QUEUED: "yellow",
    JobState.HELD: "yellow",
    JobState.UNKNOWN: "yellow",
    JobState.CANCELLED: "dim",
}


def runs_table(found: Sequence[RunStatus], width: int) -> Rows:
    """One row per run; without empty columns, and without the least important if it gets too wide.

    Args:
        width: columns there are.
    """
    rows = [
        (
            *map(plain, (status.run.name, _values(status))),
            state_text(status),
            *map(plain, _cells(status)),
        )
        for status in found
    ]
    columns = {head: [row[index] for row in rows] for index, head in enumerate(_HEADS)}
    return Rows(columns, _FIGURES, optional=_OPTIONAL, room=width)


def show_run(status: RunStatus) -> None:
    """Print everything about one run."""
    console = output()
    for line in run_lines(status):
        console.print(line, soft_wrap=True)


def run_lines(status: RunStatus, *, files: bool = True) -> Iterator[Text]:
    """Everything about one run.

    Args:
        files: whether to say what it has made, and where that lies.
    """
    yield joined(
        plain(status.run.name, "bold"), _GAP, state_text(status), _GAP, plain(_job(status))
    )
    for label, text in (*_point(status), *_details(status), *(_files(status) if files else ())):
        yield plain(f"  {label:<14}{text}")
    yield from _failure(status)


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
        "restarts": status.restarts,
        "expected_start": job.start if job.state in {JobState.QUEUED, JobState.HELD} else None,
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


def state_text(status: RunStatus) -> Text:
    """A state in its colour."""
    state = status.job.state
    return Text(state.value, style=_STYLES.get(state, "red"))


def _sweep_json(status: RunStatus) -> dict[str, Any] | None:
    sweep = status.record.sweep if status.record else None
    return None if sweep is None else {"name": sweep.name, "values": dict(sweep.values)}


def _values(status: RunStatus) -> str:
    sweep = status.record.sweep if status.record else None
    return "" if sweep is None else values_text(sweep.values)


def _cells(status: RunStatus) -> tuple[str, ...]:
    found = status.measured
    left = found.remaining_s if status.job.state.alive else None
    return (
        status.record.scheduler if status.record else "",
        _progress(status, "{}/{}"),
        "" if found.last_loss is None else f"{found.last_loss:.4g}",
        _time(found.step_time_s),
        _time(status.predicted_step_s),
        "" if status.efficiency is None else f"{status.efficiency:.0%}",
        format_bytes(max(peak.measured_bytes for peak in status.peaks)) if status.peaks else "",
        str(status.restarts or ""),
        _time(left),
        _waits_for(status.job),
    )


def _waits_for(job: JobStatus) -> str:
    """What a job in the queue waits for, and until when, as far as the batch system says."""
    if job.state not in {JobState.QUEUED, JobState.HELD}:
        return ""
    start = "" if job.start is None else f"{datetime.fromtimestamp(job.start):%a %H:%M}"
    return ", ".join(filter(None, (job.reason[:_REASON], start and f"until {start}")))


def _progress(status: RunStatus, form: str) -> str:
    """Steps made of those to make; a run that only measures has percent."""
    if status.record is not None and status.record.kind == PROFILING:
        return f"{status.measured.step}%"
    return form.format(status.measured.step, status.steps) if status.steps else ""


def _job(status: RunStatus) -> str:
    if status.record is None:
        return ""
    nodes = f" on {status.job.nodes}" if status.job.nodes else ""
    return f"{status.record.scheduler} job {status.record.job_id or 'not confirmed'}{nodes}"


def _point(status: RunStatus) -> Iterator[tuple[str, str]]:
    if status.record is not None and status.record.sweep is not None:
        yield "values", values_text(status.record.sweep.values)
        yield "sweep", status.record.sweep.name


def _details(status: RunStatus) -> Iterator[tuple[str, str]]:
    found, job = status.measured, status.job
    if job.reason:
        yield "reason", job.reason
    if job.start is not None and job.state in {JobState.QUEUED, JobState.HELD}:
        yield "expected", f"to start {datetime.fromtimestamp(job.start):%Y-%m-%d %H:%M}"
    if status.restarts:
        yield "restarts", str(status.restarts)
    if status.record is not None:
        submitted = datetime.fromtimestamp(status.record.submitted_at)
        yield "submitted", f"{submitted:%Y-%m-%d %H:%M:%S}"
    if status.phase and job.state.alive:
        yield "doing", status.phase
    if progress := _progress(status, "step {} of {}"):
        yield "progress", progress
    yield from _speed(status)
    if found.evaluation:
        values = ", ".join(f"{name} {value:.4g}" for name, value in found.evaluation.items())
        yield "evaluation", f"after step {found.evaluation_step}: {values}"
    if found.first_loss is not None:
        now = "not finite" if found.last_loss is None else f"{found.last_loss:.4g}"
        yield "loss", f"{found.first_loss:.4g} after the first step, {now} now"
    if found.not_finite:
        *more, last = found.not_finite
        before = f"; {len(more)} steps before it" if more else ""
        yield "not finite", f"step {last}: {found.fault}{before}"


def _files(status: RunStatus) -> Iterator[tuple[str, str]]:
    """What the run has made, and where it lies."""
    if status.record and status.record.kind == PROFILING and status.run.profile.exists():
        yield "profile", short(status.run.profile)
    if status.record and status.record.kind == PROFILING and status.run.cluster.exists():
        yield "cluster", short(status.run.cluster)
    if status.plan is not None:
        yield "plan", headline(status.plan).removeprefix(f"{status.plan.name}: ")
        yield "plan file", short(status.run.plan)
    weights = last_checkpoint(status.run)
    if weights is not None:
        yield "weights", short(weights)
    if status.can_go_on:
        since = "its beginning" if weights is None else f"step {step_of(weights)}"
        yield "to go on", f"pipectl resume {status.run.name}  (from {since})"
    yield "run directory", short(status.run.path)


def _speed(status: RunStatus) -> Iterator[tuple[str, str]]:
    found, predicted, ratio = status.measured, status.predicted_step_s, status.prediction_ratio
    if found.step_time_s is not None:
        text = f"{format_time(found.step_time_s)} a step"
        if status.plan is not None:
            text += f", {status.plan.batch_size / found.step_time_s:.1f} samples/s"
        if status.efficiency is not None:
            text += f", efficiency {status.efficiency:.0%}"
        yield "measured", text
    if predicted is not None:
        against = "" if ratio is None else f"; measured is {ratio:.2f} times that"
        yield "predicted", f"{format_time(predicted)} a step{against}"
    if status.laggard is not None:
        yield "waiting", _laggard(status.laggard)
    if status.peaks:
        yield "peak memory", _peaks(status.peaks)
    if status.job.state.alive and found.remaining_s is not None:
        yield "remaining", format_time(found.remaining_s)


def _laggard(found: Laggard) -> str:
    node = f" on {found.node}" if found.node else ""
    return (
        f"for rank {found.rank}{node}: the others wait {found.others:.0%} of their time, "
        f"it waits {found.share:.0%}"
    )


def _peaks(peaks: Sequence[Peak]) -> str:
    """Of the ranks that have held most."""
    largest = sorted(peaks, key=lambda peak: peak.measured_bytes, reverse=True)[:_SHOWN_PEAKS]
    more = f", {len(peaks) - len(largest)} ranks less" if len(peaks) > len(largest) else ""
    return ", ".join(map(_peak, sorted(largest))) + more


def _peak(peak: Peak) -> str:
    text = f"rank {peak.rank} {format_bytes(peak.measured_bytes)}"
    if peak.predicted_bytes is None:
        return text
    return f"{text} (predicted {format_bytes(peak.predicted_bytes)})"


def _failure(status: RunStatus) -> Iterator[Text]:
    fault = status.culprit
    if fault is None or status.job.state is JobState.COMPLETED:
        return
    others = f" (and {fault.others} more ranks)" if fault.others else ""
    yield joined(plain("  error         ", "red"), plain(f"{fault.where}{others}"))
    for line in fault.message.splitlines():
        yield plain(f"                {line}")
    for line in (fault.cure or "").splitlines():
        yield plain(f"                {line}")
    yield plain(
        f"                details: {short(status.run.errors)}, pipectl logs {status.run.name}"
    )


def _time(time_s: float | None) -> str:
    return "" if time_s is None else format_time(time_s)
