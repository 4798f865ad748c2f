"""Running a captured graph operator by operator on real tensors, measuring each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from pipectl.capture.opaque import Opaque
from pipectl.capture.operators import arguments_by_name, written_arguments
from pipectl.capture.regions import WHOLE, arithmetic, missing_kernels, region_of
from pipectl.capture.stage import on_device, place_subgraphs
from pipectl.profile import OperatorMemory
from pipectl.profiler.costs import Call, Ran, Times, run, value_bytes
from pipectl.profiler.memory import Allocations, measure_allocations
from pipectl.profiler.repeats import Pattern, Shape, key_of, shapes_of
from pipectl.profiler.states import SampleStates
from pipectl.profiler.subject import Subject
from pipectl.profiler.timing import Timing
from pipectl.runtime.process import release_freed_memory


@dataclass(frozen=True)
class Measured:
    """What was found of one operator.

    Args:
        saved: (name of the storage, bytes) kept for backward; parameters left out.
        memory: what it allocates.
    """

    times: Times
    output_bytes: int
    saved: tuple[tuple[str, int], ...]
    memory: OperatorMemory


class Walk:
    """One pass over a graph at one batch size.

    Values are freed behind their last reader, so the pass needs little more memory than the widest
    place of the graph, and parameters are asked for by the operator that is measured.

    Args:
        states: parameters and buffers.
        timing: takes an operator's times; None leaves them out.
        once: whether operators equal to one measured before are not measured again.
    """

    def __init__(
        self,
        subject: Subject,
        states: SampleStates,
        timing: Timing | None,
        *,
        once: bool,
    ) -> None:
        self._graph = subject.graph
        self._subject = subject
        self._timing = timing
        self._states = states
        self._patterns: dict[Any, Pattern] | None = {} if once else None
        self._values: dict[fx.Node, Any] = {}
        self._storage_names: dict[fx.Node, str] = {}
        self._last = self._last_readers()
        place_subgraphs(self._graph.root, subject.device.torch_device)
        for node in self._graph.graph.nodes:
            if node.op == "placeholder" and node.name not in self._graph.states:
                given = subject.batch.get(node.name)
                self._values[node] = None if given is None else given.clone()  # may be written

    def measure(self, done: Callable[[str], None]) -> dict[str, Measured]:
        """Measure every operator in order; ``done`` is called with the name of each."""
        found: dict[str, Measured] = {}
        for node in self._graph.operators:
            known = self._repeat(node)
            found[node.name] = known or self._measure(node)
            self._free(node)
            if self._patterns is not None and known is None:
                release_freed_memory()  # parameters of all sizes follow each other, and never again
            done(node.name)
        return found

    def _repeat(self, node: fx.Node) -> Measured | None:
        """What an operator equal to an earlier one costs; None if it has to be measured."""
        if self._patterns is None:
            return None
        call = self._call(node, self._outline)
        pattern = self._patterns.get(self._key(node, call))
        if pattern is None:
            return None
        names = pattern.renamed(node.name, self._argument_names(node))
        leaves = pytree.tree_leaves((call.args, dict(call.kwargs)))
        self._values[node] = pattern.value(leaves, self._subject.device.torch_device)
        self._storage_names[node] = names[pattern.storage_name]
        saved = tuple((names[name], size) for name, size in pattern.saved)
        memory = self._named(node, call, pattern.allocations)
        return Measured(pattern.times, pattern.output_bytes, saved, memory)

    def _note(self, node: fx.Node, ran: Ran, measured: Measured, allocations: Allocations) -> None:
        """Remember an operator for those equal to it."""
        result = shapes_of(ran)
        states = {self._graph.states.get(source.name) for source in node.all_input_nodes} - {None}
        views = any(
            isinstance(s, Shape) and s.origin is not None for s in pytree.tree_leaves(result)
        )
        call = self._call(node, self._outline)
        if self._patterns is None or (states and views) or _written(node, call):
            return  # a view of a parameter needs that parameter, and each write its own memory
        key = self._key(node, call)
        name = self._storage_name(node)
        names = self._argument_names(node)
        self._patterns[key] = Pattern(
            node.name,
            names,
            measured.times,
            measured.output_bytes,
            measured.saved,
            allocations,
            name,
            result,
        )

    def _key(self, node: fx.Node, call: Call) -> Any:
        known = self._graph.states
        states = [self._outline(s) for s in node.all_input_nodes if s.name in known]
        return key_of(node, call, frozenset(_storages(states)))

    def _argument_names(self, node: fx.Node) -> tuple[str, ...]:
        known = self._graph.states
        sources = [s for s in self._graph.tensor_inputs(node) if s.name not in known]
        return tuple(self._storage_name(source) for source in sources)

    def _measure(self, node: fx.Node) -> Measured:
        call = self._call(node, self._state)
        device = self._subject.device.torch_device
        with missing_kernels(node.name, self._subject.precision, device), torch.enable_grad():
            times = self._times(node, call)
            allocations = measure_allocations(call, self._subject.device.torch_device)
            ran = run(call)
        saved = self._name_saved(node, call, ran)
        self._values[node] = self._value(node, call, ran)
        memory = self._named(node, call, allocations)
        measured = Measured(times, value_bytes(ran.result), saved, memory)
        self._note(node, ran, measured, allocations)
        return measured

    def _value(self, node: fx.Node, call: Call, ran: Ran) -> Any:
        """What later operators read: where values are written in place, in their own memory."""
        result = ran.result
        flags = pytree.tree_map_only(Tensor, lambda tensor: tensor.requires_grad, result)
        written = _written(node, call)
        if written and not self._state_storages & set(_storages(written)):
            with torch.no_grad():
                result = call.target(*call.args, **call.kwargs)
            if any(flag is True for flag in pytree.tree_leaves(flags)):
                self._pass_gradient(written)
        return pytree.tree_map(
            lambda one, flag: one.detach().requires_grad_(flag) if isinstance(one, Tensor) else one,
            result,
            flags,
        )

    def _pass_gradient(self, written: list[Tensor]) -> None:
        """Let values that were written through a view have the gradient that this gave them."""
        storages = set(_storages(written))
        for node, value in self._values.items():
            if self._graph.requires_grad.get(node.name) and storages & set(_storages([value])):
                value.requires_grad_()

    @cached_property
    def _state_storages(self) -> set[int]:
        nodes = self._graph.graph.find_nodes(op="placeholder")
        return set(_storages([self._outline(n) for n in nodes if n.name in self._graph.states]))

    def _times(self, node: fx.Node, call: Call) -> Times:
        if self._timing is None:
            return Times(0.0, 0.0)
        return self._timing.of(f"{self._subject.size}:{node.name}", call, self._subject.device)

    def _named(self, node: fx.Node, call: Call, allocations: Allocations) -> OperatorMemory:
        """What an operator allocates, by the names of values, parameters and buffers."""
        states = self._graph.states
        used = [states[s.name] for s in self._graph.tensor_inputs(node) if s.name in states]
        buffers = [state.name for state in used if state.kind == "buffer"]
        sizes = tuple((name, self._states.outline(name).nbytes) for name in dict.fromkeys(buffers))
        return allocations.named(self._storage_name(node), self._wanting(node, call), sizes)

    def _wanting(self, node: fx.Node, call: Call) -> list[str]:
        """For each argument that wants a gradient, the value or parameter it comes from."""
        states = self._graph.states

        def source_of(source: fx.Node) -> Any:
            name = states[source.name].name if source.name in states else source.name
            value = self._values.get(source, name)
            return pytree.tree_map(lambda _: name, value)

        sources = pytree.tree_leaves(fx.node.map_arg((node.args, node.kwargs), source_of))
        leaves = pytree.tree_leaves((call.args, dict(call.kwargs)))
        return [
            source
            for source, leaf in zip(sources, leaves, strict=True)
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]

    def _call(self, node: fx.Node, state: Callable[[fx.Node], Tensor]) -> Call:
        def value(source: fx.Node) -> Any:
            if source.name in self._graph.states:
                return state(source)
            if source.op == "get_attr":
                return self._graph.root.get_submodule(str(source.target))
            if self._graph.is_size(source):
                return self._graph.size_at(source, self._subject.size)
            return self._values[source]

        given = on_device((node.args, node.kwargs), self._subject.device.torch_device)
        args, kwargs = fx.node.map_arg(given, value)
        schema = getattr(node.target, "_schema", None)
        mutates = bool(schema is not None and schema.is_mutable) or "batch_norm" in str(node.target)
        mutates = mutates or isinstance(node.target, Opaque)
        return Call(self._as_in_a_stage(node), args, kwargs, mutates)

    def _as_in_a_stage(self, node: fx.Node) -> Callable[..., Any]:
        """An operator as a stage runs it, with the casts that autocast makes."""
        target: Any = node.target
        region = region_of(node)

        def run_target(*args: Any, **kwargs: Any) -> Any:
            with arithmetic(self._subject.precision, self._subject.device.torch_device):
                return region.run(target, *args, **kwargs)

        return target if self._subject.precision == "float32" and region == WHOLE else run_target

    def _name_saved(self, node: fx.Node, call: Call, ran: Ran) -> tuple[tuple[str, int], ...]:
        """Name what was kept by the value whose memory it is, so that no stage counts it twice."""
        names = self._names_in_reach(node, call, ran)
        storages: dict[int, tuple[str, int]] = {}
        for index, tensor in enumerate(ran.kept):
            storage = tensor.untyped_storage()
            name = names.get(storage._cdata, f"{node.name}:{index}")
            storages.setdefault(storage._cdata, (name, storage.nbytes()))
        found: dict[str, int] = {}
        for name, size in storages.values():
            if name:
                found[name] = found.get(name, 0) + size
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

    def _state(self, node: fx.Node) -> Tensor:
        """A parameter, buffer or constant; it stays until the operator is done."""
        state = self._graph.states[node.name]
        constant = state.kind == "constant"
        self._values[node] = (
            self._graph.constants[state.name].to(self._subject.device.torch_device)
            if constant
            else self._states[state.name]
        )
        return self._values[node]  # type: ignore[no-any-return]

    def _outline(self, node: fx.Node) -> Tensor:
        state = self._graph.states[node.name]
        constant = state.kind == "constant"
        return self._graph.constants[state.name] if constant else self._states.outline(state.name)

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
        for source in node.all_input_nodes:
            if source.name in self._graph.states:
                self._values.pop(source, None)
        for value in self._last.get(node, ()):
            self._values.pop(value, None)


def _written(node: fx.Node, call: Call) -> list[Tensor]:
    """The arguments that an operator writes, if its schema says so."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = arguments_by_name(schema, call.args, call.kwargs)
    found = pytree.tree_leaves([given.get(name) for name in written_arguments(schema)])
    return [leaf for leaf in found if isinstance(leaf, Tensor)]


def _storages(leaves: list[Any]) -> list[int]:
    """Identity of the storage of every tensor among ``leaves``."""
    return [leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, Tensor)]
