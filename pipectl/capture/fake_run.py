"""A run of a graph on fake tensors: what its operators share, write and save."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from pipectl.capture.carried import Dependence
from pipectl.capture.operators import calling_module, written_tensors
from pipectl.capture.refusals import Refusal, place_of_node
from pipectl.capture.regions import region_of
from pipectl.capture.tensors import storage_of, storages_in, tensors_in
from pipectl.torch_api import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    is_edge_of_vmap,
    version_of,
)


def _never_read(_: object) -> NoReturn:
    raise AssertionError("no backward of a fake run runs")


class FakeRun:
    """All values stay alive, so that storages stay distinct. It runs with gradients if the caller
    does.

    Args:
        root: the module of the graph.
        operators: the nodes that compute, in graph order.
        states: parameters, buffers and constants by placeholder, with or without values.
        buffers: placeholders of the buffers.
        inputs: contents of the micro-batch that the graph reads, by placeholder; tensors have no
            memory (device ``meta``).
        size_of_node: returns the value of a node that has no tensor.

    Attributes:
        values: of every node.
        index: of every operator.
        touched: operators that read or write each storage, in order.
        last_write: index of the last operator that writes a storage.
        persistent: storages of states and inputs.
        first_version: of every placeholder's tensor.
        saved: what operators save for their backward, with its version at that time.
        dependence: what values depend on.

    Raises:
        RefusedError: the size of a value depends on the data, or an operator is of a transform.
    """

    def __init__(
        self,
        root: fx.GraphModule,
        operators: Sequence[fx.Node],
        states: Mapping[str, Tensor],
        buffers: Collection[str],
        inputs: Mapping[str, Any],
        size_of_node: Callable[[fx.Node], Any],
    ) -> None:
        self.index = {node: i for i, node in enumerate(operators)}
        self.values: dict[fx.Node, Any] = {}
        self.touched: dict[int, list[fx.Node]] = {}
        self.last_write: dict[int, int] = {}
        self.persistent: set[int] = set()
        self.first_version: dict[fx.Node, int] = {}
        self.saved: list[tuple[fx.Node, Tensor, int]] = []
        self.dependence = Dependence()
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            for node in root.graph.nodes:
                if node.op == "placeholder":
                    value: Any = inputs.get(node.name)
                    if node.name in states:
                        value = mode.from_tensor(states[node.name])
                    elif isinstance(value, Tensor):
                        value = torch.empty_like(value, device="cpu")
                    self.values[node] = value
                    self.first_version[node] = version_of(value) if isinstance(value, Tensor) else 0
                    self.persistent.update(storages_in(value))
                    if node.name in buffers:
                        self.dependence.enter(node.name, value)
                elif node.op == "get_attr":
                    self.values[node] = root.get_submodule(str(node.target))
                elif node in self.index:
                    self.values[node] = self._run(node)
                elif node.op == "call_function":
                    self.values[node] = size_of_node(node)

    def _run(self, node: fx.Node) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        target: Any = node.target
        if is_edge_of_vmap(target):
            raise Refusal.TRANSFORMS.error(place_of_node(node), part=calling_module(node))
        tensors = tensors_in((args, kwargs))
        versions = [version_of(tensor) for tensor in tensors]

        def note(tensor: Tensor) -> None:
            self.saved.append((node, tensor, version_of(tensor)))

        try:
            with saved_tensors_hooks(note, _never_read):
                result = region_of(node).run(target, *args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            place, part = place_of_node(node), calling_module(node)
            raise Refusal.OPERATOR_SIZE.error(place, part=part, name=node.name) from None
        for storage in {*storages_in(tensors), *storages_in(result)}:
            self.touched.setdefault(storage, []).append(node)
        written = [
            t for t, version in zip(tensors, versions, strict=True) if version_of(t) != version
        ]
        self.dependence.note(target, args, kwargs, result, written)
        for tensor in (*written, *written_tensors(target, args, kwargs, statistics=True)):
            self.last_write.update(dict.fromkeys(storages_in(tensor), self.index[node]))
        return result

    def groups(self, copies: Sequence[fx.Node]) -> dict[str, str]:
        """Return the first operator of its group for every operator in a group.

        Args:
            copies: operators that copy a buffer for all that reads it. In evaluation, where the
                buffer may not be assigned, this reads the buffer itself, so it stays with it.
        """
        members: dict[fx.Node, set[fx.Node]] = {}
        readers = [self.touched[storage_of(self.values[copy])] for copy in copies]
        for nodes in (*readers, *self._joined()):
            group = set(nodes).union(*(members.get(node, ()) for node in nodes))
            members.update(dict.fromkeys(group, group))
        first: dict[int, str] = {}
        return {
            node.name: first.setdefault(id(members[node]), node.name)
            for node in self.index
            if len(members.get(node, ())) > 1
        }

    def _joined(self) -> Iterator[list[fx.Node]]:
        for storage, last in self.last_write.items():
            # Parameters, buffers and inputs exist once per rank, so later readers stay as well.
            whole = storage in self.persistent
            yield [node for node in self.touched[storage] if whole or self.index[node] <= last]
        for node in self.index:
            # A tuple does not travel, its items do: they are taken out where it is computed.
            if not isinstance(self.values[node], Tensor):
                yield [node, *(user for user in node.users if user in self.index)]
        for node, following in pairwise(self.index):
            # An operator without neighbours in the graph (BatchNorm's counter) stays with the next.
            if not node.users and not any(source in self.index for source in node.all_input_nodes):
                yield [node, following]
