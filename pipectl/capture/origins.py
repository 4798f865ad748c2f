"""What the values of a graph follow from, through memory that several of them share too."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import fx

from pipectl.torch_api import OpOverload, pytree, schema_of

CONVERSIONS = {"to", "_to_copy", "type_as", "contiguous", "clone", "detach", "alias"}
"""Operators that leave values as they are."""


class Origins:
    """Follows the values of a graph back, in any order of the writes to their memory.

    Args:
        graph: as it is so far, if it is being traced.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._base: dict[fx.Node, fx.Node] = {}
        self.writes: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
        """The operators that write some memory, by its first value."""
        for node in graph.nodes:
            written = written_nodes(node)
            source = written[0] if written else _viewed(node)
            self._base[node] = node if source is None else self.base(source)
            for each in written:
                self.writes[self.base(each)].append(node)

    def base(self, node: fx.Node) -> fx.Node:
        """Return the first value in the memory of a value."""
        return self._base.get(node, node)

    def follow(self, nodes: Iterable[fx.Node], is_root: Callable[[fx.Node], bool]) -> bool:
        """Return whether values follow from a root, or from random numbers."""
        waiting = [*nodes]
        visited = set(waiting)
        while waiting:
            node = waiting.pop()
            if is_root(node) or _draws(node):
                return True
            sources = [*_sources(node)]
            for write in self.writes.get(self.base(node), ()):
                sources += _sources(write)
            fresh = [each for each in sources if each not in visited]
            visited.update(fresh)
            waiting += fresh
        return False


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that an operator writes."""
    if not isinstance(node.target, OpOverload):
        return []
    written = []
    for place, argument in enumerate(schema_of(node.target).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            written += [n for n in pytree.tree_leaves(given) if isinstance(n, fx.Node)]
    return written


def kind_of(node: fx.Node) -> str:
    """Return the name of an operator without its overload."""
    return str(getattr(node.target, "_opname", ""))


def _viewed(node: fx.Node) -> fx.Node | None:
    """Return the value of which an operator gives a view, or a part."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if node.target is operator.getitem:
        return source
    if not isinstance(node.target, OpOverload):
        return None
    return source if any(each.alias_info for each in schema_of(node.target).returns) else None


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _sources(node: fx.Node) -> list[fx.Node]:
    """Return the nodes on whose values, not only sizes and types, the value of a node depends."""
    kind = kind_of(node)
    if kind.startswith(("sym_", "new_")) or kind.endswith("_like"):
        return []
    if kind == "copy_":  # whose first argument is lost
        return node.all_input_nodes[1:]
    return node.all_input_nodes[:1] if kind in CONVERSIONS else node.all_input_nodes
