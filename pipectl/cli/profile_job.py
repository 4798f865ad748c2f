"""`pipectl profile --submit`: the same in a job of its own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from pipectl.cli.console import say, say_json, short

if TYPE_CHECKING:
    from pipectl.jobs.profile import Wish
    from pipectl.jobs.submit import Submission
    from pipectl.spec import JobSpec


def submit_and_tell(
    spec: JobSpec, scheduler: str, path: Path, wish: Wish, *, wait: bool, as_json: bool
) -> None:
    """Submit the measuring and say where; with ``wait``, follow it and show the profile."""
    from pipectl.jobs.submit_profile import submit_profile

    submission = submit_profile(spec, scheduler, path, wish, time.time())
    record, run = submission.record, submission.run
    if not as_json:
        say(f"submitted: {run.name} ({record.scheduler} job {record.job_id})")
        say(f"see: pipectl status {run.name}")
    elif not wait:
        answer = {"run": run.name, "directory": str(run.path), "file": str(path.absolute())}
        say_json({**answer, "scheduler": record.scheduler, "job_id": record.job_id})
    if wait:
        _wait(submission, path, as_json=as_json)
    elif not as_json:
        say(f"when it is done, the profile is in {short(path.absolute())}")


def _wait(submission: Submission, path: Path, *, as_json: bool) -> None:
    from pipectl.cli.follow import exit_code, follow
    from pipectl.cli.profile_view import show
    from pipectl.cli.status_view import show_run, status_json
    from pipectl.jobs.profile import Measurement

    run = submission.run
    found = follow(run)
    if not (code := exit_code(found)):
        show(Measurement.load(run.profile, run.measurement), path, time.time(), as_json=as_json)
        return
    if as_json:
        say_json(status_json(found))
    else:
        show_run(found)
    raise typer.Exit(code)
