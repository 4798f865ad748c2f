"""Profiles and plans of a sweep: what its points share is made once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.batch import get
from pipectl.cluster import Cluster
from pipectl.errors import PipectlError
from pipectl.files import make_directory
from pipectl.jobs.launching import Settled, settle
from pipectl.jobs.machines import find_machines
from pipectl.jobs.places import LOCAL, profile_path, scheduler_name
from pipectl.jobs.plan import find_plan
from pipectl.jobs.profile import Measurement, Progress, fresh_profile, measure, measured
from pipectl.jobs.request import trial_request
from pipectl.jobs.submit import Inputs, gather
from pipectl.plan import Plan
from pipectl.profile import Profile
from pipectl.spec import plan_key, profile_key

if TYPE_CHECKING:
    from pipectl.spec import JobSpec, Point


@dataclass
class _Made:
    """What was made so far, by the keys that tell whether a spec shares it."""

    profiles: dict[str, tuple[Profile, Measurement | None]] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)
    launches: dict[str, Settled] = field(default_factory=dict)


def gather_sweep(
    spec: JobSpec,
    points: Sequence[Point],
    scheduler: str | None,
    progress: Progress | None = None,
) -> list[Inputs]:
    """Profile and plan of every point; those of the job itself for all that share them.

    On a batch system, points without a profile are left to their jobs, see
    :func:`pipectl.jobs.submit.gather`.

    Args:
        spec: the job without the values of its sweep.

    Raises:
        PipectlError: as for a single job; the message says of which point.
    """
    name, made = scheduler_name(spec, scheduler), _Made()
    make_directory(Path(spec.output.directory))
    _take_over(spec, points, name, made, progress)
    return [_gathered(point, name, made, progress) for point in points]


def _take_over(
    spec: JobSpec, points: Sequence[Point], name: str, made: _Made, progress: Progress | None
) -> None:
    """Profile and plan of the job itself, from their usual places, where any point has them."""
    profiled, planned = profile_key(spec), plan_key(spec)
    if any(plan_key(point.spec) == planned for point in points):
        found = gather(spec, name, progress)
        if found.profile is not None and found.plan is not None:
            made.profiles[profiled] = (found.profile, found.measurement)
            made.plans[planned] = found.plan
        return
    profile = fresh_profile(spec, profile_path(spec))
    shared = any(profile_key(point.spec) == profiled for point in points)
    if profile is None and name == LOCAL and shared:
        measurement = measure(spec, profile_path(spec), progress)
        made.profiles[profiled] = (measurement.profile, measurement)
    elif profile is not None and profile.fingerprint is not None:
        made.profiles[profiled] = (profile, None)


def _gathered(point: Point, name: str, made: _Made, progress: Progress | None) -> Inputs:
    spec = point.spec
    try:
        machines = find_machines(spec, name)
        inputs = Inputs(spec, name, machines.cluster, None, None, warning=machines.warning)
        inputs = replace(inputs, launch=_launch(spec, name, made))
        key = profile_key(spec)
        if key not in made.profiles and name == LOCAL:
            measurement = measured(spec, progress)
            made.profiles[key] = (measurement.profile, measurement)
        if key not in made.profiles:
            return inputs
        profile, how = made.profiles[key]
        plan = _plan(spec, profile, machines.cluster, made)
    except PipectlError as error:
        error.message = f"{title(point)}: {error.message}"
        raise
    return replace(inputs, profile=profile, plan=plan, measurement=how)


def _launch(spec: JobSpec, name: str, made: _Made) -> Settled:
    """How ranks are started; what cannot be written into a script fails now."""
    key = f"{spec.launch} {spec.environment}"
    request = trial_request(spec)
    if key not in made.launches:
        made.launches[key] = settle(request)
    found = made.launches[key]
    get(name).render(found.of(request))
    return found


def _plan(spec: JobSpec, profile: Profile, cluster: Cluster, made: _Made) -> Plan:
    from pipectl.runtime.supported import check_supported

    key = plan_key(spec)
    if key not in made.plans:
        plan = find_plan(spec, profile, cluster)
        check_supported(plan, "the plan")
        made.plans[key] = plan
    return made.plans[key]


def title(point: Point) -> str:
    """A point in a line, such as ``optimizer.kwargs.lr=0.001, training.seed=2``."""
    return ", ".join(f"{key}={value}" for key, value in point.values.items())
