"""A run on one page of HTML: how it went, how it was planned, what took how long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from html import escape
from typing import NamedTuple

from pipectl.batch import JobState
from pipectl.errors import PipectlError
from pipectl.jobs.state import RunStatus, get_status
from pipectl.jobs.tracing import Traced, traced
from pipectl.plan import Plan, Stage
from pipectl.profile import Profile
from pipectl.report.curves import Point, curve
from pipectl.report.finding import finding
from pipectl.report.graph_svg import graph_svg
from pipectl.report.page import bars, heading, page, paragraph, table
from pipectl.report.perfetto import chrome_trace
from pipectl.report.timelines_html import timelines_html
from pipectl.runs import RunDirectory, read_metrics
from pipectl.timeline import Timeline
from pipectl.units import format_bytes, format_time

_STAGES = (
    "stage", "ranks", "operators", "first", "last", "forward", "backward", "parameters", "memory",
)  # fmt: skip
_FIGURES = ("stage", "operators", "forward", "backward", "parameters")
_MOST_RANKS = 64


class Report(NamedTuple):
    """What is told about a run.

    Args:
        page: in HTML.
        trace: its recorded step beside the predicted one, for a trace viewer; None without one.
    """

    page: str
    trace: str | None


def report(run: RunDirectory, now: float, trace_name: str | None) -> Report:
    """The page, from what the run directory holds by now; what is missing is left out.

    Args:
        now: seconds since the epoch.
        trace_name: of the file beside the page that the trace goes to; None where it has none.
    """
    found = get_status(run, now)
    profile, step = _profile(run), _traced(run)
    parts = [*_head(found, now), *_verdict(found, step)]
    if found.plan is not None:
        parts += [*_plan(found.plan, profile), *_timelines(found, step, trace_name)]
        parts += _memory(found)
    parts += _curves(run)
    if found.plan is not None and profile is not None:
        parts += _graph(found.plan, profile)
    trace = None if step is None or trace_name is None else chrome_trace(step.groups())
    return Report(page(f"{run.name} - pipectl", parts), trace)


def _profile(run: RunDirectory) -> Profile | None:
    with suppress(PipectlError):
        return Profile.load(run.profile)
    return None


def _traced(run: RunDirectory) -> Traced | None:
    with suppress(PipectlError):
        return traced(run)
    return None


def _head(found: RunStatus, now: float) -> Iterator[str]:
    yield f"<h1>{escape(found.run.name)}</h1>"
    state = found.job.state.value
    reason = f": {found.job.reason}" if found.job.reason else ""
    steps = f", step {found.measured.step} of {found.steps}" if found.steps else ""
    bad = found.job.state.final and found.job.state is not JobState.COMPLETED
    yield paragraph(f"{state}{steps}{reason}", "bad" if bad else "")
    if found.failure is not None and bad:
        yield paragraph(f"{found.failure.where}: {found.failure.message}", "bad")
    yield paragraph(f"as of {datetime.fromtimestamp(now):%Y-%m-%d %H:%M:%S}", "faint")


def _verdict(found: RunStatus, step: Traced | None) -> Iterator[str]:
    """What bound the speed, and what would change it."""
    yield heading("Speed")
    measured, predicted = found.measured.step_time_s, found.predicted_step_s
    if measured and found.plan:
        rate = f"{format_time(measured)} a step, {found.plan.batch_size / measured:.1f} samples/s"
        share = "" if found.efficiency is None else f", efficiency {found.efficiency:.0%}"
        yield paragraph(f"Measured: {rate}{share}.")
    if predicted:
        ratio = f"; measured is {measured / predicted:.2f} times that" if measured else ""
        yield paragraph(f"Predicted: {format_time(predicted)} a step{ratio}.")
    if found.plan is not None and found.plan.prediction is not None:
        yield paragraph(_binding(found.plan, found.plan.prediction.bubble))
    if step is not None:
        yield paragraph(f"In step {step.measured.step}, {finding(step.comparison())}.")
    if found.laggard is not None:
        one = found.laggard
        yield paragraph(
            f"All wait for rank {one.rank}: the others {one.others:.0%} of their time, "
            f"it {one.share:.0%} of its own."
        )


def _binding(plan: Plan, bubble: float) -> str:
    loads = [stage.load_s for stage in plan.stages]
    most = loads.index(max(loads))
    fill = (len(plan.stages) - 1) / (plan.micro_batches + len(plan.stages) - 1)
    cure = "more micro-batches fill the pipeline better" if bubble > fill / 2 else ""
    text = (
        f"Stage {most} takes longest, {format_time(loads[most])} a micro-batch; "
        f"ranks idle {bubble:.1%} of a step as predicted"
    )
    return f"{text}; {cure}." if cure else f"{text}."


def _plan(plan: Plan, profile: Profile | None) -> Iterator[str]:
    yield heading("Plan")
    yield paragraph(
        f"{plan.schedule}, {plan.micro_batches} micro-batches of {plan.micro_batch_size} "
        f"(batch {plan.batch_size}), {plan.ranks} ranks"
    )
    names = {} if profile is None else {one.id: one.name for one in profile.operators}
    rows = [_stage_row(index, stage, names) for index, stage in enumerate(plan.stages)]
    yield table(_STAGES, rows, _FIGURES)


def _stage_row(index: int, stage: Stage, names: dict[str, str]) -> list[object]:
    ends = (names.get(node, node) for node in (stage.nodes[0], stage.nodes[-1]))
    ways = {"blocks": stage.blocks is not None, "offload": stage.offload}
    recompute = "recompute" if stage.recompute and stage.blocks is None else ""
    return [
        index,
        ", ".join(map(str, (*stage.ranks, *stage.backward_ranks))),
        len(stage.nodes),
        *ends,
        format_time(stage.cost.forward_s),
        format_time(stage.cost.backward_s),
        format_bytes(stage.cost.parameter_bytes),
        ", ".join(filter(None, (recompute, *(way for way, used in ways.items() if used)))),
    ]


def _timelines(found: RunStatus, step: Traced | None, trace_name: str | None) -> Iterator[str]:
    drawn: dict[str, Timeline] = {} if step is None else step.timelines()
    if step is None:
        with suppress(PipectlError):
            drawn["predicted"] = Timeline.load(found.run.predicted)
    if drawn:
        yield heading("A step")
        yield timelines_html(drawn)
    if step is not None and trace_name is not None:
        yield paragraph(
            f"Both for a trace viewer, such as ui.perfetto.dev: {trace_name}, beside this page.",
            "faint",
        )


def _memory(found: RunStatus) -> Iterator[str]:
    every = found.peaks
    largest = sorted(every, key=lambda peak: -peak.measured_bytes)[:_MOST_RANKS]
    peaks = sorted(largest, key=lambda peak: peak.rank)
    if not peaks:
        return
    yield heading("Memory")
    if len(peaks) < len(every):
        yield paragraph(f"{len(peaks)} of {len(every):,} ranks: those that hold most.")
    most = max(max(peak.measured_bytes, peak.predicted_bytes or 0) for peak in peaks)
    rows = []
    for peak in peaks:
        text = f"{format_bytes(peak.measured_bytes)} measured"
        drawn = [("measured", peak.measured_bytes / most, text)]
        if peak.predicted_bytes is not None:
            text = f"{format_bytes(peak.predicted_bytes)} predicted"
            drawn.append(("predicted", peak.predicted_bytes / most, text))
        rows.append((f"rank {peak.rank}", drawn))
    yield bars(rows)


def _curves(run: RunDirectory) -> list[str]:
    lines = read_metrics(run)

    def points(key: str) -> list[Point]:
        return [(line["step"], line[key]) for line in lines if line.get(key) is not None]

    drawn = [curve("loss", points("loss")), curve("samples a second", points("samples_per_s"))]
    return [heading("Training"), "".join(drawn)] if any(drawn) else []


def _graph(plan: Plan, profile: Profile) -> Iterator[str]:
    yield heading("Model")
    yield paragraph(
        "Operators by stage, in the order in which values are made; point at one for its name.",
        "faint",
    )
    drawn = graph_svg(profile, [stage.nodes for stage in plan.stages])
    yield f'<div class="scroll">{drawn}</div>'
