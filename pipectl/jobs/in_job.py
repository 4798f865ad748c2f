"""The program within a job: ``python -m pipectl.jobs.in_job RUN_DIRECTORY``.

It makes the profile and the plan of a run in its allocation, as the first step of the job script.
With ``--output FILE`` it only measures the model, for `pipectl profile`. It writes its
progress to ``heartbeat.json``, as the ranks do later, and a failure to ``errors/prepare.json`` and
standard error.

The planner is imported after the model is measured, because the memory of the measuring process
counts as memory of a rank.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pipectl.cluster import Cluster
from pipectl.errors import PipectlError
from pipectl.faults import ErrorReport, with_details
from pipectl.files import write_text
from pipectl.jobs import profiles
from pipectl.jobs.job import PERCENT, with_output_beside
from pipectl.jobs.output import complete_cluster, plan_path, profile_path, read_plan, read_profile
from pipectl.plan import Plan
from pipectl.runs import Heartbeat, Record, RunDirectory, last_checkpoint, start_of_job
from pipectl.runs.code import keep_loaded, using_code_of
from pipectl.spec import load
from pipectl.units import Report, printable

_BEAT_S = 1.0


def progress_of(run: RunDirectory, steps: int, *, measures_only: bool = False) -> Report:
    """A function that writes ``heartbeat.json`` about once a second, as the ranks do later.

    Args:
        steps: optimizer steps of the run.
        measures_only: whether the run does not train; its steps are percent.
    """
    last_s, start = 0.0, start_of_job(run)

    def report(done: int, total: int, what: str) -> None:
        nonlocal last_s
        now = time.monotonic()
        if not total:
            Heartbeat(what, 0, steps, start.number).save(start.heartbeat)
        elif now - last_s >= _BEAT_S:
            last_s, percent = now, 100 * done // total
            state = "profiling" if measures_only else f"profiling {percent}%"
            step = percent if measures_only else 0
            Heartbeat(state, step, steps, start.number).save(start.heartbeat)

    return report


def profile_and_plan(run: RunDirectory) -> None:
    """Write the profile and the plan of a run unless they are up to date.

    A run that resumes from a checkpoint keeps its plan, because results depend on the number of
    micro-batches. With a range of nodes, it keeps only that number, and has the plan for the nodes
    of this start. The ranks check themselves whether the model has changed.

    Raises:
        PipectlError: the model cannot be profiled, or no plan fits.
    """
    spec = with_output_beside(run, load(run.job))
    progress = progress_of(run, spec.training.steps)
    has_range = spec.resources.node_range is not None
    if has_range and (run.range / "cluster.json").exists():
        from pipectl.jobs.node_range import adopt_plan

        adopt_plan(run, spec, progress)
        return
    if not has_range and run.plan.exists() and last_checkpoint(run) is not None:
        return

    def share(result: Path, place: Path) -> None:
        """Copy a profile or plan to where later commands look, unless that is newer than the run.

        Runs of a sweep may have another model than the job.
        """
        with suppress(PipectlError, OSError):  # the job itself does not need the copy
            record = Record.load(run.record)
            newer = place.exists() and place.stat().st_mtime >= record.submitted_at
            if record.sweep is None and not newer:
                write_text(place, result.read_text(encoding="utf-8"))

    cluster = Cluster.load(run.cluster)
    profile = read_profile(spec, run.profile)
    if profile is None:
        profile = profiles.measure(spec, run.profile, progress)
        share(run.profile, profile_path(spec))
    keep_loaded(run, spec, profile.code)
    profile, cluster = complete_cluster(spec, profile, cluster)
    from pipectl.jobs.planning import plan_job, previous_micro_batches, write_plan

    if has_range:
        from pipectl.jobs import node_range

        has_plan = run.plan.exists()
        kept = Plan.load(run.plan).micro_batches if has_plan else previous_micro_batches(spec)
        plans = node_range.plan_range(
            spec, profile, cluster, progress, kept_micro_batches=kept, must_keep=has_plan,
            also=[node_range.granted_nodes(run)],
        )  # fmt: skip
        node_range.write_plans(run, plans, cluster)
        for count in plans:
            share(node_range.plan_file(run, count), plan_path(spec, count))
        node_range.adopt_plan(run, spec, progress)
        return
    plan = read_plan(run.plan, spec, profile, cluster)
    plan = plan or plan_job(spec, profile, cluster, progress, previous_micro_batches(spec))
    cluster.save(run.cluster)  # with the times of rows that the profile has
    write_plan(run, plan, cluster)
    share(run.plan, plan_path(spec))


def main(arguments: Sequence[str]) -> int:
    """Prepare or measure one run.

    Returns:
        The exit code; those of failures are the same as for commands.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=lambda path: RunDirectory(Path(path)))
    parser.add_argument("--output", type=Path, help="only measure, and write the profile here, too")
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--again", action="store_true")
    values = parser.parse_args(arguments)
    run: RunDirectory = values.run
    start = start_of_job(run)
    with suppress(OSError):
        start.starting.unlink(missing_ok=True)
    try:
        with using_code_of(run):
            if values.output is None:
                profile_and_plan(run)
            else:  # measure the model, and nothing else
                progress = progress_of(run, PERCENT, measures_only=True)
                spec = with_output_beside(run, load(run.job))
                profile = profiles.measure(
                    spec, run.profile, progress, values.effort, again=values.again
                )
                profile.save(values.output)
                Heartbeat("profiled", PERCENT, PERCENT, start.number).save(start.heartbeat)
    except Exception as raised:
        error = with_details(raised, start.preparation_error)
        report = ErrorReport.of(error, action="PREPARE")
        report.save(start.preparation_error)
        sys.stderr.write(printable(f"error: {str(error) or type(error).__name__}\n"))
        return report.exit_code
    with suppress(PipectlError, OSError):
        write_text(start.finished, "")  # what fails at the end of this process does not undo it
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
