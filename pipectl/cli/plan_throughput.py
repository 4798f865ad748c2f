"""`pipectl plan --objective throughput`: the steady state of very many devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table

from pipectl.cli.console import output, plain, say_json
from pipectl.cli.plan_ask import Ask
from pipectl.cli.plan_subject import find_subject
from pipectl.cli.plan_table import number_ranges
from pipectl.cli.plan_view import counted
from pipectl.cli.plan_wait import stoppable
from pipectl.cli.tables import add_rows, shown_rows, table
from pipectl.units import format_bytes, format_time

if TYPE_CHECKING:
    from pipectl.jobs.throughput import Throughput
    from pipectl.planner.throughput import ThroughputStage
    from pipectl.profile import Profile

_COLUMNS = (
    *("stage", "devices", "replicas", "tensor", "ops", "recomputed"),
    *("in flight", "memory", "load"),
)
_BAR = 16
_LEAST_WIDTH = 120


def answer(ask: Ask) -> None:
    """Search and print."""
    from pipectl.jobs.deadline import Deadline
    from pipectl.jobs.throughput import find_throughput

    subject, _ = find_subject(ask)
    deadline = Deadline(ask.budget_s)
    with stoppable(deadline):
        found = find_throughput(subject, deadline)
    if ask.as_json:
        say_json({**found.to_json(), "cut_short": deadline.cut_short})
        return
    console = output()
    for line in _lines(found, subject.request.name):
        console.print(plain(line))
    console.print(_table(found, subject.profile, wide=console.width >= _LEAST_WIDTH))
    for assumption in found.assumptions:
        console.print(plain(f"assumed: {assumption}", "dim"))


def _lines(found: Throughput, name: str) -> Iterator[str]:
    """What was found and how good it is."""
    plan, request = found.plan, found.request
    of_all = f"{plan.devices} of {counted(request.devices, 'device')}"
    plural = "es" if request.micro_batches > 1 else ""
    batch = f"{request.micro_batches} micro-batch{plural} of {found.micro_batch_size} a step"
    yield f"{name}: {counted(len(plan.stages), 'stage')} on {of_all}, {batch}"
    value, took = format_time(plan.value_s), format_time(found.planning_s)
    speed = f"{found.samples_per_s:.1f} samples/s without fill and drain"
    if plan.exact:
        yield f"time per micro-batch {value} ({speed}): the least possible, in {took}"
        return
    yield (
        f"time per micro-batch {value} ({speed}): within {found.gap:.1%} of the least possible "
        f"(none is below {format_time(plan.lower_bound_s)}), in {took}"
    )


def _table(found: Throughput, profile: Profile, *, wide: bool) -> Table:
    """One row a stage, the middle of very long pipelines left out.

    Args:
        wide: whether there is room for bars and names.
    """
    words = ("", "from") if wide else ()
    made = table(*_COLUMNS, *words, left=words)
    stages = list(found.placed)

    def cells(index: int) -> Iterator[object]:
        stage, devices = stages[index]
        yield index
        yield from _cells(stage, devices)
        if wide:
            yield "█" * round(_BAR * stage.time_s / (found.plan.value_s or 1.0))
            yield profile.by_id[stage.nodes[0]].name

    add_rows(made, shown_rows(len(stages)), len(stages), cells, len(_COLUMNS))
    return made


def _cells(stage: ThroughputStage, devices: range) -> Iterator[object]:
    yield number_ranges(devices)
    yield stage.data_parallel
    yield stage.tensor_parallel
    yield len(stage.nodes)
    yield len(stage.recomputed)
    yield stage.in_flight
    yield format_bytes(stage.memory_bytes)
    yield format_time(stage.time_s)
