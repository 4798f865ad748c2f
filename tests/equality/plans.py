"""A plan for every cell of the equality table: its stages are a random convex cut."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from all_routes import cut_routes
from cell_jobs import BATCHES
from cells import APART, DEEPER, MEMORY, OWN, PAIRED, PLANNED_AS

from pipectl.capture import CapturedGraph
from pipectl.cluster import OffloadTarget
from pipectl.plan import Blocks, Plan, Stage, StageCost, Transfer
from pipectl.schedule import default_warm_up
from pipectl.schedule.listed import Listed
from pipectl.schedule.one_f_one_b import policy_b

V_SHAPED = ("zb-v", "dualpipev", "v-half", "v-min", *OWN)
COST = StageCost(1.0, 2.0, 0.0, 0, 0, 0)


def make_plan(graph: CapturedGraph, stage_of: dict[str, int], cell: Any, ranks: int) -> Plan:
    stages = 1 + max(stage_of.values())
    batch_size, micro_batches = BATCHES[cell.batch]
    found = cut_routes(stage_of, graph.edges, graph.requires_grad)
    lanes = sorted({lane for _, lane in found})
    nodes = [tuple(n for n, s in stage_of.items() if s == stage) for stage in range(stages)]
    size = -(-batch_size // micro_batches)
    schedule = PLANNED_AS.get(cell.schedule, cell.schedule)
    plan = Plan(
        name=str(cell),
        fingerprint=graph.fingerprint,
        schedule=schedule,
        warm_up=warm_up_of(cell.schedule, stages, -(-batch_size // size), ranks),
        batch_size=batch_size,
        micro_batch_size=size,
        micro_batches=-(-batch_size // size),
        stages=tuple(
            Stage(nodes[stage], (rank,), COST, **MEMORY.get(cell.memory, {}))
            for stage, rank in enumerate(places(cell.schedule, stages, ranks))
        ),
        transfers=tuple(Transfer(*lane, size_bytes=1) for lane in lanes),
        node_of_rank=(0,) * ranks,
        offload_to=OffloadTarget.DISK if "disk" in cell.memory else OffloadTarget.HOST,
    )
    if cell.schedule in OWN:
        listed = folded(ranks, micro_batches, falling=OWN[cell.schedule])
        plan = replace(plan, actions=listed.text, warm_up=listed.warm_up)
    if cell.schedule in APART and ranks > 1:
        plan = apart(plan, recompute=cell.schedule == "gpipe-inputs")
    if cell.schedule in PAIRED:
        plan = paired(plan, ranks)
    if "blocks" in cell.memory:
        plan = in_blocks(plan, graph)
    return plan


def apart(plan: Plan, *, recompute: bool) -> Plan:
    """Every backward on the rank behind that of its forward."""
    ranks = [(stage.ranks[0] + 1) % plan.ranks for stage in plan.stages]
    stages = (
        replace(stage, backward_ranks=(rank,), recompute=recompute)
        for stage, rank in zip(plan.stages, ranks, strict=True)
    )
    return replace(plan, stages=tuple(stages))


def in_blocks(plan: Plan, graph: CapturedGraph) -> Plan:
    """Up to three blocks in every stage, cut anywhere but within what shares memory."""
    draw = random.Random(len(plan.stages))
    stages = []
    for stage in plan.stages:
        owner = [graph.groups.get(node, node) for node in stage.nodes]
        places = [i for i in range(1, len(owner)) if not {*owner[:i]} & {*owner[i:]}]
        chosen = sorted(draw.sample(places, min(2, len(places))))
        firsts = tuple(stage.nodes[place] for place in chosen)
        stages.append(replace(stage, blocks=Blocks(firsts, 1.0, 1.0, 2.0, 0, 0)))
    return replace(plan, stages=tuple(stages))


def paired(plan: Plan, ranks: int) -> Plan:
    """Two ranks for every stage, but for the last if there are too few."""
    firsts = [2 * index for index in range(len(plan.stages))]
    alone = [first + 1 < ranks for first in firsts]
    stages = (
        replace(stage, ranks=(first,), backward_ranks=(first + 1,) if two else ())
        for stage, first, two in zip(plan.stages, firsts, alone, strict=True)
    )
    warm_up = default_warm_up(plan.schedule, len(alone), plan.micro_batches, apart=alone)
    nodes = plan.node_of_rank[:1] * ranks
    return replace(plan, stages=tuple(stages), warm_up=warm_up, node_of_rank=nodes)


def warm_up_of(schedule: str, stages: int, micro_batches: int, ranks: int) -> tuple[int, ...]:
    if schedule == DEEPER:
        return policy_b(stages, micro_batches)
    planned = "gpipe" if schedule in OWN else PLANNED_AS.get(schedule, schedule)
    return default_warm_up(planned, stages, micro_batches, ranks=ranks)


def places(schedule: str, stages: int, ranks: int) -> list[int]:
    """The rank of every stage."""
    if schedule in V_SHAPED:
        return [*range(ranks), *reversed(range(ranks))]
    return [stage % ranks for stage in range(stages)]


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
