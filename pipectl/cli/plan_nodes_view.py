"""The table of `pipectl plan --nodes`, and what people should conclude from it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from pipectl.cli.console import plain
from pipectl.cli.plan_view import counted
from pipectl.cli.tables import table
from pipectl.planner.answers.scaling import Count, Scaling
from pipectl.units import format_time

_COLUMNS = (
    *("nodes", "ranks", "stages", "step", "samples/s", "efficiency", "bubble"),
    "node-h/1000",
)
_BAR = 24
_DASH = "-"
_FASTER = 1.005


def scaling_table(found: Scaling, *, wide: bool) -> Table:
    """One row a number of nodes.

    Args:
        wide: whether there is room for bars.
    """
    words = ("samples/s, · ideal",) if wide else ()
    made = table(*_COLUMNS, *words, left=words)
    for count in found.counts:
        cells = [*_cells(found, count), *([_bar(found, count)] if wide else [])]
        made.add_row(*map(plain, cells))
    return made


def _cells(found: Scaling, count: Count) -> list[str]:
    plan, efficiency = count.plan, found.efficiency(count)
    if plan is None or plan.prediction is None or efficiency is None:
        return [str(count.nodes), str(count.ranks), *[_DASH] * (len(_COLUMNS) - 2)]
    return [
        str(count.nodes),
        str(count.ranks),
        str(len(plan.stages)),
        format_time(plan.prediction.step_time_s),
        f"{count.samples_per_s:.1f}",
        f"{efficiency:.0%}",
        f"{plan.prediction.bubble:.1%}",
        f"{count.node_hours:.3g}",
    ]


def _bar(found: Scaling, count: Count) -> str:
    """Throughput against what the largest count could have."""
    base, efficiency = found.base, found.efficiency(count)
    if base is None or efficiency is None:
        return ""
    ideal = _BAR * count.nodes / found.counts[-1].nodes
    whole = max(1, round(min(1.0, efficiency) * ideal))
    return "█" * whole + "·" * (round(ideal) - whole)


def scaling_lines(found: Scaling) -> Iterator[str]:
    """What people should conclude."""
    for count in found.counts:
        if count.plan is None:
            yield f"{_nodes(count.nodes)}: {count.reason.removeprefix('no feasible plan: ')}"
    base, pays = found.base, found.pays_until
    if base is None or pays is None:
        yield "the model fits on none of these"
        return
    if base is not found.counts[0]:
        yield f"efficiency is against {_nodes(base.nodes)}, the fewest on which the model fits"
    if pays is found.counts[-1]:
        yield f"scaling pays up to {_nodes(pays.nodes)}, the most that was tried"
        return
    after = found.counts[found.counts.index(pays) + 1]
    if after.step_s is not None and pays.step_s is not None:
        gain = pays.step_s / after.step_s
        words = f"{gain:.2f} times as fast, of {after.nodes / pays.nodes:.2f} possible"
        yield (
            f"scaling pays up to {_nodes(pays.nodes)}: {after.nodes} would be "
            + (words if gain >= _FASTER else "no faster")
        )


def _nodes(number: int) -> str:
    return counted(number, "node")
