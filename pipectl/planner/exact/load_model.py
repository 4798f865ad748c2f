"""Blocks, their costs on every kind of device, and the values between them, as arrays.

The stages of a pipeline are cut from the *stage graph*: the forward graph, with operators of one
group contracted. An operator of the backward belongs to the block of its group. One whose group has
no forward operator stands in the stage graph as a forward operator would that it is the backward
of: its edges to other backward operators are mirrored. This is the rule of Tarnawski et al.,
"Efficient algorithms for device placement of DNN graph operators", NeurIPS 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.planner.exact.arrays import Arcs, Moves
from pipectl.planner.exact.reduce import joined, loose
from pipectl.planner.exact.request import BalanceRequest, DeviceKind
from pipectl.planner.graphs.bitsets import bits
from pipectl.planner.graphs.condense import Condensed, contract, group_labels
from pipectl.profile import Operator, Profile


@dataclass(frozen=True)
class Lists:
    """Lists of integers in one array: list i is ``items[starts[i]:starts[i + 1]]``."""

    starts: Integers
    items: Integers

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Lists:
        """Pack lists."""
        starts = np.zeros(len(lists) + 1, dtype=np.int64)
        np.cumsum([len(items) for items in lists], out=starts[1:])
        return cls(starts, np.array([item for items in lists for item in items], dtype=np.int64))

    def of_row(self, row: int) -> list[int]:
        """One of the lists."""
        found: list[int] = self.items[self.starts[row] : self.starts[row + 1]].tolist()
        return found


@dataclass(frozen=True)
class LoadModel:
    """What a stage of given blocks costs.

    A value crosses a stage's border if some, but not all, of the blocks that make or read it are
    in the stage.

    Args:
        operators: indices of every block's operators; the blocks stand in a topological order.
        first, last: further operators, which cost nothing, of the first and of the last stage.
        accelerator_s, cpu_s: compute of every block; infinite where it cannot run.
        memory_bytes: of every block.
        transfer_s: of every value that several blocks use.
        users: the blocks of every value, ascending.
        values: the values of every block.
        predecessors, successors: of every block.
        limit_bytes: memory of an accelerator; infinite if there is no limit.
    """

    operators: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]
    last: tuple[int, ...]
    accelerator_s: Floats
    cpu_s: Floats
    memory_bytes: Floats
    transfer_s: Floats
    users: Lists
    values: Lists
    predecessors: Lists
    successors: Lists
    limit_bytes: float

    def __len__(self) -> int:
        return len(self.accelerator_s)

    @cached_property
    def moves(self) -> Moves:
        """The values, for kernels."""
        return Moves(
            self.transfer_s,
            self.users.starts,
            self.users.items,
            self.values.starts,
            self.values.items,
        )

    @cached_property
    def arcs(self) -> Arcs:
        """The stage graph, for kernels."""
        before, after = self.predecessors, self.successors
        return Arcs(before.starts, before.items, after.starts, after.items)

    @cached_property
    def costs(self) -> Floats:
        """Shape [blocks, 3]: seconds on an accelerator and on a CPU, bytes."""
        return np.stack([self.accelerator_s, self.cpu_s, self.memory_bytes], axis=1)

    @cached_property
    def work_s(self) -> Floats:
        """Compute that accelerators could be asked for: of no block that they cannot run."""
        return np.where(np.isfinite(self.accelerator_s), self.accelerator_s, 0.0)

    def load_s(self, blocks: Sequence[int], device: DeviceKind) -> float:
        """Load of a stage: compute, and on accelerators the transfer of what crosses its border."""
        chosen = np.array(blocks, dtype=np.int64)
        if device is DeviceKind.CPU:
            return float(self.cpu_s[chosen].sum())
        inside = np.zeros(len(self), dtype=np.int64)
        inside[chosen] = 1
        return float(self.accelerator_s[chosen].sum()) + self._crossing_s(inside)

    def _crossing_s(self, inside: Integers) -> float:
        if not len(self.transfer_s):
            return 0.0
        users = np.add.reduceat(inside[self.users.items], self.users.starts[:-1])
        crossing = (users > 0) & (users < np.diff(self.users.starts))
        return float(self.transfer_s[crossing].sum())


def load_model(profile: Profile, request: BalanceRequest) -> LoadModel:
    """The arrays for a profile; it must have been prepared (:mod:`pipectl.planner.pruning`)."""
    operators = profile.operators
    edges = profile.edge_indices
    arcs = stage_edges(operators, edges)
    costs = _Costs(operators, request)
    graph = contract(operators, arcs, group_labels(operators))
    users, _ = _values(graph, edges, costs.transfer_s)
    free = [not any(costs.of(block.operators)) for block in graph.blocks]
    place = (free, graph.predecessors, graph.successors, users)
    home = joined(*place)
    labels = [0] * len(operators)
    for block, other in zip(graph.blocks, home, strict=True):
        for number in block.operators:
            labels[number] = other
    return _model(contract(operators, arcs, labels), edges, costs)


class _Costs:
    """What operators cost, as far as it matters for a request.

    Args:
        transfer_s: of every operator's output.
        limit_bytes: infinite where all operators together stay within it.
    """

    def __init__(self, operators: Sequence[Operator], request: BalanceRequest) -> None:
        self.accelerator_s = [_accelerator_s(operator) for operator in operators]
        self.cpu_s = [_cpu_s(operator) if request.cpus else np.inf for operator in operators]
        self.transfer_s = _transfers(operators, request)
        limit, needed = request.memory_limit_bytes, sum(o.memory_bytes or 0 for o in operators)
        self.limit_bytes = np.inf if limit is None or needed <= limit else float(limit)
        limited = np.isfinite(self.limit_bytes)
        self.memory_bytes = [float(o.memory_bytes or 0) if limited else 0.0 for o in operators]
        self._has_cpus = request.cpus > 0

    def of(self, numbers: Sequence[int]) -> tuple[float, ...]:
        """Everything that some operators could cost together."""
        lists = [self.accelerator_s, self.memory_bytes, *([self.cpu_s] if self._has_cpus else [])]
        return tuple(sum(costs[number] for number in numbers) for costs in lists)


def _model(graph: Condensed, edges: Sequence[tuple[int, int]], costs: _Costs) -> LoadModel:
    """The model of a stage graph without those blocks that may stand anywhere."""
    users, _ = _values(graph, edges, costs.transfer_s)
    free = [not any(costs.of(block.operators)) for block in graph.blocks]
    first, last = loose(free, graph.predecessors, graph.successors, users)
    kept = sorted(set(range(len(graph))) - set(first) - set(last)) or [first.pop()]
    place = {block: index for index, block in enumerate(kept)}
    users, seconds = _values(graph, edges, costs.transfer_s)
    numbers = [graph.blocks[block].operators for block in kept]
    of_block: list[list[int]] = [[] for _ in kept]
    for value, blocks in enumerate(users):
        for block in blocks:
            of_block[place[block]].append(value)
    before = [[place[b] for b in bits(graph.predecessors[k]) if b in place] for k in kept]
    after = [[place[b] for b in bits(graph.successors[k]) if b in place] for k in kept]
    return LoadModel(
        operators=tuple(numbers),
        first=tuple(number for block in first for number in graph.blocks[block].operators),
        last=tuple(number for block in last for number in graph.blocks[block].operators),
        accelerator_s=_sums(numbers, costs.accelerator_s),
        cpu_s=_sums(numbers, costs.cpu_s),
        memory_bytes=_sums(numbers, costs.memory_bytes),
        transfer_s=np.array(seconds, dtype=np.float64),
        users=Lists.of([[place[block] for block in blocks] for blocks in users]),
        values=Lists.of(of_block),
        predecessors=Lists.of(before),
        successors=Lists.of(after),
        limit_bytes=costs.limit_bytes,
    )


def stage_edges(
    operators: Sequence[Operator], edges: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The edges that stages have to follow."""
    backward = [operator.phase == "backward" for operator in operators]
    forward = {o.group for o in operators if o.phase != "backward"} - {None}
    alone = [back and o.group not in forward for back, o in zip(backward, operators, strict=True)]
    return [edge for edge in edges if not backward[edge[0]] and not backward[edge[1]]] + [
        (target, source)
        for source, target in edges
        if backward[source] and backward[target] and (alone[source] or alone[target])
    ]


def _accelerator_s(operator: Operator) -> float:
    return np.inf if operator.cpu_only else operator.forward_s + operator.backward_s


def _cpu_s(operator: Operator) -> float:
    return np.inf if operator.cpu_s is None else operator.cpu_s


def _transfers(operators: Sequence[Operator], request: BalanceRequest) -> list[float]:
    """Time to move each operator's output."""
    bandwidth = request.bandwidth_bytes_per_s
    return [
        operator.transfer_s * request.communication_scale
        if operator.transfer_s is not None
        else (2.0 * operator.output_bytes / bandwidth if bandwidth else 0.0)
        for operator in operators
    ]


def _sums(numbers: Sequence[Sequence[int]], costs: Sequence[float]) -> Floats:
    return np.array([sum(costs[n] for n in block) for block in numbers], dtype=np.float64)


def _values(
    graph: Condensed, edges: Sequence[tuple[int, int]], transfers: Sequence[float]
) -> tuple[list[list[int]], list[float]]:
    """The blocks of every value that several use and that takes time, and that time.

    Values of the same blocks cross the same borders: they are one.
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
