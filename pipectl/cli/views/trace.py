"""A recorded step for people: what took how long, beside the prediction, and what stands out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from rich.table import Table

from pipectl.cli.console import label_lines, note, output, plain, say, table
from pipectl.report.comparison import SPENT, Both, Comparison, Part, Spent, explain
from pipectl.report.recorded import RecordedStep
from pipectl.units import format_time

T = TypeVar("T")
_PARTS = ("stage", "rank", "action", "times", "predicted", "measured", "ratio")
_MAX_PARTS, _MAX_RANKS, _INDENT = 32, 16, 13
_NOTHING_S = 5e-7
_SLOWER, _FASTER = 1.1, 0.9
"""Measured over predicted time, from which on a row has a colour."""


def print_comparison(recorded: RecordedStep, comparison: Comparison) -> None:
    """Print what took how long, and what stands out."""
    console = output()
    say(step_line(recorded, comparison), "bold")
    lines = [(f"{label}:", text, "") for label, text in explain(comparison)]
    width = console.width if console.is_terminal else None
    for line in label_lines(lines, _INDENT, width, bold=True):
        console.print(line, soft_wrap=True)
    every = [part for part in comparison.parts if max(part.time) >= _NOTHING_S]
    parts = _choose_worst(every, _MAX_PARTS, lambda part: abs(part.time.more_s))
    console.print("", _parts_table(parts), sep="\n")
    ranks = _choose_worst(
        list(comparison.ranks.items()),
        _MAX_RANKS,
        lambda rank: max(abs(both.more_s) for both in rank[1].values()),
    )
    heading = plain("per rank in the step, predicted / measured", "dim")
    console.print("", heading, _ranks_table(dict(ranks)), sep="\n")
    for remark in _remarks(recorded, comparison, len(parts) < len(every), len(ranks)):
        note(remark)


def step_line(recorded: RecordedStep, comparison: Comparison) -> str:
    """``20261120-152233-gpt, step 10: 412 ms, predicted 371 ms, 1.11 times that``."""
    time, ratio = comparison.time, comparison.time.ratio
    return (
        f"{recorded.run.name}, step {comparison.step}: {format_time(time.measured_s)}, "
        f"predicted {format_time(time.predicted_s)}"
        + ("" if ratio is None else f", {ratio:.2f} times that")
    )


def _choose_worst(items: Sequence[T], count: int, difference_s: Callable[[T], float]) -> list[T]:
    """All, or of very many those that differ most, in their order."""
    worst = sorted(range(len(items)), key=lambda index: -difference_s(items[index]))[:count]
    return [items[index] for index in sorted(worst)]


def _parts_table(parts: Sequence[Part]) -> Table:
    """An action of each kind, on average."""
    rows = []
    for part in parts:
        one = Both(*(time_s / part.actions for time_s in part.time))
        ratio = 1.0 if one.ratio is None else one.ratio
        style = "yellow" if ratio >= _SLOWER else "green" if ratio <= _FASTER else ""
        cells = (
            "" if part.stage < 0 else part.stage,
            part.rank,
            part.kind.replace("_", " "),
            part.actions,
            *map(format_time, one),
            "" if one.ratio is None else f"{one.ratio:.2f}",
        )
        rows.append([plain(cell, style) for cell in cells])
    return table(_PARTS, rows, left=("action",))


def _ranks_table(ranks: Mapping[int, Spent]) -> Table:
    """Predicted and measured times of a step; without what no rank does."""
    kinds = [name for name in SPENT if any(max(r[name]) >= _NOTHING_S for r in ranks.values())]
    rows = [
        (
            rank,
            *(
                " / ".join(format_time(time_s) if time_s >= _NOTHING_S else "0" for time_s in both)
                for both in (spent[name] for name in kinds)
            ),
        )
        for rank, spent in ranks.items()
    ]
    return table(("rank", *(name.replace("_", " ") for name in kinds)), rows, wrap=True)


def _remarks(
    recorded: RecordedStep, comparison: Comparison, cut: bool, ranks: int
) -> Iterator[str]:
    """What the tables do not say."""
    if cut or ranks < len(comparison.ranks):
        yield "shown are those that differ most; --json has all"
    if len(comparison.ranks) < recorded.plan.ranks:
        yield f"{len(comparison.ranks):,} of {recorded.plan.ranks:,} ranks were recorded"
    if comparison.clock_error_s:
        error = format_time(comparison.clock_error_s)
        yield f"times of different nodes are right to {error}"
    if comparison.unpaired:
        yield f"{comparison.unpaired} actions have no counterpart: a batch that was not full"
    if len(recorded.steps) > 1:
        yield f"{len(recorded.steps)} steps are recorded; --step chooses another"
