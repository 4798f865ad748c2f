"""Running a captured graph operator by operator on real tensors, measuring each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from pipectl.capture import CapturedGraph
from pipectl.capture.precision import arithmetic
from pipectl.profiler.costs import Call, Ran, Times, measure, run, value_bytes
from pipectl.runtime.device import Device


@dataclass(frozen=True)
class Measured:
    """What was found of one operator.

    Args:
        saved: (name of the storage, bytes) kept for backward; parameters left out.
    """

    times: Times
    output_bytes: int
    saved: tuple[tuple[str, int], ...]


class Walk:
    """One pass over a graph at one batch size.

    Values are freed behind their last reader, so the pass needs little more memory than the widest
    place of the graph.

    Args:
        states: parameters and buffers by full name, on the device.
        inputs: the batch's tensors by placeholder name.
        precision: as in the spec.
    """

    def __init__(
        self,
        graph: CapturedGraph,
        states: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        batch: int,
        device: Device,
        precision: str = "float32",
    ) -> None:
        self._graph = graph
        self._batch = batch
        self._device = device
        self._precision = precision
        self._values: dict[fx.Node, Any] = {}
        self._storage_names: dict[fx.Node, str] = {}
        self._last = self._last_readers()
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                self._values[node] = self._placeholder(node, states, inputs)

    def measure(self, done: Callable[[str], None]) -> dict[str, Measured]:
        """Measure every operator in order; ``done`` is called with the name of each."""
        found: dict[str, Measured] = {}
        for node in self._graph.operators:
            found[node.name] = self._measure(node)
            self._free(node)
            done(node.name)
        return found

    def _measure(self, node: fx.Node) -> Measured:
        call = self._call(node)
        with torch.enable_grad():
            times = measure(call, self._device)
            ran = run(call)
        saved = self._name_saved(node, call, ran)
        self._values[node] = pytree.tree_map_only(
            Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), ran.result
        )
        return Measured(times, value_bytes(ran.result), saved)

    def _call(self, node: fx.Node) -> Call:
        def value(source: fx.Node) -> Any:
            if source.op == "get_attr":
                return self._graph.root.get_submodule(str(source.target))
            if self._graph.is_size(source):
                return self._graph.size_at(source, self._batch)
            return self._values[source]

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
        schema = getattr(node.target, "_schema", None)
        mutates = bool(schema is not None and schema.is_mutable) or "batch_norm" in str(node.target)
        return Call(self._in_precision(node.target), args, kwargs, mutates)

    def _in_precision(self, target: Any) -> Callable[..., Any]:
        """An operator as a stage runs it, with the casts that autocast makes."""

        def run_target(*args: Any, **kwargs: Any) -> Any:
            with arithmetic(self._precision, self._device.torch_device):
                return target(*args, **kwargs)

        return target if self._precision == "float32" else run_target

    def _name_saved(self, node: fx.Node, call: Call, ran: Ran) -> tuple[tuple[str, int], ...]:
        """Name what was kept by the value whose memory it is, so that no stage counts it twice."""
        names = self._names_in_reach(node, call, ran)
        found: dict[str, int] = {}
        for index, tensor in enumerate(ran.kept):
            storage = tensor.untyped_storage()
            name = names.get(storage._cdata, f"{node.name}:{index}")
            if name:
                found[name] = max(found.get(name, 0), storage.nbytes())
        return tuple(found.items())

    def _names_in_reach(self, node: fx.Node, call: Call, ran: Ran) -> dict[int, str]:
        """Storage to name, "" for states: of the arguments, then of what the operator made."""
        original: dict[int, str] = {}
        for source in node.all_input_nodes:
            name = "" if source.name in self._graph.states else self._storage_name(source)
            for storage in _storages(pytree.tree_leaves(self._values.get(source))):
                original[storage] = name
        given = _storages(pytree.tree_leaves((call.args, dict(call.kwargs))))
        names = dict(zip(_storages(ran.leaves), (original.get(s, "") for s in given), strict=True))
        for storage in _storages(pytree.tree_leaves(ran.result)):
            self._storage_names[node] = names.setdefault(storage, node.name) or node.name
        return names

    def _storage_name(self, source: fx.Node) -> str:
        return self._storage_names.get(source, source.name)

    def _placeholder(
        self, node: fx.Node, states: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> Any:
        state = self._graph.states.get(node.name)
        if state is None:
            return inputs.get(node.name)
        known = self._graph.constants if state.kind == "constant" else states
        return known[state.name]

    def _last_readers(self) -> dict[fx.Node, list[fx.Node]]:
        """For every operator, the values that nobody reads after it."""
        last: dict[fx.Node, fx.Node] = {}
        for node in self._graph.operators:
            last[node] = node
            last.update(dict.fromkeys(self._graph.tensor_inputs(node), node))
        free: dict[fx.Node, list[fx.Node]] = {}
        for value, reader in last.items():
            if value.op != "placeholder":
                free.setdefault(reader, []).append(value)
        return free

    def _free(self, node: fx.Node) -> None:
        for value in self._last.get(node, ()):
            self._values.pop(value, None)


def _storages(leaves: list[Any]) -> list[int]:
    """Identity of the storage of every tensor among ``leaves``."""
    return [leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, Tensor)]
