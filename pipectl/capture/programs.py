"""Whether a later step computes what the first one does, by the programs of both.

What the first step leaves may differ from what was there before: a table that is computed when it
is first needed. The first program computes such a table in every step, the later one reads it. They
are the same if the table always is, and both compute the same with it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from pipectl.capture.model_with_loss import is_assignment
from pipectl.capture.opaque import Opaque
from pipectl.capture.origins import Origins, kind_of, written_nodes
from pipectl.capture.python_state import left_in, mark_of
from pipectl.capture.refusals import place_of_node
from pipectl.capture.tensors import octets_of
from pipectl.torch_api import CHECKS, OpOverload, schema_of

_OVERWRITES = ("copy_", "fill_", "zero_")
"""Operators that write their first argument and read nothing of it."""
_COPIES = ("detach", "clone", "alias")
_Lines = list[tuple[str, str]]


def difference(
    first: ExportedProgram, later: ExportedProgram, tables: Collection[str] | None = None
) -> str | None:
    """Return the line of the model where two programs first differ; None if they are equal.

    Args:
        tables: names of what the first step has left, and the later one has not made anew; None if
            these are no steps one after the other.
    """
    place = _difference(_lines(first, _Left()), _lines(later, _Left()))
    if place is None or tables is None:
        return place
    written = _written_buffers(later)
    filled = {name for name in _filled_buffers(first) if name not in written}
    names = filled.union(tables)
    if not names:
        return place
    return _difference(_lines(first, _Left.of(first, names)), _lines(later, _Left.of(later, names)))


@dataclass
class _Left:
    """What of a program stands for what a step before it has left.

    Attributes:
        names: of its values.
        gone: writes that change nothing, each with the argument that it writes.
    """

    names: dict[fx.Node, str] = field(default_factory=dict)
    gone: dict[fx.Node, fx.Node] = field(default_factory=dict)

    @classmethod
    def of(cls, program: ExportedProgram, names: Collection[str]) -> _Left:
        """Return it for what is left under some names, if nobody reads it before it is whole."""
        found, origins = cls(), Origins(program.graph)
        kinds = _kinds(program)
        position = {node: index for index, node in enumerate(program.graph.nodes)}
        for node in program.graph.nodes:
            kind, target = kinds.get(node.name, (None, ""))
            is_buffer = kind is InputKind.BUFFER and target in names
            left = (target, 0) if is_buffer else mark_of(node)
            if kind is InputKind.CONSTANT_TENSOR:
                left = left_in(program.constants.get(target))
            if left is None or left[0] not in names:
                continue
            writes = origins.writes.get(origins.base(node), [])
            if not _is_read_between(position, origins, node, writes):
                found.names.update(dict.fromkeys(_states_of(node), repr(left)))
                if node.op != "placeholder" or is_buffer:
                    found.gone.update((write, written_nodes(write)[0]) for write in writes)
        for write in filter(is_assignment, found.gone):
            value = write.all_input_nodes[-1]
            while kind_of(value) in _COPIES:  # what the model reads is not the copy
                value = value.all_input_nodes[0]
            found.names[value] = found.names[origins.base(write)]
        return found

    def inputs_of(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that are needed for a value."""
        if node in self.names:
            return []
        return [self.gone[node]] if node in self.gone else node.all_input_nodes


