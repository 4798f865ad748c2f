"""`pipectl resume`: go on with a run that has ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from pipectl.cli.console import say, say_json
from pipectl.cli.options import RUNS, Json, Overrides, RunName, RunsDirectory

if TYPE_CHECKING:
    from pipectl.jobs.resume import Resumption


def command(
    name: RunName,
    overrides: Overrides = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run to its end.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Even if it cannot be told whether it is over.")
    ] = False,
    as_json: Json = False,
    directory: RunsDirectory = RUNS,
) -> None:
    """Go on from a run's last checkpoint, with other ranks where --set asks for them."""
    from pipectl.cli.submit import follow_to_the_end
    from pipectl.jobs.resume import resume
    from pipectl.runs import find_run

    found = resume(find_run(directory, name), overrides or (), time.time(), force=force)
    if not as_json:
        _tell(found)
    if wait:
        follow_to_the_end(found.run, as_json=as_json)
    elif as_json:
        say_json(
            {
                "run": found.run.name,
                "directory": str(found.run.path),
                "scheduler": found.record.scheduler,
                "job_id": found.record.job_id,
                "from_step": found.step,
                "planned_anew": found.planned,
            }
        )


def _tell(found: Resumption) -> None:
    from pipectl.cli.plan_view import headline, prediction_lines

    if found.planned and found.plan is not None:
        say(f"planned anew: {headline(found.plan)}")
        for line in prediction_lines(found.plan):
            say(line)
    record = found.record
    begin = f"from step {found.step}" if found.step else "from the beginning: no checkpoint yet"
    say(f"resumed: {record.name} ({record.scheduler} job {record.job_id}), {begin}")
    say(f"see: pipectl status {found.run.name}")
