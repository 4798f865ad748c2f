"""`pipectl plan --objective max-stage-load`: the balance that related work asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table

from pipectl.cli.console import output, plain, say_json
from pipectl.cli.plan_ask import Ask
from pipectl.cli.plan_subject import find_subject
from pipectl.cli.plan_view import counted
from pipectl.cli.plan_wait import stoppable
from pipectl.cli.tables import table
from pipectl.units import format_time

if TYPE_CHECKING:
    from pipectl.jobs.balance import Balanced
    from pipectl.profile import Profile

_COLUMNS = ("stage", "device", "ops", "load", "", "from")
_BAR = 24


def answer(ask: Ask) -> None:
    """Search and print."""
    from pipectl.jobs.balance import find_balance
    from pipectl.jobs.deadline import Deadline

    subject, _ = find_subject(ask)
    deadline = Deadline(ask.budget_s)
    with stoppable(deadline):
        found = find_balance(subject, ask.wishes, deadline)
    if ask.as_json:
        say_json({**found.to_json(), "cut_short": deadline.cut_short})
        return
    console = output()
    for line in _lines(found, subject.request.name):
        console.print(plain(line))
    console.print(_table(found, subject.profile))
    for line in _predicted(found):
        console.print(plain(line))


def _lines(found: Balanced, name: str) -> Iterator[str]:
    """What was found and how good it is."""
    balance, request = found.balance, found.request
    devices = counted(request.devices, "device")
    beside = f" and {counted(request.cpus, 'CPU')}" if request.cpus else ""
    yield f"{name}: {counted(len(balance.stages), 'stage')} on {devices}{beside}"
    value = format_time(balance.value_s)
    if balance.exact:
        yield f"largest stage load {value}: the smallest possible, in {_took(found)}"
    else:
        yield (
            f"largest stage load {value}: within {balance.gap:.1%} of the smallest possible "
            f"(none is below {format_time(balance.lower_bound_s)}), in {_took(found)}"
        )


def _took(found: Balanced) -> str:
    return format_time(found.planning_s)


def _table(found: Balanced, profile: Profile) -> Table:
    """One row a stage."""
    made = table(*_COLUMNS, left=("", "from"))
    names, value_s = profile.by_id, found.balance.value_s or 1.0
    for index, stage in enumerate(found.balance.stages):
        bar = "█" * round(_BAR * stage.load_s / value_s)
        cells = (index, stage.device, len(stage.nodes), format_time(stage.load_s), bar)
        made.add_row(*map(plain, (*cells, names[stage.nodes[0]].name)))
    return made


def _predicted(found: Balanced) -> Iterator[str]:
    prediction = found.plan.prediction
    if prediction is not None:
        yield (
            f"as a 1f1b pipeline of {found.plan.micro_batches} micro-batches: "
            f"{format_time(prediction.step_time_s)} a step, bubble {prediction.bubble:.1%}"
        )
    yield from (f"assumed: {assumption}" for assumption in found.plan.assumptions)