def _states_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes of one tensor, of which each write makes another."""
    yield node
    while written := written_nodes(node):
        node = written[0]
        yield node


def _is_read_between(
    position: dict[fx.Node, int], origins: Origins, node: fx.Node, writes: list[fx.Node]
) -> bool:
    """Return whether anything but views and writes reads memory before its last write.

    Of a placeholder, reads before the first write are reads of what an earlier step has left.
    """
    if not writes:
        return False
    base = origins.base(node)
    begin = position[writes[0]] if base.op == "placeholder" else position[base]
    between = (n for n, index in position.items() if begin < index < position[writes[-1]])
    return any(
        origins.base(reader) is not base
        and any(origins.base(source) is base for source in reader.all_input_nodes)
        for reader in between
    )


def _kinds(program: ExportedProgram) -> dict[str, tuple[InputKind, str]]:
    """Return what each placeholder is, and its name in the model."""
    specs = program.graph_signature.input_specs
    return {getattr(spec.arg, "name", ""): (spec.kind, str(spec.target)) for spec in specs}


def _buffers(program: ExportedProgram) -> Iterator[tuple[str, fx.Node]]:
    kinds = _kinds(program)
    for node in program.graph.find_nodes(op="placeholder"):
        kind, target = kinds[node.name]
        if kind is InputKind.BUFFER:
            yield target, node


def _written_buffers(program: ExportedProgram) -> set[str]:
    writes = Origins(program.graph).writes
    return {name for name, node in _buffers(program) if writes.get(node)}


def _filled_buffers(program: ExportedProgram) -> set[str]:
    """Return the buffers into which every step writes the same values."""
    origins, kinds = Origins(program.graph), _kinds(program)
    trained = {n for n, tensor in program.state_dict.items() if tensor.requires_grad}

    def is_other(node: fx.Node) -> bool:
        """Return whether a value may be another one in the next step."""
        kind, target = kinds.get(node.name, (None, ""))
        if node.op != "placeholder" or kind is InputKind.CONSTANT_TENSOR:
            return False
        is_state = kind in (InputKind.PARAMETER, InputKind.BUFFER)
        return not is_state or target in trained or bool(origins.writes.get(node))

    def is_steady(write: fx.Node) -> bool:
        values = write.all_input_nodes[1:]
        return kind_of(write) in _OVERWRITES and not origins.follow(values, is_other)

    return {
        name
        for name, node in _buffers(program)
        if (writes := origins.writes.get(node)) and all(map(is_steady, writes))
    }


def _lines(program: ExportedProgram, left: _Left) -> _Lines:
    """Return all that a program computes for its results, except for the values of parameters and
    buffers, with the line of the model for each operator, and for each constant that of its first
    use.
    """
    lines, reading = list[tuple[str, str]](), dict[str, str]()
    kinds = _kinds(program)
    fixed = {name for name, (kind, _) in kinds.items() if kind is InputKind.CONSTANT_TENSOR}
    for module in program.graph_module.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        used = _used(module.graph, fixed.difference(node.name for node in left.names), left)
        numbers, counts = dict[fx.Node, str](), Counter[str]()
        for node in (each for each in module.graph.nodes if each in used):
            if node in left.names:
                numbers[node] = left.names[node]
                continue
            if node in left.gone:
                numbers[node] = numbers[left.gone[node]]
                continue
            # Another constant before it leaves the number of an operator as it is. States and items
            # of the batch have names: another one in the same place is another program.
            kind = ("c" if node.name in fixed else "") if node.op == "placeholder" else "%"
            numbers[node] = f"{kind}{counts[kind]}" if kind else node.name
            counts[kind] += 1
            if node.op == "placeholder":
                users = (user for user in node.users if user in used)
                reading[kinds.get(node.name, (None, ""))[1]] = next(
                    filter(None, map(place_of_node, users)), ""
                )
            else:
                lines.append((f"{numbers[node]} = {_call(node, numbers)}", place_of_node(node)))
    return lines + _constants(program, reading)


def _call(node: fx.Node, numbers: dict[fx.Node, str]) -> str:
    target: Any = getattr(node.target, "__name__", node.target)
    if isinstance(node.target, Opaque):
        target = f"{target}{node.target.kinds}"
    return f"{target}{fx.map_arg((node.args, node.kwargs), numbers.__getitem__)}"


def _constants(program: ExportedProgram, reading: dict[str, str]) -> _Lines:
    tensors = {
        name: tensor
        for name, tensor in program.constants.items()
        if type(tensor) is Tensor and not tensor.is_meta and name in reading
    }
    digests = (hashlib.sha256(octets_of(tensor)).hexdigest() for tensor in tensors.values())
    return [
        (f"constant {i}: {digest}", reading[name])
        for i, (name, digest) in enumerate(zip(tensors, digests, strict=True))
    ]


def _used(graph: fx.Graph, constants: Collection[str], left: _Left) -> set[fx.Node]:
    """Return the nodes on which the results of a graph, or what it writes, depend.

    Args:
        constants: names of the placeholders that a write does not outlast.
    """
    used, needed = set[fx.Node](), set[fx.Node]()
    for node in reversed(graph.nodes):
        is_needed = node in needed or node.op in ("output", "get_attr")
        if not is_needed and node.op != "placeholder" and node not in left.gone:
            written = written_nodes(node)
            is_needed = _acts(node) or any(_outlasts(n, needed, constants) for n in written)
        if is_needed:
            used.add(node)
            needed.update(left.inputs_of(node))
    return used


def _acts(node: fx.Node) -> bool:
    """Return whether an operator may do more than to return values and to write its arguments."""
    if isinstance(node.target, OpOverload):
        return node.target not in CHECKS and not schema_of(node.target).returns
    return getattr(node.target, "__module__", "") not in ("_operator", "math", "torch")


def _outlasts(node: fx.Node, needed: set[fx.Node], constants: Collection[str]) -> bool:
    """Return whether what is written to a value may be read in a place that counts.

    The value may be a view of what it is computed of.
    """
    while node not in needed:
        if node.op == "placeholder":
            return node.name not in constants
        if not node.all_input_nodes:
            return False
        node = node.all_input_nodes[0]
    return True


def _difference(lines: _Lines, others: _Lines) -> str | None:
    longer = max(lines, others, key=len)
    for one, other, (_, place) in zip_longest(lines, others, longer, fillvalue=("", "")):
        if one[0] != other[0]:
            return place or one[1] or other[1]
    return None
