"""What cannot be in a plan: ranks, stages and nodes that do not exist, counts that contradict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipectl.plan.stage import Stage

if TYPE_CHECKING:
    from pipectl.plan.plan import Plan

MOST_MICRO_BATCHES = 2**16
"""More are a mistake, and would fill memory with rows of programs."""

MOST_NODES = 2**20


def faults_of(plan: Plan) -> list[str]:
    """In words, with the field; ranks and stages that are named exist, a node has one stage."""
    return list(_faults(plan))


def _faults(plan: Plan) -> Iterator[str]:
    if not plan.stages:
        yield "stages: there is none"
    if len(plan.warm_up) != len(plan.stages):
        yield f"warm_up: {len(plan.warm_up)} entries for {len(plan.stages)} stages"
    yield from _counts_faults(plan)
    nodes = [node for stage in plan.stages for node in stage.nodes]
    if len(set(nodes)) != len(nodes):
        yield "stages: a node is in two stages"
    for index, stage in enumerate(plan.stages):
        yield from (f"stages[{index}].{fault}" for fault in _stage_faults(stage, plan.ranks))
    stages = range(len(plan.stages))
    if any(end not in stages for item in plan.transfers for end in (item.source, item.target)):
        yield "transfers: a stage that does not exist"


def _stage_faults(stage: Stage, ranks: int) -> Iterator[str]:
    for name, held in (("ranks", stage.ranks), ("backward_ranks", stage.backward_ranks)):
        known = all(0 <= rank < ranks for rank in held)
        if not known or len(set(held)) != len(held) or (not held and name == "ranks"):
            yield f"{name}: {list(held)} of {ranks} ranks"
    if stage.backward_ranks and len(stage.backward_ranks) != stage.replicas:
        yield f"backward_ranks: {len(stage.backward_ranks)} for {stage.replicas} replicas"
    if stage.blocks is not None:
        fault = stage.blocks.fault(stage.nodes)
        if fault is not None:
            yield f"blocks: {fault}"
        if not stage.recompute or stage.backward_ranks:
            yield "blocks: of a stage that does not recompute where its forward runs"


def _counts_faults(plan: Plan) -> Iterator[str]:
    least = -(-plan.batch_size // plan.micro_batch_size)
    if plan.micro_batches != least or least > MOST_MICRO_BATCHES:
        yield (
            f"micro_batches: {plan.micro_batches}; {plan.batch_size} samples in parts of "
            f"{plan.micro_batch_size} are {least}, and {MOST_MICRO_BATCHES} are the most"
        )
    if not all(0 <= node < MOST_NODES for node in plan.node_of_rank):
        yield f"node_of_rank: a node that is not from 0 to {MOST_NODES - 1}"
