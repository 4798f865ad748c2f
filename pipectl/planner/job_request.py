"""The request to the planner of a job."""

from __future__ import annotations

from pipectl.cluster import Cluster, OffloadTarget
from pipectl.errors import InvalidInputError
from pipectl.planner.request import EvaluationSize, PlanRequest
from pipectl.profile import Profile
from pipectl.schedule import NAMES
from pipectl.schedule.combinations import APART, SEGMENTS, Part, go_together
from pipectl.schedule.listed import Listed
from pipectl.schedule.registry import make_listed, read_listed
from pipectl.spec import JobSpec, evaluation_key
from pipectl.spec.checks import features_of

_RECOMPUTE: dict[str | None, tuple[bool | None, bool | None]] = {
    None: (None, None),
    "none": (False, False),
    "all": (True, False),
    "blocks": (True, True),
}
"""Whether all stages recompute, and whether segment by segment; None lets the planner choose."""


def request_of_job(
    spec: JobSpec, profile: Profile, cluster: Cluster, kept_micro_batches: int | None
) -> PlanRequest:
    """Return what a job lets the planner choose.

    Args:
        kept_micro_batches: their number in an earlier plan, which stays if the job does not set it;
            None leaves it to the planner.

    Raises:
        InvalidInputError: the job leaves the number of micro-batches to the planner, and its loss
            depends on it; or a file of the job's own schedule is wrong.
    """
    pipeline, resources, loss = spec.pipeline, spec.resources, profile.halved_loss
    limit, share = pipeline.memory_limit, resources.memory_per_rank()
    is_share = share is not None and (limit is None or share < limit)
    listed = _own_schedule(spec)
    if loss is not None and loss.depends and not (pipeline.micro_batches or listed):
        raise InvalidInputError(
            f"pipeline.micro_batches: auto cannot choose their number: {loss}",
            hint="set the number (--set pipeline.micro_batches=N), with a learning rate for it; or "
            "write loss.weight: sum if it is a sum over samples, or name there a function that "
            "counts what it is a mean of",
        )
    kept = None if pipeline.micro_batches else kept_micro_batches
    recompute, segments = _RECOMPUTE[pipeline.recompute]
    if pipeline.offload in tuple(OffloadTarget):
        offload_to = OffloadTarget(pipeline.offload)
    else:  # to memory that ranks do not compute in
        offload_to = OffloadTarget.HOST if resources.gpus_per_node else OffloadTarget.DISK
    offload: bool | None = None
    if pipeline.offload is not None:
        offload = pipeline.offload != "none"
    elif offload_to is OffloadTarget.DISK and any(
        node.device.disk_link is None for node in cluster.nodes
    ):
        offload = False  # it is unknown whether it pays
    backward_apart = None if pipeline.backward is None else pipeline.backward == "apart"
    asked: set[Part] = {*features_of(pipeline, spec.training)}
    if backward_apart is None and not go_together({*asked, APART}):
        backward_apart = False
    if segments is None and not go_together({*asked, SEGMENTS}):
        segments = False
    return PlanRequest(
        name=spec.name,
        batch_size=spec.training.batch_size,
        micro_batches=pipeline.micro_batches or kept,
        keeps_micro_batches=kept is not None,
        stages=pipeline.stages,
        schedule=None if listed else pipeline.schedule,
        listed=listed,
        warm_up=pipeline.warm_up,
        memory_limit_bytes=share if is_share else limit,
        memory_shared_by=resources.tasks_per_node if is_share else None,
        recompute=recompute,
        segments=segments,
        offload=offload,
        offload_to=offload_to,
        replicas=None if pipeline.replicas == "any" else int(pipeline.replicas or 1),
        shard_optimizer=pipeline.shard_optimizer,
        updates_together=spec.training.updates_together,
        reproducible=spec.training.reproducible,
        correct_delay=spec.training.correct_delay,
        backward_apart=backward_apart,
        every_schedule=pipeline.schedule is None and listed is None and not spec.training.compile,
        smallest=profile.smallest,
        evaluation=_evaluation_size(spec, profile),
        batches=profile.batches(spec.training.batch_size, drop_last=spec.data.drop_last),
    )


def _evaluation_size(spec: JobSpec, profile: Profile) -> EvaluationSize | None:
    """How many samples are evaluated at once; None without an evaluation."""
    if spec.evaluation is None:
        return None
    is_known = profile.evaluation_key == evaluation_key(spec)
    return EvaluationSize(
        spec.evaluation.batch_size, max(profile.held_out, default=None) if is_known else None
    )


def _own_schedule(spec: JobSpec) -> Listed | None:
    """The job's own schedule; None if it uses a built-in one."""
    pipeline = spec.pipeline
    name: str | None = pipeline.schedule
    if name is None or name in NAMES:
        return None
    if spec.schedule_file is not None:
        listed = read_listed(spec.schedule_file, spec.schedule_file.name)
    else:
        if pipeline.micro_batches is None:
            raise InvalidInputError(
                f"pipeline.schedule: {name} needs a fixed number of micro-batches",
                hint="set pipeline.micro_batches",
            )
        ranks = spec.resources.ranks
        listed = make_listed(name, ranks, pipeline.stages or ranks, pipeline.micro_batches)
    for key in ("stages", "micro_batches"):
        expected, number = getattr(pipeline, key), getattr(listed, key)
        if expected not in (None, number):
            raise InvalidInputError(
                f"pipeline.{key}: {expected}, but schedule {listed.name} has {number}",
                hint=f"leave pipeline.{key} out, or change the schedule",
            )
    return listed
