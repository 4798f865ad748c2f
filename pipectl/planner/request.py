"""A request to the planner: what is fixed, and which choices are open.

What is tried for these is in :mod:`pipectl.planner.choices`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipectl.cluster import Cluster, OffloadTarget
from pipectl.errors import OutOfTimeError
from pipectl.plan import Plan, Replication
from pipectl.profile import Profile
from pipectl.profile_parts import SmallestMicroBatch
from pipectl.schedule import SCHEDULES
from pipectl.schedule.interleaved import INTERLEAVED
from pipectl.schedule.listed import Listed
from pipectl.schedule.one_f_one_b import GPIPE, ONE_F_ONE_B

OPEN = (ONE_F_ONE_B, GPIPE)
"""Schedules that the search itself tries."""
OTHER_SCHEDULES = tuple(name for name, schedule in SCHEDULES.items() if schedule not in OPEN)
"""Planned from plans of the search, if they are named or ``every_schedule`` allows them."""
COMPARED = (*OPEN, INTERLEAVED)
"""Those that plans are compared with; others assume what half a backward takes."""


class EvaluationSize(NamedTuple):
    """How many samples an evaluation computes at once.

    Args:
        asked: as the job has it; None for those of a micro-batch.
        held_out: the most that there are; None if unknown.
    """

    asked: int | None = None
    held_out: int | None = None

    def samples(self, micro_batch_size: int) -> int:
        """The samples, of a plan with micro-batches of this size."""
        asked = self.asked or micro_batch_size
        return asked if self.held_out is None else min(asked, self.held_out)

    def has_several(self, micro_batch_size: int) -> bool:
        """Whether there are more samples than these."""
        return self.held_out is None or self.held_out > self.samples(micro_batch_size)


@dataclass(frozen=True)
class PlanRequest:
    """A job as the planner sees it; None leaves a choice to the planner.

    The checks of job specs (:mod:`pipectl.spec.checks`) exclude choices that contradict each other.

    Args:
        batch_size: samples of one optimizer step.
        warm_up: forwards each stage runs before its first backward, one entry per stage.
        memory_limit_bytes: resident memory of any rank, its process included.
        memory_shared_by: ranks per node if the limit is a rank's share of
            ``resources.memory_per_node``; None if there is no limit, or it is
            ``pipeline.memory_limit``.
        recompute: whether stages recompute their forward for their backward instead of keeping its
            saved values: all stages, none, or those that do not fit otherwise.
        segments: whether stages that recompute do so segment by segment: all that hold less then,
            none, or those that do not fit otherwise.
        replicas: of every stage; None leaves it to the planner, stage by stage.
        replication: how replicas share the work; None tries both ways. Split micro-batches change
            results if an operator uses the whole micro-batch, as BatchNorm does.
        offload: whether stages move saved values off the device until their backward: all stages,
            none, or those that gain.
        offload_to: where offloaded values are kept.
        backward_apart: whether the backward of a stage has a separate rank: all stages, none, or
            those that gain.
        every_schedule: whether an open schedule may be any that keeps the results of one rank, or
            only one with one stage per rank and whole backwards.
        listed: a user's own schedule, which also fixes the numbers of stages and micro-batches.
        shard_optimizer: whether each replica of a stage keeps a part of its optimizer state.
        updates_together, reproducible: as in the plan.
        correct_delay: whether updates are corrected, for which the last one is kept.
        key: recorded in the plan; see :class:`pipectl.plan.Plan`.
        from_job: whether the request is from a job file; errors then name keys, otherwise options.
        keeps_micro_batches: whether ``micro_batches`` is that of an earlier plan of the job.
        smallest: the smallest micro-batch that the model takes; None if it takes single samples.
        batches: the sizes of the batches of an epoch; empty if all have ``batch_size``. Copies of
            a pipeline share them.
        evaluation: the size of evaluations; None without them.
    """

    name: str
    batch_size: int
    micro_batches: int | None = None
    stages: int | None = None
    schedule: str | None = None
    warm_up: tuple[int, ...] | None = None
    memory_limit_bytes: int | None = None
    memory_shared_by: int | None = None
    recompute: bool | None = False
    segments: bool | None = False
    replicas: int | None = 1
    replication: Replication | None = Replication.WHOLE
    offload: bool | None = False
    offload_to: OffloadTarget = OffloadTarget.HOST
    backward_apart: bool | None = False
    every_schedule: bool = False
    listed: Listed | None = None
    shard_optimizer: bool = False
    updates_together: bool = True
    reproducible: bool = False
    correct_delay: bool = False
    key: str | None = None
    from_job: bool = True
    keeps_micro_batches: bool = False
    smallest: SmallestMicroBatch | None = None
    batches: tuple[int, ...] = ()
    evaluation: EvaluationSize | None = None

    @property
    def memory_key(self) -> str:
        """The key of the job that sets the memory limit."""
        shared = self.memory_shared_by is not None
        return "resources.memory_per_node" if shared else "pipeline.memory_limit"

    @property
    def more_ranks(self) -> str:
        """What gives the job more ranks, for errors."""
        return "more ranks in resources" if self.from_job else "more --devices"

    def more_memory(self, cluster: Cluster) -> str:
        """What gives the ranks more memory, for errors: the limit, or else their devices."""
        smallest = min(cluster.memory_of(rank, None) for rank in range(cluster.ranks))
        if self.memory_limit_bytes is None or self.memory_limit_bytes > smallest:
            return "ranks with more memory"
        return f"a larger {self.memory_key}"

    @property
    def has_variants(self) -> bool:
        """Whether plans are derived from plain plans of the search.

        True if offload, backwards on other ranks, other schedules or recomputation by segments are
        open or required; open segments count only with one rank per stage.
        """
        varied = self.offload is not False or self.backward_apart is not False
        plain = self.replicas == 1 and self.schedule not in OTHER_SCHEDULES
        return varied or self.every_schedule or self.segments or (plain and self.segments is None)

    @property
    def without_variants(self) -> PlanRequest:
        """The request for plain plans."""
        return replace(
            self, offload=False, backward_apart=False, every_schedule=False, segments=False
        )

    @property
    def replications(self) -> tuple[Replication, ...]:
        """The allowed ways in which replicas share the work."""
        return tuple(Replication) if self.replication is None else (self.replication,)

    @property
    def fixed_stages(self) -> int | None:
        """The number of stages, if any field of the request fixes it."""
        return len(self.warm_up) if self.warm_up is not None else self.stages


Planner = Callable[[Profile, Cluster, PlanRequest], Plan]
"""Makes the best plan it can; raises InfeasibleError if none fits."""

Expired = Callable[[], bool]
"""Whether a search must end; searches call it regularly."""


def out_of_time() -> OutOfTimeError:
    """The error for no plan in time."""
    return OutOfTimeError("planning was ended before any plan was found", hint="allow more time")
