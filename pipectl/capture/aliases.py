"""Which operators share storage, found by running the graph once on fake tensors.

An in-place operator makes an order that no edge shows: who reads before the write, who after.
All operators that touch a storage up to its last write therefore stay in one stage, where the
graph order holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree

from pipectl.capture.operators import arguments_by_name, written_arguments
from pipectl.capture.refusals import AS_IT_IS, EagerError, NodeError, module_of, place_in
from pipectl.capture.regions import region_of

if TYPE_CHECKING:
    from pipectl.capture.graph import CapturedGraph


_TRANSFORMS = "torch._functorch.predispatch"
"""The module of what stands in a graph where ``torch.func.vmap`` begins and ends."""


@dataclass
class Aliases:
    """What the fake run found, by operator name.

    Attributes:
        groups: a group's id for every operator that must share a stage with others.
        requires_grad: whether the operator's value has a gradient, once all its writes are done.
        returned_argument: the argument node that an in-place operator returned itself.
        settled: for values that are written after they are made: the operator of the last write.
        rewritten: placeholders of the buffers that are written, other than by a norm itself.
        written: placeholders of all states and inputs that are written, each with the operator of
            its last write.
    """

    groups: dict[str, str] = field(default_factory=dict)
    requires_grad: dict[str, bool] = field(default_factory=dict)
    returned_argument: dict[str, fx.Node] = field(default_factory=dict)
    settled: dict[str, str] = field(default_factory=dict)
    rewritten: set[str] = field(default_factory=set)
    written: dict[str, str] = field(default_factory=dict)


def find_aliases(graph: CapturedGraph, states: Mapping[str, Tensor]) -> Aliases:
    """Run ``graph`` on fake tensors and note storages, writes and gradients.

    Args:
        states: parameters and buffers by full name, for shapes, dtypes and ``requires_grad``.
    """
    return _FakeRun(graph, states).result()


class _FakeRun:
    """One pass over the graph; values stay referenced, so that storage addresses stay unique."""

    def __init__(self, graph: CapturedGraph, states: Mapping[str, Tensor]) -> None:
        self._graph = graph
        self._found = Aliases()
        self._index = {node: i for i, node in enumerate(graph.operators)}
        self._touched: dict[int, list[fx.Node]] = {}
        self._last_write: dict[int, int] = {}
        self._persistent: set[int] = set()
        self._first_version: dict[fx.Node, int] = {}
        self._parent: dict[fx.Node, fx.Node] = {}
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._values: dict[fx.Node, Any] = {}
        with mode, torch.enable_grad():
            for node in graph.graph.nodes:
                self._visit(node, mode, states)

    def result(self) -> Aliases:
        self._note_gradients()
        self._group_mutated()
        self._group_tuples()
        self._group_counters()
        self._settle()
        self._note_rewritten()
        members: dict[fx.Node, list[fx.Node]] = {}
        for node in self._graph.operators:
            members.setdefault(self._root(node), []).append(node)
        for group in members.values():
            if len(group) > 1:
                self._found.groups.update({node.name: group[0].name for node in group})
        return self._found

    def _visit(self, node: fx.Node, mode: FakeTensorMode, states: Mapping[str, Tensor]) -> None:
        if node.op == "placeholder":
            self._values[node] = value = self._placeholder(node, mode, states)
            self._first_version[node] = value._version if isinstance(value, Tensor) else 0
            self._persistent |= set(_storages(self._values[node]))
        elif node.op == "get_attr":
            self._values[node] = self._graph.root.get_submodule(str(node.target))
        elif self._graph.is_size(node):
            self._values[node] = self._graph.size_at(node, self._graph.batch_size)
        elif node in self._index:
            self._values[node] = self._run(node)

    def _placeholder(
        self, node: fx.Node, mode: FakeTensorMode, states: Mapping[str, Tensor]
    ) -> Any:
        state = self._graph.states.get(node.name)
        if state is None and not node.users:
            return None
        if state is not None:
            known = self._graph.constants if state.kind == "constant" else states
            return mode.from_tensor(known[state.name])
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return value
        batch = self._graph.batch_size
        shape = [size if isinstance(size, int) else batch for size in value.shape]
        return torch.empty(shape, dtype=value.dtype)

    def _run(self, node: fx.Node) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._values.__getitem__)
        if getattr(node.target, "__module__", "") == _TRANSFORMS:
            place = place_in(node.meta.get("stack_trace") or "")
            raise EagerError(
                f"model: cannot be captured{place}: it transforms functions (torch.func)",
                path=module_of(node),
            )
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        versions = [tensor._version for tensor in tensors]
        try:
            target: Any = node.target
            result = region_of(node).run(target, *args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            raise NodeError(
                node,
                f"model: {node.name!r} has a size that depends on the data"
                + place_in(node.meta.get("stack_trace") or ""),
                cure=f"give the tensor a fixed size (padding and a mask, say), or {AS_IT_IS}",
            ) from None
        index = self._index[node]
        for storage in {*_storages(tensors), *_storages(result)}:
            self._touched.setdefault(storage, []).append(node)
        written = [t for t, version in zip(tensors, versions, strict=True) if t._version != version]
        for tensor in (*written, *_declared_writes(node.target, args, kwargs)):
            self._last_write.update(dict.fromkeys(_storages(tensor), index))
            self._note_returned(node, tensor, result)
        return result

    def _note_returned(self, node: fx.Node, written: Tensor, result: Any) -> None:
        for source in node.all_input_nodes:
            if self._values[source] is written is result:
                self._found.returned_argument[node.name] = source

    def _note_gradients(self) -> None:
        """Only at the end: a write through a view may have given a value its gradient."""
        for node in self._graph.operators:
            leaves = pytree.tree_leaves(self._values[node])
            found = (leaf.requires_grad for leaf in leaves if isinstance(leaf, Tensor))
            self._found.requires_grad[node.name] = any(found)

    def _group_mutated(self) -> None:
        for storage, last in self._last_write.items():
            # Parameters, buffers and inputs exist once a rank, so later readers stay as well.
            whole = storage in self._persistent
            nodes = [n for n in self._touched[storage] if whole or self._index[n] <= last]
            self._join(nodes)

    def _group_tuples(self) -> None:
        """A tuple does not travel, its items do: they are taken out where it is made."""
        for node in self._graph.operators:
            if not isinstance(self._values[node], Tensor):
                self._join([node, *(user for user in node.users if user in self._index)])

    def _group_counters(self) -> None:
        """An operator without neighbours in the graph (BatchNorm's counter) stays with the next."""
        for node, following in pairwise(self._graph.operators):
            if not node.users and not any(s in self._index for s in node.all_input_nodes):
                self._join([node, following])

    def _settle(self) -> None:
        for index, node in enumerate(self._graph.operators):
            last = max(
                (self._last_write.get(s, -1) for s in _storages(self._values[node])), default=-1
            )
            if last > index:
                self._found.settled[node.name] = self._graph.operators[last].name

    def _note_rewritten(self) -> None:
        for node, value in self._values.items():
            if node.name in self._graph.states and value._version != self._first_version[node]:
                self._found.rewritten.add(node.name)
            writes = [self._last_write[s] for s in _storages(value) if s in self._last_write]
            if node.op == "placeholder" and writes:
                self._found.written[node.name] = self._graph.operators[max(writes)].name

    def _join(self, nodes: list[fx.Node]) -> None:
        for node in nodes[1:]:
            low, high = sorted(
                (self._root(nodes[0]), self._root(node)), key=self._index.__getitem__
            )
            if low is not high:
                self._parent[high] = low

    def _root(self, node: fx.Node) -> fx.Node:
        while node in self._parent:
            node = self._parent[node]
        return node


def _declared_writes(target: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """What an operator says it writes, and running statistics, of which nothing tells."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return []
    given, names = arguments_by_name(schema, args, kwargs), written_arguments(schema)
    if any(given.get(flag) is True for flag in ("training", "use_input_stats", "train")):
        names += ["running_mean", "running_var"]
    found = pytree.tree_leaves([given.get(name) for name in names])
    return [leaf for leaf in found if isinstance(leaf, Tensor)]


def _storages(value: Any) -> list[int]:
    """Identities of the storages of every tensor in ``value``."""
    return [
        leaf.untyped_storage()._cdata
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, Tensor)
    ]
