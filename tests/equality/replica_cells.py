"""Cells of the equality table whose stages have replicas, trained with SGD."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, count, pairwise

from pipectl.capture import CapturedGraph, Cut
from pipectl.capture.slices import batch_dimension
from pipectl.errors import CaptureError, MismatchError
from pipectl.plan import Plan, Replication
from pipectl.schedule import default_warm_up


@dataclass(frozen=True)
class Shared:
    """A cell with so many replicas of each stage, or of each place in the round of stages."""

    model: str
    replicas: tuple[int, ...]
    way: str = "whole"
    batch: str = "smaller_last"
    schedule: str = "1f1b"
    shard: bool = False
    memory: str = ""
    compiled: bool = False

    def __str__(self) -> str:
        counts = "x".join(map(str, self.replicas))
        more = "-sharded" * self.shard + f"-{self.memory}" * bool(self.memory)
        more += "-compiled" * self.compiled
        return f"{self.model}-{self.schedule}-{self.batch}-{counts}-{self.way}{more}"

    @property
    def ranks(self) -> int:
        return sum(self.replicas)

    @property
    def reference(self) -> Shared:
        """What one rank trains."""
        return Shared(self.model, (1,), batch=self.batch)


SHARED = (
    Shared("gpt", (2,)),
    Shared("gpt", (2,), "split"),
    Shared("cnn", (2,)),
    Shared("gpt_bf16", (2,), shard=True),
    Shared("gpt", (1, 2), "split", memory="recompute"),
    Shared("tied", (1, 2), "split"),
    Shared("cnn", (2, 1), memory="host"),
    Shared("frozen", (2, 1), shard=True),
    Shared("gpt_buckets", (1, 2), "split"),
    Shared("gpt", (3,), batch="one_left_over"),
    Shared("gpt", (2, 2), shard=True),
    Shared("gpt", (2, 2), schedule="zb-h1"),
    Shared("gpt", (2, 2), schedule="interleaved"),
    Shared("gpt", (3, 1), "split", batch="few"),
    Shared("gpt", (1, 3), "split", schedule="zb-h1", batch="few"),
    Shared("tied", (2, 1, 1)),
    Shared("cnn", (1, 2, 1)),
    Shared("gpt_float16", (2, 2)),
    Shared("cnn", (2, 2), schedule="dualpipev"),
    Shared("gpt_buckets", (2, 2), shard=True),
)
"""Trained by every run of the tests."""
FURTHER = (
    Shared("gpt", (2,), shard=True),
    Shared("gpt", (2,), schedule="gpipe"),
    Shared("tied", (2,)),
    Shared("gpt_buckets", (2,)),
    Shared("gpt", (1, 2)),
    Shared("gpt", (2, 1), schedule="gpipe"),
    Shared("gpt", (2, 1), "split", memory="host"),
    Shared("frozen", (1, 2), "split"),
    Shared("gpt", (1, 2), "split", compiled=True),
    Shared("gpt", (1, 3)),
    Shared("gpt", (2, 2)),
    Shared("gpt", (2, 2), memory="recompute"),
    Shared("gpt", (2, 2), schedule="looped-bfs", memory="disk"),
    Shared("gpt", (2, 2), schedule="zb-v"),
    Shared("gpt", (2, 2), "split", schedule="interleaved", batch="few"),
    Shared("tied", (2, 1, 1), "split"),
)
"""Trained by ``make test-equality``, too."""


def cells_of(ranks: int, *, sample: bool) -> Iterator[Shared]:
    """What is trained over so many ranks; on one, what all others are compared with."""
    if ranks == 1 and sample:
        yield from dict.fromkeys(cell.reference for cell in (*SHARED, *FURTHER))
    yield from (cell for cell in (SHARED if sample else FURTHER) if cell.ranks == ranks)


def shared_plan(
    cell: Shared,
    graph: CapturedGraph,
    number: int,
    cut: Callable[[int], dict[str, int]],
    make_plan: Callable[[dict[str, int]], Plan],
) -> tuple[Plan, dict[str, int]]:
    """A plan of the first random cut into so many stages that suits the cell."""
    split = cell.way == "split"
    stages = next(
        found
        for seed in count(len(str(cell)))
        for found in [in_order(graph, number, seed) if split else cut(seed)]
        if trains_everywhere(graph, found, number)
        if not split or has_rows(graph, found)
    )
    plan = make_plan(stages)
    groups = [tuple(range(*edges)) for edges in pairwise([0, *accumulate(cell.replicas)])]
    held = tuple(replace(stage, ranks=groups[stage.ranks[0]]) for stage in plan.stages)
    plan = replace(
        plan,
        stages=held,
        warm_up=default_warm_up(
            cell.schedule,
            number,
            plan.micro_batches,
            ranks=len(groups),
            replicas=None if split else [stage.replicas for stage in held],
        ),
        node_of_rank=(0,) * cell.ranks,
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
