"""Which operators share storage, found by running the graph once on fake tensors.

An in-place operator makes an order that no edge shows: who reads before the write, who after.
All operators that touch a storage up to its last write therefore stay in one stage, where the
graph order holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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

from pipectl.capture.operators import written_tensors
from pipectl.capture.refusals import data_dependent_size, forms_gradients, module_of, place_in
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
        last_writer: for values that are written after they are computed: the last operator that
            does.
        rewritten: placeholders of the buffers that are written, other than by a norm itself.
        written: placeholders of all states and inputs that are written, each with the operator of
            its last write.
    """

    groups: dict[str, str] = field(default_factory=dict)
    requires_grad: dict[str, bool] = field(default_factory=dict)
    returned_argument: dict[str, fx.Node] = field(default_factory=dict)
    last_writer: dict[str, str] = field(default_factory=dict)
    rewritten: set[str] = field(default_factory=set)
    written: dict[str, str] = field(default_factory=dict)


def find_aliases(graph: CapturedGraph, states: Mapping[str, Tensor]) -> Aliases:
    """Run ``graph`` on fake tensors and note storages, writes and gradients.

    Args:
        states: parameters and buffers by full name, for shapes, dtypes and ``requires_grad``.
    """
    run = _FakeRun(graph, states)
    operators, index = graph.operators, run.index
    found = Aliases(_groups(operators, _joined(operators, run)), {}, run.returned_argument)
    for node, value in run.values.items():
        last = max((run.last_write.get(each, -1) for each in _storages(value)), default=-1)
        if node.op == "placeholder":
            if node.name in graph.states and value._version != run.first_version[node]:
                found.rewritten.add(node.name)
            if last >= 0:
                found.written[node.name] = operators[last].name
        elif node in index:
            # Only now: a write through a view may have given a value its gradient.
            leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
            found.requires_grad[node.name] = any(leaf.requires_grad for leaf in leaves)
            if last > index[node]:
                found.last_writer[node.name] = operators[last].name
    return found


def _joined(operators: Sequence[fx.Node], run: _FakeRun) -> Iterator[list[fx.Node]]:
    """Operators that must share a stage."""
    for storage, last in run.last_write.items():
        # Parameters, buffers and inputs exist once per rank, so later readers stay as well.
        whole = storage in run.persistent
        yield [node for node in run.touched[storage] if whole or run.index[node] <= last]
    for node in operators:
        # A tuple does not travel, its items do: they are taken out in the stage that computes it.
        if not isinstance(run.values[node], Tensor):
            yield [node, *(user for user in node.users if user in run.index)]
    for node, following in pairwise(operators):
        # An operator without neighbours in the graph (BatchNorm's counter) stays with the next.
        if not node.users and not any(source in run.index for source in node.all_input_nodes):
            yield [node, following]


def _groups(operators: Sequence[fx.Node], joined: Iterable[Sequence[fx.Node]]) -> dict[str, str]:
    """For operators that others are joined to, directly or by others: the first of all these."""
    members: dict[fx.Node, set[fx.Node]] = {}
    for nodes in joined:
        group = set(nodes).union(*(members.get(node, ()) for node in nodes))
        members.update(dict.fromkeys(group, group))
    first: dict[int, str] = {}
    return {
        node.name: first.setdefault(id(members[node]), node.name)
        for node in operators
        if len(members.get(node, ())) > 1
    }


class _FakeRun:
    """One pass over the graph; values stay referenced, so that storage addresses stay unique.

    Attributes:
        touched: operators that read or write each storage, in order.
        last_write: index of the last operator that writes a storage.
        persistent: storages of states and inputs.
    """

    def __init__(self, graph: CapturedGraph, states: Mapping[str, Tensor]) -> None:
        self._graph = graph
        self.index = {node: i for i, node in enumerate(graph.operators)}
        self.values: dict[fx.Node, Any] = {}
        self.touched: dict[int, list[fx.Node]] = {}
        self.last_write: dict[int, int] = {}
        self.persistent: set[int] = set()
        self.first_version: dict[fx.Node, int] = {}
        self.returned_argument: dict[str, fx.Node] = {}
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode, torch.enable_grad():
            for node in graph.graph.nodes:
                if node.op == "placeholder":
                    self.values[node] = value = self._placeholder(node, mode, states)
                    self.first_version[node] = value._version if isinstance(value, Tensor) else 0
                    self.persistent.update(_storages(value))
                elif node.op == "get_attr":
                    self.values[node] = graph.root.get_submodule(str(node.target))
                elif graph.is_size(node):
                    self.values[node] = graph.size_at(node, graph.batch_size)
                elif node in self.index:
                    self.values[node] = self._run(node)

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
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        if getattr(node.target, "__module__", "") == _TRANSFORMS:
            place = place_in(node.meta.get("stack_trace") or "")
            what = "it transforms functions (torch.func)"
            raise forms_gradients(what, place=place, part=module_of(node))
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        versions = [tensor._version for tensor in tensors]
        try:
            target: Any = node.target
            result = region_of(node).run(target, *args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            place = place_in(node.meta.get("stack_trace") or "")
            raise data_dependent_size(node, place) from None
        index = self.index[node]
        for storage in {*_storages(tensors), *_storages(result)}:
            self.touched.setdefault(storage, []).append(node)
        written = [t for t, version in zip(tensors, versions, strict=True) if t._version != version]
        for tensor in (*written, *written_tensors(target, args, kwargs, statistics=True)):
            self.last_write.update(dict.fromkeys(_storages(tensor), index))
            for source in node.all_input_nodes:
                if self.values[source] is tensor is result:
                    self.returned_argument[node.name] = source
        return result


def _storages(value: Any) -> list[int]:
    """Identities of the storages of every tensor in ``value``."""
    return [
        leaf.untyped_storage()._cdata
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, Tensor)
    ]
