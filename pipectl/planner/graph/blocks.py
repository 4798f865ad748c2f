"""The operator graph with everything that must share a stage contracted to one block.

Operators of the same group share a stage. A contracted group need not be convex: if a path leaves
it and comes back, everything on the path must share the stage too, because stages feed only later
stages. These operators are the strongly connected component of the group after the contraction::

    a ──► b ──► c        a and c in one group:   (a c) ⇄ b    one block  (a b c)

Sets of blocks are integers (bit b is block b), or many at once as rows of booleans or 64-bit words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipectl.arrays import Flags, Words
from pipectl.profile import Profile
from pipectl.profile_parts import Operator
from pipectl.sorting import topological_order

_FEW = 16
"""Every step of a loop over the bits of an integer takes as long as the integer is."""


def bits(members: int) -> Iterator[int]:
    """Positions of the set bits, ascending."""
    if members.bit_count() > _FEW:
        octets = members.to_bytes(members.bit_length() // 8 + 1, "little")
        flags = np.unpackbits(np.frombuffer(octets, dtype=np.uint8), bitorder="little")
        yield from np.flatnonzero(flags).tolist()
        return
    while members:
        low = members & -members
        yield low.bit_length() - 1
        members ^= low


def bitset(positions: Iterable[int]) -> int:
    """The integer with these bits set; positions must be distinct."""
    places = list(positions)
    if len(places) <= _FEW:
        return sum(1 << place for place in places)
    flags = np.zeros(max(places) + 1, dtype=np.uint8)
    flags[places] = 1
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


def membership(bitsets: Sequence[int], width: int) -> Flags:
    """Bitsets as rows of booleans; shape [bitsets, width]."""
    size = -(-width // 8)
    packed = b"".join(members.to_bytes(size, "little") for members in bitsets)
    rows = np.frombuffer(packed, dtype=np.uint8).reshape(len(bitsets), size)
    return np.unpackbits(rows, axis=1, bitorder="little")[:, :width].astype(np.bool_)


def words_of(rows: Flags) -> Words:
    """Rows of booleans, packed; shape [rows, words]. The order of the bits is not specified."""
    packed = np.packbits(rows, axis=1)
    packed = np.pad(packed, ((0, 0), (0, -packed.shape[1] % 8)))
    return np.ascontiguousarray(packed).view(np.uint64)


def follows(rows: Flags) -> Flags:
    """Whether one set is a proper subset of another; shape [rows, rows], the larger one last."""
    words = words_of(rows)
    inside = np.ones((len(words), len(words)), np.bool_)
    for column in words.T:
        inside &= (column[:, None] & ~column[None, :]) == 0
    np.fill_diagonal(inside, val=False)
    return inside


@dataclass(frozen=True)
class Block:
    """Operators that share a stage.

    Args:
        operators: indices into the profile's operators, ascending.
        parameters: bytes by name; a parameter that several operators use occurs once.
        saved: bytes by name of every value kept for the backward; aliases occur once.
    """

    operators: tuple[int, ...]
    parameters: dict[str, int]
    saved: dict[str, int]


@dataclass(frozen=True)
class Value:
    """An operator's output that leaves its block.

    Args:
        producer: block that computes it.
        blocks: bitset of the producer and of every block that reads it.
        size_bytes: of the activation message.
        gradient_bytes: of the gradient message; 0 if no gradient comes back.
    """

    producer: int
    blocks: int
    size_bytes: int
    gradient_bytes: int


@dataclass(frozen=True)
class BlockGraph:
    """A DAG of blocks in a topological order that follows the operators' order.

    Args:
        predecessors: bitset of the direct predecessors of every block.
        successors: bitset of the direct successors of every block.
        values: outputs that several blocks use.
    """

    blocks: tuple[Block, ...]
    predecessors: tuple[int, ...]
    successors: tuple[int, ...]
    values: tuple[Value, ...]

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def everything(self) -> int:
        """Bitset of all blocks."""
        return (1 << len(self.blocks)) - 1

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """Bitset of everything each block depends on."""
        return _closure(self.predecessors, range(len(self)))

    @cached_property
    def descendants(self) -> tuple[int, ...]:
        """Bitset of everything that depends on each block."""
        return _closure(self.successors, range(len(self) - 1, -1, -1))

    @cached_property
    def block_of(self) -> tuple[int, ...]:
        """The block of every operator."""
        home = {index: place for place, b in enumerate(self.blocks) for index in b.operators}
        return tuple(home[index] for index in range(len(home)))

    def operators_of(self, blocks: int) -> list[int]:
        """Indices of the operators in a bitset of blocks, ascending."""
        return sorted(index for block in bits(blocks) for index in self.blocks[block].operators)


def _closure(direct: Sequence[int], order: Iterable[int]) -> tuple[int, ...]:
    """What each block reaches; ``order`` has a block after everything it reaches."""
    reached = list(direct)
    for block in order:
        for neighbour in bits(direct[block]):
            reached[block] |= reached[neighbour]
    return tuple(reached)


def condense(profile: Profile) -> BlockGraph:
    """Contract groups, with the operators on paths between their members."""
    return contract(profile.operators, profile.edge_indices, group_labels(profile.operators))


def contract(
    operators: Sequence[Operator], edges: Sequence[tuple[int, int]], labels: Sequence[int]
) -> BlockGraph:
    """The DAG of blocks if operators with equal labels share a block.

    Args:
        labels: one number per operator.
    """
    arcs = {(labels[source], labels[target]) for source, target in edges}
    component = _components(sorted(set(labels)), sorted(arcs))
    first: dict[int, int] = {}
    home = [first.setdefault(component[label], number) for number, label in enumerate(labels)]
    order = topological_order(sorted(first.values()), {(home[u], home[v]) for u, v in edges})
    position = {number: place for place, number in enumerate(order)}
    return _assemble(operators, edges, [position[number] for number in home])


def group_labels(operators: Sequence[Operator]) -> list[int]:
    """The index of the first operator of each operator's group."""
    first: dict[str, int] = {}
    return [
        number if operator.group is None else first.setdefault(operator.group, number)
        for number, operator in enumerate(operators)
    ]


