"""`pipectl resume`: submit a run that has ended again."""

from __future__ import annotations

import json
import time
from pathlib import Path

from pipectl.cli import options as opt
from pipectl.cli.console import say
from pipectl.cli.submission import describe_job, print_and_follow, print_notes, print_plan
from pipectl.jobs.resume import resume
from pipectl.runs import find_run, last_checkpoint, step_of


def command(
    name: str = opt.RUN,
    overrides: list[str] | None = opt.OVERRIDES,
    wait: bool = opt.WAIT,
    force: bool = opt.flag("Resume even if it is unknown whether the run has ended.", "--force"),
    trust_owner: bool = opt.TRUST_OWNER,
    as_json: bool = opt.JSON,
    directory: Path = opt.DIRECTORY,
) -> None:
    run = find_run(directory, name)
    submission, replanned, changes = resume(
        run, overrides or (), time.time(), force=force, trust_owner=trust_owner
    )
    job, record, checkpoint = submission.job, submission.record, last_checkpoint(run)
    step = 0 if checkpoint is None else step_of(checkpoint) or 0
    print_notes([job])
    if not as_json:
        if job.plan is None or replanned:
            print_plan([job], "new plan: ")
        for key, (old, new) in changes.items():
            say(f"changed: {key} {json.dumps(old)} -> {json.dumps(new)}")
    begin = f"from step {step}" if step else "from the beginning: no checkpoint yet"
    title = f"resumed: {record.name} ({describe_job(record)}), {begin}"
    print_and_follow(
        submission, title, wait=wait, as_json=as_json,
        from_step=step, planned_anew=replanned, changes=changes,
    )  # fmt: skip
