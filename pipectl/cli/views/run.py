"""The state of runs as text and as JSON: one run, a list, a sweep, the ranks of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from pipectl.batch import JobState, JobStatus
from pipectl.cli.console import (
    Fitted,
    label_lines,
    plain,
    say_json,
    short_path,
    show,
    table,
    whole,
)
from pipectl.files import is_there
from pipectl.jobs.run_json import Subject, runs_json
from pipectl.jobs.state import RunStatus, find_best
from pipectl.runs import (
    PROFILING,
    TRAINING,
    Logs,
    SweepDirectory,
    best_checkpoint,
    best_evaluation,
    last_checkpoint,
    name_in_shell,
    read_heartbeat,
    read_nodes,
    read_starts,
    step_of,
)
from pipectl.runs.kept_code import read_changed_code
from pipectl.runs.phases import TRAINS
from pipectl.units import format_bytes, format_long_time, format_time, plural, printable

_STYLES = {
    JobState.COMPLETED: "green",
    JobState.RUNNING: "cyan",
    JobState.QUEUED: "yellow",
    JobState.HELD: "yellow",
    JobState.UNKNOWN: "yellow",
    JobState.CANCELLED: "dim",
}
_SLOWER = 1.1
"""Measured over predicted step time of a run that counts as slow."""
_FULL = 1.005
"""Efficiency that is printed as more than 100 %: computing was faster than in the profile."""
_INDENT = 16
"""Width of the labels."""
_MAX_REASON, _MAX_VALUE = 40, 24
"""Maximum characters of a reason, and of a value of a sweep, in a table."""
_NOTHING_S = 1e-4
"""Part of a step that is too short to mention."""
_NOTHING_NEW = ("exit code", "NonZeroExitCode")
"""Beginnings of reasons that say less than the report of a failure."""
_MAX_PARTS = 3
"""Maximum number of parts of a difference."""
_MOVES = {
    "none": "while a rank sends or waits",
    "thread": "at any time, by a thread",
}
"""When messages move, by the heartbeat's ``progress``."""
_HUGE = 1e300
"""Sums of such values are finite."""
_EIGHTHS, _LEVELS = " ▏▎▍▌▋▊▉█", "▁▂▃▄▅▆▇█"
_WORDS = ("run", "values", "state", "on", "waits for")
_OPTIONAL = (  # the least important first
    "predicted", "memory", "efficiency", "on", "restarts", "remaining", "per step", "waits for",
    "values",
)  # fmt: skip
Fact = tuple[str, str, str]
"""Label, text and style."""
Difference = tuple[int, Mapping[str, float]]
"""A recorded step, and how it differs from the prediction; see :func:`divide_last_step`."""


def print_runs(subject: Subject, statuses: Sequence[RunStatus], *, as_json: bool = False) -> None:
    """Print everything about one run, a sweep and its runs, or a table of runs."""
    if as_json:
        say_json(runs_json(subject, statuses))
    else:
        show(draw_runs(subject, statuses))


def draw_runs(
    subject: Subject, statuses: Sequence[RunStatus], height: int | None = None
) -> RenderableType:
    """The state of runs as text.

    Args:
        height: lines of the full screen, on which one run has a curve of its loss and its ranks in
            place of its files; of a sweep, runs that are over come last. None for a text of any
            length.
    """
    if isinstance(subject, SweepDirectory):
        return _draw_sweep(subject, statuses, height)
    if subject is None:
        return runs_table(statuses)
    (status,) = statuses
    if height is None:
        difference = None
        if status.prediction_ratio:  # the simulator is imported if there is something to compare
            from pipectl.report.comparison import divide_last_step

            difference = divide_last_step(status.run)
        return Fitted(lambda width: Group(*run_lines(status, width, difference)))
    losses = [line.loss for line in status.curve if line.loss is not None]

    def draw_screen(width: int) -> RenderableType:
        parts: list[RenderableType] = [*run_lines(status, width, files=False)]
        if losses:
            parts += [Text(), plain(f"  loss  {sparkline(losses, max(10, width - 10))}", "cyan")]
        room = height - len(parts)
        if status.ranks and room > 0:
            parts += [Text(), ranks_table(status, room)]
        return Group(*parts)

    return Fitted(draw_screen)


