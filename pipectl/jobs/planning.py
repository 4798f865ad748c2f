"""A job's own plan: what the job asks of the planner, and the files of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipectl.cluster import Cluster, OffloadTarget
from pipectl.errors import DataFileError, InfeasibleError, InvalidInputError
from pipectl.jobs.job_files import plan_file_key, plan_path
from pipectl.plan import Plan
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Profile
from pipectl.runs import RunDirectory
from pipectl.schedule import NAMES
from pipectl.schedule.listed import Listed
from pipectl.schedule.registry import make_listed, read_listed
from pipectl.simulate import simulate

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

_RECOMPUTE: dict[str | None, tuple[bool | None, bool | None]] = {
    None: (None, None),
    "none": (False, False),
    "all": (True, False),
    "blocks": (True, True),
}
"""Whether all stages recompute, and block by block; None leaves it to the planner."""


def find_plan(spec: JobSpec, profile: Profile, cluster: Cluster, *, keep: bool = False) -> Plan:
    """The best plan for a job.

    Args:
        keep: whether it has those of :func:`kept_micro_batches`.

    Raises:
        InfeasibleError: nothing fits; the message says how much is missing.
    """
    micro_batches = kept_micro_batches(spec) if keep else None
    with advise_other_micro_batches(micro_batches):
        return make_plan(profile, cluster, request_of(spec, profile, cluster, micro_batches))


def write_plan(run: RunDirectory, plan: Plan, cluster: Cluster) -> None:
    """Put a plan and its predicted timeline into a run directory."""
    plan.save(run.plan)
    simulate(plan, cluster).timeline.save(run.predicted)


def kept_micro_batches(spec: JobSpec) -> int | None:
    """How many micro-batches the job's plan before had; None if the job says how many itself, or
    there is no plan of batches of this size.

    A new plan has as many: results depend on them, and a profile that was measured a moment later
    must not make another training of a job.
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
def advise_other_micro_batches(micro_batches: int | None) -> Iterator[None]:
    """Within, an error that nothing fits says that the number of micro-batches was kept."""
    try:
        yield
    except InfeasibleError as error:
        if micro_batches is not None:
            error.cure = (
                f"{error.cure}\nor let the planner choose the number of micro-batches again "
                f"(now {micro_batches}, from the previous plan): pipectl plan JOB.yaml "
                "--new-micro-batches"
            )
        raise


def request_of(
    spec: JobSpec, profile: Profile, cluster: Cluster, micro_batches: int | None = None
) -> PlanRequest:
    """What a job asks of the planner.

    Args:
        micro_batches: if the job leaves their number open; None leaves it to the planner.
    """
    pipeline = spec.pipeline
    listed = _own_schedule(spec)
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
    backward_apart = None if pipeline.backward is None else pipeline.backward == "apart"
    if spec.training.compile and pipeline.recompute != "all":
        # Never of stages whose other half is compiled, unless the job says so.
        backward_apart = backward_apart or False
    return PlanRequest(
        name=spec.name,
        batch_size=spec.training.batch_size,
        micro_batches=pipeline.micro_batches or micro_batches,
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
        backward_apart=backward_apart,
        every_schedule=pipeline.schedule is None and listed is None and not spec.training.compile,
        key=plan_file_key(spec, profile, cluster),
    )


def _own_schedule(spec: JobSpec) -> Listed | None:
    """A job's own schedule; None if it uses a built-in one."""
    pipeline = spec.pipeline
    name: str | None = pipeline.schedule
    if name is None or name in NAMES:
        return None
    if spec.schedule_file is not None:
        listed = read_listed(spec.schedule_file, name)
    else:
        if pipeline.micro_batches is None:
            raise InvalidInputError(
                f"pipeline.schedule: {name} needs a fixed number of micro-batches",
                cure="set pipeline.micro_batches",
            )
        ranks = spec.resources.ranks
        listed = make_listed(name, ranks, pipeline.stages or ranks, pipeline.micro_batches)
    for key in ("stages", "micro_batches"):
        expected, number = getattr(pipeline, key), getattr(listed, key)
        if expected not in (None, number):
            raise InvalidInputError(
                f"pipeline.{key}: {expected}, but schedule {listed.name} has {number}",
                cure=f"leave pipeline.{key} out, or change the schedule",
            )
    return listed
