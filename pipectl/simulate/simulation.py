"""Simulation of one optimizer step from the costs of a plan and the links of a cluster.

The model:

- A rank runs its rows in order. A WAIT row lasts until its operation is over. A computation takes
  its share of the time of a full micro-batch, divided by the speed of the device. A recomputation
  takes the time of its forward; the halves of a split backward take the times in the plan.
- If the cluster has row times, these are time of the rank itself: of the rows of messages, at the
  start of a step, after a computation, at the meeting before an update and at its end
  (:mod:`pipectl.link`). On shared cores the time of rows is added to the next computation.
- A message moves when both ends have started it (rendezvous), over links that it may share
  (:mod:`pipectl.simulate.network`, :mod:`pipectl.simulate.events`).
- Copies to and from host memory run one after another in each direction.
- Gradients are summed over the replicas of a stage when all replicas have started the sum, while
  they continue to compute, over the same links as messages (:mod:`pipectl.simulate.network`).
- Ranks of a node share its cores evenly while more ranks compute than there are cores.
- At UPDATE all ranks meet if the plan says so, then each rank updates its stages. If they do not
  meet, a rank begins its next step while others end theirs, and the step time is from step to step:
  each rank follows the same course again as soon as no rank is late for its first computation. It
  is at most that, because a rank with a long update finds more of its messages there. Ranks do not
  begin long steps before all have ended their backwards.
- If steps are not flushed, ranks do not meet, and the steady state is simulated: two stretches are
  executed between empty pipelines, the second with twice as many steady steps. Both fill and drain
  alike, so their difference is the steady state.

The program of a rank almost always depends only on its stages and their neighbours. It is made from
a small plan that contains only these, and ranks with equal small plans share a program: a pipeline
with 10,000 stages has few different programs. If a rank needs the whole plan, its program is made
once per combination of recomputation and offloading of its own stages.

Simultaneous events are processed in the order of scheduling, so equal inputs give equal results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from math import ceil

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.cluster import Cluster
from pipectl.errors import MismatchError, ScheduleError
from pipectl.link import FREE_ROWS, RowTimes, seconds_of
from pipectl.plan import LONG_STEP_S, Plan, Prediction, StageCost, Transfer
from pipectl.schedule.actions import EVENT_NAMES, Actions, Kind
from pipectl.schedule.channel import carries_weights, channels_of_rank
from pipectl.schedule.lowering import lower, lower_stretch
from pipectl.schedule.registry import is_unflushed, schedule_of
from pipectl.schedule.unflushed import steps_apart
from pipectl.simulate import events
from pipectl.simulate.memory import amounts_of, evaluation_peaks, peak_bytes, unused_bytes
from pipectl.simulate.network import Numbering, streams_of, tables
from pipectl.simulate.tables import (
    CLOCK,
    EVENT,
    FULL,
    KIND,
    LAST,
    MEET,
    MESSAGE_ROWS,
    MICRO_BATCH,
    OPERATIONS,
    POOL,
    RANK,
    RECORD,
    SAMPLES,
    SIZE,
    STAGE,
    STREAM,
    Network,
    Programs,
    Rows,
    Tables,
)
from pipectl.timeline import Event, Timeline

Record = tuple[int, float, float, int, int, int, int]
"""Rank, start, end, kind, stage, micro-batch, channel."""

EVENTS_AT_ONCE = 100_000
"""Events per call of the compiled loop; between calls, Python handles signals."""
_NO_COST = StageCost(0.0, 0.0, 0.0, 0, 0, 0)
MICRO_BATCHES_TO_STEADY = 4
"""Micro-batches per stage after which waits do not change any more, if steps overlap."""


@dataclass(frozen=True)
class Simulation(Prediction):
    """One simulated optimizer step; if steps overlap, one of many, from update to update.

    Args:
        record: executes the step again and returns what every rank did.
    """

    record: Callable[[], Sequence[Record]] = field(repr=False, compare=False, kw_only=True)

    @cached_property
    def timeline(self) -> Timeline:
        """Events by rank and start, without waits that took no time.

        If steps overlap, the timeline has several steps, between two empty pipelines.
        """
        events = (
            Event(rank, start, end, EVENT_NAMES[kind], *rest)
            for rank, start, end, kind, *rest in self.record()
            if end > start or kind < Kind.SEND_START
        )
        return Timeline(tuple(events), len(self.utilisation))

    @property
    def prediction(self) -> Prediction:
        """The figures that a plan contains."""
        return Prediction(**{each.name: getattr(self, each.name) for each in fields(Prediction)})


def simulate(
    plan: Plan,
    cluster: Cluster,
    actions: Sequence[Actions] | None = None,
    *,
    process_baseline_bytes: int = 0,
    capture_bytes: int = 0,
    heap_share: float = 0.0,
) -> Simulation:
    """Simulate one optimizer step.

    Args:
        actions: of every rank, with at most the plan's micro-batches; by default the plan's own,
            which are always used if steps overlap.
        process_baseline_bytes: memory of a process without a stage; added to the peaks.
        capture_bytes: peak of every rank before the training.
        heap_share: memory that the allocator of a rank holds unused, relative to what a step
            allocates; see :func:`~pipectl.simulate.memory.unused_bytes`.

    Raises:
        MismatchError: the plan uses nodes that the cluster lacks.
        ScheduleError: the ranks wait for each other forever.
    """
    if is_unflushed(plan):
        steady = max(2, ceil(MICRO_BATCHES_TO_STEADY * len(plan.stages) / plan.micro_batches))
        machine, longer = (_stretch(plan, cluster, steady * n) for n in (1, 2))
        short_s, long_s = machine.run(), longer.run()
        step_time_s = (long_s - short_s) / steady
        busy = zip(machine.busy_s(), longer.busy_s(), strict=True)
        busy_s = [(more - less) / steady for less, more in busy]
    else:
        machine = Machine(plan, cluster, actions)
        machine.run()
        step_time_s, busy_s = machine.step_time_s(), machine.busy_s()

    def record() -> list[Record]:
        """Execute the step again; if steps overlap, the shortest stretch with a steady one."""
        if is_unflushed(plan):
            again = _stretch(plan, cluster, 1, record=True)
        else:
            again = Machine(plan, cluster, actions, record=True)
        again.run()
        return again.records()

    peaks = machine.peak_memory_bytes(process_baseline_bytes, heap_share)
    utilisation = tuple(busy / step_time_s if step_time_s else 0.0 for busy in busy_s)
    return Simulation(
        step_time_s=step_time_s,
        bubble=max(0.0, 1 - sum(utilisation) / len(utilisation)),  # rounding may exceed 1
        utilisation=utilisation,
        peak_memory_bytes=tuple(max(peak, capture_bytes) for peak in peaks),
        peak_flops_per_s=cluster.peak_flops_per_s(plan.node_of_rank),
        record=record,
    )


def _stretch(plan: Plan, cluster: Cluster, steady: int, *, record: bool = False) -> Machine:
    """Return a machine that executes overlapping steps between two empty pipelines."""
    steps = steady + steps_apart(plan)
    actions = [lower_stretch(plan, rank, steps) for rank in range(plan.ranks)]
    return Machine(plan, cluster, actions, steps=steps, record=record)


class Machine:
    """Ranks, links, cores and a queue of events.

    Args:
        actions: of every rank; by default the plan's own.
        steps: number of steps in the actions, executed as one.
        record: whether to keep the start and the end of every row.

    Raises:
        MismatchError: the plan uses nodes that the cluster lacks.
    """

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        actions: Sequence[Actions] | None = None,
        *,
        steps: int = 1,
        record: bool = False,
    ) -> None:
        used = 1 + max(plan.node_of_rank)
        if used > len(cluster.nodes):
            raise MismatchError(
                f"plan {plan.name!r} uses {used} nodes, cluster {cluster.name!r} has "
                f"{len(cluster.nodes)}",
                hint="plan again for this cluster",
            )
        numbering = Numbering(plan)
        self._plan, self._actions, self._channels = plan, actions, numbering.channels
        self.programs = programs_of(plan, numbering, actions)
        network = tables(streams_of(plan, cluster, numbering, steps), self.programs.share)
        self.tables = _new_tables(plan, cluster, numbering, self.programs, network, record=record)

    def run(self) -> float:
        """Execute everything; return the end of the last row, in seconds.

        Raises:
            ScheduleError: ranks wait forever.
        """
        while events.advance(self.tables, EVENTS_AT_ONCE):
            pass
        ranks = self.tables.ranks
        unfinished = np.flatnonzero(ranks["position"] < ranks["end"]).tolist()
        if unfinished:
            raise ScheduleError(
                f"plan {self._plan.name!r}: ranks {unfinished} wait forever",
                hint="plan again; a warm_up must not rise from a stage to the next",
            )
        return float(self.tables.clock["now"][0])

    def step_time_s(self) -> float:
        """Return the seconds from the end of a step to that of the next one, after :meth:`run`."""
        clock, ranks = self.tables.clock[0], self.tables.ranks
        if clock["meets"]:
            return float(clock["now"])
        step_s = float((ranks["ended_s"] - ranks["idle_s"]).max())
        if step_s >= LONG_STEP_S:
            updates_s = ranks["update_s"] / ranks["speed"]
            step_s = max(step_s, float((ranks["ended_s"] - updates_s).max()))
        return step_s

    def busy_s(self) -> list[float]:
        """Return the seconds in which each rank computes."""
        busy_s: list[float] = self.tables.ranks["busy_s"].tolist()
        return busy_s

    def peak_memory_bytes(self, process_baseline_bytes: int, heap_share: float) -> tuple[int, ...]:
        """Return the peak bytes of each rank, including the process baseline and unused memory."""
        amounts = amounts_of(self._plan, self._actions or ())
        peaks = peak_bytes(self.programs, amounts)
        if heap_share:
            peaks += unused_bytes(self._plan, peaks - amounts.resident, heap_share)
        peaks = np.maximum(peaks, evaluation_peaks(self._plan, heap_share))
        return tuple(process_baseline_bytes + round(peak) for peak in peaks.tolist())

    def records(self) -> list[Record]:
        """Return the rows that took time, by rank and start; empty unless they were recorded."""
        records = self.tables.records[: self.tables.clock["recorded"][0]]
        rows, ranks = self.programs.rows[records["row"]], self.programs.ranks[records["rank"]]
        names = self.programs.names

        def named(base: Integers, slots: Rows) -> Integers:
            """Return what the slots of ranks stand for in the plan; -1 stays -1."""
            places = np.minimum(base + slots, len(names) - 1)
            return np.where(slots < 0, -1, names[places])

        stage = named(ranks["stages"], rows[:, STAGE])
        stream = named(ranks["streams"], rows[:, STREAM])
        channel = np.where(stream < len(self._channels), stream, -1)
        times = records["rank"], records["start"], records["end"]
        columns = *times, rows[:, KIND], stage, rows[:, MICRO_BATCH], channel
        return sorted(zip(*(column.tolist() for column in columns), strict=True))


def _work_s(plan: Plan) -> Floats:
    """Return the seconds of a full micro-batch by kind and stage, on a device of speed 1."""
    work_s = np.zeros((len(Kind), len(plan.stages)))
    whole = [Kind.FORWARD, Kind.EVALUATE, Kind.RECOMPUTE, Kind.BACKWARD]
    for index, stage in enumerate(plan.stages):
        forward_s, cost = stage.cost.forward_s, stage.running
        work_s[whole, index] = cost.forward_s, forward_s, stage.recompute_s, cost.backward_s
        work_s[[Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT], index] = cost.halves_s
    return work_s


def _message_s(rows: Sequence[RowTimes], numbering: Numbering) -> Floats:
    """Return the seconds of the rows of messages for a full micro-batch, by kind and stream.

    Args:
        rows: row times of each rank.
    """
    if all(each is FREE_ROWS for each in rows):
        return np.zeros((len(Kind), 0))
    message_s = np.zeros((len(Kind), numbering.streams))
    for index, channel in enumerate(numbering.channels):
        if not channel.is_local:
            ends = rows[channel.source_rank], rows[channel.target_rank]
            known = (
                ends[0].send_start, ends[0].send_wait, ends[1].receive_start, ends[1].receive_wait
            )  # fmt: skip
            message_s[list(MESSAGE_ROWS), index] = [
                seconds_of(each, channel.size_bytes) for each in known
            ]
    return message_s


def _new_tables(
    plan: Plan,
    cluster: Cluster,
    numbering: Numbering,
    programs: Programs,
    network: Network,
    *,
    record: bool,
) -> Tables:
    """Return the tables at the start, when all ranks are about to begin, one after another."""
    nodes, cores = np.array(plan.node_of_rank), np.array([node.cores for node in cluster.nodes])
    ranks_of_node = np.bincount(nodes, minlength=len(cluster.nodes))
    crowded = ranks_of_node > cores
    pools = np.zeros(int(crowded.sum()), dtype=POOL)
    pools["cores"], shared = cores[crowded], ranks_of_node[crowded]
    pools["start"] = np.cumsum(shared) - shared
    ranks = programs.ranks.copy()
    ranks["pool"] = np.where(crowded, np.cumsum(crowded) - 1, -1)[nodes]
    devices = cluster.devices_of(plan.node_of_rank)
    row_times = [device.rows or FREE_ROWS for device in devices]
    for stage in plan.stages:
        for rank in stage.updating_ranks:
            ranks["update_s"][rank] += stage.cost.update_s
    ranks["speed"] = [device.speed for device in devices]
    ranks["update_s"] += [each.end for each in row_times] * ranks["speed"]
    ranks["begin_s"] = [each.begin for each in row_times]
    ranks["after_s"] = [each.compute for each in row_times]
    ranks["position"], ranks["since"] = ranks["first"], -1.0
    rows = ranks["end"] - ranks["first"]
    alarms = 2 * int(rows[ranks["pool"] >= 0].sum())  # at the start and the end of computations
    in_pieces = int((network.transfers["left"] > 1).sum())
    queue = np.zeros(len(ranks) + alarms + in_pieces, dtype=EVENT)
    queue["target"][: len(ranks)] = np.arange(len(ranks))
    queue["number"][: len(ranks)] = 1 + np.arange(len(ranks))
    clock = np.zeros(1, dtype=CLOCK)
    clock["queued"] = clock["number"] = len(ranks)
    clock["agree_s"] = max(each.agree for each in row_times)
    clock["meets"] = plan.updates_together_on(cluster)
    return Tables(
        *programs._replace(ranks=ranks),
        operation=OPERATIONS,
        work_s=_work_s(plan),
        message_s=_message_s(row_times, numbering),
        **network._asdict(),
        free_at=np.zeros(int(network.queues.max(initial=-1)) + 1),
        pools=pools,
        queue=queue,
        work=np.zeros(int(shared.sum()), dtype=EVENT),
        clock=clock,
        records=np.zeros(int(rows.sum()) if record else 0, dtype=RECORD),
    )


def programs_of(
    plan: Plan, numbering: Numbering, actions: Sequence[Actions] | None = None
) -> Programs:
    """Return what every rank executes; rows that ranks share are stored once.

    Args:
        actions: of every rank; by default the plan's own.

    Raises:
        ScheduleError: see :func:`pipectl.schedule.lower`.
    """
    if actions is None:
        return _own_programs(_skeleton(plan))
    rows = [rows_of(plan, numbering, rank, each) for rank, each in enumerate(actions)]
    return _assemble(plan, numbering, rows)


@lru_cache(maxsize=8)
def _own_programs(plan: Plan) -> Programs:
    """Return what every rank executes by a plan from :func:`_skeleton`."""
    numbering = Numbering(plan)
    if not schedule_of(plan).is_local or any(
        len(stage.ranks) > 1 or stage.backward_ranks for stage in plan.stages
    ):
        return _assemble(plan, numbering, _rows_of_all(plan, numbering))
    numbers: dict[Plan, int] = {}
    number, stages, streams = [], [], []
    for small, own_stages, own_streams in _neighbourhoods(plan, numbering):
        number.append(numbers.setdefault(small, len(numbers)))
        stages.append(own_stages)
        streams.append(own_streams)
    rows = list(map(_rows_of_first, numbers))
    return _assemble(plan, numbering, rows, number, stages, streams)


def _assemble(
    plan: Plan,
    numbering: Numbering,
    rows: Sequence[Rows],
    number: Sequence[int] = (),
    stages: Sequence[Sequence[int]] = (),
    streams: Sequence[Sequence[int]] = (),
) -> Programs:
    """Return the programs with these rows.

    Args:
        number: place of the rows of every rank; by default, each rank has its own.
        stages, streams: what the numbers in the rows of every rank stand for; by default, all of
            the plan.
    """
    count = plan.ranks
    number = number or list(range(count))
    ends = np.cumsum([len(each) for each in rows])
    ranks = np.zeros(count, dtype=RANK)
    ranks["end"] = ends[number]
    ranks["first"] = (ends - [len(each) for each in rows])[number]
    stage_names, ranks["stages"] = _join(stages or [range(len(plan.stages))] * count)
    stream_names, places = _join(streams or [range(numbering.streams)] * count)
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
    stages and streams in the whole plan. Takes time in proportion to the channels.

    Args:
        plan: from :func:`_skeleton`.
    """
    stages_of: list[list[int]] = [[] for _ in range(plan.ranks)]
    for index, stage in enumerate(plan.stages):
        stages_of[stage.ranks[0]].append(index)
    for rank, own in enumerate(stages_of):
        numbers = [index for index, _ in channels_of_rank(plan, rank)]
        near = [channel for _, channel in channels_of_rank(plan, rank)]
        ends = {end for item in near for end in (item.source_stage, item.target_stage)}
        stages = sorted(ends.union(own))
        position = {stage: index for index, stage in enumerate(stages)}
        small = replace(
            plan,
            stages=tuple(
                replace(plan.stages[stage], ranks=(int(plan.stages[stage].ranks[0] != rank),))
                for stage in stages
            ),
            warm_up=tuple(plan.warm_up[stage] for stage in stages),
            transfers=tuple(
                Transfer(item.kind, position[item.source_stage], position[item.target_stage], 0)
                for item in near
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
        stages=tuple(
            replace(stage, nodes=(), cost=_NO_COST, segments=None) for stage in plan.stages
        ),
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
        for rank in stage.every_rank:
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
