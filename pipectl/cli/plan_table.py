"""The stages of a plan as a table: one row each, the middle of very long pipelines left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.table import Table

from pipectl.cli.tables import add_rows, shown_rows, table
from pipectl.plan import Plan, Replication, Stage
from pipectl.units import format_bytes, format_time

_FIGURES = (
    *("stage", "rank", "node", "ops", "parameters"),
    *("forward", "backward", "load", "peak memory"),
)
_LONG = 40


def stage_table(plan: Plan, ends: Sequence[tuple[str, str]] | None) -> Table:
    """One row per stage, with all ranks that hold it.

    Args:
        ends: first and last operator of every stage; None where there is no room for them.
    """
    words = ("from", "to") if ends else ()
    made = table(*_FIGURES, *words, left=words)
    total_s = sum(stage.load_s for stage in plan.stages) or 1.0

    def cells(index: int) -> Iterator[object]:
        yield from _cells(plan, index, plan.stages[index].load_s / total_s)
        yield from ends[index] if ends else ()

    add_rows(made, shown_stages(plan), len(plan.stages), cells, len(_FIGURES))
    return made


def shown_stages(plan: Plan) -> list[int]:
    """All stages, or of very many the first, the last, the slowest and the fullest."""

    def extremes() -> set[int]:
        loads = [stage.load_s for stage in plan.stages]
        peaks = [_peak_bytes(plan, stage) for stage in plan.stages]
        return {loads.index(max(loads)), peaks.index(max(peaks))}

    return shown_rows(len(plan.stages), extremes)


def number_ranges(numbers: Sequence[int]) -> str:
    """Numbers with neighbours put together: ``0-3,8``."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)


def _cells(plan: Plan, index: int, share: float) -> Iterator[object]:
    stage = plan.stages[index]
    yield index
    yield number_ranges((*stage.ranks, *stage.backward_ranks))
    yield number_ranges([plan.node_of_rank[rank] for rank in stage.ranks])
    yield len(stage.nodes)
    yield format_bytes(stage.cost.parameter_bytes)
    yield format_time(stage.cost.forward_s)
    yield format_time(stage.cost.backward_s)
    yield f"{share:.1%}"
    yield "" if plan.prediction is None else format_bytes(_peak_bytes(plan, stage))


def _peak_bytes(plan: Plan, stage: Stage) -> int:
    """Of the fullest of a stage's ranks; 0 without a prediction."""
    if plan.prediction is None:
        return 0
    peaks = plan.prediction.peak_memory_bytes
    return max(peaks[rank] for rank in (*stage.ranks, *stage.backward_ranks))


def mark_lines(plan: Plan) -> Iterator[str]:
    """What sets stages apart besides their figures; nothing where nothing does."""
    if any(stage.replicas > 1 for stage in plan.stages):
        split = plan.replication is Replication.SPLIT
        share = "samples of every micro-batch" if split else "whole micro-batches in turn"
        changed = "; operators such as BatchNorm see only these" if split else ""
        yield f"replicas: the ranks of a stage take {share}{changed}"
    marks: Mapping[str, Callable[[Stage], bool]] = {
        "backward on ranks of their own": lambda stage: bool(stage.backward_ranks),
        "recomputed in the backward": lambda stage: stage.recompute and stage.blocks is None,
        "recomputed block by block in the backward": lambda stage: stage.blocks is not None,
        "offloaded until the backward": lambda stage: stage.offload,
    }
    for words, holds in marks.items():
        found = [index for index, stage in enumerate(plan.stages) if holds(stage)]
        if found:
            yield f"{words}: {_stages(found, len(plan.stages))}"


def _stages(indices: Sequence[int], count: int) -> str:
    """Some of all stages in words."""
    if len(indices) == count:
        return "all stages" if count > 1 else "the stage"
    ranges = number_ranges(indices)
    if len(ranges) > _LONG:
        return f"{len(indices):,} of {count:,} stages"
    return f"stage {ranges}" if len(indices) == 1 else f"stages {ranges}"
