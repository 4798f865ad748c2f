"""A plan for people: the table of its stages, the predicted step as a Gantt, what was assumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from pipectl.cli.console import plain
from pipectl.cli.plan_table import mark_lines, shown_stages, stage_table
from pipectl.plan import Plan, Prediction, Search, Stage
from pipectl.report.gantt import gantt, legend
from pipectl.timeline import Timeline
from pipectl.units import format_bytes, format_time

_STYLES = {
    "forward": "cyan",
    "backward": "magenta",
    "backward_input": "magenta",
    "backward_weight": "blue",
    "recompute": "blue",
    "reduce_wait": "yellow",
    "update": "green",
    "evaluate": "cyan",
}
_FIGURES_WIDTH = 70


def plan_view(
    plan: Plan,
    timeline: Timeline | None,
    width: int,
    names: Mapping[str, str],
    remarks: Sequence[str] = (),
) -> RenderableType:
    """Everything `pipectl plan` shows.

    Args:
        plan: with or without a prediction.
        timeline: the predicted step; None leaves the Gantt out.
        width: columns there are.
        names: readable name of operator ids, where known.
        remarks: lines that follow the predicted figures.
    """
    ends = [_ends(stage, names) for stage in plan.stages]
    room = width - _FIGURES_WIDTH - 2
    beside = all(len(end) * 2 <= room for index in shown_stages(plan) for end in ends[index])
    parts: list[RenderableType] = [plain(headline(plan), "bold")]
    parts.append(stage_table(plan, ends if beside else None))
    parts += [plain(line) for line in mark_lines(plan)]
    if not beside:
        shown = ((index, *ends[index]) for index in shown_stages(plan))
        parts += [plain(f"stage {index}: {a} … {b}") for index, a, b in shown]
    parts += [plain(line) for line in (*prediction_lines(plan), *_search_lines(plan), *remarks)]
    if timeline is not None:
        parts += ["", *gantt_lines(timeline, width), plain(legend(timeline), "dim")]
    parts += [plain(f"assumed: {assumption}", "dim") for assumption in plan.assumptions]
    return Group(*parts)


def headline(plan: Plan) -> str:
    """One line: what is cut into what."""
    plural = "es" if plan.micro_batches > 1 else ""
    batches = f"{plan.micro_batches} micro-batch{plural} of {plan.micro_batch_size}"
    return (
        f"{plan.name}: {counted(len(plan.stages), 'stage')} on {_ranks(plan)}, "
        f"schedule {plan.schedule}, {batches} (batch {plan.batch_size})"
    )


def _ranks(plan: Plan) -> str:
    """How many ranks there are, and how many have work."""
    used = {rank for stage in plan.stages for rank in (*stage.ranks, *stage.backward_ranks)}
    all_ranks = counted(plan.ranks, "rank")
    return all_ranks if len(used) == plan.ranks else f"{len(used)} of {all_ranks}"


def _ends(stage: Stage, names: Mapping[str, str]) -> tuple[str, str]:
    first, last = stage.nodes[0], stage.nodes[-1]
    return names.get(first, first), names.get(last, last)


def prediction_lines(plan: Plan) -> Iterator[str]:
    """Step time, throughput, bubble, the binding stage; then memory."""
    if plan.prediction is not None:
        step_s = plan.prediction.step_time_s
        rate = f"{plan.batch_size / step_s:.1f} samples/s, " if step_s else ""
        yield (
            f"predicted: {format_time(step_s)} a step, {rate}"
            f"bubble {plan.prediction.bubble:.1%}; {_binding(plan)}"
        )
        yield f"memory: {_memory(plan.prediction, plan.memory_limit_bytes)}"


def _search_lines(plan: Plan) -> Iterator[str]:
    """How good the partition is."""
    if plan.search is not None:
        least = "least possible" if plan.search.exact else "none is below"
        yield (
            f"search: largest stage load {format_time(plan.search.max_stage_load_s)} ({least}: "
            f"{format_time(plan.search.lower_bound_s)}), by {plan.search.planner} "
            f"in {format_time(plan.search.planning_s)}"
        )
        yield from _bound(plan.search)


def _bound(search: Search) -> Iterator[str]:
    """How good the step is, where that is known."""
    if search.step_lower_bound_s is not None and search.gap is not None:
        yield (
            f"bound: with the micro-batch sizes that were tried, no step is shorter than "
            f"{format_time(search.step_lower_bound_s)}: this one is within {search.gap:.1%}"
        )


def gantt_lines(timeline: Timeline, width: int) -> list[Text]:
    """The Gantt's rows with colours."""
    lines = []
    for row in gantt(timeline, width):
        line = Text(row.label)
        for segment in row.segments:
            line.append(segment.text, style=_STYLES.get(segment.kind, ""))
        lines.append(line)
    return lines


def _binding(plan: Plan) -> str:
    loads = [stage.load_s for stage in plan.stages]
    index = loads.index(max(loads))
    return f"stage {index} binds ({format_time(loads[index])} a micro-batch)"


def _memory(prediction: Prediction, limit_bytes: int | None) -> str:
    peaks = prediction.peak_memory_bytes
    most = f"at most {format_bytes(max(peaks))} a rank (rank {peaks.index(max(peaks))})"
    return most if limit_bytes is None else f"{most}, limit {format_bytes(limit_bytes)}"


def counted(number: int, noun: str) -> str:
    """A number with its noun in the plural where it needs one."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