def run_lines(
    status: RunStatus, width: int, difference: Difference | None = None, *, files: bool = True
) -> Iterator[Text]:
    """Everything about one run, a label and a text per line, wrapped to ``width`` columns.

    Args:
        files: whether to list the files of the run.
    """
    record, job = status.record, status.job
    job_text = f"{record.scheduler} job {record.job_id or 'not confirmed'}" if record else ""
    if job.nodes and not job_text.endswith(f"@{job.nodes}"):
        job_text += f" on {job.nodes}"
    name, state = plain(status.run.name, "bold"), _state(status)
    head = Text("  ").join((name, state, plain(job_text)))
    head = Text(" ").join(head.split("\n"))  # nobody's field looks like another line
    head.no_wrap, head.overflow = True, "ignore"
    yield head
    facts = run_facts(status, difference)
    facts += _files(status) if files else ()
    indented = ((f"  {label}", text, style) for label, text, style in facts)
    yield from label_lines(indented, _INDENT, width)


def run_facts(status: RunStatus, difference: Difference | None = None) -> list[Fact]:
    """Failure, progress, speed and memory of a run; see :func:`run_lines`."""
    facts = [*_failure(status), *_changed_code(status), *_processor(status)]
    facts += [*_progress(status), *_times(status), *_pace(status)]
    return [*facts, *(_difference(*difference) if difference else ()), *_memory_and_waits(status)]


def _failure(status: RunStatus) -> Iterator[Fact]:
    """What ended the run, or what it waits for."""
    job, failure = status.job, status.failure
    logs = whole(f"pipectl logs {name_in_shell(status.run)}")
    details = f"logs: {logs}"
    if failure is not None and failure.has_file:
        details = f"details: {whole(short_path(status.start.errors))}\n{details}"
    if failure is not None and job.state is not JobState.COMPLETED:
        others = len(status.errors) - 1
        also = f" (and {plural(others, 'more rank')})" if others else ""
        yield "error", f"{failure.where}{also}", "red"
        yield "", "\n".join(filter(None, (failure.what, failure.hint, details))), ""
    if job.reason and not (failure is not None and job.reason.startswith(_NOTHING_NEW)):
        yield "reason", job.reason, ""
    if job.hint:
        yield "", job.hint, ""
    if failure is None and job.state is JobState.FAILED and not Logs(status.run).is_empty:
        yield "details", logs, ""
    if warning := status.warning:
        yield "warning", f"{printable(warning)}\nlogs: {logs}", "yellow"
    if job.start is not None and job.state.waits:
        yield "expected", f"to start {datetime.fromtimestamp(job.start):%Y-%m-%d %H:%M}", ""
    if stalled := status.stalled:
        yield "stalled", stalled, "red"


def _changed_code(status: RunStatus) -> Iterator[Fact]:
    """Files of the job that have changed since the submission."""
    if used := read_changed_code(status.start):
        names = ", ".join(short_path(Path(path)) for path in used)
        yield (
            "changed code",
            f"since the submission, and used as it was at the start: {names}",
            "red",
        )
    more = "; `resume --with-changed-code` takes the files" if status.can_go_on else ""
    if own := [short_path(Path(each.path)) for each in status.changed_files if each.copy]:
        yield (
            "code",
            f"{', '.join(own)} changed since; the run keeps its own copies{more}",
            "yellow",
        )


def _processor(status: RunStatus) -> Iterator[Fact]:
    """Who had the cores of the ranks: before all figures, which depend on it."""
    if (processor := status.measured.processor) is not None:
        yield "processor", processor.describe(status.ranks), "red"
        if status.record is not None and (hint := processor.hint(status.record.scheduler)):
            yield "", hint, ""


