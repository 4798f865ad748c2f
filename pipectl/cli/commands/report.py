"""`pipectl report`: compare a recorded step with its prediction, or two runs; also as pages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import typer
from rich.console import RenderableType

from pipectl.cli import options as opt
from pipectl.cli.console import (
    labels,
    note,
    plain,
    say,
    say_json,
    short_path,
    show,
    table,
)
from pipectl.cli.views.page import make_page, make_pair_page
from pipectl.cli.views.pair import PairView
from pipectl.files import is_stream, make_directory_of, write_text
from pipectl.jobs.state import get_statuses
from pipectl.report.comparison import (
    TIME_USES,
    Comparison,
    Part,
    RecordedStep,
    Times,
    TimeUses,
    load_step,
)
from pipectl.report.gantt import gantt_svg
from pipectl.report.pair import Pair
from pipectl.report.perfetto import chrome_trace
from pipectl.runs import RunDirectory, find_run
from pipectl.units import format_bytes, format_time

T = TypeVar("T")
_PARTS = ("stage", "rank", "action", "times", "predicted", "measured", "ratio")
_MAX_PARTS, _MAX_RANKS, _INDENT = 32, 16, 13
_NOTHING_S = 5e-7
_SLOWER, _FASTER = 1.1, 0.9
"""Measured over predicted times beyond which a row has a colour."""


def command(
    context: typer.Context,
    name: str = opt.LAST_RUN,
    other: str | None = opt.OTHER_RUN,
    directory: Path = opt.DIRECTORY,
    step: int | None = opt.count("Recorded step to show; by default the last."),
    output_file: Path | None = opt.value(
        "FILE", "Write an HTML page to this file instead of printing.", "-o", "--output"
    ),
    svg: Path | None = opt.value("FILE", "Write a picture of both timelines to this file."),
    perfetto: Path | None = opt.value("FILE", "Write a trace for ui.perfetto.dev to this file."),
    as_json: bool = opt.JSON,
) -> None:
    run = find_run(directory, name)
    if other is not None:
        hint = "leave one of the runs out"
        opt.refuse(context, "--step --svg --perfetto", "shows one run", hint=hint)
        _compare_runs(run, find_run(directory, other), output_file, as_json=as_json)
        return
    for path in filter(None, (output_file, svg, perfetto)):
        make_directory_of(path)
    page = "" if output_file is None else make_page(run, time.time(), step)
    if output_file is not None and not (svg or perfetto or as_json):
        _write(output_file, page, "in a browser", say)
        return
    recorded = load_step(run, step)
    comparison = recorded.compare()
    if output_file is not None:
        _write(output_file, page, "in a browser", note if as_json else say)
    if as_json:
        say_json({"run": run.name, "steps": recorded.steps, **comparison.to_json()})
    elif output_file is None:
        print_comparison(recorded, comparison)
    if perfetto is not None:
        trace = chrome_trace(recorded.timelines(), recorded.plan)
        _write(perfetto, trace, "at https://ui.perfetto.dev")
    if svg is not None:
        title = step_line(recorded, comparison)
        _write(svg, gantt_svg(recorded.timelines(), title, recorded.plan.summary), "in a browser")


def _write(path: Path, text: str, where: str, tell: Callable[[str], None] = note) -> None:
    write_text(path, text)
    if not is_stream(path):
        tell(f"{short_path(path.absolute())} ({format_bytes(len(text))}): open it {where}")


def _compare_runs(
    first: RunDirectory, second: RunDirectory, output_file: Path | None, *, as_json: bool
) -> None:
    """Print two runs side by side, or write a page of them."""
    if output_file is not None:
        make_directory_of(output_file)
    now = time.time()
    one, two = get_statuses([first, second], now)
    pair = Pair.load(first, second)
    view = PairView(pair, (one, two))
    if output_file is not None:
        _write(output_file, make_pair_page(view, now), "in a browser", note if as_json else say)
    if as_json:
        say_json(pair.to_json())
    elif output_file is None:
        show(view.draw())


def print_comparison(recorded: RecordedStep, comparison: Comparison) -> None:
    """Print the comparison of a step with its prediction."""
    say(step_line(recorded, comparison), "bold")
    lines = [(f"{label}:", text, "") for label, text in recorded.explain(comparison)]
    show(labels(lines, _INDENT, "bold"))
    every = [part for part in comparison.parts if max(part.time) >= _NOTHING_S]
    parts = _choose_worst(every, _MAX_PARTS, lambda part: abs(part.time.more_s))
    show("", _parts_table(parts))
    ranks = _choose_worst(
        list(comparison.ranks.items()),
        _MAX_RANKS,
        lambda rank: max(abs(both.more_s) for both in rank[1].values()),
    )
    heading = plain("per rank in the step, predicted / measured", "dim")
    show("", heading, _ranks_table(dict(ranks)))
    for remark in _remarks(recorded, comparison, len(parts) < len(every), len(ranks)):
        note(remark)


def step_line(recorded: RecordedStep, comparison: Comparison) -> str:
    """``20261120-152233-gpt, step 10: 412 ms, 1.11 times the predicted 371 ms``."""
    time, ratio = comparison.time, comparison.time.ratio
    if comparison.differs is not None:
        ratio = None
    return (
        f"{recorded.run.name}, step {comparison.step}: {format_time(time.measured_s)}, "
        + (f"{comparison.differs}; " if comparison.differs else "")
        + ("" if ratio is None else f"{ratio:.2f} times the ")
        + f"predicted {format_time(time.predicted_s)}"
    )


def _choose_worst(items: Sequence[T], count: int, difference_s: Callable[[T], float]) -> list[T]:
    """At most ``count`` items, those with the largest differences, in order."""
    worst = sorted(range(len(items)), key=lambda index: -difference_s(items[index]))[:count]
    return [items[index] for index in sorted(worst)]


def _parts_table(parts: Sequence[Part]) -> RenderableType:
    """Mean times of the actions of each kind, per stage and rank."""
    rows = []
    for part in parts:
        one = Times(*(time_s / part.actions for time_s in part.time))
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


def _ranks_table(ranks: Mapping[int, TimeUses]) -> RenderableType:
    """Predicted and measured times of the ranks in a step, without kinds that take no time."""
    kinds = [name for name in TIME_USES if any(max(r[name]) >= _NOTHING_S for r in ranks.values())]
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
    return table(("rank", *(TIME_USES[name].name for name in kinds)), rows, wrap=True)


def _remarks(
    recorded: RecordedStep, comparison: Comparison, cut: bool, ranks: int
) -> Iterator[str]:
    """Remarks on the comparison."""
    if cut or ranks < len(comparison.ranks):
        yield "only those that differ most are shown; --json has all"
    if len(comparison.ranks) < recorded.plan.ranks:
        yield f"{len(comparison.ranks):,} of {recorded.plan.ranks:,} ranks were recorded"
    if comparison.clock_error_s:
        error = format_time(comparison.clock_error_s)
        yield f"the clocks of the nodes agree to within {error}"
    if comparison.unpaired:
        yield f"{comparison.unpaired} actions have no counterpart"
    if len(recorded.steps) > 1:
        yield f"{len(recorded.steps)} steps are recorded; --step chooses another"
