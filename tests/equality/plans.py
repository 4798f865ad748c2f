"""A plan for every cell of the equality table: its stages are a random convex cut."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, count, pairwise

from pipectl.capture import CapturedGraph, Cut
from pipectl.capture.slices import batch_dimension
from pipectl.cluster import OffloadTarget
from pipectl.errors import CaptureError, MismatchError
from pipectl.plan import Plan, Replication, Segments, Stage, StageCost, Transfer
from pipectl.schedule import default_warm_up
from pipectl.schedule.listed import Listed
from pipectl.schedule.one_f_one_b import policy_b
from tests.equality.cell_jobs import BATCHES
from tests.equality.cells import APART, CHUNKS, DEEPER, MEMORY, OWN, PAIRED, PLANNED_AS, Cell
from tests.equality.cuts import random_cut

V_SHAPED = ("zb-v", "dualpipev", "v-half", "v-min", *OWN)
COST = StageCost(1.0, 2.0, 0.0, 0, 0, 0)


def plan_and_cut(
    graph: CapturedGraph, cell: Cell, ranks: int, seed: int
) -> tuple[Plan, dict[str, int]]:
    """A plan of a random cut, which it has as well."""
    if cell.replicas:
        return shared_plan(graph, cell)
    parts = -(-ranks // 2) if cell.schedule in PAIRED else ranks * CHUNKS.get(cell.schedule, 1)
    stages = random_cut(graph, parts, seed)
    return make_plan(graph, stages, cell, ranks), stages


def make_plan(graph: CapturedGraph, stage_of: dict[str, int], cell: Cell, ranks: int) -> Plan:
    """Without replicas."""
    stages = 1 + max(stage_of.values())
    batch_size, micro_batches = BATCHES[cell.batch]
    lanes = sorted(Cut(graph, stage_of, training=True).lanes)
    nodes = [tuple(n for n, s in stage_of.items() if s == stage) for stage in range(stages)]
    size = -(-batch_size // micro_batches)
    fields = dict(MEMORY.get(cell.memory, {}))
    if cell.schedule == "gpipe-inputs":
        fields["recompute"] = True
    at = places(cell.schedule, stages, ranks)
    plan = Plan(
        name=str(cell),
        fingerprint=graph.fingerprint,
        schedule=PLANNED_AS.get(cell.schedule, cell.schedule),
        warm_up=warm_up_of(cell.schedule, -(-batch_size // size), ranks, at),
        batch_size=batch_size,
        micro_batch_size=size,
        micro_batches=-(-batch_size // size),
        stages=tuple(
            Stage(nodes[stage], (rank,), COST, backward_ranks=tuple(backward), **fields)
            for stage, (rank, *backward) in enumerate(at)
        ),
        transfers=tuple(Transfer(*lane, size_bytes=1) for lane in lanes),
        node_of_rank=(0,) * ranks,
        offload_to=OffloadTarget.DISK if "disk" in cell.memory else OffloadTarget.HOST,
    )
    if cell.schedule in OWN:
        listed = folded(ranks, micro_batches, falling=OWN[cell.schedule])
        plan = replace(plan, actions=listed.text, warm_up=listed.warm_up)
    return in_blocks(plan, graph) if "blocks" in cell.memory else plan


def places(schedule: str, stages: int, ranks: int) -> list[tuple[int, ...]]:
    """The rank of every stage, and another one if that has its backward."""
    if schedule in V_SHAPED:
        return [(rank,) for rank in (*range(ranks), *reversed(range(ranks)))]
    if schedule in PAIRED:
        return [tuple(range(ranks)[2 * stage :][:2]) for stage in range(stages)]
    if schedule in APART and ranks > 1:
        return [(stage % ranks, (stage + 1) % ranks) for stage in range(stages)]
    return [(stage % ranks,) for stage in range(stages)]


def warm_up_of(
    schedule: str, micro_batches: int, ranks: int, at: list[tuple[int, ...]]
) -> tuple[int, ...]:
    if schedule == DEEPER:
        return policy_b(len(at), micro_batches)
    planned = "gpipe" if schedule in OWN else PLANNED_AS.get(schedule, schedule)
    if schedule in PAIRED:
        apart = [len(both) == 2 for both in at]
        return default_warm_up(planned, len(at), micro_batches, apart=apart)
    return default_warm_up(planned, len(at), micro_batches, ranks=ranks)


def in_blocks(plan: Plan, graph: CapturedGraph) -> Plan:
    """Up to three blocks in every stage, cut anywhere but within what shares memory."""
    draw = random.Random(len(plan.stages))
    stages = []
    for stage in plan.stages:
        owner = [graph.groups.get(node, node) for node in stage.nodes]
        places = [i for i in range(1, len(owner)) if not {*owner[:i]} & {*owner[i:]}]
        chosen = sorted(draw.sample(places, min(2, len(places))))
        firsts = tuple(stage.nodes[place] for place in chosen)
        stages.append(replace(stage, segments=Segments(firsts, 1.0, 1.0, 2.0, 0, 0)))
    return replace(plan, stages=tuple(stages))


def folded(ranks: int, micro_batches: int, *, falling: bool) -> Listed:
    """Two stages a rank, in a V; all forwards of each, then all backwards."""
    rising = range(micro_batches)
    back = rising[::-1] if falling else rising
    lines = []
    for first in range(ranks):
        second = 2 * ranks - 1 - first
        forwards = [f"{stage}F{index}" for stage in (first, second) for index in rising]
        backwards = [f"{stage}B{index}" for stage in (second, first) for index in back]
        lines.append(",".join(forwards + backwards))
    return Listed.read("\n".join(lines), "folded.csv")


def stages_of_states(graph: CapturedGraph, stage_of: dict[str, int]) -> dict[str, int]:
    """The first stage that uses each parameter and buffer."""
    return {
        state.name: min(stage_of[user] for user in graph.users[placeholder])
        for placeholder, state in graph.states.items()
        if graph.users.get(placeholder)
    }


def shared_plan(graph: CapturedGraph, cell: Cell) -> tuple[Plan, dict[str, int]]:
    """A plan of the first random cut that suits the cell."""
    groups = [tuple(range(*edges)) for edges in pairwise([0, *accumulate(cell.replicas)])]
    number, split = len(groups) * CHUNKS.get(cell.schedule, 1), cell.way == "split"
    cut = in_order if split else random_cut
    stages = next(
        found
        for found in (cut(graph, number, seed) for seed in count(len(str(cell))))
        if trains_everywhere(graph, found, number) and (not split or has_rows(graph, found))
    )
    plan = make_plan(graph, stages, cell, len(groups))
    held = tuple(replace(stage, ranks=groups[stage.ranks[0]]) for stage in plan.stages)
    replicas = None if split else [stage.replicas for stage in held]
    places = {"ranks": len(groups), "replicas": replicas}
    plan = replace(
        plan,
        stages=held,
        warm_up=default_warm_up(cell.schedule, number, plan.micro_batches, **places),
        node_of_rank=(0,) * sum(cell.replicas),
        replication=Replication(cell.way),
        shard_optimizer=cell.shard,
    )
    return plan, stages


def in_order(graph: CapturedGraph, stages: int, seed: int) -> dict[str, int]:
    """Stages that follow the graph's order, cut anywhere."""
    names = [node.name for node in graph.operators]
    cuts = sorted(random.Random(seed).sample(range(1, len(names)), stages - 1))
    return {name: sum(index >= cut for cut in cuts) for index, name in enumerate(names)}


def trains_everywhere(graph: CapturedGraph, stages: dict[str, int], count: int) -> bool:
    """Whether every stage has several parameters."""
    held = [
        stages[user]
        for placeholder, state in graph.states.items()
        if state.kind == "parameter"
        for user in graph.users.get(placeholder, ())
    ]
    return all(held.count(stage) > 2 for stage in range(count))


def has_rows(graph: CapturedGraph, stages: dict[str, int]) -> bool:
    """Whether every value that is sent has a dimension for samples, or is shared by them."""
    nodes = {node.name: node for node in graph.operators}
    try:
        for slots in Cut(graph, stages, training=True).lanes.values():
            for slot in slots:
                batch_dimension(graph, nodes[slot.value])
    except (CaptureError, MismatchError):
        return False
    return True