def _progress(status: RunStatus) -> Iterator[Fact]:
    """Steps, time left and loss; percent if the run only measures."""
    alive, so_far = status.job.state.alive, status.measured
    if status.phase not in ("", TRAINS) and alive:
        yield "phase", status.phase, ""
    if status.steps:
        picture = bar(status.step / status.steps, 20).replace(" ", "░")
        done = f"{status.step}%" if _measures(status) else f"step {status.step} of {status.steps}"
        left_s = so_far.remaining_s if alive else None
        left = f", {format_long_time(left_s)} left" if left_s else ""
        yield "progress", f"{picture} {done}{left}", ""
    if so_far.has_losses and (status.record is None or status.record.kind == TRAINING):
        first, last = _figure(so_far.first_loss), _figure(so_far.last_loss)
        when = "at the end" if status.job.state.final else "now"
        yield "loss", f"{first} at first, {last} {when}", ""
    if so_far.rebalanced:
        *more, moved = so_far.rebalanced
        before = f"; {plural(len(more), 'time')} before it" if more else ""
        yield "rebalanced", f"after step {moved}: {so_far.why}{before}", ""
    if so_far.not_finite:
        *more, at = so_far.not_finite
        before = f"; {plural(len(more), 'step')} before it" if more else ""
        yield "not finite", f"step {at}: {so_far.fault}{before}", "red"
    if so_far.evaluation:
        values = ", ".join(f"{name} {_figure(value)}" for name, value in so_far.evaluation.items())
        end = f"; the training ended: {so_far.early_stop}" if so_far.early_stop else ""
        yield "evaluation", f"after step {so_far.evaluation_step}: {values}{end}", ""
    if (best := best_evaluation(status.run.checkpoints)) is not None:
        kept = best_checkpoint(status.run.checkpoints)
        text = str(best)
        if kept is None:
            text += "; there is no checkpoint of it"
        elif kept.missed is not None:
            text += f"; its checkpoint is missing, that of step {kept.best.step} is the best"
        yield "best", text, ""


def _times(status: RunStatus) -> Iterator[Fact]:
    """How long it has waited and run, and whether its walltime suffices."""
    times, alive = status.times, status.job.state.alive
    if status.job.state.waits and status.record is not None and status.record.after:
        names = ", ".join(map(whole, status.record.after))
        yield "after", f"starts once {names} has completed", ""
    in_this_start = " in this start" if status.restarts else ""
    words = (
        (times.waited_s, "has waited {}" if status.job.state.waits else "waited {}"),
        (times.run_s, f"{'runs' if alive else 'ran'} for {{}}{in_this_start}"),
        (times.left_s, "{} of its walltime left"),
    )
    said = [text.format(_whole_time(time_s)) for time_s, text in words if time_s is not None]
    if said:
        yield "time", ", ".join(said), ""
    if times.node_hours is not None:
        yield "used", f"{times.node_hours:.3g} node-hours{in_this_start}", ""
    if (last := status.last_step) is not None:
        yield "too short", _what_then(status, last), "yellow"


def _whole_time(time_s: float) -> str:
    """As :func:`format_long_time`, in whole seconds."""
    return f"{time_s:.0f} s" if time_s < 120 else format_long_time(time_s)


def _what_then(status: RunStatus, last: int) -> str:
    """What becomes of a run whose walltime does not suffice."""
    record = status.record
    text = f"at this speed, its walltime is over after step {last} of {status.steps}; "
    if record is None or record.lead_time_s is None:
        return f"{text}it saves no checkpoint then: see `checkpoint` in the job"
    if record.max_starts is not None and read_starts(status.run) < record.max_starts:
        return f"{text}it then saves a checkpoint, and starts again by itself"
    return f"{text}it then saves a checkpoint, from which `pipectl resume` goes on"


