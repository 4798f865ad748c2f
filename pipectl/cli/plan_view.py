"""A plan for people: the table of its stages, the predicted step as a Gantt, what was assumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipectl.cli.console import plain
from pipectl.plan import Plan, Prediction, Stage
from pipectl.report.gantt import LEGEND, gantt
from pipectl.timeline import Timeline
from pipectl.units import format_bytes, format_time

_STYLES = {
    "forward": "cyan",
    "backward": "magenta",
    "backward_input": "magenta",
    "backward_weight": "blue",
    "update": "green",
    "evaluate": "cyan",
}
_FIGURES_WIDTH = 70
_FIGURES = (
    *("stage", "rank", "node", "ops", "parameters"),
    *("forward", "backward", "load", "peak memory"),
)


def plan_view(
    plan: Plan, timeline: Timeline | None, width: int, names: Mapping[str, str]
) -> RenderableType:
    """Everything `pipectl plan` shows.

    Args:
        plan: with or without a prediction.
        timeline: the predicted step; None leaves the Gantt out.
        width: columns there are.
        names: readable name of operator ids, where known.
    """
    ends = [_ends(stage, names) for stage in plan.stages]
    room = width - _FIGURES_WIDTH - 2
    beside = max(map(len, (end for pair in ends for end in pair))) * 2 <= room
    parts: list[RenderableType] = [plain(headline(plan), "bold")]
    parts.append(stage_table(plan, ends if beside else None))
    if not beside:
        parts += [plain(f"stage {index}: {a} … {b}") for index, (a, b) in enumerate(ends)]
    parts += [plain(line) for line in (*prediction_lines(plan), *_search_lines(plan))]
    if timeline is not None:
        parts += ["", *gantt_lines(timeline, width), plain(LEGEND, "dim")]
    parts += [plain(f"assumed: {assumption}", "dim") for assumption in plan.assumptions]
    return Group(*parts)


def headline(plan: Plan) -> str:
    """One line: what is cut into what."""
    plural = "es" if plan.micro_batches > 1 else ""
    batches = f"{plan.micro_batches} micro-batch{plural} of {plan.micro_batch_size}"
    return (
        f"{plan.name}: {_count(len(plan.stages), 'stage')} on {_count(plan.ranks, 'rank')}, "
        f"schedule {plan.schedule}, {batches} (batch {plan.batch_size})"
    )


def stage_table(plan: Plan, ends: Sequence[tuple[str, str]] | None) -> Table:
    """One row per stage replica.

    Args:
        ends: first and last operator of every stage; None where there is no room for them.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in _FIGURES:
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("from", "to") if ends else ():
        table.add_column(column, no_wrap=True)
    load_s = sum(_load(stage) for stage in plan.stages) or 1.0
    for index, stage in enumerate(plan.stages):
        for rank in stage.ranks:
            cells = _cells(plan, index, rank, _load(stage) / load_s)
            table.add_row(*map(plain, (*cells, *(ends[index] if ends else ()))))
    return table


def _ends(stage: Stage, names: Mapping[str, str]) -> tuple[str, str]:
    first, last = stage.nodes[0], stage.nodes[-1]
    return names.get(first, first), names.get(last, last)


def _cells(plan: Plan, index: int, rank: int, share: float) -> tuple[object, ...]:
    stage = plan.stages[index]
    return (
        index,
        rank,
        plan.node_of_rank[rank],
        len(stage.nodes),
        format_bytes(stage.cost.parameter_bytes),
        format_time(stage.cost.forward_s),
        format_time(stage.cost.backward_s),
        f"{share:.1%}",
        "" if plan.prediction is None else format_bytes(plan.prediction.peak_memory_bytes[rank]),
    )


def prediction_lines(plan: Plan) -> Iterator[str]:
    """Step time, throughput, bubble, the binding stage; then memory."""
    if plan.prediction is not None:
        step_s = plan.prediction.step_time_s
        yield (
            f"predicted: {format_time(step_s)} a step, {plan.batch_size / step_s:.1f} samples/s, "
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
    loads = [_load(stage) for stage in plan.stages]
    index = loads.index(max(loads))
    return f"stage {index} binds ({format_time(loads[index])} a micro-batch)"


def _memory(prediction: Prediction, limit_bytes: int | None) -> str:
    peaks = prediction.peak_memory_bytes
    most = f"at most {format_bytes(max(peaks))} a rank (rank {peaks.index(max(peaks))})"
    return most if limit_bytes is None else f"{most}, limit {format_bytes(limit_bytes)}"


def _load(stage: Stage) -> float:
    return stage.cost.forward_s + stage.cost.backward_s


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
