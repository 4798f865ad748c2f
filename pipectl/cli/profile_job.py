"""`pipectl profile --submit`: the same in a job of its own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.cli.console import say, say_json, short
from pipectl.cli.views.submission import print_measuring, submission_json, wait_for

if TYPE_CHECKING:
    from pipectl.jobs.profile import Wish
    from pipectl.spec import JobSpec


def submit_and_tell(
    spec: JobSpec, scheduler: str, path: Path, wish: Wish, *, wait: bool, as_json: bool
) -> None:
    """Submit the measuring and say where; with ``wait``, follow it and show the profile."""
    from pipectl.cli.profile_view import show
    from pipectl.jobs.profile import Measurement
    from pipectl.jobs.submit_profile import submit_profile

    submission = submit_profile(spec, scheduler, path, wish, time.time())
    record, run = submission.record, submission.run
    if not as_json:
        print_measuring(run, record)
    elif not wait:
        say_json(submission_json(run, record, file=str(path.absolute())))
    if wait:
        wait_for(run, as_json=as_json)
        found = Measurement.load(run.profile, run.measurement)
        show(found, path, time.time(), as_json=as_json)
    elif not as_json:
        say(f"when it is done, the profile is in {short(path.absolute())}")