def _pace(status: RunStatus) -> Iterator[Fact]:
    """Measured and predicted speed."""
    so_far, ratio = status.measured, status.prediction_ratio
    step_s = so_far.step_time_s
    if step_s is not None:
        text = f"{format_time(step_s)} per step{_of_steps(status)}"
        if so_far.samples_per_s:
            text += f", {so_far.samples_per_s:.1f} samples/s"
        if so_far.tokens_per_s:
            text += f", {so_far.tokens_per_s:,.0f} tokens/s"
        if status.plan is not None:
            flops = status.plan.describe_flops(step_s)
            text += f", {flops}" if flops else ""
        if status.efficiency is not None:
            text += f", efficiency {status.efficiency:.0%}"
            text += " (faster than profiled)" if status.efficiency >= _FULL else ""
        yield "speed", text, ""
    if status.predicted_step_s is not None:
        text, style = f"{format_time(status.predicted_step_s)} per step", ""
        if ratio is not None:
            style, change = "yellow" if ratio >= _SLOWER else "green", abs(ratio - 1)
            how = f"is {change:.0%} {'slower' if ratio > 1 else 'faster'}"
            how = how if change >= 0.005 else "is as fast as that"
            text += f"; the run {how if change <= 1 else f'takes {ratio:.2f} times that'}"
        yield "predicted", text, style


def _of_steps(status: RunStatus) -> str:
    """Of which steps the speed is the median."""
    so_far = status.measured
    if so_far.timed_steps < 2:
        return ""
    last = "" if status.job.state.final else "the last "
    plan = " under the last plan" if so_far.is_of_plan else ""
    return f" (median of {last}{so_far.timed_steps}{plan})"


def _difference(step: int, parts: Mapping[str, float]) -> Iterator[Fact]:
    """``step 10 was 9.10 ms longer: 4.20 ms computing, 3.10 ms waiting for messages``."""
    from pipectl.report.comparison import TIME_USES

    total_s = sum(parts.values())
    named = [(TIME_USES[name].name, part_s) for name, part_s in parts.items()]
    named.sort(key=lambda part: -abs(part[1]))
    worth = [part for part in named if abs(part[1]) >= max(_NOTHING_S, abs(total_s) / 20)]
    if worth:
        listed = ", ".join(
            f"{format_time(abs(part_s))} {'more' if part_s > 0 else 'less'} {name}"
            for name, part_s in worth[:_MAX_PARTS]
        )
        how = "longer" if total_s > 0 else "shorter"
        yield "difference", f"step {step} was {format_time(abs(total_s))} {how}: {listed}", ""


def _memory_and_waits(status: RunStatus) -> Iterator[Fact]:
    """The rank with the most memory, and the rank that the others wait for."""
    if status.peaks:
        rank, measured, predicted = max(status.peaks, key=lambda peak: peak.measured_bytes)
        expected = "" if predicted is None else f", predicted {format_bytes(predicted)}"
        yield "memory", f"at most {format_bytes(measured)} per rank (rank {rank}{expected})", ""
    if (laggard := status.laggard) is not None:
        node = f" on {laggard.node}" if laggard.node else ""
        text = (
            f"for rank {laggard.rank}{node}: the others wait {laggard.others:.0%} of their time, "
            f"it waits {laggard.share:.0%}"
        )
        yield "waiting", text, "yellow"


def _files(status: RunStatus) -> Iterator[Fact]:
    """What was submitted, and where the files of the run are."""
    run, record = status.run, status.record
    if status.restarts:
        yield "restarts", str(status.restarts), ""
    if record is not None and record.sweep is not None:
        yield "values", values_text(record.sweep.values), ""
        yield "sweep", record.sweep.name, ""
    if record is not None:
        first_s = min((record.submitted_at, *(event.time for event in record.history)))
        times = {"submitted": first_s, "resumed": record.submitted_at}
        for label, time_s in [*times.items()][: 2 if record.submitted_at > first_s else 1]:
            yield label, f"{datetime.fromtimestamp(time_s):%Y-%m-%d %H:%M:%S}", ""
    results = {"profile": run.profile, "cluster": run.cluster} if _measures(status) else {}
    yield from (
        (label, whole(short_path(path)), "") for label, path in results.items() if is_there(path)
    )
    if record is not None and record.min_nodes is not None:
        number = f"{used} of " if (used := read_nodes(status.start)) else ""
        yield "nodes", f"{number}{record.min_nodes}-{record.nodes}", ""
    if status.plan is not None:
        yield "plan", status.plan.summary, ""
    yield "directory", whole(short_path(run.path)), ""
    weights = last_checkpoint(run)
    if weights is not None:
        yield "weights", whole(short_path(weights)), ""
    if status.can_go_on:
        since = "the beginning" if weights is None else f"step {step_of(weights)}"
        yield "resume with", f"{whole(f'pipectl resume {name_in_shell(run)}')}  (from {since})", ""


