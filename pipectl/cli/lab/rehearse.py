"""`pipectl lab rehearse`: run a plan with sleeps in place of computation."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from pipectl.batch import HERE, LOCAL
from pipectl.cli import options as opt
from pipectl.cli.console import labels, note, say_json, short_path, show, warn
from pipectl.cli.progress import profiling_progress
from pipectl.cli.restart import restart_for_job
from pipectl.cli.submission import follow_or_exit, print_notes, print_submission
from pipectl.jobs.measuring import plan_rehearsal, result_of
from pipectl.jobs.owners import warning_of_code
from pipectl.jobs.submit import submit
from pipectl.spec import load
from pipectl.units import format_time, plural

_SCHEDULER: Any = opt.value(
    "NAME",
    "Where to rehearse, and for which to plan; by default here, for launch.scheduler.",
    "--scheduler",
    autocompletion=opt.names_of_schedulers,
)
_SHARED = 0.005
"""Share of the step from which on the effect of shared cores and links is printed."""


def command(
    job: Path = opt.JOB_FILE,
    scheduler: str | None = _SCHEDULER,
    wait: bool = opt.WAIT,
    as_json: bool = opt.JSON,
    overrides: list[str] | None = opt.OVERRIDES,
) -> None:
    spec = load(job, overrides or (), check_names=True)
    restart_for_job(spec, job)
    warn(warning_of_code(spec, job))
    with profiling_progress() as progress:
        prepared, rehearsal = plan_rehearsal(spec, scheduler, progress)
    print_notes([prepared])
    (submission,) = submit([prepared], time.time())
    run, record = submission.run, submission.record
    note(
        f"rehearsing {record.ranks} ranks ({record.scheduler}): {plural(rehearsal.steps, 'step')} "
        f"in about {format_time(rehearsal.expected_s)}, times stretched by {rehearsal.stretch:g}"
    )
    if not wait and record.scheduler not in {HERE, LOCAL}:
        print_submission(submission, as_json=as_json)
        return
    follow_or_exit(run, as_json=as_json)
    result = result_of(run)
    if as_json:
        say_json(result)
        return
    predicted_s, planned_s = result["predicted_step_time_s"], result["planned_step_time_s"]
    rehearsed, ratio = (
        format_time(result["rehearsed_step_time_s"]),
        result["rehearsed_over_predicted"],
    )
    lines = [
        ("predicted:", f"{format_time(predicted_s)} per step"),
        ("rehearsed:", f"{rehearsed} per step, {ratio:.3f} times that"),
    ]
    if planned_s is not None and abs(planned_s / predicted_s - 1) > _SHARED:
        lines.append(
            (
                "plan:",
                f"{format_time(planned_s)} per step, because ranks share cores and links; the "
                "rehearsal gives each its own",
            )
        )
    if (share := result["message_share"]) < 1:
        lines.append(("messages:", f"{share:.2g} of their size, their links' time in full"))
    if result["late_s"] > rehearsal.late_s / rehearsal.stretch:
        lines.append(
            (
                "delay:",
                f"the latest rank was {format_time(result['late_s'])} late (in the plan's time): "
                "this machine was busy, or has too few cores for so many ranks",
            )
        )
    lines.append(("timelines:", short_path(run.trace)))
    show(labels([(label, text, "") for label, text in lines], len("timelines: ")))
