"""The state of one run for people: everything about it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from datetime import datetime

from rich.console import Console
from rich.text import Text

from pipectl.batch import JobState
from pipectl.cli.console import joined, output, plain, say_json, short
from pipectl.cli.status_json import status_json
from pipectl.cli.status_words import progress, state_text
from pipectl.cli.sweep_values import values_text
from pipectl.cli.views.plan import headline
from pipectl.jobs.status import Laggard, Peak, RunStatus
from pipectl.runs import PROFILING, as_typed, last_checkpoint, step_of
from pipectl.units import format_bytes, format_time

_SHOWN_PEAKS = 4
_INDENT = 16
"""Columns of the labels."""
_GAP = Text("  ")


def show_run(status: RunStatus, *, as_json: bool = False) -> None:
    """Print everything about one run."""
    if as_json:
        say_json(status_json(status))
        return
    console = output()
    for line in run_lines(status):
        for part in _fitted(line, console) if console.is_terminal else [line]:
            console.print(part, soft_wrap=True)


def _fitted(line: Text, console: Console) -> Iterator[Text]:
    """A line on so many that each fits the terminal, those after the first indented; words, and so
    paths, stay whole."""
    room = console.width - _INDENT
    if len(line) <= console.width or room < _INDENT or not line.plain.startswith("  "):
        yield line
        return
    text = line.plain[_INDENT:]
    parts = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
    for number, part in enumerate(parts):
        yield joined(plain(" " * _INDENT) if number else line[:_INDENT], plain(part))


def run_lines(status: RunStatus, *, files: bool = True) -> Iterator[Text]:
    """Everything about one run.

    Args:
        files: whether to say what it has made, and where that lies.
    """
    yield joined(
        plain(_in_a_line(status.run.name), "bold"),
        _GAP,
        state_text(status),
        _GAP,
        plain(_in_a_line(_job(status))),
    )
    yield from _failure(status)
    for label, text in (*_point(status), *_details(status), *(_files(status) if files else ())):
        yield plain(f"  {label:<14}{_in_a_line(text)}")


def _in_a_line(text: str) -> str:
    """Nobody's field looks like another line."""
    return " ".join(text.split("\n"))


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
    if job.reason and not _says_no_more_than_the_failure(status):
        yield "reason", job.reason
    if job.start is not None and job.state.waits:
        yield "expected", f"to start {datetime.fromtimestamp(job.start):%Y-%m-%d %H:%M}"
    if status.restarts:
        yield "restarts", str(status.restarts)
    if status.record is not None:
        submitted = datetime.fromtimestamp(status.record.submitted_at)
        yield "submitted", f"{submitted:%Y-%m-%d %H:%M:%S}"
    yield from _doing(status)
    if made := progress(status, "step {} of {}"):
        yield "progress", made
    yield from _speed(status)
    if found.evaluation:
        values = ", ".join(f"{name} {_figure(value)}" for name, value in found.evaluation.items())
        yield "evaluation", f"after step {found.evaluation_step}: {values}"
    if found.first_loss is not None:
        now = _figure(found.last_loss)
        yield "loss", f"{found.first_loss:.4g} after the first step, {now} now"
    if found.not_finite:
        *more, last = found.not_finite
        before = f"; {len(more)} steps before it" if more else ""
        yield "not finite", f"step {last}: {found.fault}{before}"


def _doing(status: RunStatus) -> Iterator[tuple[str, str]]:
    if status.phase and status.job.state.alive:
        yield "doing", status.phase
    if stalled := status.stalled:
        yield "stalled", stalled


def _says_no_more_than_the_failure(status: RunStatus) -> bool:
    """Whether the reason is but the exit code, and a rank has said what was wrong."""
    return status.culprit is not None and status.job.reason.startswith("exit code")


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


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
        yield "to go on", f"pipectl resume {as_typed(status.run)}  (from {since})"
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
    yield joined(plain("  error         ", "red"), plain(_in_a_line(f"{fault.where}{others}")))
    for line in fault.message.splitlines():
        yield plain(f"                {line}")
    for line in (fault.cure or "").splitlines():
        yield plain(f"                {line}")
    yield plain(
        f"                details: {short(status.run.errors)}, pipectl logs {as_typed(status.run)}"
    )
