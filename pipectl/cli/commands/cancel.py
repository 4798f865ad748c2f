"""`pipectl cancel`: end a run."""

from __future__ import annotations

import time

from pipectl.cli.console import say
from pipectl.cli.options import RUNS, RunName, RunsDirectory


def command(name: RunName, directory: RunsDirectory = RUNS) -> None:
    """End a run, or all of a sweep; what is over stays as it is."""
    from pipectl.jobs.cancel import Cancellation, cancel, cancel_sweep
    from pipectl.runs import find_run, find_sweep

    sweep = find_sweep(directory, name)
    if sweep is not None:
        count = cancel_sweep(sweep, time.time())
        say(f"cancelled: {count} of the {len(sweep.runs())} runs of {sweep.name}")
        return
    run = find_run(directory, name)
    outcome = cancel(run, time.time())
    if outcome is Cancellation.ASKED:
        say(f"cancelled: {run.name}")
    elif outcome is Cancellation.REMOVED:
        say(f"{run.name} was over already; its job, which was still listed, is cancelled")
    else:
        say(f"{run.name} was over already")
