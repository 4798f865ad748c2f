"""Running a captured graph operator by operator on real tensors, measuring each.

In a model that fits no process, an operator equal to one measured before (those of repeated blocks)
is not run: later operators get values of the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from pipectl.capture import CapturedJob
from pipectl.capture.opaque import Opaque
from pipectl.capture.operators import written_tensors
from pipectl.capture.regions import WHOLE, arithmetic, missing_kernels, region_of
from pipectl.capture.stage import on_device, place_subgraphs
from pipectl.capture.step import is_deferred
from pipectl.profile import OperatorMemory
from pipectl.profiler.bench import Subject
from pipectl.profiler.journal import Journal
from pipectl.profiler.operators import (
    Call,
    Observed,
    count_flops,
    observe,
    storages_in,
    time_alone,
)
from pipectl.runtime.process import release_freed_memory


@dataclass(frozen=True)
class Measured:
    """What one operator costs.

    Args:
        saved: (name of the storage, bytes) kept for backward; parameters left out.
        memory: what it allocates.
        flops: floating-point operations of forward and backward.
        times: seconds of forward and backward, by itself; 0 if they were not asked for.
    """

    output_bytes: int
    saved: tuple[tuple[str, int], ...]
    memory: OperatorMemory
    flops: int
    times: tuple[float, float]

    def renamed(self, storages: Mapping[str, str], sources: Mapping[str, str]) -> Measured:
        """The same of an equal operator, by the names there.

        Args:
            storages: new names of those in ``saved``.
            sources: new names of values, parameters and buffers.
        """
        saved = []
        for name, size in self.saved:
            storage, colon, index = name.partition(":")
            saved.append((storages[storage] + colon + index, size))
        memory = replace(
            self.memory,
            storage=storages[self.memory.storage],
            gradients=tuple((sources[name], size) for name, size in self.memory.gradients),
            buffers=tuple((sources[name], size) for name, size in self.memory.buffers),
        )
        return replace(self, saved=tuple(saved), memory=memory)


@dataclass(frozen=True)
class Shape:
    """A tensor without its values.

    Args:
        origin: index of the argument whose storage it lies in; None for one of its own.
    """

    origin: int | None
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor, origin: int | None) -> Shape:
        """The shape of a tensor."""
        sizes, strides, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return cls(origin, tensor.dtype, sizes, strides, offset, tensor.requires_grad)

    def fill(self, leaves: list[Any], device: torch.device) -> Tensor:
        """A tensor of this shape: random, or with valid indices, or in memory of an argument."""
        if self.origin is not None:
            tensor = torch.empty(0, dtype=self.dtype, device=device)
            storage = leaves[self.origin].detach().untyped_storage()
            tensor.set_(storage, self.offset, self.sizes, self.strides)
            return tensor.requires_grad_(self.requires_grad)
        tensor = torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device=device)
        if self.dtype.is_floating_point:
            return tensor.normal_().requires_grad_(self.requires_grad)
        return tensor.fill_(self.dtype is torch.bool)  # a valid index, a mask that hides nothing


class _Pattern(NamedTuple):
    """An operator that was measured, and what it gave, with shapes for tensors."""

    node: fx.Node
    measured: Measured
    result: Any


class Walk:
    """One pass over a graph at one batch size.

    Values are freed after their last reader, so the pass needs little more memory than the widest
    place of the graph, and parameters are asked for by the operator that is measured.

    Args:
        budget_s: seconds for the times of each operator; None takes no times.
        journal: where these are kept.
        once: whether operators equal to one measured before are not measured again.
    """

    def __init__(
        self, job: CapturedJob, subject: Subject, journal: Journal, budget_s: float | None, *,
        once: bool,
    ) -> None:  # fmt: skip
        self._job = job
        self._graph = subject.graph
        self._subject = subject
        self._device = subject.device.torch_device
        self._journal, self._budget_s = journal, budget_s
        self._patterns: dict[Any, _Pattern] | None = {} if once else None
        self._values: dict[fx.Node, Any] = {}
        self._storage_names: dict[fx.Node, str] = {}
        self._unread_after = self._last_readers()
        place_subgraphs(self._graph.root, self._device)
        for node in self._graph.graph.nodes:
            if node.op == "placeholder" and node.name not in self._graph.states:
                given = subject.batch.get(node.name)
                self._values[node] = None if given is None else given.clone()  # may be written

    def measure(self, done: Callable[[str], None]) -> dict[str, Measured]:
        """Measure every operator in order; ``done`` is called with the name of each."""
        measured: dict[str, Measured] = {}
        for node in self._graph.operators:
            known = self._repeat(node)
            measured[node.name] = known or self._measure(node)
            for source in node.all_input_nodes:
                if source.name in self._graph.states:
                    self._values.pop(source, None)
            for value in self._unread_after.get(node, ()):
                self._values.pop(value, None)
            if self._patterns is not None and known is None:
                release_freed_memory()  # parameters of all sizes follow each other, and never again
            done(node.name)
        return measured

    def _measure(self, node: fx.Node) -> Measured:
        call = self._call(node, self._state)
        with missing_kernels(node.name, self._subject.precision, self._device), torch.enable_grad():
            times = self._times(node, call)
            flops = count_flops(call)
            observed = observe(call, self._device)
        result = observed.run.result
        saved = self._name_saved(node, call, observed)
        size = result.numel() * result.element_size() if isinstance(result, Tensor) else 0
        self._values[node] = self._value(node, call, result)
        measured = Measured(size, saved, self._memory(node, call, observed), flops, times)
        self._note(node, observed, measured)
        return measured

    def _times(self, node: fx.Node, call: Call) -> tuple[float, float]:
        if self._budget_s is None:
            return 0.0, 0.0
        key = f"{self._subject.size}:{node.name}"
        entry = self._journal.find(key)
        if entry is None:
            entry = {"times": time_alone(call, self._subject.device, self._budget_s)}
            self._journal.note(key, entry)
        forward_s, backward_s = entry["times"]
        return forward_s, backward_s

    def _repeat(self, node: fx.Node) -> Measured | None:
        """What an operator equal to an earlier one costs; None if it has to be measured."""
        if self._patterns is None:
            return None
        call = self._call(node, self._outline)
        pattern = self._patterns.get(self._key(node, call))
        if pattern is None:
            return None
        pairs = list(zip(pattern.node.all_input_nodes, node.all_input_nodes, strict=True))
        storages = {self._storage_name(old): self._storage_name(new) for old, new in pairs}
        sources = {self._full_name(old): self._full_name(new) for old, new in pairs}
        leaves = pytree.tree_leaves((call.args, dict(call.kwargs)))
        self._values[node] = pytree.tree_map_only(
            Shape, lambda shape: shape.fill(leaves, self._device), pattern.result
        )
        measured = pattern.measured.renamed({**storages, pattern.node.name: node.name}, sources)
        self._storage_names[node] = measured.memory.storage
        return measured

    def _note(self, node: fx.Node, observed: Observed, measured: Measured) -> None:
        """Remember an operator for those equal to it."""
        call = self._call(node, self._outline)
        origins: dict[int, int] = {}
        for index, leaf in enumerate(observed.run.leaves):
            if isinstance(leaf, Tensor):
                origins.setdefault(leaf.untyped_storage()._cdata, index)
        found = [origins.get(storage) for storage in storages_in(observed.run.result)]
        views = any(origin is not None for origin in found)
        reads_states = any(s.name in self._graph.states for s in node.all_input_nodes)
        if (
            self._patterns is None
            or (reads_states and views)
            or written_tensors(node.target, call.args, call.kwargs)
        ):
            return  # a view of a parameter needs that parameter, and each write its own memory
        waiting = iter(found)
        result = pytree.tree_map_only(
            Tensor, lambda tensor: Shape.of(tensor, next(waiting)), observed.run.result
        )
        self._patterns[self._key(node, call)] = _Pattern(node, measured, result)

    def _key(self, node: fx.Node, call: Call) -> Any:
        """Equal for operators of one kind with equal arguments, but for the values of tensors."""
        known = self._graph.states
        states = {*storages_in([self._outline(s) for s in node.all_input_nodes if s.name in known])}
        leaves, structure = pytree.tree_flatten((call.args, dict(call.kwargs)))
        order: dict[int, int] = {}
        described: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()._cdata
                place = order.setdefault(storage, len(order))
                described.append((Shape.of(leaf, place), storage in states))
            else:
                described.append((type(leaf).__name__, str(getattr(leaf, "code", leaf))))
        kind = node.target, region_of(node), str(structure)
        return *kind, tuple(described), len(node.all_input_nodes)

    def _value(self, node: fx.Node, call: Call, result: Any) -> Any:
        """What later operators read: if values are written in place, in their own memory."""
        flags = pytree.tree_map_only(Tensor, lambda tensor: tensor.requires_grad, result)
        written = storages_in(written_tensors(node.target, call.args, call.kwargs))
        if written and not self._state_storages & set(written):
            with torch.no_grad():
                result = call.target(*call.args, **call.kwargs)
            if any(flag is True for flag in pytree.tree_leaves(flags)):
                # Values that were written through a view have the gradient that this gave them.
                for other, value in self._values.items():
                    wants = self._graph.requires_grad.get(other.name)
                    if wants and set(written) & set(storages_in(value)):
                        value.requires_grad_()
        return pytree.tree_map(
            lambda one, flag: one.detach().requires_grad_(flag) if isinstance(one, Tensor) else one,
            result,
            flags,
        )

    @cached_property
    def _state_storages(self) -> set[int]:
        nodes = self._graph.graph.find_nodes(op="placeholder")
        return set(storages_in([self._outline(n) for n in nodes if n.name in self._graph.states]))

    def _memory(self, node: fx.Node, call: Call, observed: Observed) -> OperatorMemory:
        """What an operator allocates, by the names of values, parameters and buffers."""
        known = self._graph.states
        used = [known[s.name] for s in self._graph.tensor_inputs(node) if s.name in known]
        buffers = dict.fromkeys(state.name for state in used if state.kind == "buffer")
        # For each argument that wants a gradient, the value or parameter it comes from.
        sources = pytree.tree_leaves(
            fx.node.map_arg(
                (node.args, node.kwargs),
                lambda source: pytree.tree_map(
                    lambda _: self._full_name(source), self._values.get(source, source.name)
                ),
            )
        )
        leaves = pytree.tree_leaves((call.args, dict(call.kwargs)))
        wanting = [
            source
            for source, leaf in zip(sources, leaves, strict=True)
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        gradients: dict[str, int] = {}
        for index, size in enumerate(observed.gradients_bytes):
            if size is not None:
                gradients[wanting[index]] = gradients.get(wanting[index], 0) + size
        return OperatorMemory(
            made_bytes=observed.made_bytes,
            storage=self._storage_name(node),
            forward_bytes=observed.forward_bytes,
            backward_bytes=observed.backward_bytes,
            gradients=tuple(gradients.items()),
            buffers=tuple((name, self._job.states[name].nbytes) for name in buffers),
        )

    def _name_saved(
        self, node: fx.Node, call: Call, observed: Observed
    ) -> tuple[tuple[str, int], ...]:
        """Name what was kept by the value whose memory it is, so that no stage counts it twice."""
        original: dict[int, str] = {}  # storage to name, "" for states
        for source in node.all_input_nodes:
            name = "" if source.name in self._graph.states else self._storage_name(source)
            original.update(dict.fromkeys(storages_in(self._values.get(source)), name))
        given = storages_in((call.args, dict(call.kwargs)))
        copies = storages_in(observed.run.leaves)
        names = {copy: original.get(own, "") for copy, own in zip(copies, given, strict=True)}
        for storage in storages_in(observed.run.result):
            self._storage_names[node] = names.setdefault(storage, node.name) or node.name
        saved: dict[str, int] = {}
        for index, (storage, size) in enumerate(observed.kept.items()):
            name = names.get(storage, f"{node.name}:{index}")
            if name:
                saved[name] = saved.get(name, 0) + size
        return tuple(saved.items())

    def _storage_name(self, source: fx.Node) -> str:
        return self._storage_names.get(source, source.name)

    def _full_name(self, source: fx.Node) -> str:
        """Of a parameter or buffer, or of a value."""
        state = self._graph.states.get(source.name)
        return source.name if state is None else state.name

    def _call(self, node: fx.Node, state: Callable[[fx.Node], Tensor]) -> Call:
        def value(source: fx.Node) -> Any:
            if source.name in self._graph.states:
                return state(source)
            if source.op == "get_attr":
                return self._graph.root.get_submodule(str(source.target))
            if self._graph.is_size(source):
                return self._graph.size_at(source, self._subject.size)
            return self._values[source]

        args, kwargs = fx.node.map_arg(on_device((node.args, node.kwargs), self._device), value)
        schema = getattr(node.target, "_schema", None)
        mutates = bool(schema is not None and schema.is_mutable) or "batch_norm" in str(node.target)
        target: Any = node.target
        mutates = mutates or isinstance(target, Opaque)
        region = region_of(node)

        def run_target(*args: Any, **kwargs: Any) -> Any:
            with arithmetic(self._subject.precision, self._device):
                return region.run(target, *args, **kwargs)

        # As a stage runs it, with the casts that autocast makes.
        plain = self._subject.precision == "float32" and region == WHOLE
        return Call(target if plain else run_target, args, kwargs, mutates)

    def _outline(self, node: fx.Node) -> Tensor:
        """A parameter, buffer or constant: its shape, layout and type, perhaps without values."""
        state = self._graph.states[node.name]
        constant = state.kind == "constant"
        return self._graph.constants[state.name] if constant else self._job.states[state.name]

    def _state(self, node: fx.Node) -> Tensor:
        """The same with values, kept until the operator is done.

        If it has no memory, a parameter is random, in the range that layers are usually initialised
        in; a buffer has the values that the factory gives it, since it may hold indices.
        """
        tensor = self._outline(node)
        state = self._graph.states[node.name]
        if state.kind == "constant":
            tensor = tensor.to(self._device)
        elif is_deferred(tensor):
            if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
                sizes, strides = tensor.shape, tensor.stride()
                bound = prod(sizes[1:]) ** -0.5
                filled = torch.empty_strided(
                    sizes, strides, dtype=tensor.dtype, device=self._device
                )
                tensor = nn.Parameter(filled.uniform_(-bound, bound), tensor.requires_grad)
            else:
                tensor = self._job.made(state.name).to(self._device)
        self._values[node] = tensor
        return tensor

    def _last_readers(self) -> dict[fx.Node, list[fx.Node]]:
        """For every operator, the values that nobody reads after it."""
        last: dict[fx.Node, fx.Node] = {}
        for node in self._graph.operators:
            last[node] = node
            last.update(dict.fromkeys(self._graph.tensor_inputs(node), node))
        unread: dict[fx.Node, list[fx.Node]] = {}
        for value, reader in last.items():
            if value.op != "placeholder":
                unread.setdefault(reader, []).append(value)
        return unread
