"""The programs of all ranks as rows of the event loop.

The program of a rank almost always depends only on its stages and their neighbours. It is made from
a small plan that contains only these, and ranks with equal small plans share a program: a pipeline
with 10,000 stages has few different programs. If a rank needs the whole plan, its program is made
once per combination of recomputation and offloading of its own stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from pipectl.arrays import Integers
from pipectl.plan import Plan, StageCost, Transfer
from pipectl.schedule import schedule_of
from pipectl.schedule.actions import Actions, Kind
from pipectl.schedule.channel import carries_weights, channels_of_rank
from pipectl.schedule.lowering import lower
from pipectl.schedule.registry import is_unflushed
from pipectl.simulate.network import Numbering
from pipectl.simulate.tables import FULL, LAST, MEET, RANK, SAMPLES, SIZE, Programs, Rows

_NO_COST = StageCost(0.0, 0.0, 0.0, 0, 0, 0)


def programs_of(
    plan: Plan, numbering: Numbering, programs: Sequence[Actions] | None = None
) -> Programs:
    """Return what every rank executes; rows that ranks share are stored once.

    Args:
        programs: programs of all ranks; by default the plan's own.

    Raises:
        ScheduleError: see :func:`pipectl.schedule.lower`.
    """
    count = plan.ranks
    stages: list[Sequence[int]] = [range(len(plan.stages))] * count  # fast to hash
    streams: list[Sequence[int]] = [range(numbering.streams)] * count
    number = list(range(count))
    if programs is not None:
        rows = [rows_of(plan, numbering, rank, actions) for rank, actions in enumerate(programs)]
    elif not schedule_of(plan).is_local or any(
        len(stage.ranks) > 1 or stage.backward_ranks for stage in plan.stages
    ):
        rows = _rows_of_all(_skeleton(plan), numbering)
    else:
        numbers: dict[Plan, int] = {}
        for rank, (small, *names) in enumerate(_neighbourhoods(plan, numbering)):
            number[rank] = numbers.setdefault(small, len(numbers))
            stages[rank], streams[rank] = names
        rows = list(map(_rows_of_first, numbers))
    ends = np.cumsum([len(each) for each in rows])
    ranks = np.zeros(count, dtype=RANK)
    ranks["end"] = ends[number]
    ranks["first"] = (ends - [len(each) for each in rows])[number]
    stage_names, ranks["stages"] = _join(stages)
    stream_names, places = _join(streams)
    ranks["streams"] = places + len(stage_names)
    every = np.concatenate(rows)
    sizes = np.flatnonzero(np.bincount(every[:, SIZE]))
    every[:, SIZE] = np.searchsorted(sizes, every[:, SIZE])
    parts = (sizes - SAMPLES) / plan.micro_batch_size
    last = plan.micro_batch_shares[-1]
    share = np.where(sizes == FULL, 1.0, np.where(sizes == LAST, last, parts))
    return Programs(every, ranks, np.concatenate([stage_names, stream_names]), share)


def _neighbourhoods(
    plan: Plan, numbering: Numbering
) -> Iterator[tuple[Plan, tuple[int, ...], tuple[int, ...]]]:
    """Yield for each rank a small plan, in which it is rank 0 and all others are rank 1, and its
    stages and streams in the whole plan. Takes time in proportion to the channels."""
    skeleton = _skeleton(plan)
    stages_of: list[list[int]] = [[] for _ in range(plan.ranks)]
    for index, stage in enumerate(plan.stages):
        stages_of[stage.ranks[0]].append(index)
    for rank, own in enumerate(stages_of):
        numbers = [index for index, _ in channels_of_rank(plan, rank)]
        connections = [channel for _, channel in channels_of_rank(plan, rank)]
        ends = {end for item in connections for end in (item.source_stage, item.target_stage)}
        stages = sorted(ends.union(own))
        position = {stage: index for index, stage in enumerate(stages)}
        small = replace(
            skeleton,
            stages=tuple(
                replace(skeleton.stages[stage], ranks=(int(plan.stages[stage].ranks[0] != rank),))
                for stage in stages
            ),
            warm_up=tuple(plan.warm_up[stage] for stage in stages),
            transfers=tuple(
                Transfer(item.kind, position[item.source_stage], position[item.target_stage], 0)
                for item in connections
            ),
            node_of_rank=(0, 0),
        )
        yield small, tuple(stages), tuple(numbering.around(numbers, stages, rank))


def _skeleton(plan: Plan) -> Plan:
    """Return the plan without what programs do not depend on, so that more plans are equal."""
    return replace(
        plan,
        name="",
        fingerprint=None,
        stages=tuple(replace(stage, nodes=(), cost=_NO_COST, blocks=None) for stage in plan.stages),
        transfers=tuple(replace(item, size_bytes=0) for item in plan.transfers),
        memory_limit_bytes=None,
        prediction=None,
        search=None,
        key=None,
        assumptions=(),
    )


@lru_cache(maxsize=256)
def _rows_of_first(plan: Plan) -> Rows:
    return rows_of(plan, Numbering(plan), 0, lower(plan, 0))


def _rows_of_all(plan: Plan, numbering: Numbering) -> list[Rows]:
    """Return the rows of every rank, cached by the modes of its own stages."""
    stages = tuple(replace(stage, recompute=False, offload=False) for stage in plan.stages)
    known = _rows_by_modes(replace(plan, stages=stages))
    modes: list[list[bool]] = [[] for _ in range(plan.ranks)]
    for stage in plan.stages:
        for rank in (*stage.ranks, *stage.backward_ranks):
            modes[rank] += stage.recompute, stage.offload
    rows = []
    for rank, own in enumerate(modes):
        key = rank, tuple(own)
        if key not in known:
            known[key] = rows_of(plan, numbering, rank, lower(plan, rank))
        rows.append(known[key])
    return rows


@lru_cache(maxsize=16)
def _rows_by_modes(_: Plan) -> dict[tuple[int, tuple[bool, ...]], Rows]:
    """Return the cache of rows by rank and modes, for plans that differ only in modes."""
    return {}


def rows_of(plan: Plan, numbering: Numbering, rank: int, actions: Actions) -> Rows:
    """Return the columns that the loop reads; a meeting precedes every UPDATE of a flushed step."""
    kind, micro_batch = actions.column("kind"), actions.column("micro_batch")
    start, stop = actions.column("start"), actions.column("stop")
    is_last = (micro_batch >= 0) & ((micro_batch + 1) % plan.micro_batches == 0)
    if is_unflushed(plan):
        is_last &= ~carries_weights(plan, actions)
    size = np.where(is_last, LAST, FULL)
    rows = np.stack(
        [
            kind,
            actions.column("stage"),
            numbering.of_rows(rank, actions),
            micro_batch,
            np.where(start < 0, size, SAMPLES + stop - start),
        ],
        axis=1,
    ).astype(np.int32)
    if is_unflushed(plan):
        return np.ascontiguousarray(rows)
    updates = np.flatnonzero(kind == Kind.UPDATE)
    meetings = rows[updates]
    meetings[:, 0] = MEET
    return np.ascontiguousarray(np.insert(rows, updates, meetings, axis=0))


def _join(lists: Sequence[Sequence[int]]) -> tuple[Integers, Integers]:
    """Join all lists in one array and return the start of each; equal lists are stored once."""
    bases: dict[Sequence[int], int] = {}
    joined: list[int] = []
    for items in lists:
        if items not in bases:
            bases[items] = len(joined)
            joined.extend(items)
    starts = [bases[items] for items in lists]
    return np.array(joined, dtype=np.int64), np.array(starts, dtype=np.int64)