def runs_table(statuses: Sequence[RunStatus]) -> RenderableType:
    """One row per run, without empty columns, and without less important ones that do not fit."""
    return _table([_row(status) for status in statuses], _OPTIONAL)


def _table(rows: Sequence[Mapping[str, str | Text]], optional: Sequence[str]) -> RenderableType:
    """A table of rows, which map heads to cells."""
    cells = [tuple(row.values()) for row in rows]
    return table(tuple(rows[0]), cells, left=_WORDS, optional=optional, cut="waits for")


def _row(status: RunStatus) -> dict[str, str | Text]:
    record, so_far, peaks = status.record, status.measured, status.peaks
    sweep = None if record is None else record.sweep
    left_s = so_far.remaining_s if status.job.state.alive else None
    step = f"{status.step}/{status.steps}" if status.steps else ""
    pace = "yellow" if (status.prediction_ratio or 0) >= _SLOWER else ""
    return {
        "run": status.run.name,
        "values": "" if sweep is None else values_text(sweep.values),
        "state": plain(status.job.reason) if status.is_closed else _state(status),
        "on": record.scheduler if record else "",
        "step": f"{status.step}%" if _measures(status) else step,
        "loss": _figure(so_far.last_loss, ""),
        "per step": plain(_time(so_far.step_time_s), pace),
        "predicted": plain(_time(status.predicted_step_s), pace),
        "efficiency": "" if status.efficiency is None else f"{status.efficiency:.0%}",
        "memory": format_bytes(max(peak.measured_bytes for peak in peaks)) if peaks else "",
        "restarts": str(status.restarts or ""),
        "remaining": "" if left_s is None else format_long_time(left_s),
        "waits for": _waits_for(status.job),
    }


def _waits_for(job: JobStatus) -> str:
    """What a queued job waits for, and its expected start, according to the batch system."""
    if not job.state.waits:
        return ""
    start = "" if job.start is None else f"until {datetime.fromtimestamp(job.start):%a %H:%M}"
    return ", ".join(filter(None, (_shortened(job.reason, _MAX_REASON), start)))


def _draw_sweep(
    sweep: SweepDirectory, statuses: Sequence[RunStatus], height: int | None
) -> RenderableType:
    """The number of runs in each state, and a row per run; the best run is marked.

    If columns do not fit, those of values are left out last.
    """
    states = Counter(status.job.state.value for status in statuses)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    head = plain(f"{sweep.name}  {len(statuses)} runs{counts and ': '}{counts}", "bold")
    if not statuses:
        return head
    best = find_best(statuses)
    if height is not None:
        statuses = sorted(statuses, key=lambda status: status.job.state.final)
        statuses = statuses[: max(1, height - 1)]
    points: list[Mapping[str, Any]] = [
        {} if one.record is None or one.record.sweep is None else one.record.sweep.values
        for one in statuses
    ]
    taken = ("run", "state", "step", "loss", "best")
    keys = short_keys((key for point in points for key in point), taken)
    metrics = dict.fromkeys(name for one in statuses for name in one.measured.evaluation)
    rows = []
    for point, one in zip(points, statuses, strict=True):
        facts, evaluation = _row(one), one.measured.evaluation
        rows.append(
            {
                "run": one.run.name.removeprefix(f"{sweep.name}-"),
                **{name: _value(point, key) for key, name in keys.items()},
                **{head: facts[head] for head in ("state", "step", "loss")},
                **{f"evaluation {name}": _figure(evaluation.get(name), "") for name in metrics},
                "best": plain("*" if one is best else "", "green"),
            }
        )
    optional = ("step", *reversed(keys.values()), "best")
    return Group(head, _table(rows, optional))


