"""From profile and cluster to a plan, and telling whether a plan is still good."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.cluster import Cluster
from pipectl.errors import DataFileError, InfeasibleError
from pipectl.jobs.machines import memory_of_task
from pipectl.jobs.places import plan_path
from pipectl.jobs.schedules import listed_of
from pipectl.plan import OffloadTarget, Plan
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Profile
from pipectl.runs import RunDirectory
from pipectl.simulate import simulate
from pipectl.spec import plan_key
from pipectl.timeline import Timeline

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

_RECOMPUTE = {None: None, "none": False, "all": True, "blocks": True}
"""What all stages do, by the word of the spec; None leaves it to the planner."""
_BLOCKS = {**_RECOMPUTE, "all": False}
"""Whether block by block, likewise."""
_APART = {"together": False, "apart": True, None: None}
"""Whether backwards have ranks of their own, likewise."""


def find_plan(spec: JobSpec, profile: Profile, cluster: Cluster, kept: int | None = None) -> Plan:
    """The best plan for a job.

    Args:
        kept: see :func:`kept_micro_batches`.

    Raises:
        InfeasibleError: nothing fits; the message says how much is missing.
    """
    with advising_other_micro_batches(kept):
        return make_plan(profile, cluster, request_of(spec, profile, cluster, kept))


def kept_micro_batches(spec: JobSpec, path: Path | None = None) -> int | None:
    """How many micro-batches the job's plan before had, if the job leaves their number open.

    A new plan has as many: results depend on them, and a profile that was measured a moment later
    must not make another training of a job.

    Args:
        path: of that plan; by default where the job's own is.

    Returns:
        None if the job says how many, or there is no plan of batches of this size.
    """
    path = path or plan_path(spec)
    if spec.pipeline.micro_batches is not None or not path.exists():
        return None
    try:
        plan = Plan.load(path)
    except DataFileError:  # a new plan replaces it
        return None
    return plan.micro_batches if plan.batch_size == spec.training.batch_size else None


def coupling_warning(spec: JobSpec, profile: Profile) -> str:
    """That the planner chooses between different trainings; empty if it does not."""
    names = profile.coupled
    if spec.pipeline.micro_batches is not None or not names:
        return ""
    more = "computes" if len(names) == 1 else f"and {len(names) - 1} more compute"
    return (
        f"{names[0]} {more} over all samples of a micro-batch: results depend on the number of "
        "micro-batches, which `auto` leaves to the planner; pipeline.micro_batches sets it"
    )


@contextmanager
def advising_other_micro_batches(kept: int | None) -> Iterator[None]:
    """Where nothing fits, say that the number of micro-batches was kept."""
    try:
        yield
    except InfeasibleError as error:
        if kept is not None:
            error.cure = (
                f"{error.cure}\nor let the planner choose anew how many micro-batches there are "
                f"(kept: {kept}): pipectl plan JOB.yaml --new-micro-batches"
            )
        raise


def request_of(
    spec: JobSpec, profile: Profile, cluster: Cluster, kept: int | None = None
) -> PlanRequest:
    """What a job asks of the planner.

    Args:
        kept: micro-batches where the job leaves their number open; None leaves it to the planner.
    """
    pipeline = spec.pipeline
    listed = listed_of(spec)
    return PlanRequest(
        name=spec.name,
        batch_size=spec.training.batch_size,
        micro_batches=pipeline.micro_batches or kept,
        stages=pipeline.stages,
        schedule=None if listed else pipeline.schedule,
        listed=listed,
        warm_up=pipeline.warm_up,
        memory_limit_bytes=pipeline.memory_limit_bytes or memory_of_task(spec),
        recompute=_RECOMPUTE[pipeline.recompute],
        blocks=_BLOCKS[pipeline.recompute],
        offload=_offload(spec, cluster),
        offload_to=_offload_to(spec),
        replicas=None if pipeline.replicas == "any" else int(pipeline.replicas or 1),
        shard_optimizer=pipeline.shard_optimizer,
        backward_apart=_backward_apart(spec),
        key=_key(spec, profile, cluster),
    )


def fresh_plan(spec: JobSpec, profile: Profile, cluster: Cluster, path: Path) -> Plan | None:
    """The plan in ``path``; None if there is none or spec, profile or cluster have changed since.

    Raises:
        DataFileError: there is one, but it cannot be read.
    """
    if not path.exists():
        return None
    plan = Plan.load(path)
    return plan if plan.key == _key(spec, profile, cluster) else None


def planned(spec: JobSpec, profile: Profile, cluster: Cluster) -> Plan:
    """The plan that lies there if it is still good, else a new one, put there.

    Raises:
        InfeasibleError: nothing fits.
        DataFileError: there is a plan, but it cannot be read.
    """
    plan = fresh_plan(spec, profile, cluster, plan_path(spec))
    if plan is None:
        plan = find_plan(spec, profile, cluster, kept_micro_batches(spec))
        plan.save(plan_path(spec))
    return plan


def predicted(plan: Plan, cluster: Cluster) -> Timeline:
    """The simulated step of a plan."""
    return simulate(plan, cluster).timeline


def write_plan(run: RunDirectory, plan: Plan, cluster: Cluster) -> None:
    """Put a plan and its predicted timeline into a run directory."""
    plan.save(run.plan)
    predicted(plan, cluster).save(run.predicted)


def _offload_to(spec: JobSpec) -> OffloadTarget:
    """As the job says, or else what is not the memory that ranks compute in."""
    if spec.pipeline.offload in tuple(OffloadTarget):
        return OffloadTarget(spec.pipeline.offload)
    return OffloadTarget.HOST if spec.resources.gpus_per_node else OffloadTarget.DISK


def _offload(spec: JobSpec, cluster: Cluster) -> bool | None:
    """All stages, none, or those for which it pays; on an unknown disk that cannot be told."""
    if spec.pipeline.offload is not None:
        return spec.pipeline.offload != "none"
    if _offload_to(spec) is OffloadTarget.HOST:
        return None
    known = all(node.device.disk_link is not None for node in cluster.nodes)
    return None if known else False


def _backward_apart(spec: JobSpec) -> bool | None:
    """All stages, none, or those for which it pays; never those whose other half is compiled."""
    followed = not spec.training.compile or spec.pipeline.recompute == "all"
    found = _APART[spec.pipeline.backward]
    return found if followed else bool(found)


def _key(spec: JobSpec, profile: Profile, cluster: Cluster) -> str:
    """Names everything that a plan was made from."""
    parts = [plan_key(spec), profile.to_json(), cluster.to_json()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
