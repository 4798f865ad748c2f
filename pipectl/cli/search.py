"""Searches that the user may interrupt: for plans, and for when a job would be done."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from pipectl.cli.console import note
from pipectl.cli.progress import progress_bar
from pipectl.jobs.plan_search import PlanSearch
from pipectl.jobs.planning import PlanInputs

if TYPE_CHECKING:
    from pipectl.jobs.prospects import Prospects


@contextmanager
def interruptible(search: PlanSearch) -> Iterator[Callable[[str], None]]:
    """A context in which Ctrl-C ends planning with the best plan so far, and a second one aborts.

    It gives a function ``tell(what)`` that shows what is done next.
    """

    def stop(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        search.interrupted = True
        note("stopping with the best plan so far; Ctrl-C again aborts", style="")

    before = signal.signal(signal.SIGINT, stop)
    try:
        with progress_bar("planning") as report:
            report(0, 0, "planning (Ctrl-C: the best so far)")
            yield lambda what: report(0, 0, what)
    finally:
        signal.signal(signal.SIGINT, before)


def ask_prospects(inputs: PlanInputs, counts: tuple[int, ...] | None = None) -> Prospects:
    """Plan for numbers of nodes, and ask when the job would start; Ctrl-C ends this early.

    Args:
        counts: None for those of the job.
    """
    from pipectl.jobs.prospects import find_prospects

    search = PlanSearch()
    with interruptible(search) as tell:
        found = find_prospects(inputs, counts or inputs.counts, search, tell)
    found.compared = counts or ()
    return found
