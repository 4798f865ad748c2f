"""Layouts, which searches choose: stages, their ranks, and all else that makes a plan.

Also proposes the layouts one move away from a layout. Balance alone does not make a step short:
with few micro-batches, fill and drain count as much, and so do messages. Moves of borders improve
on balanced partitions, and so do exchanges of the ranks of two stages if ranks differ. If stages
may have replicas, which take consecutive ranks of an order, replicas move too, and stages are split
and merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from pipectl.cluster import Cluster
from pipectl.plan import Replication
from pipectl.planner.graph.blocks import BlockGraph, bits, bitset
from pipectl.planner.graph.downsets import Partition

Ranks = tuple[tuple[int, ...], ...]
"""The ranks of every stage."""

FRACTIONS = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 0.0)
"""Fractions of a stage's load that move to its neighbour; 0 is a single block."""
MAX_BLOCKS_MOVED_SINGLY = 60
"""In larger graphs, only some fractions of a load move together with replicas."""
SPLITS = 8
"""Number of equal parts of a stage's load at whose borders it may be split."""
FEW, EVERY, FAR = range(3)
"""Sets of moves; see :func:`neighbours`."""


class Layout(NamedTuple):
    """Stages and their ranks.

    Args:
        recompute: which stages recompute their forward; empty if all must, or none does.
    """

    partition: Partition
    ranks: Ranks
    recompute: tuple[bool, ...] = ()


