"""A recorded step for people: what took how long, beside the prediction, and what stands out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from rich.table import Table

from pipectl.cli.console import note, output, plain, say
from pipectl.cli.tables import table
from pipectl.report.comparison import SPENT, Both, Comparison, Part, RankStep
from pipectl.report.finding import finding
from pipectl.units import format_time

if TYPE_CHECKING:
    from pipectl.jobs.tracing import Traced

T = TypeVar("T")
_PARTS = ("stage", "rank", "action", "times", "predicted", "measured", "ratio")
_MOST_PARTS, _MOST_RANKS = 32, 16
_NOTHING_S = 5e-7


def show(found: Traced) -> None:
    """Print it."""
    compared, console = found.comparison(), output()
    say(step_line(found, compared), "bold")
    say(finding(compared))
    parts = _chosen(compared.parts, _MOST_PARTS, lambda part: abs(part.time.more_s))
    console.print(_parts_table(parts))
    ranks = _chosen(compared.ranks, _MOST_RANKS, _rank_off_s)
    console.print(_ranks_table(ranks))
    for remark in _remarks(found, compared, len(parts), len(ranks)):
        note(remark)


def step_line(found: Traced, compared: Comparison) -> str:
    """``20261120-152233-gpt, step 10: 412 ms, predicted 371 ms, 1.11 times that``."""
    ratio = compared.time.ratio
    return (
        f"{found.run.name}, step {compared.step}: {format_time(compared.time.measured_s)}, "
        f"predicted {format_time(compared.time.predicted_s)}"
        + ("" if ratio is None else f", {ratio:.2f} times that")
    )


def _chosen(items: Sequence[T], most: int, off_s: Callable[[T], float]) -> list[T]:
    """All, or of very many those that are furthest off, in their order."""
    worst = sorted(range(len(items)), key=lambda index: -off_s(items[index]))[:most]
    return [items[index] for index in sorted(worst)]


def _rank_off_s(rank: RankStep) -> float:
    return max(abs(both.more_s) for both in rank.spent.values())


def _parts_table(parts: Sequence[Part]) -> Table:
    """An action of each kind, on average."""
    made = table(*_PARTS, left=("action",))
    for part in parts:
        one = Both(*(time_s / part.actions for time_s in part.time))
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
        stage = "" if part.stage < 0 else str(part.stage)
        named = stage, str(part.rank), part.kind.replace("_", " "), str(part.actions)
        made.add_row(*map(plain, (*named, *map(format_time, one), ratio)))
    return made


def _ranks_table(ranks: Sequence[RankStep]) -> Table:
    """Predicted and measured times of a step; without what no rank does."""
    shown = [name for name in SPENT if any(sum(r.spent[name]) >= _NOTHING_S for r in ranks)]
    made = table("rank", *(name.replace("_", " ") for name in shown), no_wrap=False)
    for rank in ranks:
        cells = (" / ".join(map(format_time, rank.spent[name])) for name in shown)
        made.add_row(*map(plain, (rank.rank, *cells)))
    return made


def _remarks(found: Traced, compared: Comparison, parts: int, ranks: int) -> Iterator[str]:
    """What the tables do not say."""
    yield "times of ranks: predicted / measured, in the whole step"
    if parts < len(compared.parts) or ranks < len(compared.ranks):
        yield "shown are those that differ most; --json has all"
    if len(compared.ranks) < found.plan.ranks:
        yield f"{len(compared.ranks):,} of {found.plan.ranks:,} ranks were recorded"
    if compared.clock_error_s:
        error = format_time(compared.clock_error_s)
        yield f"times of different nodes are right to {error}"
    if compared.unpaired:
        yield f"{compared.unpaired} actions have no counterpart: a batch that was not full"
    if len(found.steps) > 1:
        yield f"{len(found.steps)} steps are recorded; --step chooses another"
