"""Blocks, what they cost, and the values between them, as arrays.

The stages of a pipeline are cut from the *stage graph*: the forward graph, with operators of one
group contracted. An operator of the backward belongs to the block of its group. If the group has no
forward operator, the backward operator takes the place of one: its edges to other backward
operators are reversed. This is the rule of Tarnawski et al., "Efficient algorithms for device
placement of DNN graph operators", NeurIPS 2020.

Two rules remove blocks without time and without relevant memory, and keep the optimum:

- If such a block feeds, or reads from, only one block ``m``, and ``m`` uses each of its values, an
  optimal partition has it in the stage of ``m``: moving it there adds no load and may remove a
  transfer.
- If it has no predecessors (successors), and its values take no time to transfer, it may be put
  into the first (last) stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.planner.graph.blocks import BlockGraph, bits, contract, group_labels
from pipectl.planner.graph.downsets import topological_orders
from pipectl.planner.graph.imported import stage_edges
from pipectl.profile import Profile

TOLERANCE = 1e-11
"""Loads whose relative difference is smaller count as equal: sums round by about as much."""


@dataclass(frozen=True)
class BalanceRequest:
    """The devices to partition a graph for.

    Args:
        devices: at most, one per stage.
        memory_limit_bytes: of a device; None for no limit.
        bandwidth_bytes_per_s: of a link, for values without ``transfer_s``, each of which crosses
            it twice: as activation and as gradient; None if these transfers are free.
        communication_scale: factor of every ``transfer_s``.
    """

    devices: int
    memory_limit_bytes: float | None = None
    bandwidth_bytes_per_s: float | None = None
    communication_scale: float = 1.0


@dataclass(frozen=True)
class BalancedStage:
    """One stage of the result.

    Args:
        nodes: ids of its operators, in the profile's order.
        load_s: compute and transfers.
    """

    nodes: tuple[str, ...]
    load_s: float


@dataclass(frozen=True)
class Balance:
    """The best partition found.

    Args:
        value_s: largest load of a stage.
        lower_bound_s: lower bound on this for every admissible partition.
        stages: in the order of the pipeline; none is empty.
        downsets: upper bound on the number of downsets searched.
    """

    value_s: float
    lower_bound_s: float
    stages: tuple[BalancedStage, ...]
    downsets: int

    @property
    def exact(self) -> bool:
        """Whether the value is proven optimal."""
        return self.lower_bound_s >= self.value_s * (1 - TOLERANCE)

    @property
    def gap(self) -> float:
        """How far the value may be above the optimum, relative to the bound."""
        return self.value_s / self.lower_bound_s - 1 if self.lower_bound_s else 0.0


Stages = tuple[tuple[int, ...], ...]
"""The blocks of every stage, in the order of the pipeline."""


class Moves(NamedTuple):
    """Values that several blocks use, as arrays for kernels.

    Args:
        transfer_s: of every value.
        users_at, users: the blocks of value v are ``users[users_at[v]:users_at[v + 1]]``.
        values_at, values: the values of every block, in the same way.
    """

    transfer_s: Floats
    users_at: Integers
    users: Integers
    values_at: Integers
    values: Integers


def packed(lists: Sequence[Sequence[int]]) -> tuple[Integers, Integers]:
    """The start of each list in their concatenation, and the concatenation."""
    starts = np.cumsum([0, *map(len, lists)], dtype=np.int64)
    return starts, np.array([item for items in lists for item in items], dtype=np.int64)


@dataclass(frozen=True)
class LoadModel:
    """Costs of stages, as sets of blocks.

    A value crosses a stage's border if some, but not all, of the blocks that make or read it are
    in the stage.

    Args:
        operators: indices of every block's operators; the blocks stand in a topological order.
        first, last: removed operators, which cost nothing, of the first and of the last stage.
        compute_s, memory_bytes: of every block; memory is 0 if there is enough for all blocks.
        moves: the values that several blocks use.
        neighbours: predecessors and successors of every block.
        limit_bytes: memory of a device; infinite if there is no limit.
    """

    operators: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]
    last: tuple[int, ...]
    compute_s: Floats
    memory_bytes: Floats
    moves: Moves
    neighbours: tuple[list[list[int]], list[list[int]]]
    limit_bytes: float

    def __len__(self) -> int:
        return len(self.compute_s)

    def load_s(self, blocks: Sequence[int]) -> float:
        """Load of a stage: compute, and transfers of values that cross its border."""
        inside = np.zeros(len(self), dtype=np.int64)
        inside[list(blocks)] = 1
        load_s = float(self.compute_s[list(blocks)].sum())
        moves = self.moves
        if len(moves.transfer_s):
            users = np.add.reduceat(inside[moves.users], moves.users_at[:-1])
            crossing = (users > 0) & (users < np.diff(moves.users_at))
            load_s += float(moves.transfer_s[crossing].sum())
        return load_s

    def value_s(self, stages: Stages) -> float:
        """The largest load."""
        return max(map(self.load_s, stages))

    def orders(self) -> list[list[int]]:
        """Topological orders of the blocks, built from either end; their own order is first."""
        last = len(self) - 1
        before, after = self.neighbours
        mirrored = [
            [[last - item for item in lists[last - block]] for block in range(len(self))]
            for lists in (after, before)
        ]
        backward = [[last - b for b in reversed(order)] for order in topological_orders(*mirrored)]
        orders = (*topological_orders(before, after), *backward)
        return [list(order) for order in dict.fromkeys(map(tuple, orders))]


def load_model(profile: Profile, request: BalanceRequest) -> LoadModel:
    """The arrays for a profile, prepared by :mod:`pipectl.planner.graph.imported`."""
    operators, edges = profile.operators, profile.edge_indices
    compute_s = [operator.forward_s + operator.backward_s for operator in operators]
    bandwidth = request.bandwidth_bytes_per_s
    transfers = [
        operator.transfer_s * request.communication_scale
        if operator.transfer_s is not None
        else (2.0 * operator.output_bytes / bandwidth if bandwidth else 0.0)
        for operator in operators
    ]
    memory = [float(operator.memory_bytes or 0) for operator in operators]
    limit = request.memory_limit_bytes
    limited = limit is not None and sum(memory) > limit
    costs = compute_s, memory if limited else [0.0] * len(memory)

    arcs = stage_edges(operators, edges)
    graph = contract(operators, arcs, group_labels(operators))
    users, _ = _values(graph, edges, transfers)
    home = _joined(_free(graph, costs), graph, users)
    labels = [home[block] for block in graph.block_of]
    graph = contract(operators, arcs, labels)
    users, seconds = _values(graph, edges, transfers)
    first, last = _loose(_free(graph, costs), graph, users)
    kept = sorted(set(range(len(graph))) - set(first) - set(last)) or [first.pop()]
    place = {block: index for index, block in enumerate(kept)}
    values: list[list[int]] = [[] for _ in kept]
    for value, blocks in enumerate(users):
        for block in blocks:
            values[place[block]].append(value)
    numbers = [graph.blocks[block].operators for block in kept]
    before, after = (
        [[place[b] for b in bits(near[block]) if b in place] for block in kept]
        for near in (graph.predecessors, graph.successors)
    )
    placed = [[place[block] for block in blocks] for blocks in users]
    return LoadModel(
        operators=tuple(numbers),
        first=tuple(number for block in first for number in graph.blocks[block].operators),
        last=tuple(number for block in last for number in graph.blocks[block].operators),
        compute_s=_sums(numbers, costs[0]),
        memory_bytes=_sums(numbers, costs[1]),
        moves=Moves(np.array(seconds, dtype=np.float64), *packed(placed), *packed(values)),
        neighbours=(before, after),
        limit_bytes=float(limit) if limited and limit is not None else np.inf,
    )


def _free(graph: BlockGraph, costs: tuple[Sequence[float], Sequence[float]]) -> list[bool]:
    return [
        not any(column[number] for column in costs for number in block.operators)
        for block in graph.blocks
    ]


def _sums(numbers: Sequence[Sequence[int]], costs: Sequence[float]) -> Floats:
    return np.array([sum(costs[n] for n in block) for block in numbers], dtype=np.float64)


def _values(
    graph: BlockGraph, edges: Sequence[tuple[int, int]], transfers: Sequence[float]
) -> tuple[list[list[int]], list[float]]:
    """Blocks and transfer time of every value that several blocks use and that takes time.

    Values of the same blocks cross the same borders, so they are merged.
    """
    home = graph.block_of
    blocks: dict[int, set[int]] = {}
    for source, target in edges:
        blocks.setdefault(source, {home[source]}).add(home[target])
    together: dict[tuple[int, ...], float] = {}
    for source in sorted(blocks):
        if len(blocks[source]) > 1 and transfers[source] > 0:
            users = tuple(sorted(blocks[source]))
            together[users] = together.get(users, 0.0) + transfers[source]
    return [list(users) for users in together], list(together.values())


def _joined(free: Sequence[bool], graph: BlockGraph, values: Sequence[Sequence[int]]) -> list[int]:
    """For every block, the block whose stage it joins by the first rule; itself if none."""
    near = zip(graph.predecessors, graph.successors, strict=True)
    neighbours = [set(bits(before | after)) for before, after in near]
    owned: list[list[set[int]]] = [[] for _ in free]
    for users in map(set, values):
        for block in users:
            owned[block].append(users)
    home = list(range(len(free)))
    pending = [block for block, costs_nothing in enumerate(free) if costs_nothing]
    while pending:
        block = pending.pop()
        if home[block] != block or len(neighbours[block]) != 1:
            continue
        (other,) = neighbours[block]
        if all(other in shared for shared in owned[block]):
            home[block] = other
            neighbours[other].discard(block)
            for shared in owned[block]:
                shared.discard(block)
            if free[other]:
                pending.append(other)
    for block in range(len(home)):
        while home[home[block]] != home[block]:
            home[block] = home[home[block]]
    return home


def _loose(
    free: Sequence[bool], graph: BlockGraph, values: Sequence[Sequence[int]]
) -> tuple[list[int], list[int]]:
    """The blocks that the second rule puts into the first stage, and into the last."""
    moving = {block for users in values for block in users}
    still = [block for block, ok in enumerate(free) if ok and block not in moving]
    before, after = graph.predecessors, graph.successors
    first = [block for block in still if not before[block]]
    return first, [block for block in still if before[block] and not after[block]]
