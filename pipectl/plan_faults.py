"""What cannot be in a plan: ranks, stages and nodes that do not exist, counts that contradict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipectl.plan import Plan, Stage

MOST_MICRO_BATCHES = 2**16
"""More are a mistake, and would fill memory with rows of programs."""

MOST_NODES = 2**20


def faults_of(plan: Plan) -> list[str]:
    """In words, with the field; ranks and stages that are named exist, a node has one stage."""
    faults: list[str] = []
    if not plan.stages:
        faults.append("stages: there is none")
    if len(plan.warm_up) != len(plan.stages):
        faults.append(f"warm_up: {len(plan.warm_up)} entries for {len(plan.stages)} stages")
    faults += _counts_faults(plan)
    nodes = [node for stage in plan.stages for node in stage.nodes]
    if len(set(nodes)) != len(nodes):
        faults.append("stages: a node is in two stages")
    for index, stage in enumerate(plan.stages):
        for name in ("ranks", "backward_ranks"):
            ranks: tuple[int, ...] = getattr(stage, name)
            known = all(0 <= rank < plan.ranks for rank in ranks)
            if not known or len(set(ranks)) != len(ranks) or (not ranks and name == "ranks"):
                faults.append(f"stages[{index}].{name}: {list(ranks)} of {plan.ranks} ranks")
        if stage.backward_ranks and len(stage.backward_ranks) != stage.replicas:
            faults.append(
                f"stages[{index}].backward_ranks: {len(stage.backward_ranks)} for "
                f"{stage.replicas} replicas"
            )
        faults += [f"stages[{index}].blocks: {fault}" for fault in _blocks_faults(stage)]
    stages = range(len(plan.stages))
    if any(end not in stages for item in plan.transfers for end in (item.source, item.target)):
        faults.append("transfers: a stage that does not exist")
    return faults


def _blocks_faults(stage: Stage) -> Iterator[str]:
    if stage.blocks is not None:
        fault = stage.blocks.fault(stage.nodes)
        if fault is not None:
            yield fault
        if not stage.recompute or stage.backward_ranks:
            yield "of a stage that does not recompute where its forward runs"


def _counts_faults(plan: Plan) -> Iterator[str]:
    least = -(-plan.batch_size // plan.micro_batch_size)
    if plan.micro_batches != least or least > MOST_MICRO_BATCHES:
        yield (
            f"micro_batches: {plan.micro_batches}; {plan.batch_size} samples in parts of "
            f"{plan.micro_batch_size} are {least}, and {MOST_MICRO_BATCHES} are the most"
        )
    if not all(0 <= node < MOST_NODES for node in plan.node_of_rank):
        yield f"node_of_rank: a node that is not from 0 to {MOST_NODES - 1}"