def values_text(values: Mapping[str, Any]) -> str:
    """The values of a point, with the last words of their keys: ``lr=0.001 seed=2``."""
    names = short_keys(values)
    return " ".join(f"{name}={_value(values, key)}" for key, name in names.items())


def short_keys(keys: Iterable[str], taken: Sequence[str] = ()) -> dict[str, str]:
    """The last word of every key, or the whole key if the word is ambiguous or ``taken``."""
    words = {key: key.rpartition(".")[2] for key in keys}
    ends = Counter(words.values())
    return {key: key if ends[word] > 1 or word in taken else word for key, word in words.items()}


def _value(values: Mapping[str, Any], key: str) -> str:
    """A shortened value; empty if the point has no such key."""
    if key not in values:
        return ""
    return _shortened("null" if values[key] is None else str(values[key]), _MAX_VALUE)


def _shortened(text: str, size: int) -> str:
    return text if len(text) <= size else f"{text[: size - 3]}..."


def ranks_table(status: RunStatus, max_rows: int | None = None) -> RenderableType:
    """One row per rank that has reported: the share of time it computes, and its memory.

    Args:
        max_rows: None for all.
    """
    peaks = {peak.rank: peak for peak in status.peaks}
    ranks, count = status.ranks, len(status.ranks)
    if max_rows is not None and count > max_rows:
        ranks = ranks[: max_rows - 1]
    rows: list[Sequence[object]] = []
    for rank in ranks:
        waiting, peak = rank.waiting, peaks.get(rank.rank)
        predicted = None if peak is None else peak.predicted_bytes
        rows.append(
            (
                rank.rank,
                rank.node,
                ",".join(map(str, rank.stages)),
                "" if waiting is None else bar(1 - waiting, 10),
                "" if waiting is None else f"{waiting:.0%}",
                _time(rank.busy_s),
                "" if peak is None else format_bytes(peak.measured_bytes),
                "" if predicted is None else format_bytes(predicted),
            )
        )
    if len(ranks) < count:
        rows.append(("…", f"{count - len(ranks)} more", *[""] * 6))
    computes = "computes in last step"
    heads = ("rank", "node", "stage", "busy", "waits", computes, "memory", "predicted")
    optional = ("predicted", computes, "busy", "stage", "waits", "memory", "node")
    parts: list[RenderableType] = [table(heads, rows, left=heads[1:4], optional=optional)]
    heartbeat = read_heartbeat(status.start)
    if heartbeat and (sent := heartbeat.messages):
        route, mode, why = (sent.get(key) for key in ("route", "progress", "why"))
        route = "straight from the ranks' memory" if route == "in place" else route
        moves = "".join(f" and move {words}" for key, words in _MOVES.items() if key == mode)
        how = f"messages go {route}{moves} (launch.progress: {mode}; reason: {why})"
        parts.append(plain(how, "dim"))
    return Group(*parts)


def bar(share: float, width: int) -> str:
    """A share from 0 to 1 as a bar of ``width`` characters."""
    eighths = round(8 * width * min(1.0, max(0.0, share)))
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve with one character per value, or per mean of neighbours if they do not fit.

    Args:
        width: maximum number of characters.
    """
    from pipectl.report.charts import average_points  # for --watch alone

    if not values:
        return ""
    small = [min(max(value, -_HUGE), _HUGE) for value in values]
    means = [mean for _, mean in average_points(list(enumerate(small)), width)]
    low, span = min(means), max(means) - min(means)
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[round(top * (mean - low) / span) if span else 0] for mean in means)


def _measures(status: RunStatus) -> bool:
    """Whether the run only measures, so its steps are percent."""
    return status.record is not None and status.record.kind == PROFILING


def _state(status: RunStatus) -> Text:
    """A state in its colour."""
    state = status.job.state
    return Text(state.value, style=_STYLES.get(state, "red"))


def _time(time_s: float | None) -> str:
    return "" if time_s is None else format_time(time_s)


def _figure(value: float | None, missing: str = "not finite") -> str:
    return missing if value is None else f"{value:.4g}"
