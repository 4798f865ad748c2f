"""Plans of one schedule, with equal stages or with the stages of another plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from pipectl.errors import UsageError
from pipectl.lanes import TransferKind
from pipectl.plan import Plan, Stage, StageCost, Transfer
from pipectl.schedule.listed import Listed
from pipectl.schedule.registry import (
    NAMES,
    default_ranks,
    default_warm_up,
    find_packaged,
    make_listed,
)


def plan_equal_stages(
    schedule: str, listed: Listed | None, numbers: Mapping[str, int | None], cost: StageCost
) -> Plan:
    """Return a plan of a schedule with equal stages, whose messages have no bytes.

    Args:
        schedule: name of the schedule.
        listed: schedule read from a file; None if it is built in or offered by a package.
        numbers: ``stages``, ``micro-batches`` and ``ranks``; None if the schedule has its own.
        cost: of every stage.

    Raises:
        UsageError: the schedule is unknown, or a number that it needs is missing or wrong.
        ScheduleError: the schedule is invalid.
    """
    stages, micro_batches, ranks = numbers.values()
    if listed is None:
        if schedule not in NAMES:
            find_packaged(schedule)
        if stages is None or micro_batches is None:
            raise UsageError(
                f"schedule {schedule}: of how many stages and micro-batches?",
                hint="add for example --stages 4 --micro-batches 8",
            )
        if schedule in NAMES:
            rank_of_stage = default_ranks(schedule, stages, ranks)
            ranks = len(set(rank_of_stage))
            warm_up = default_warm_up(schedule, stages, micro_batches, ranks=ranks)
        else:
            listed = make_listed(schedule, ranks or stages, stages, micro_batches)
    if listed is not None:
        stages, micro_batches, ranks = listed.stages, listed.micro_batches, len(listed.ranks)
        rank_of_stage, warm_up = listed.rank_of_stage, listed.warm_up
    assert stages is not None
    assert micro_batches is not None
    for (name, value), number in zip(numbers.items(), (stages, micro_batches, ranks), strict=True):
        if value not in (None, number):
            subject = schedule if listed else f"{schedule} of {stages} stages"
            raise UsageError(
                f"{subject} has {number} {name}, not {value}", hint=f"leave --{name} out"
            )
    pairs = list(pairwise(range(stages)))
    return Plan(
        name=schedule,
        fingerprint=None,
        schedule=schedule,
        actions=listed.text if listed else (),
        warm_up=tuple(warm_up),
        batch_size=micro_batches,
        micro_batch_size=1,
        micro_batches=micro_batches,
        stages=tuple(Stage((f"stage{s}",), (rank,), cost) for s, rank in enumerate(rank_of_stage)),
        transfers=(
            *(Transfer(TransferKind.ACTIVATION, a, b, 0) for a, b in pairs),
            *(Transfer(TransferKind.GRADIENT, b, a, 0) for a, b in pairs),
        ),
        node_of_rank=(0,) * (1 + max(rank_of_stage)),
    )


def reorder(plan: Plan, listed: Listed) -> Plan:
    """Return the plan with its stages in the order, and on the ranks, of a user's schedule.

    Raises:
        UsageError: the schedule has other numbers of stages, micro-batches or ranks.
    """
    schedule = listed.name
    if any(stage.replicas > 1 or stage.backward_ranks for stage in plan.stages):
        raise UsageError(
            f"--schedule {schedule}: stages of the plan have several ranks, lists give them one",
            hint="plan again with pipeline.schedule",
        )
    have = len(plan.stages), plan.micro_batches, plan.ranks
    needs = listed.stages, listed.micro_batches, len(listed.ranks)
    if have[:2] != needs[:2] or needs[2] > have[2]:
        raise UsageError(
            "{} has {} stages, {} micro-batches and {} ranks; the plan {}, {} and {}".format(
                schedule, *needs, *have
            ),
            hint="use a schedule made for the plan, or plan again with pipeline.schedule",
        )
    ranks = zip(plan.stages, listed.rank_of_stage, strict=True)
    return replace(
        plan,
        schedule=listed.name,
        actions=listed.text,
        warm_up=listed.warm_up,
        stages=tuple(replace(stage, ranks=(rank,)) for stage, rank in ranks),
        prediction=None,
    )
