"""`pipectl resume`: go on with a run that has ended."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from pipectl.cli.console import say, say_json
from pipectl.cli.options import RUNS, Json, Overrides, RunName, RunsDirectory, TrustOwner
from pipectl.cli.views.submission import (
    follow_to_the_end,
    print_launch,
    print_plan,
    submission_json,
)
from pipectl.runs import as_typed


def command(
    name: RunName,
    overrides: Overrides = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run to its end.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Even if nobody can tell whether it is over.")
    ] = False,
    trust_owner: TrustOwner = False,
    as_json: Json = False,
    directory: RunsDirectory = RUNS,
) -> None:
    """Go on from the last checkpoint of a run.

    With --set, on other ranks or for more steps.
    """
    from pipectl.jobs.resume import resume
    from pipectl.runs import find_run

    run = find_run(directory, name)
    found = resume(run, overrides or (), time.time(), force=force, trust_owner=trust_owner)
    job, record = found.job, found.record
    print_launch(job.launch, job.warning)
    if not as_json:
        if job.plan is None or found.replanned:
            print_plan(job.plan, "planned anew: ")
        begin = f"from step {found.step}" if found.step else "from the beginning: no checkpoint yet"
        say(f"resumed: {record.name} ({record.scheduler} job {record.job_id}), {begin}")
        say(f"see: pipectl status {as_typed(run)}")
    if wait:
        follow_to_the_end(run, as_json=as_json)
    elif as_json:
        more = {"from_step": found.step, "planned_anew": found.replanned}
        say_json(submission_json(run, record, **more))
