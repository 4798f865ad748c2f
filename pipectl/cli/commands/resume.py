"""`pipectl resume`: go on with a run that has ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from pipectl.cli.console import note, say, say_json, warn
from pipectl.cli.options import RUNS, Json, Overrides, RunName, RunsDirectory, TrustOwner
from pipectl.cli.submit_script import NO_PROFILE, tell_launch
from pipectl.cli.submitted import answer, follow_to_the_end, tell_plan
from pipectl.runs import as_typed

if TYPE_CHECKING:
    from pipectl.jobs.resume import Resumption


def command(
    name: RunName,
    overrides: Overrides = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run to its end.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Even if it cannot be told whether it is over.")
    ] = False,
    trust_owner: TrustOwner = False,
    as_json: Json = False,
    directory: RunsDirectory = RUNS,
) -> None:
    """Go on from a run's last checkpoint, with other ranks where --set asks for them."""
    from pipectl.jobs.resume import resume
    from pipectl.runs import find_run

    run = find_run(directory, name)
    found = resume(run, overrides or (), time.time(), force=force, trust_owner=trust_owner)
    warn(found.warning)
    tell_launch(found.launch)
    if not as_json:
        _tell(found)
    if wait:
        follow_to_the_end(found.run, as_json=as_json)
    elif as_json:
        more = {"from_step": found.step, "planned_anew": found.planned}
        say_json(answer(found.run, found.record, **more))


def _tell(found: Resumption) -> None:
    if found.plan is None:
        note(NO_PROFILE)
    elif found.planned:
        tell_plan(found.plan, "planned anew: ")
    record = found.record
    begin = f"from step {found.step}" if found.step else "from the beginning: no checkpoint yet"
    say(f"resumed: {record.name} ({record.scheduler} job {record.job_id}), {begin}")
    say(f"see: pipectl status {as_typed(found.run)}")
