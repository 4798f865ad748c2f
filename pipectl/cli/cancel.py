"""`pipectl cancel`: end a run."""

from __future__ import annotations

import time

from pipectl.cli.console import say
from pipectl.cli.options import RUNS, RunName, RunsDirectory


def command(name: RunName, directory: RunsDirectory = RUNS) -> None:
    """End a run; one that is over already is left as it is."""
    from pipectl.jobs.cancel import cancel
    from pipectl.runs import find_run

    run = find_run(directory, name)
    say(f"cancelled: {run.name}" if cancel(run, time.time()) else f"{run.name} was over already")
