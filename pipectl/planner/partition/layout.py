"""Layouts, which searches choose: stages, their ranks, and all else that makes a plan.

Also proposes the layouts one move away from a layout. Balance alone does not make a step short:
with few micro-batches, fill and drain count as much, and so do messages. Moves of borders improve
on balanced partitions, and so do exchanges of the ranks of two stages if ranks differ. If stages
may have replicas, these move too, one class of devices at a time, and stages are split and merged.
The ranks of a class are taken in one order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, combinations, pairwise, product
from typing import NamedTuple

from pipectl.cluster import Cluster
from pipectl.plan import Replication
from pipectl.planner.costs.devices import Use, ranks_of_uses, ways_through_nodes
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

    @property
    def is_replicated(self) -> bool:
        """Whether a stage has several replicas."""
        return max(map(len, self.layout.ranks)) > 1


def consecutive(replicas: Sequence[int], order: Sequence[int] | None = None) -> Ranks:
    """Consecutive ranks of an order for every stage; the default order is ascending."""
    ranks = range(sum(replicas)) if order is None else order
    return tuple(tuple(ranks[a:b]) for a, b in pairwise([0, *accumulate(replicas)]))


def device_orders(cluster: Cluster) -> list[tuple[int, ...]]:
    """Orders of ranks: node by node, and round-robin over the nodes; both also from the last node
    on, if nodes with the same device differ."""
    node_of, place, orders = cluster.node_of_rank, dict[int, int](), list[tuple[int, ...]]()
    turn = []
    for node in node_of:
        turn.append(place.get(node, 0))
        place[node] = turn[-1] + 1
    for turns in ([0] * cluster.ranks, turn):
        for way in ways_through_nodes(cluster):
            keys = [(turns[rank], way * node_of[rank], rank) for rank in range(cluster.ranks)]
            orders.append(tuple(rank for *_, rank in sorted(keys)))
    return list(dict.fromkeys(orders))


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


def recompute_moves(layout: Layout, near: Iterable[Layout]) -> Iterator[Layout]:
    """Layouts near another one, each with every choice of which of the changed stages recompute;
    and the layout itself with one stage changed in this."""
    stages = range(len(layout.partition))
    own = layout.recompute or (False,) * len(layout.partition)
    for stage in stages:
        again = (*own[:stage], not own[stage], *own[stage + 1 :])
        yield layout._replace(recompute=again if any(again) else ())
    for each in near:
        moved = [
            at
            for at in stages
            if each.partition[at] != layout.partition[at] or each.ranks[at] != layout.ranks[at]
        ]
        for chosen in product((False, True), repeat=len(moved)):
            changed = dict(zip(moved, chosen, strict=True))
            again = tuple(changed.get(at, own[at]) for at in stages)
            yield each._replace(recompute=again if any(again) else ())


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
    classes: Sequence[Sequence[int]],
    max_replicas: int,
    *,
    keep_stages: bool,
) -> Iterator[Layout]:
    """Layouts with replicas one move away, whose stages take ranks in the present order.

    A border moves, alone or with a replica to or from the neighbour; a replica moves between two
    stages, or to or from the spare ranks; two stages exchange their replicas, or two replicas of
    different classes; a stage is split with any division of its replicas; two neighbours are
    merged.

    Args:
        loads: of every block.
        classes: the ranks of every class of devices, the fastest first.
        max_replicas: of a stage.
        keep_stages: whether a stage is split only if two others are merged.
    """
    partition, again, kinds = layout.partition, layout.recompute, range(len(classes))
    uses = [
        tuple(len(members.intersection(ranks)) for members in map(set, classes))
        for ranks in layout.ranks
    ]
    spare = tuple(len(classes[kind]) - sum(use[kind] for use in uses) for kind in kinds)
    fractions = () if len(graph) <= MAX_BLOCKS_MOVED_SINGLY else FRACTIONS
    changes: list[_Change] = []
    for moved in near_partitions(partition, graph, loads, fractions):
        border = next(at for at in range(len(uses)) if moved[at] != partition[at])
        changes.append(_Change(moved, uses, again))
        for kind in kinds:
            for shift in (-1, 1):
                changed = _with(_with(uses, border, kind, shift), border + 1, kind, -shift)
                changes.append(_Change(moved, changed, again))
    changes += [_Change(partition, changed, again) for changed in _shifts(uses, spare)]
    whole = _Change(partition, uses, again)
    merged = list(_merges(whole, max_replicas))
    if keep_stages:
        changes += [split for each in merged for split in _splits(each, loads, spare)]
    else:
        changes += [*_splits(whole, loads, spare), *merged]
    orders = _orders(layout, classes)
    for cut, counts, recompute in changes:
        replicas = [*map(sum, counts)]
        if min(map(min, counts)) >= 0 and min(replicas) > 0 and max(replicas) <= max_replicas:
            yield Layout(cut, ranks_of_uses(counts, orders), recompute)


class _Change(NamedTuple):
    """A partition, the devices of each class that its stages use, and which recompute."""

    partition: Partition
    uses: Sequence[Use]
    recompute: tuple[bool, ...]


def _with(uses: Sequence[Use], stage: int, kind: int, more: int) -> list[Use]:
    """The uses of stages if one has so many more devices of a class."""
    changed, use = list(uses), uses[stage]
    changed[stage] = (*use[:kind], use[kind] + more, *use[kind + 1 :])
    return changed


def _orders(layout: Layout, classes: Sequence[Sequence[int]]) -> list[list[int]]:
    """The ranks of every class in the order of the stages, then the spare ones."""
    used = [rank for ranks in layout.ranks for rank in ranks]
    return [
        [*filter(set(members).__contains__, used), *sorted(set(members).difference(used))]
        for members in classes
    ]


def _shifts(uses: Sequence[Use], spare: Use) -> Iterator[list[Use]]:
    """Uses after one replica moves, takes the place of another, or two stages exchange theirs."""
    kinds, stages = range(len(spare)), range(len(uses))
    for one, kind in product(stages, kinds):
        for gained in (1, -1)[not spare[kind] :]:
            yield _with(uses, one, kind, gained)
        for instead in kinds:
            if instead != kind and spare[instead]:
                yield _with(_with(uses, one, kind, -1), one, instead, 1)
        for other in stages:
            if other != one:
                given = _with(_with(uses, one, kind, -1), other, kind, 1)
                yield given
                for back in kinds:
                    if back != kind and one < other:
                        yield _with(_with(given, one, back, 1), other, back, -1)
    for one, other in combinations(stages, 2):
        changed = list(uses)
        changed[one], changed[other] = uses[other], uses[one]
        yield changed


def _splits(layout: _Change, loads: Sequence[float], spare: Use) -> Iterator[_Change]:
    """Each stage split in graph order, at even steps of its load, for any division of its replicas,
    and of the spare ones with them."""
    partition, uses, again = layout
    for stage, use in enumerate(uses):
        blocks = list(bits(partition[stage]))
        total = sum(loads[block] for block in blocks)
        places = {_count(blocks, loads, total * step / SPLITS) for step in range(1, SPLITS)}
        every = tuple(own + more for own, more in zip(use, spare, strict=True))
        pairs = [pair for room in dict.fromkeys((every, use)) for pair in _divisions(room)]
        for place in sorted(places - {len(blocks)}):
            first = bitset(blocks[:place])
            for pair in dict.fromkeys(pairs):
                yield _Change(
                    (*partition[:stage], first, partition[stage] & ~first, *partition[stage + 1 :]),
                    (*uses[:stage], *pair, *uses[stage + 1 :]),
                    again and (*again[: stage + 1], *again[stage:]),
                )


def _divisions(room: Use) -> Iterator[tuple[Use, Use]]:
    """Divisions of devices among two stages: the fastest first, and the slowest first."""
    kinds, count = range(len(room)), sum(room)
    row = [kind for kind in kinds for _ in range(room[kind])]
    for order in (row, row[::-1])[: len(set(row))]:
        for first in range(1, count, max(1, count // SPLITS)):
            taken = tuple(order[:first].count(kind) for kind in kinds)
            yield taken, tuple(a - b for a, b in zip(room, taken, strict=True))


def _merges(layout: _Change, max_replicas: int) -> Iterator[_Change]:
    """Each two neighbours as one stage, on the devices of both, without the slowest too many."""
    partition, uses, again = layout
    for stage in range(len(partition) - 1):
        row = [
            kind
            for kind in range(len(uses[stage]))
            for _ in range(uses[stage][kind] + uses[stage + 1][kind])
        ][:max_replicas]
        both = tuple(row.count(kind) for kind in range(len(uses[stage])))
        yield _Change(
            (*partition[:stage], partition[stage] | partition[stage + 1], *partition[stage + 2 :]),
            (*uses[:stage], both, *uses[stage + 2 :]),
            again and (*again[:stage], again[stage] or again[stage + 1], *again[stage + 2 :]),
        )
