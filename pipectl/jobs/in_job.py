"""The program within a job: ``python -m pipectl.jobs.in_job RUN_DIRECTORY``.

It makes the profile and the plan of a run in its allocation, as the first step of the job script;
with ``--output FILE`` it only measures the model, for `pipectl profile --submit`. It writes its
progress to ``heartbeat.json``, as the ranks do later, and a failure to ``errors/prepare.json`` and
standard error.

The planner is imported only when it plans: memory that the process holds while a model is measured
counts as memory of a rank.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.cluster import Cluster
from pipectl.errors import PipectlError
from pipectl.faults import ErrorReport, with_details
from pipectl.files import write_json
from pipectl.jobs.job_files import fresh_profile, join_rows, load_run, plan_path, profile_path
from pipectl.jobs.prepare import PERCENT
from pipectl.jobs.profiles import measure
from pipectl.plan import Plan
from pipectl.profile import Profile
from pipectl.runs import Heartbeat, Record, RunDirectory, last_checkpoint
from pipectl.units import printable

if TYPE_CHECKING:
    from pipectl.profiler.progress import Progress
_BEAT_S = 1.0


def progress_of(run: RunDirectory, steps: int, *, measures_only: bool = False) -> Progress:
    """A function that writes ``heartbeat.json`` as the ranks write it later, about once a second.

    Args:
        steps: optimizer steps of the run.
        measures_only: whether it trains nothing; its steps are percent.
    """
    last_s = 0.0

    def report(done: int, total: int, what: str) -> None:
        nonlocal last_s
        now = time.monotonic()
        if not total:
            Heartbeat(what, 0, steps).save(run.heartbeat)
        elif now - last_s >= _BEAT_S:
            last_s, percent = now, 100 * done // total
            state = "profiling" if measures_only else f"profiling {percent}%"
            step = percent if measures_only else 0
            Heartbeat(state, step, steps).save(run.heartbeat)

    return report


def profile_and_plan(run: RunDirectory) -> None:
    """Write the profile and the plan of a run, unless they are there and still of its job.

    A run that goes on from a checkpoint keeps its plan: results depend on its micro-batches, and
    the ranks see for themselves whether the model is another.

    Raises:
        PipectlError: the model cannot be profiled, or no plan fits.
    """
    if run.plan.exists() and last_checkpoint(run) is not None:
        return
    spec = load_run(run)
    progress = progress_of(run, spec.training.steps)
    profile = fresh_profile(spec, run.profile)
    if profile is None:
        run.plan.unlink(missing_ok=True)  # of the model as it was
        profile = measure(spec, run.profile, progress).profile
        _share(run, profile, profile_path(spec))
    if not run.plan.exists():
        from pipectl.jobs.planning import find_plan, write_plan

        progress(0, 0, "planning")
        profile, cluster = join_rows(profile, Cluster.load(run.cluster))
        cluster.save(run.cluster)
        plan = find_plan(spec, profile, cluster, keep=True)
        write_plan(run, plan, cluster)
        _share(run, plan, plan_path(spec))


def _share(run: RunDirectory, result: Profile | Plan, place: Path) -> None:
    """Put a profile or plan where later commands look, unless there is one newer than this run.

    Those of a sweep may be of another model than the job's; the cache has profiles of equal models.
    """
    with suppress(PipectlError, OSError):  # the job itself does not need it there
        record = Record.load(run.record)
        newer = place.exists() and place.stat().st_mtime >= record.submitted_at
        if record.sweep is None and not newer:
            result.save(place)


def main(arguments: Sequence[str]) -> int:
    """Prepare or measure one run; a failure goes to ``errors/prepare.json`` and standard error.

    Returns:
        The exit code that commands have.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=lambda path: RunDirectory(Path(path)))
    parser.add_argument("--output", type=Path, help="only measure, and write the profile here, too")
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--again", action="store_true")
    values = parser.parse_args(arguments)
    run: RunDirectory = values.run
    try:
        if values.output is None:
            profile_and_plan(run)
        else:  # measure the model, and nothing else
            progress = progress_of(run, PERCENT, measures_only=True)
            progress(0, 0, "capturing")
            spec, effort = load_run(run), values.effort
            measurement = measure(spec, run.profile, progress, effort, again=values.again)
            write_json(run.measurement, measurement.to_json())
            measurement.profile.save(values.output)
            Heartbeat("profiled", PERCENT, PERCENT).save(run.heartbeat)
    except Exception as raised:
        error = with_details(raised, run.preparation_error)
        report = ErrorReport.of(error, action="PREPARE")
        report.save(run.preparation_error)
        sys.stderr.write(printable(f"error: {error or type(error).__name__}\n"))
        return report.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
