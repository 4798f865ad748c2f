"""The state of runs for people and as JSON: one run, a table of many, a sweep, the ranks."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipectl.batch import JobState, JobStatus
from pipectl.cli.console import joined, output, plain, say, say_json, short
from pipectl.cli.rows import Rows
from pipectl.cli.sweep_values import short_keys, shown, values_text
from pipectl.cli.tables import table
from pipectl.cli.views.plan import headline
from pipectl.jobs.state import Laggard, Peak, RunStatus, find_best
from pipectl.report.charts import thinned
from pipectl.runs import PROFILING, SweepDirectory, as_typed, last_checkpoint, step_of
from pipectl.units import format_bytes, format_time

_STYLES = {
    JobState.COMPLETED: "green",
    JobState.RUNNING: "cyan",
    JobState.QUEUED: "yellow",
    JobState.HELD: "yellow",
    JobState.UNKNOWN: "yellow",
    JobState.CANCELLED: "dim",
}
_SLOWER = 1.1
"""Measured over predicted step time from which on a run counts as slow."""
_MAX_PEAKS = 4
_INDENT = 16
"""Columns of the labels."""
_MAX_REASON = 40
"""Characters of a reason in a table."""
_EIGHTHS, _LEVELS = " ▏▎▍▌▋▊▉█", "▁▂▃▄▅▆▇█"
_FIGURES = (
    "step", "loss", "per step", "predicted", "efficiency", "memory", "restarts", "remaining",
)  # fmt: skip
_HEADS = ("run", "values", "state", "on", *_FIGURES, "waits for")
_OPTIONAL = (  # the least important first
    "predicted", "memory", "efficiency", "on", "restarts", "waits for", "remaining", "per step",
    "values",
)  # fmt: skip
_RANK_HEADS = ("rank", "node", "stage", "busy", "waits", "computes per step", "memory", "predicted")


def print_run(status: RunStatus, *, as_json: bool = False) -> None:
    """Print everything about one run."""
    if as_json:
        say_json(run_json(status))
        return
    console = output()
    for line in run_lines(status):
        for part in _wrap(line, console) if console.is_terminal else [line]:
            console.print(part, soft_wrap=True)


def print_sweep(
    sweep: SweepDirectory, statuses: Sequence[RunStatus], *, as_json: bool = False
) -> None:
    """Print how the runs of a sweep are."""
    if as_json:
        best = find_best(statuses)
        say_json(
            {
                "sweep": sweep.name,
                "directory": str(sweep.path),
                "best": None if best is None else best.run.name,
                "runs": [run_json(status) for status in statuses],
            }
        )
    else:
        console = output()
        say(sweep_headline(sweep, statuses), "bold")
        console.print(sweep_table(sweep, statuses, console.width))


def run_json(status: RunStatus) -> dict[str, Any]:
    """Everything about one run, for programs."""
    so_far, job, record, failure = status.measured, status.job, status.record, status.failure
    sweep = None if record is None else record.sweep
    return {
        "run": status.run.name,
        "directory": str(status.run.path),
        "kind": record.kind if record else None,
        "sweep": None if sweep is None else {"name": sweep.name, "values": dict(sweep.values)},
        "scheduler": record.scheduler if record else None,
        "job_id": record.job_id if record else None,
        "state": job.state.value,
        "reason": job.reason,
        "source": job.source,
        "nodes": job.nodes,
        "exit_code": job.exit_code,
        "submitted_at": record.submitted_at if record else None,
        "phase": status.phase,
        "stalled": status.stalled or None,
        "restarts": status.restarts,
        "expected_start": job.start if job.state.waits else None,
        "step": so_far.step,
        "steps": status.steps,
        "first_loss": so_far.first_loss,
        "last_loss": so_far.last_loss,
        "samples_per_s": so_far.samples_per_s,
        "step_time_s": so_far.step_time_s,
        "predicted_step_time_s": status.predicted_step_s,
        "measured_over_predicted": status.prediction_ratio,
        "efficiency": status.efficiency,
        "remaining_s": so_far.remaining_s,
        "not_finite_steps": list(so_far.not_finite),
        "evaluation_step": so_far.evaluation_step,
        "evaluation": dict(so_far.evaluation),
        "waits_for": None if status.laggard is None else status.laggard._asdict(),
        "ranks": [dict(rank) for rank in status.ranks],
        "peaks": [peak._asdict() for peak in status.peaks],
        "error": None if failure is None else {"where": failure.where, "message": failure.message},
    }


def run_lines(status: RunStatus, *, files: bool = True) -> Iterator[Text]:
    """Everything about one run, a label and a text per line.

    Args:
        files: whether to say what it has made, and where that lies.
    """
    record, job = status.record, status.job
    where = f" on {job.nodes}" if job.nodes else ""
    named = f"{record.scheduler} job {record.job_id or 'not confirmed'}{where}" if record else ""
    yield joined(
        plain(_on_one_line(status.run.name), "bold"),
        Text("  "),
        _state(status),
        Text("  "),
        plain(_on_one_line(named)),
    )
    if status.failure is not None and job.state is not JobState.COMPLETED:
        failure = status.failure
        others = f" (and {failure.others} more ranks)" if failure.others else ""
        yield joined(
            plain(f"  {'error':<14}", "red"), plain(_on_one_line(f"{failure.where}{others}"))
        )
        logs = f"details: {short(status.run.errors)}, pipectl logs {as_typed(status.run)}"
        for line in (*failure.message.splitlines(), *(failure.cure or "").splitlines(), logs):
            yield plain(f"{'':{_INDENT}}{line}")
    for label, text, style in (*_details(status), *(_files(status) if files else ())):
        yield joined(plain(f"  {label:<14}"), plain(_on_one_line(text), style))


def _details(status: RunStatus) -> Iterator[tuple[str, str, str]]:
    """Label, text and style: what it does, how it goes, what it holds, when it was submitted."""
    job, record = status.job, status.record
    only_exit_code = status.failure is not None and job.reason.startswith("exit code")
    if job.reason and not only_exit_code:
        yield "reason", job.reason, ""
    if job.start is not None and job.state.waits:
        yield "expected", f"to start {datetime.fromtimestamp(job.start):%Y-%m-%d %H:%M}", ""
    if status.phase and job.state.alive:
        yield "doing", status.phase, ""
    if stalled := status.stalled:
        yield "stalled", stalled, "red"
    if progress := _progress(status):
        yield "progress", progress, ""
    yield from _speed(status)
    yield from _figures(status)
    if status.restarts:
        yield "restarts", str(status.restarts), ""
    if record is not None and record.sweep is not None:
        yield "values", values_text(record.sweep.values), ""
        yield "sweep", record.sweep.name, ""
    if record is not None:
        yield "submitted", f"{datetime.fromtimestamp(record.submitted_at):%Y-%m-%d %H:%M:%S}", ""


def _figures(status: RunStatus) -> Iterator[tuple[str, str, str]]:
    """Losses, waits and memory."""
    so_far = status.measured
    if so_far.first_loss is not None:
        now = _figure(so_far.last_loss)
        yield "loss", f"{so_far.first_loss:.4g} after the first step, {now} now", ""
    if so_far.not_finite:
        *more, last = so_far.not_finite
        before = f"; {len(more)} steps before it" if more else ""
        yield "not finite", f"step {last}: {so_far.fault}{before}", "red"
    if so_far.evaluation:
        values = ", ".join(f"{name} {_figure(value)}" for name, value in so_far.evaluation.items())
        yield "evaluation", f"after step {so_far.evaluation_step}: {values}", ""
    if status.laggard is not None:
        yield "waiting", _laggard(status.laggard), "yellow"
    if status.peaks:
        yield "peak memory", _peaks(status.peaks), ""


def _progress(status: RunStatus) -> str:
    """``████████░░░░ step 40 of 60, 1 min 20 s left``; percent of a run that only measures."""
    step, steps = status.measured.step, status.steps
    if not steps:
        return ""
    measures = status.record is not None and status.record.kind == PROFILING
    done = f"{step}%" if measures else f"step {step} of {steps}"
    left_s = status.measured.remaining_s if status.job.state.alive else None
    left = "" if left_s is None else f", {format_long_time(left_s)} left"
    return f"{bar(step / steps, 20).replace(' ', '░')} {done}{left}"


def _speed(status: RunStatus) -> Iterator[tuple[str, str, str]]:
    step_s, predicted_s, ratio = (
        status.measured.step_time_s,
        status.predicted_step_s,
        status.prediction_ratio,
    )
    if step_s is not None:
        text = f"{format_time(step_s)} per step"
        if status.plan is not None:
            text += f", {status.plan.batch_size / step_s:.1f} samples/s"
        if status.efficiency is not None:
            text += f", efficiency {status.efficiency:.0%}"
        yield "speed", text, ""
    if predicted_s is not None:
        against, style = "", ""
        if ratio is not None:
            style = "yellow" if ratio >= _SLOWER else "green"
            change = abs(ratio - 1)
            how = "as predicted" if change < 0.005 else "slower" if ratio > 1 else "faster"
            against = f"; the run takes {ratio:.2f} times that ({change:.0%} {how})"
            if change < 0.005:
                against = "; so does the run"
        yield "predicted", f"{format_time(predicted_s)} per step{against}", style


def _laggard(laggard: Laggard) -> str:
    node = f" on {laggard.node}" if laggard.node else ""
    return (
        f"for rank {laggard.rank}{node}: the others wait {laggard.others:.0%} of their time, "
        f"it waits {laggard.share:.0%}"
    )


def _peaks(peaks: Sequence[Peak]) -> str:
    """Of the ranks that have held most."""
    largest = sorted(peaks, key=lambda peak: peak.measured_bytes, reverse=True)[:_MAX_PEAKS]
    texts = []
    for peak in sorted(largest):
        predicted = peak.predicted_bytes
        expected = "" if predicted is None else f" (predicted {format_bytes(predicted)})"
        texts.append(f"rank {peak.rank} {format_bytes(peak.measured_bytes)}{expected}")
    if len(peaks) > len(largest):
        texts.append(f"{len(peaks) - len(largest)} ranks less")
    return ", ".join(texts)


def _files(status: RunStatus) -> Iterator[tuple[str, str, str]]:
    """What the run has made, and where it lies."""
    run = status.run
    if status.record and status.record.kind == PROFILING:
        for label, path in (("profile", run.profile), ("cluster", run.cluster)):
            if path.exists():
                yield label, short(path), ""
    if status.plan is not None:
        yield "plan", headline(status.plan).removeprefix(f"{status.plan.name}: "), ""
        yield "plan file", short(run.plan), ""
    weights = last_checkpoint(run)
    if weights is not None:
        yield "weights", short(weights), ""
    if status.can_go_on:
        since = "its beginning" if weights is None else f"step {step_of(weights)}"
        yield "to go on", f"pipectl resume {as_typed(run)}  (from {since})", ""
    yield "run directory", short(run.path), ""


def runs_table(statuses: Sequence[RunStatus], width: int) -> Rows:
    """One row per run; without empty columns, and without the least important if it gets too wide.

    Args:
        width: columns of the terminal.
    """
    rows = [_row(status) for status in statuses]
    columns = {head: [row[index] for row in rows] for index, head in enumerate(_HEADS)}
    return Rows(columns, _FIGURES, optional=_OPTIONAL, room=width)


def _row(status: RunStatus) -> list[Text]:
    record, so_far, peaks = status.record, status.measured, status.peaks
    left_s = so_far.remaining_s if status.job.state.alive else None
    times = [so_far.step_time_s, status.predicted_step_s]
    slow = (status.prediction_ratio or 0) >= _SLOWER
    cells = (
        plain(status.run.name),
        plain("" if record is None or record.sweep is None else values_text(record.sweep.values)),
        _state(status),
        plain(record.scheduler if record else ""),
        plain(_steps(status)),
        plain("" if so_far.last_loss is None else f"{so_far.last_loss:.4g}"),
        *(plain("" if s is None else format_time(s), "yellow" if slow else "") for s in times),
        plain("" if status.efficiency is None else f"{status.efficiency:.0%}"),
        plain(format_bytes(max(peak.measured_bytes for peak in peaks)) if peaks else ""),
        plain(status.restarts or ""),
        plain("" if left_s is None else format_long_time(left_s)),
        plain(_waits_for(status.job)),
    )
    return list(cells)


def _waits_for(job: JobStatus) -> str:
    """What a job in the queue waits for, and until when, as far as the batch system says."""
    if not job.state.waits:
        return ""
    start = "" if job.start is None else f"until {datetime.fromtimestamp(job.start):%a %H:%M}"
    return ", ".join(filter(None, (job.reason[:_MAX_REASON], start)))


def sweep_headline(sweep: SweepDirectory, statuses: Sequence[RunStatus]) -> str:
    """Its name, and how many runs are in which state."""
    states = Counter(status.job.state.value for status in statuses)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    return f"{sweep.name}  {len(statuses)} runs: {counts}"


def sweep_table(
    sweep: SweepDirectory, statuses: Sequence[RunStatus], width: int, max_rows: int | None = None
) -> Rows:
    """One row per point: its place, values, state and figures; the best is marked.

    Args:
        width: columns of the terminal; values go last if they do not fit.
        max_rows: at most so many, those that are over last of all.
    """
    best = find_best(statuses)
    if max_rows is not None:
        statuses = sorted(statuses, key=lambda status: status.job.state.final)[:max_rows]
    points: list[Mapping[str, Any]] = [
        {} if one.record is None or one.record.sweep is None else one.record.sweep.values
        for one in statuses
    ]
    taken = ("run", "state", "step", "loss", "best")
    keys = short_keys([key for point in points for key in point], taken=taken)
    metrics = dict.fromkeys(name for one in statuses for name in one.measured.evaluation)
    stem = f"{sweep.name}-"
    columns: dict[str, list[Text]] = {
        "run": [plain(one.run.name.removeprefix(stem)) for one in statuses],
        **{name: [plain(shown(point, key)) for point in points] for key, name in keys.items()},
        "state": [_state(one) for one in statuses],
        "step": [plain(f"{one.measured.step}/{one.steps or '?'}") for one in statuses],
        "loss": [plain(_figure(one.measured.last_loss, "")) for one in statuses],
    }
    for name in metrics:
        values = (one.measured.evaluation.get(name) for one in statuses)
        columns[f"evaluation {name}"] = [plain(_figure(value, "")) for value in values]
    if best is not None:
        columns["best"] = [plain("*" if one is best else "", "green") for one in statuses]
    optional = ("step", *reversed(list(keys.values())))
    return Rows(columns, set(columns) - {"run", "state"}, optional=optional, room=width)


def ranks_table(status: RunStatus, max_rows: int | None = None) -> Table:
    """Every rank that has been heard of: how much of its time it computes, and what it holds.

    Args:
        max_rows: None for all.
    """
    peaks = {peak.rank: peak for peak in status.peaks}
    ranks, count = status.ranks, len(status.ranks)
    if max_rows is not None and count > max_rows:
        ranks = ranks[: max_rows - 1]
    rows = table(*_RANK_HEADS, left=("node", "stage", "busy"))
    for rank in ranks:
        waiting, busy_s, peak = rank.get("waiting"), rank.get("busy_s"), peaks.get(rank["rank"])
        predicted = None if peak is None else peak.predicted_bytes
        cells = (
            rank["rank"],
            rank.get("node", ""),
            ",".join(map(str, rank.get("stages") or ())),
            "" if waiting is None else bar(1 - waiting, 10),
            "" if waiting is None else f"{waiting:.0%}",
            "" if busy_s is None else format_time(busy_s),
            "" if peak is None else format_bytes(peak.measured_bytes),
            "" if predicted is None else format_bytes(predicted),
        )
        rows.add_row(*map(plain, cells))
    if len(ranks) < count:
        rows.add_row("…", plain(f"{count - len(ranks)} more"))
    return rows


def bar(share: float, width: int) -> str:
    """A share from 0 to 1 as a bar of so many characters."""
    eighths = round(8 * width * min(1.0, max(0.0, share)))
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def sparkline(values: Sequence[float], width: int) -> str:
    """A character per value, or for as many neighbours as it takes to fit, their mean.

    Args:
        width: characters at most.
    """
    if not values:
        return ""
    means = [mean for _, mean in thinned(list(enumerate(values)), width)]
    low, span = min(means), max(means) - min(means)
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[round(top * (mean - low) / span) if span else 0] for mean in means)


def format_long_time(time_s: float) -> str:
    """As :func:`format_time`; hours and days instead of very many minutes."""
    if time_s < 7200:
        return format_time(time_s)
    hours, minutes = divmod(round(time_s / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours / 24:.1f} days"


def _state(status: RunStatus) -> Text:
    """A state in its colour."""
    state = status.job.state
    return Text(state.value, style=_STYLES.get(state, "red"))


def _steps(status: RunStatus) -> str:
    """Steps made of those to make; a run that only measures has percent."""
    if status.record is not None and status.record.kind == PROFILING:
        return f"{status.measured.step}%"
    return f"{status.measured.step}/{status.steps}" if status.steps else ""


def _figure(value: float | None, missing: str = "not finite") -> str:
    return missing if value is None else f"{value:.4g}"


def _on_one_line(text: str) -> str:
    """Nobody's field looks like another line."""
    return " ".join(text.split("\n"))


def _wrap(line: Text, console: Console) -> Iterator[Text]:
    """A line on as many as it takes to fit the terminal, the later ones indented; words, and so
    paths, stay whole."""
    room = console.width - _INDENT
    if len(line) <= console.width or room < _INDENT or not line.plain.startswith("  "):
        yield line
        return
    style = line.spans[-1].style if line.spans else ""
    text = line.plain[_INDENT:]
    parts = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
    for number, part in enumerate(parts):
        yield joined(plain(" " * _INDENT) if number else line[:_INDENT], plain(part, str(style)))