def _components(nodes: Sequence[int], arcs: Iterable[tuple[int, int]]) -> dict[int, int]:
    """A representative of every node's strongly connected component (Kosaraju)."""
    onward: dict[int, list[int]] = {node: [] for node in nodes}
    back: dict[int, list[int]] = {node: [] for node in nodes}
    for source, target in arcs:
        onward[source].append(target)
        back[target].append(source)
    component: dict[int, int] = {}
    for root in reversed(_postorder(nodes, onward)):
        pending = [] if root in component else [root]
        while pending:
            node = pending.pop()
            component[node] = root
            pending += [source for source in back[node] if source not in component]
    return component


def _postorder(nodes: Iterable[int], targets: Mapping[int, Sequence[int]]) -> list[int]:
    """Nodes in the order in which a depth-first search leaves them."""
    seen: set[int] = set()
    left: list[int] = []
    for root in nodes:
        path = [] if root in seen else [(root, iter(targets[root]))]
        seen.add(root)
        while path:
            node, remaining = path[-1]
            target = next((target for target in remaining if target not in seen), None)
            if target is None:
                left.append(node)
                path.pop()
            else:
                seen.add(target)
                path.append((target, iter(targets[target])))
    return left


def _assemble(
    operators: Sequence[Operator], edges: Iterable[tuple[int, int]], block_of: Sequence[int]
) -> BlockGraph:
    members: list[list[int]] = [[] for _ in range(max(block_of) + 1)]
    for number, block in enumerate(block_of):
        members[block].append(number)
    predecessors = [0] * len(members)
    successors = [0] * len(members)
    users: dict[int, int] = {}
    for source, target in edges:
        producer, consumer = block_of[source], block_of[target]
        if producer != consumer:
            successors[producer] |= 1 << consumer
            predecessors[consumer] |= 1 << producer
            users[source] = users.get(source, 1 << producer) | 1 << consumer
    return BlockGraph(
        blocks=tuple(_block(operators, numbers) for numbers in members),
        predecessors=tuple(predecessors),
        successors=tuple(successors),
        values=tuple(
            Value(block_of[n], users[n], operators[n].output_bytes, operators[n].gradient_bytes)
            for n in sorted(users)
        ),
    )


def _block(operators: Sequence[Operator], numbers: Sequence[int]) -> Block:
    inside = [operators[number] for number in numbers]
    return Block(
        operators=tuple(numbers),
        parameters=dict(pair for operator in inside for pair in operator.parameters),
        saved=dict(pair for operator in inside for pair in operator.saved),
    )
