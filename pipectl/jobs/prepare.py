"""The first step of a batch job: profile and plan within the allocation, where files are missing.

Started as ``python -m pipectl.jobs.prepare RUN_DIRECTORY``. Progress goes to ``heartbeat.json``,
as the ranks write it later; a failure goes to ``errors/prepare.json`` and standard error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.cluster import Cluster
from pipectl.errors import PipectlError
from pipectl.jobs.places import plan_path, profile_path
from pipectl.jobs.plan import find_plan, kept_micro_batches, write_plan
from pipectl.jobs.profile import fresh_profile, measure
from pipectl.jobs.reporting import Heartbeat, reporting_failure
from pipectl.runs import Record, RunDirectory, last_checkpoint
from pipectl.spec import load

if TYPE_CHECKING:
    from pipectl.plan import Plan
    from pipectl.profile import Profile


def prepare(run: RunDirectory, clock: Callable[[], float] = time.time) -> None:
    """Write the profile and the plan of a run, unless they are there and of its job still.

    A run that goes on from a checkpoint keeps its plan: results depend on its micro-batches, and
    the ranks see for themselves whether the model is another.

    Raises:
        PipectlError: the model cannot be profiled, or no plan fits.
    """
    if run.plan.exists() and last_checkpoint(run) is not None:
        return
    spec = load(run.job)
    cluster = Cluster.load(run.cluster)
    heartbeat = Heartbeat(run, spec.training.steps, clock)
    profile = fresh_profile(spec, run.profile)
    if profile is None:
        run.plan.unlink(missing_ok=True)  # of the model as it was
        base = run.path.parent
        profile = measure(spec, run.profile, heartbeat.profiling, base=base).profile
        _share(run, profile, profile_path(spec, base=run.path.parent))
    if not run.plan.exists():
        heartbeat.beat("planning")
        place = plan_path(spec, base=run.path.parent)
        plan = find_plan(spec, profile, cluster, kept_micro_batches(spec, place))
        write_plan(run, plan, cluster)
        _share(run, plan, place)


def _share(run: RunDirectory, found: Profile | Plan, place: Path) -> None:
    """Put a profile or plan where later commands look, unless there is one newer than this run.

    Those of a sweep may be of another model than the job's; the cache has profiles of those alike.
    """
    with suppress(PipectlError, OSError):  # the job itself does not need it there
        if Record.load(run.record).sweep is not None:
            return
        if not place.exists() or place.stat().st_mtime < Record.load(run.record).submitted_at:
            found.save(place)


def main(arguments: list[str]) -> int:
    """Prepare one run; the exit code is the one that commands have."""
    run = RunDirectory(Path(arguments[0]))
    return reporting_failure(run, lambda: prepare(run))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