class Choice(NamedTuple):
    """All decisions of a plan.

    Args:
        size: samples of a micro-batch.
        replication: how replicas share the work.
        backward_ranks: of each stage, if its backward has another rank; empty if none does.
    """

    layout: Layout
    size: int
    schedule: str
    warm_up: tuple[int, ...]
    replication: Replication = Replication.WHOLE
    backward_ranks: Ranks = ()

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas of every stage."""
        return tuple(map(len, self.layout.ranks))


def consecutive(replicas: Sequence[int], order: Sequence[int] | None = None) -> Ranks:
    """Consecutive ranks of an order for every stage; the default order is ascending."""
    ranks = range(sum(replicas)) if order is None else order
    return tuple(tuple(ranks[a:b]) for a, b in pairwise([0, *accumulate(replicas)]))


def device_orders(node_of_rank: Sequence[int]) -> list[tuple[int, ...]]:
    """Orders of ranks: node by node, and round-robin over the nodes."""
    by_node = tuple(range(len(node_of_rank)))
    place: dict[int, int] = {}
    turn = []
    for node in node_of_rank:
        turn.append(place.get(node, 0))
        place[node] = turn[-1] + 1
    around = tuple(sorted(by_node, key=lambda rank: (turn[rank], node_of_rank[rank])))
    return list(dict.fromkeys([by_node, around]))


def ranks_with_backwards(apart: Sequence[bool], cluster: Cluster) -> Ranks:
    """One rank per stage, or two if ``apart``, on the same node if it has two."""
    free: list[list[int]] = [[] for _ in cluster.nodes]
    for rank, node in enumerate(cluster.node_of_rank):
        free[node].append(rank)
    chosen, last = [], 0
    for needs in (1 + alone for alone in apart):
        nodes = [*range(last, len(free)), *range(last)]
        last = next((node for node in nodes if len(free[node]) >= needs), -1)
        if last < 0:  # no node has two
            last = next(node for node in nodes if free[node])
            left = sorted(rank for ranks in free for rank in ranks)
            taken = [free[last][0], next(rank for rank in left if rank != free[last][0])]
        else:
            taken = free[last][:needs]
        free = [[rank for rank in ranks if rank not in taken] for ranks in free]
        chosen.append(tuple(taken))
    return tuple(chosen)


def neighbours(
    layout: Layout,
    graph: BlockGraph,
    loads: Sequence[float],
    exchanged: Sequence[Ranks] = (),
    reach: int = FEW,
) -> Iterator[Layout]:
    """Every layout that is one move away, borders of the stages with the most load first.

    Args:
        loads: of every block.
        exchanged: ranks of the stages after two of them exchanged theirs.
        reach: FEW: some fractions of a stage's load move to a neighbour, or two stages exchange
            ranks; EVERY: any number of blocks moves; FAR: two neighbours exchange their places, or
            a single block moves further.
    """
    fractions = FRACTIONS if reach == FEW else ()
    partitions = near_partitions(layout.partition, graph, loads, fractions)
    if reach == FAR:
        partitions = _far_partitions(layout.partition, graph)
    for partition in partitions:
        yield layout._replace(partition=partition)
    if reach == FAR:
        return
    for ranks in exchanged:
        yield layout._replace(ranks=ranks)


def near_partitions(
    partition: Partition, graph: BlockGraph, loads: Sequence[float], fractions: Sequence[float]
) -> Iterator[Partition]:
    """Every partition in which one stage gives some load to the next or to the previous one.

    The end (or beginning) of the stage in graph order moves, or a single block without successors
    (or predecessors) in the stage, so stages stay convex.

    Args:
        fractions: of a stage's load that move; if empty, any number of blocks moves.
    """
    totals = [sum(loads[block] for block in bits(stage)) for stage in partition]
    borders = range(1, len(partition))
    for border in sorted(borders, key=lambda at: (-max(totals[at - 1 : at + 1]), at)):
        before, after = partition[border - 1 : border + 1]
        tail = _ends(list(bits(before))[::-1], loads, fractions)
        for moved in dict.fromkeys((*tail, *_free(before, graph.successors))):
            yield _with_border(partition, border, before & ~moved, after | moved)
        head = _ends(list(bits(after)), loads, fractions)
        for moved in dict.fromkeys((*head, *_free(after, graph.predecessors))):
            yield _with_border(partition, border, before | moved, after & ~moved)


def _far_partitions(partition: Partition, graph: BlockGraph) -> Iterator[Partition]:
    """Every partition in which two neighbours exchange their places, or a single block moves
    further than to the next stage."""
    for border in range(1, len(partition)):
        before, after = partition[border - 1 : border + 1]
        if not any(graph.successors[block] & after for block in bits(before)):
            yield _with_border(partition, border, after, before)
    stage_of = {block: place for place, stage in enumerate(partition) for block in bits(stage)}
    for block, home in stage_of.items():
        if partition[home] == 1 << block:
            continue
        first = max((stage_of[each] for each in bits(graph.predecessors[block])), default=0)
        uses = [stage_of[each] for each in bits(graph.successors[block])]
        for target in range(first, min(uses, default=len(partition) - 1) + 1):
            if abs(target - home) > 1:
                changed = list(partition)
                changed[home] &= ~(1 << block)
                changed[target] |= 1 << block
                yield tuple(changed)


def _free(stage: int, onward: Sequence[int]) -> Iterator[int]:
    """Blocks without successors (or predecessors) in a stage that has several blocks."""
    if stage & (stage - 1):
        yield from (1 << block for block in bits(stage) if not onward[block] & stage)


def _ends(
    blocks: Sequence[int], loads: Sequence[float], fractions: Sequence[float]
) -> Iterator[int]:
    """Bitsets of the first blocks, for each fraction of their load; never of all blocks."""
    total = sum(loads[block] for block in blocks)
    counts = {_count(blocks, loads, fraction * total) for fraction in fractions}
    wanted = sorted(counts) if fractions else range(1, len(blocks))
    return (bitset(blocks[:count]) for count in wanted if count < len(blocks))


def _count(blocks: Sequence[int], loads: Sequence[float], amount: float) -> int:
    """How many blocks from the front have at least some load; at least one."""
    for count, block in enumerate(blocks, start=1):
        amount -= loads[block]
        if amount <= 0:
            return count
    return len(blocks)


def _with_border(partition: Partition, border: int, before: int, after: int) -> Partition:
    return (*partition[: border - 1], before, after, *partition[border + 1 :])


def replica_moves(
    layout: Layout,
    graph: BlockGraph,
    loads: Sequence[float],
    ranks: int,
    max_replicas: int,
    *,
    keep_stages: bool,
) -> Iterator[Layout]:
    """Layouts with replicas one move away, whose stages take ranks in the present order.

    A border moves, alone or with a replica to or from the neighbour; a replica moves between two
    stages, or to or from the spare ranks; two stages exchange their numbers of replicas; a stage is
    split with any division of its replicas; two neighbours are merged.

    Args:
        loads: of every block.
        ranks: of the cluster.
        max_replicas: of a stage.
        keep_stages: whether no stage is split or merged.
    """
    partition, replicas = layout.partition, tuple(map(len, layout.ranks))
    stages, spare = len(partition), ranks - sum(replicas)
    fractions = () if len(graph) <= MAX_BLOCKS_MOVED_SINGLY else FRACTIONS
    changes: list[tuple[Partition, Sequence[int]]] = []
    for moved in near_partitions(partition, graph, loads, fractions):
        border = next(at for at in range(stages) if moved[at] != partition[at])
        for shift in (0, -1, 1):
            changed = list(replicas)
            changed[border] += shift
            changed[border + 1] -= shift
            changes.append((moved, changed))
    changes += [(partition, changed) for changed in _shifts(replicas, spare)]
    if not keep_stages:
        changes += _splits(partition, replicas, loads, spare)
        changes += _merges(partition, replicas, max_replicas)
    order = _order(layout, ranks)
    for cut, counts in changes:
        if min(counts) > 0 and max(counts) <= max_replicas:
            yield Layout(cut, consecutive(counts, order))


def _order(layout: Layout, ranks: int) -> tuple[int, ...]:
    """The ranks in the order of the stages, then the spare ones."""
    used = [rank for of_stage in layout.ranks for rank in of_stage]
    return (*used, *sorted(set(range(ranks)).difference(used)))


def _shifts(replicas: Sequence[int], spare: int) -> Iterator[list[int]]:
    """Numbers of replicas after one replica moves, or two stages exchange theirs."""
    for one in range(len(replicas)):
        for gained in (1, -1)[not spare :]:
            changed = list(replicas)
            changed[one] += gained
            yield changed
        for other in range(len(replicas)):
            if other != one:
                changed = list(replicas)
                changed[one], changed[other] = replicas[one] - 1, replicas[other] + 1
                yield changed
            if one < other:
                changed = list(replicas)
                changed[one], changed[other] = replicas[other], replicas[one]
                yield changed


def _splits(
    partition: Partition, replicas: Sequence[int], loads: Sequence[float], spare: int
) -> Iterator[tuple[Partition, Sequence[int]]]:
    """Each stage split in graph order, at even steps of its load, for any division of replicas."""
    for stage, count in enumerate(replicas):
        blocks, room = list(bits(partition[stage])), count + spare
        total = sum(loads[block] for block in blocks)
        places = {_count(blocks, loads, total * step / SPLITS) for step in range(1, SPLITS)}
        for place in sorted(places - {len(blocks)}):
            for first in range(1, room, max(1, room // SPLITS)):
                pair = first, room - first
                yield _split(partition, replicas, stage, bitset(blocks[:place]), pair)


def _split(
    partition: Partition, replicas: Sequence[int], stage: int, first: int, pair: tuple[int, int]
) -> tuple[Partition, Sequence[int]]:
    """The partition with a stage split in two, the first of which has these blocks."""
    halves = first, partition[stage] & ~first
    return (
        (*partition[:stage], *halves, *partition[stage + 1 :]),
        (*replicas[:stage], *pair, *replicas[stage + 1 :]),
    )


def _merges(
    partition: Partition, replicas: Sequence[int], max_replicas: int
) -> Iterator[tuple[Partition, Sequence[int]]]:
    for stage in range(len(partition) - 1):
        both = partition[stage] | partition[stage + 1]
        count = min(max_replicas, replicas[stage] + replicas[stage + 1])
        yield (
            (*partition[:stage], both, *partition[stage + 2 :]),
            (*replicas[:stage], count, *replicas[stage + 2 :]),
        )
