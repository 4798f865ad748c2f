"""The programs of all ranks as the rows of the event loop.

What a rank executes follows from its stages and their neighbours, hardly ever from the rest of the
plan. So the program of a rank is made from a plan that holds only those, and ranks for which these
small plans are equal share it: of a pipeline with 10,000 stages, few programs differ. If a rank
needs the whole plan, its program is made once for every way in which its own stages recompute and
offload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from pipectl.arrays import Integers
from pipectl.plan import Plan, StageCost, Transfer
from pipectl.schedule import schedule_of
from pipectl.schedule.actions import Action, Actions, Kind
from pipectl.schedule.channel import carries_weights
from pipectl.schedule.lowering import lower
from pipectl.schedule.registry import is_unflushed
from pipectl.simulate.network import Numbering
from pipectl.simulate.tables import FULL, LAST, MEET, RANK, SAMPLES, Programs, Rows

_NO_COST = StageCost(0.0, 0.0, 0.0, 0, 0, 0)


@dataclass(frozen=True)
class Part:
    """What one rank executes.

    Args:
        program: number of its rows; ranks with the same number share them.
        rows: see :mod:`pipectl.simulate.tables`.
        stages, streams: the rank's; the rows hold indices into them.
    """

    program: int
    rows: Rows
    stages: Sequence[int]
    streams: Sequence[int]


def flatten(parts: Sequence[Part]) -> Programs:
    """The tables of the event loop; rows of one program are held once."""
    known: dict[int, tuple[int, Rows]] = {}
    total = 0
    for part in parts:
        if part.program not in known:
            known[part.program] = total, part.rows
            total += len(part.rows)
    ranks = np.zeros(len(parts), dtype=RANK)
    stages, ranks["stages"] = _joined([part.stages for part in parts])
    streams, streams_at = _joined([part.streams for part in parts])
    ranks["streams"] = streams_at + len(stages)
    ranks["first"] = [known[part.program][0] for part in parts]
    ranks["end"] = ranks["first"] + [len(part.rows) for part in parts]
    rows = np.concatenate([rows for _, rows in known.values()])
    return Programs(rows, ranks, np.concatenate([stages, streams]))


def given_parts(plan: Plan, numbering: Numbering, programs: Sequence[Actions]) -> list[Part]:
    """Programs that somebody else made."""
    stages, streams = range(len(plan.stages)), range(numbering.streams)
    return [
        Part(rank, rows_of(plan, numbering, rank, program), stages, streams)
        for rank, program in enumerate(programs)
    ]


def parts_of(plan: Plan, numbering: Numbering) -> list[Part]:
    """The programs of a plan.

    Raises:
        ScheduleError: see :func:`pipectl.schedule.lower`.
    """
    skeleton = _skeleton(plan)
    if not _is_local(plan):
        stages, streams = range(len(plan.stages)), range(numbering.streams)
        rows = _rows_of_all(skeleton, numbering)
        return [Part(*each, stages, streams) for each in enumerate(rows)]
    surroundings = _Surroundings(skeleton, numbering)
    programs: dict[Plan, tuple[int, Rows]] = {}
    parts = []
    for rank in range(plan.ranks):
        small, stages_of_rank, streams_of_rank = surroundings.of_rank(rank)
        if small not in programs:
            programs[small] = len(programs), _rows_of_first(small)
        parts.append(Part(*programs[small], stages_of_rank, streams_of_rank))
    return parts


def _is_local(plan: Plan) -> bool:
    """Whether small plans tell what ranks do."""
    is_local = schedule_of(plan).is_local
    return is_local and not any(
        len(stage.ranks) > 1 or stage.backward_ranks for stage in plan.stages
    )


class _Surroundings:
    """Small plans of single ranks; each costs time in proportion to the rank's channels."""

    def __init__(self, plan: Plan, numbering: Numbering) -> None:
        self._plan = plan
        self._numbering = numbering
        self._stages: list[list[int]] = [[] for _ in range(plan.ranks)]
        for index, stage in enumerate(plan.stages):
            self._stages[stage.ranks[0]].append(index)
        self._channels: list[list[int]] = [[] for _ in range(plan.ranks)]
        for index, channel in enumerate(numbering.connections):
            for rank in {channel.source_rank, channel.target_rank}:
                self._channels[rank].append(index)

    def of_rank(self, rank: int) -> tuple[Plan, tuple[int, ...], tuple[int, ...]]:
        """A plan in which it is rank 0 and others rank 1; its stages and streams in this one."""
        channels = [self._numbering.connections[index] for index in self._channels[rank]]
        ends = {end for item in channels for end in (item.source_stage, item.target_stage)}
        stages = sorted(ends.union(self._stages[rank]))
        position = {stage: index for index, stage in enumerate(stages)}
        whole = self._plan
        small = replace(
            whole,
            stages=tuple(
                replace(whole.stages[stage], ranks=(int(whole.stages[stage].ranks[0] != rank),))
                for stage in stages
            ),
            warm_up=tuple(whole.warm_up[stage] for stage in stages),
            transfers=tuple(
                Transfer(item.kind, position[item.source_stage], position[item.target_stage], 0)
                for item in channels
            ),
            node_of_rank=(0, 0),
        )
        streams = self._numbering.around(self._channels[rank], stages, rank)
        return small, tuple(stages), tuple(streams)


def _skeleton(plan: Plan) -> Plan:
    """The plan without all that no program depends on, so that more plans are equal."""
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
    """Of every rank; they follow from the modes of its own stages and from no others."""
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
    """Rows by rank and by what its stages do, of plans that differ in nothing else."""
    return {}


def rows_of(plan: Plan, numbering: Numbering, rank: int, actions: Actions) -> Rows:
    """The columns the loop reads, with a meeting before every UPDATE that ends a flushed step."""
    kind, micro_batch = actions.column("kind"), actions.column("micro_batch")
    start, stop = actions.column("start"), actions.column("stop")
    size = np.where(micro_batch == plan.micro_batches - 1, LAST, FULL)
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


def with_sizes(plan: Plan, rows: Actions) -> Actions:
    """Rows of steps that are not flushed, in which smaller last micro-batches of steps say so."""
    last = plan.batch_size - (plan.micro_batches - 1) * plan.micro_batch_size
    if last == plan.micro_batch_size or not is_unflushed(plan):
        return rows
    sized, index = rows.rows.copy(), rows.column("micro_batch")
    last_of_step = (index >= 0) & (index % plan.micro_batches == plan.micro_batches - 1)
    smaller = last_of_step & ~carries_weights(plan, rows)
    for name, value in (("start", 0), ("stop", last)):
        sized[smaller, Action._fields.index(name)] = value
    return Actions(sized)


def _joined(lists: Sequence[Sequence[int]]) -> tuple[Integers, Integers]:
    """All lists in one array, and where each begins; equal ones are held once."""
    bases: dict[Sequence[int], int] = {}
    joined: list[int] = []
    for items in lists:
        if items not in bases:
            bases[items] = len(joined)
            joined.extend(items)
    starts = [bases[items] for items in lists]
    return np.array(joined, dtype=np.int64), np.array(starts, dtype=np.int64)
