"""`pipectl resume`: submit a run that has ended again."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from pipectl.cli import options as opt
from pipectl.cli.console import note, say, short_path, warn
from pipectl.cli.submission import describe_job, print_and_follow, print_notes, print_plan
from pipectl.jobs.resume import resume
from pipectl.jobs.warnings import script_warning, splitting_warning
from pipectl.runs import RunDirectory, find_run, last_checkpoint, step_of
from pipectl.runs.kept_code import read_code, without_copies


def command(
    name: str = opt.RUN,
    overrides: list[str] | None = opt.OVERRIDES,
    wait: bool = opt.WAIT,
    force: bool = opt.flag("Resume even if it is unknown whether the run has ended.", "--force"),
    trust_owner: bool = opt.TRUST_OWNER,
    with_changed_code: bool = opt.flag(
        "Take the code as it is now, not as it was submitted.", "--with-changed-code"
    ),
    as_json: bool = opt.JSON,
    directory: Path = opt.DIRECTORY,
) -> None:
    run = find_run(directory, name)
    submission, replanned, changes, changed_files, has_own_code = resume(
        run, overrides or (), time.time(), force=force, trust_owner=trust_owner,
        with_changed_code=with_changed_code,
    )  # fmt: skip
    job, record, checkpoint = submission.job, submission.record, last_checkpoint(run)
    step = 0 if checkpoint is None else step_of(checkpoint) or 0
    print_notes([job])
    if job.profile is not None:
        warn(splitting_warning(job.spec, job.profile))
        warn(script_warning(job.spec, job.profile))
    _note_changes(submission.run, changed_files, has_own_code=has_own_code)
    if not as_json:
        if job.plan is None or replanned:
            print_plan([job], "new plan: ")
        for key, (old, new) in changes.items():
            say(f"changed: {key} {json.dumps(old)} -> {json.dumps(new)}")
    if step and "optimizer.factory" in changes:
        note("an optimizer of another class begins with new state")
    begin = f"from step {step}" if step else "from the beginning: no checkpoint yet"
    title = f"resumed: {record.name} ({describe_job(record)}), {begin}"
    print_and_follow(
        submission, title, wait=wait, as_json=as_json,
        from_step=step, planned_anew=replanned, changes=changes,
        changed_files=list(changed_files), has_own_code=has_own_code,
    )  # fmt: skip


def _note_changes(run: RunDirectory, files: Sequence[str], *, has_own_code: bool) -> None:
    """Say which files have changed since the submission, and which content of them the job uses."""
    if not has_own_code:
        names = ", ".join(short_path(Path(path)) for path in files)
        if names:
            note(f"the run takes its code as it is now; changed since it was submitted: {names}")
        return
    kept = read_code(run)
    copied = {file.path for file in kept.files if file.copy} if kept else set()
    for path in files:
        if path in copied:
            short = short_path(Path(path))
            note(f"{short} has changed since the submission; the run goes on with its own copy")
    for name in without_copies(file for file in kept.files if file.path in files) if kept else ():
        short = short_path(Path(name))
        warn(f"{short} has changed since the submission, and the run has no copy of it")
    if any(path in copied for path in files):
        note("to take the code as it is now: pipectl resume --with-changed-code")
