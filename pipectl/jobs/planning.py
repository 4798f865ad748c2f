"""A job's own plan: what the job asks of the planner, and whether a plan is still good."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.cluster import Cluster
from pipectl.errors import DataFileError, InfeasibleError
from pipectl.jobs.places import plan_path
from pipectl.jobs.schedules import schedule_of_job
from pipectl.plan import OffloadTarget, Plan
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Profile
from pipectl.runs import RunDirectory
from pipectl.simulate import simulate
from pipectl.spec import plan_key

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

_RECOMPUTE: dict[str | None, tuple[bool | None, bool | None]] = {
    None: (None, None),
    "none": (False, False),
    "all": (True, False),
    "blocks": (True, True),
}
"""Whether all stages recompute, and block by block; None leaves it to the planner."""


def find_plan(spec: JobSpec, profile: Profile, cluster: Cluster, kept: int | None = None) -> Plan:
    """The best plan for a job.

    Args:
        kept: see :func:`kept_micro_batches`.

    Raises:
        InfeasibleError: nothing fits; the message says how much is missing.
    """
    with advising_other_micro_batches(kept):
        return make_plan(profile, cluster, request_of(spec, profile, cluster, kept))


def fresh_plan(spec: JobSpec, profile: Profile, cluster: Cluster, path: Path) -> Plan | None:
    """The plan in ``path``; None if there is none or spec, profile or cluster have changed since.

    Raises:
        DataFileError: there is one, but it cannot be read.
    """
    if not path.exists():
        return None
    plan = Plan.load(path)
    return plan if plan.key == _key(spec, profile, cluster) else None


def write_plan(run: RunDirectory, plan: Plan, cluster: Cluster) -> None:
    """Put a plan and its predicted timeline into a run directory."""
    plan.save(run.plan)
    simulate(plan, cluster).timeline.save(run.predicted)


def kept_micro_batches(spec: JobSpec) -> int | None:
    """How many micro-batches the job's plan before had, if the job leaves their number open.

    A new plan has as many: results depend on them, and a profile that was measured a moment later
    must not make another training of a job.

    Returns:
        None if the job says how many, or there is no plan of batches of this size.
    """
    path = plan_path(spec)
    if spec.pipeline.micro_batches is not None or not path.exists():
        return None
    try:
        plan = Plan.load(path)
    except DataFileError:  # a new plan replaces it
        return None
    return plan.micro_batches if plan.batch_size == spec.training.batch_size else None


@contextmanager
def advising_other_micro_batches(kept: int | None) -> Iterator[None]:
    """Within, an error that nothing fits says that the number of micro-batches was kept."""
    try:
        yield
    except InfeasibleError as error:
        if kept is not None:
            error.cure = (
                f"{error.cure}\nor let the planner choose anew how many micro-batches there are "
                f"(kept: {kept}): pipectl plan JOB.yaml --new-micro-batches"
            )
        raise


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


def request_of(
    spec: JobSpec, profile: Profile, cluster: Cluster, kept: int | None = None
) -> PlanRequest:
    """What a job asks of the planner.

    Args:
        kept: micro-batches if the job leaves their number open; None leaves it to the planner.
    """
    pipeline = spec.pipeline
    listed = schedule_of_job(spec)
    recompute, blocks = _RECOMPUTE[pipeline.recompute]
    if pipeline.offload in tuple(OffloadTarget):
        offload_to = OffloadTarget(pipeline.offload)
    else:  # what is not the memory that ranks compute in
        offload_to = OffloadTarget.HOST if spec.resources.gpus_per_node else OffloadTarget.DISK
    offload: bool | None = None
    if pipeline.offload is not None:
        offload = pipeline.offload != "none"
    elif offload_to is OffloadTarget.DISK and any(
        node.device.disk_link is None for node in cluster.nodes
    ):
        offload = False  # nobody can tell whether it pays
    apart = None if pipeline.backward is None else pipeline.backward == "apart"
    if spec.training.compile and pipeline.recompute != "all":
        apart = bool(apart)  # never of stages whose other half is compiled, unless the job says so
    return PlanRequest(
        name=spec.name,
        batch_size=spec.training.batch_size,
        micro_batches=pipeline.micro_batches or kept,
        stages=pipeline.stages,
        schedule=None if listed else pipeline.schedule,
        listed=listed,
        warm_up=pipeline.warm_up,
        memory_limit_bytes=pipeline.memory_limit or spec.resources.memory_per_task,
        recompute=recompute,
        blocks=blocks,
        offload=offload,
        offload_to=offload_to,
        replicas=None if pipeline.replicas == "any" else int(pipeline.replicas or 1),
        shard_optimizer=pipeline.shard_optimizer,
        backward_apart=apart,
        key=_key(spec, profile, cluster),
    )


def _key(spec: JobSpec, profile: Profile, cluster: Cluster) -> str:
    """Names everything that a plan was made from."""
    parts = [plan_key(spec), profile.to_json(), cluster.to_json()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
