"""Running a captured graph operator by operator on real tensors, measuring each.

Operators equal to an earlier one (those of repeated blocks) are not measured again. In a model that
fits in no process they are not run either: later operators get values of the same shapes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

from pipectl.capture import CapturedJob, State
from pipectl.capture.casts import Casting, state_behind
from pipectl.capture.model_with_loss import own_path
from pipectl.capture.opaque import Form, Opaque
from pipectl.capture.operators import calling_module, written_tensors
from pipectl.capture.patches import hooks_on_saved_tensors
from pipectl.capture.regions import WHOLE, arithmetic, missing_kernels, region_of
from pipectl.capture.stage import on_device, place_subgraphs
from pipectl.capture.tensors import fill_sample, is_deferred, storage_of, storages_in, tensors_in
from pipectl.profile_parts import Operator, OperatorMemory
from pipectl.profiler.bench import Subject
from pipectl.profiler.journal import Journal
from pipectl.profiler.machine import clock_for, record_allocated
from pipectl.runtime.casts import use_cast
from pipectl.runtime.device import Device, release_freed_memory
from pipectl.runtime.saved_tensors import hides_values, nodes_behind
from pipectl.torch_api import (
    ATTENTION_ON_CPU,
    ATTENTION_ON_CPU_BACKWARD,
    edge_of,
    identity_of,
    pytree,
)

_MIN_REPEATS, _MAX_REPEATS = 3, 15
_LONG_S = 2.0
"""An operator that takes longer is steady, and not repeated more than it must be."""
_ATTENTION = {
    ATTENTION_ON_CPU: sdpa_flop,
    ATTENTION_ON_CPU_BACKWARD: sdpa_backward_flop,
}
"""What torch's own counter leaves out."""
_RESULT = -1
"""In place of the index of an argument: the memory is that of the result."""


class Run(NamedTuple):
    """The inputs and results of one call.

    Args:
        leaves: the flattened arguments: aliases or copies of the call's own.
        roots: tensors of the result with which its backward began.
        seeds: gradients with which its backward began.
        gradients: of the arguments that require one, in order; none if there was no backward.
    """

    result: Any
    leaves: list[Any]
    roots: list[Tensor]
    seeds: list[Tensor]
    gradients: Sequence[Tensor | None]


@dataclass(frozen=True)
class Call:
    """One operator with real arguments.

    Args:
        mutates: whether it writes into its arguments, which are then copied for every run.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mutates: bool

    @property
    def leaves(self) -> list[Any]:
        """The arguments, flattened."""
        return pytree.tree_leaves((self.args, self.kwargs))

    def fresh(self) -> tuple[Any, Any]:
        """Return the arguments for one run: aliases, or copies if they are written."""

        def alias(tensor: Tensor) -> Tensor:
            alias = tensor.detach().requires_grad_(tensor.requires_grad)
            return alias.clone() if self.mutates else alias

        fresh: tuple[Any, Any] = pytree.tree_map_only(Tensor, alias, (self.args, self.kwargs))
        return fresh

    def run(self, mark: Callable[[], None] = lambda: None) -> Run:
        """Run forward and backward.

        Args:
            mark: called before the forward, after it, and before the backward.
        """
        args, kwargs = self.fresh()
        leaves = pytree.tree_leaves((args, kwargs))
        with_gradient = [leaf for leaf in tensors_in(leaves) if leaf.requires_grad]
        mark()
        result = self.target(*args, **kwargs)
        mark()
        roots = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
        seeds = [torch.ones_like(root) for root in roots]
        mark()
        gradients: Sequence[Tensor | None] = ()
        if with_gradient and roots:
            gradients = torch.autograd.grad(roots, with_gradient, seeds, allow_unused=True)
        return Run(result, leaves, roots, seeds, gradients)


@dataclass(frozen=True)
class Pattern:
    """The cost of equal operators. Arguments are identified by their index among all leaves.

    Memory that a backward releases (saved values of the operators of which it consists) makes room
    for later allocations, as in a stage. Arguments and seeds are not counted.

    Args:
        result: with forms for tensors.
        casts: (argument, type, bytes) of each cast that it is given in place of a parameter.
        output_bytes: of the result, if it is one tensor.
        kept: (argument whose memory it is, ``_RESULT``, or None; bytes) of each storage that
            autograd keeps for the backward.
        made_bytes: storages that the result creates.
        forward_bytes, backward_bytes: maximum of live bytes.
        gradients: (argument, bytes of memory that its gradient creates).
        hides: whether its backward reads what an autograd function keeps in attributes.
        flops: of both passes.
        times: seconds of both passes; 0 if they were not measured.
    """

    result: Any
    casts: list[tuple[int, torch.dtype, int]]
    output_bytes: int
    kept: list[tuple[int | None, int]]
    made_bytes: int
    forward_bytes: int
    backward_bytes: int
    gradients: list[tuple[int, int]]
    hides: bool = False
    flops: int = 0
    times: tuple[float, float] = (0.0, 0.0)

    @property
    def origins(self) -> list[int]:
        """For every tensor of the result the argument whose memory it uses; -1 if none."""
        leaves = pytree.tree_leaves(self.result)
        return [leaf.memory for leaf in leaves if isinstance(leaf, Form)]


def observe(call: Call, device: torch.device, casts: Mapping[int, Tensor]) -> tuple[Any, Pattern]:
    """Run an operator forward and backward once, and record its memory; return its result too.

    Args:
        casts: of arguments, which exist before it runs.
    """
    kept_bytes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept_bytes.setdefault(identity_of(storage), storage.nbytes())
        return tensor

    def new_bytes(value: Any, known: Sequence[Any]) -> int:
        """Return the bytes of the storages in ``value`` that no tensor in ``known`` uses."""
        old = set(storages_in(known))
        storages = [tensor.untyped_storage() for tensor in tensors_in(value)]
        sizes = {identity_of(storage): storage.nbytes() for storage in storages}
        return sum(size for storage, size in sizes.items() if storage not in old)

    wanting = [i for i, x in enumerate(call.leaves) if isinstance(x, Tensor) and x.requires_grad]
    hooks = hooks_on_saved_tensors(pack, lambda tensor: tensor)
    with record_allocated(device) as recording, hooks as transforms:
        run = call.run(recording.mark)
    arguments, forward, seeds, backward = recording.phases
    places: dict[int, int] = {}
    for index, leaf in enumerate(run.leaves):
        if isinstance(leaf, Tensor):
            places.setdefault(storage_of(leaf), index)
    places |= {storage_of(cast): index for index, cast in casts.items()}
    gradients = []
    counted: list[Any] = list(run.seeds)
    for index, gradient in zip(wanting, run.gradients, strict=False):
        if gradient is not None:
            gradients.append((index, new_bytes([gradient], counted)))
            counted.append(gradient)
    result, results = run.result, storages_in(run.result)
    made_bytes = new_bytes(result, run.leaves)
    kept = [(places.get(s, _RESULT if s in results else None), n) for s, n in kept_bytes.items()]
    if transforms:  # autograd saved more than the hooks have seen
        seen_bytes = made_bytes + sum(n for place, n in kept if place is None)
        kept.append((None, max(0, forward.end_bytes - arguments.end_bytes - seen_bytes)))
    pattern = Pattern(
        pytree.tree_map_only(Tensor, lambda t: Form.of(t, places.get(storage_of(t), -1)), result),
        [(index, cast.dtype, cast.nbytes) for index, cast in casts.items()],
        result.numel() * result.element_size() if isinstance(result, Tensor) else 0,
        kept,
        made_bytes,
        forward.peak_bytes - arguments.end_bytes,
        backward.peak_bytes - seeds.end_bytes,
        gradients,
        any(map(hides_values, nodes_behind(map(edge_of, run.roots)))),
    )
    return result, pattern


def count_flops(call: Call) -> int:
    """Count floating-point operations of matrix products, convolutions and attention, both passes.

    The count is 0 for code that does not run under a mode of torch's dispatcher.
    """
    counter = FlopCounterMode(display=False, custom_mapping=_ATTENTION)
    with suppress(Exception), counter:
        call.run()
        return int(counter.get_total_flops())
    return 0


def time_alone(call: Call, device: Device, budget_s: float) -> tuple[float, float]:
    """Return the median seconds of forward and backward, which exclude runs that were disturbed.

    Runs are repeated until the figures are steady or the budget is used.
    """
    clock = clock_for(device, lambda: call.run(lambda: None))
    looks: list[float] = []
    times: list[tuple[float, float]] = []
    spent_s = 0.0
    while len(times) <= _MAX_REPEATS and spent_s < _LONG_S:
        if len(times) > _MIN_REPEATS and spent_s > budget_s:
            break
        looks.clear()
        run = call.run(lambda: looks.append(clock()))
        start, middle, begin = looks
        times.append((middle - start, clock() - begin if run.gradients else 0.0))
        if len(times) > 1:  # the first run warms up
            spent_s += sum(times[-1])
    forward, backward = zip(*times[1:], strict=True)
    return statistics.median(forward), statistics.median(backward)


class Walk:
    """One pass over a graph at one batch size.

    Values are freed after their last reader, so the pass needs little more memory than the widest
    part of the graph; parameters are created for the operator that is measured.

    Args:
        budget_s: seconds for the times of each operator; None measures no times.
        journal: keeps the times.

    Attributes:
        hiding: operators whose backward reads what an autograd function keeps in attributes.
    """

    def __init__(
        self, job: CapturedJob, subject: Subject, journal: Journal, budget_s: float | None
    ) -> None:
        self._job, self._subject, self._graph = job, subject, subject.graph
        self._device = subject.device.torch_device
        self._casting = Casting(subject.precision, self._device)
        self._journal, self._budget_s = journal, budget_s
        self._fits = not job.is_deferred
        self._constants = {n: t.to(self._device) for n, t in self._graph.constants.items()}
        states = [self._outline(state) for state in self._graph.states.values()]
        self._state_storages = set(storages_in(states))
        self.hiding: set[str] = set()
        self._patterns: dict[Any, Pattern] = {}
        self._values: dict[fx.Node, Any] = {}
        self._storage_names: dict[fx.Node, str] = {}
        place_subgraphs(self._graph.root, self._device)
        for node in self._graph.graph.nodes:
            if node.op == "placeholder" and node.name not in self._graph.states:
                tensor = subject.batch.get(node.name)
                self._values[node] = None if tensor is None else tensor.clone()  # may be written

    def measure(self, done: Callable[[str], None]) -> dict[str, Operator]:
        """Measure every operator in order; call ``done`` with the name of each.

        The times are those of the operator alone; 0 if they were not measured.
        """
        last_reader: dict[fx.Node, fx.Node] = {}
        for node in self._graph.operators:
            last_reader[node] = node
            last_reader.update(dict.fromkeys(self._graph.tensor_inputs(node), node))
        unread_after: dict[fx.Node, list[fx.Node]] = {}
        for value, reader in last_reader.items():
            if value.op != "placeholder":
                unread_after.setdefault(reader, []).append(value)
        measured: dict[str, Operator] = {}
        for node in self._graph.operators:
            call = self._call(node, self._outline)
            key = self._key(node, call)
            pattern = self._patterns.get(key)
            if pattern is None:
                measured[node.name] = self._operator(node, self._observe(node, key))
                if not self._fits:  # parameters of all sizes follow each other, and never again
                    release_freed_memory()
            else:
                self._values[node] = self._value_like(node, call, pattern)
                measured[node.name] = self._operator(node, pattern)
            for value in unread_after.get(node, ()):
                self._values.pop(value, None)
            done(node.name)
        return measured

    def _key(self, node: fx.Node, call: Call) -> Any:
        """Return a key that is equal for calls that differ only in the values of tensors."""
        order: dict[int, int] = {}
        described: list[Any] = []
        for leaf in call.leaves:
            if isinstance(leaf, Tensor):
                storage = storage_of(leaf)
                place = order.setdefault(storage, len(order))
                described.append((Form.of(leaf, place), storage in self._state_storages))
            else:
                described.append((type(leaf).__name__, str(getattr(leaf, "code", leaf))))
        structure = pytree.tree_structure((call.args, call.kwargs))
        return node.target, region_of(node), str(structure), tuple(described)

    def _value_like(self, node: fx.Node, call: Call, pattern: Pattern) -> Any:
        """Return the value of an operator equal to an earlier one."""
        if self._fits:
            call, _ = self._with_casts(node, call)
            args, kwargs = call.fresh()
            with torch.enable_grad():
                return self._value(call, call.target(*args, **kwargs), set())
        leaves = call.leaves

        def fill(form: Form) -> Tensor:
            if form.memory < 0:
                tensor = fill_sample(form.blank(device=self._device))
            else:
                sizes, strides, offset = form.layout_at()
                storage = leaves[form.memory].detach().untyped_storage()
                tensor = torch.empty(0, dtype=form.dtype, device=self._device)
                tensor.set_(storage, offset, sizes, strides)
            return tensor.requires_grad_(form.requires_grad)

        return pytree.tree_map_only(Form, fill, pattern.result)

    def _observe(self, node: fx.Node, key: Any) -> Pattern:
        """Measure an operator, and remember the figures for those with an equal key."""
        call, casts = self._with_casts(node, self._call(node, self._state))
        times, budget_s = (0.0, 0.0), self._budget_s
        with missing_kernels(node.name, self._subject.precision, self._device), torch.enable_grad():
            if budget_s is not None:
                times = self._journal.remember(
                    f"{self._subject.size}:{node.name}",
                    tuple[float, float],
                    lambda: time_alone(call, self._subject.device, budget_s),
                )
            flops = count_flops(call)
            result, pattern = observe(call, self._device, casts)
        pattern = replace(pattern, flops=flops, times=times)
        is_view = any(origin >= 0 for origin in pattern.origins)
        written = written_tensors(node.target, call.args, call.kwargs)
        # A view of a parameter needs that parameter, and each write its own memory.
        if not (self._graph.states_of(node) and is_view) and not written:
            self._patterns[key] = pattern
        self._values[node] = self._value(call, result, set(storages_in(written)))
        return pattern

    def _with_casts(self, node: fx.Node, call: Call) -> tuple[Call, Mapping[int, Tensor]]:
        """Return an operator as a stage runs it: given the casts that micro-batches share."""
        leaves = call.leaves
        casts = {
            index: leaves[index].detach().to(dtype)
            for index, dtype in self._casting.of(self._graph, node, self._outline).items()
        }

        def run(*args: Any, **kwargs: Any) -> Any:
            leaves, structure = pytree.tree_flatten((args, kwargs))
            for index, cast in casts.items():
                leaves[index] = use_cast(leaves[index], cast)
            args, kwargs = pytree.tree_unflatten(leaves, structure)
            return call.target(*args, **kwargs)

        return (replace(call, target=run) if casts else call), casts

    def _value(self, call: Call, result: Any, written: set[int]) -> Any:
        """Return what later operators read; values that are written in place are in their own
        memory.
        """
        flags = pytree.tree_map_only(Tensor, lambda tensor: tensor.requires_grad, result)
        if written and not self._state_storages & written:
            with torch.no_grad():
                result = call.target(*call.args, **call.kwargs)
            if any(flag is True for flag in pytree.tree_leaves(flags)):
                # Values that were written through a view have the gradient that this gave them.
                for other, value in self._values.items():
                    wants = self._graph.requires_grad.get(other.name)
                    if wants and written & set(storages_in(value)):
                        value.requires_grad_()
        return pytree.tree_map(
            lambda one, flag: one.detach().requires_grad_(flag) if isinstance(one, Tensor) else one,
            result,
            flags,
        )

    def _operator(self, node: fx.Node, pattern: Pattern) -> Operator:
        """Return an operator of the profile, with the names of values, parameters and buffers.

        What is kept has the name of the value whose memory it is, so that no stage counts it twice.
        """
        graph, known = self._graph, self._graph.states
        if pattern.hides:
            self.hiding.add(node.name)
        sources = pytree.tree_leaves(  # for every argument, the value or parameter it comes from
            fx.node.map_arg(
                (node.args, node.kwargs),
                lambda source: pytree.tree_map(lambda _: source, self._values.get(source)),
            )
        )

        def storage_name(argument: int) -> str:
            source = sources[argument]
            own = "" if source.name in known else source.name
            return self._storage_names.get(source, own)

        for origin in pattern.origins:
            borrowed = "" if origin < 0 else storage_name(origin)
            self._storage_names[node] = borrowed or node.name
        saved: dict[str, int] = {}
        for index, (argument, size) in enumerate(pattern.kept):
            name = f"{node.name}:{index}"
            if argument is not None:
                name = node.name if argument == _RESULT else storage_name(argument)
            if name:
                saved[name] = saved.get(name, 0) + size
        casts: dict[str, int] = {}
        for argument, dtype, size in pattern.casts:
            source = sources[argument]
            view = "" if source.name in known else f":{source.name}"
            name = known[state_behind(graph, source) or source.name].name
            casts[f"{name}{view}:{str(dtype).removeprefix('torch.')}"] = size
        gradients: dict[str, int] = {}
        for argument, size in pattern.gradients:
            source = sources[argument]
            name = known[source.name].name if source.name in known else source.name
            gradients[name] = gradients.get(name, 0) + size

        def sizes(kind: str) -> tuple[tuple[str, int], ...]:
            names = dict.fromkeys(s.name for s in graph.states_of(node) if s.kind == kind)
            return tuple((name, self._subject.states[name].nbytes) for name in names)

        path = own_path(calling_module(node))
        return Operator(
            id=node.name,
            name=f"{path}.{node.name}" if path else node.name,
            forward_s=pattern.times[0],
            backward_s=pattern.times[1],
            parameter_bytes=sum(size for _, size in sizes("parameter")),
            output_bytes=pattern.output_bytes,
            gradient_bytes=pattern.output_bytes if graph.requires_grad[node.name] else 0,
            parameters=sizes("parameter"),
            saved=tuple(saved.items()),
            casts=tuple(casts.items()),
            group=graph.groups.get(node.name),
            signature=graph.signatures[node.name],
            memory=OperatorMemory(
                pattern.made_bytes,
                self._storage_names.get(node, node.name),
                pattern.forward_bytes,
                pattern.backward_bytes,
                tuple(gradients.items()),
                sizes("buffer"),
            ),
            flops=pattern.flops,
        )

    def _call(self, node: fx.Node, make: Callable[[State], Tensor]) -> Call:
        """Return an operator with its arguments; ``make`` returns parameters, buffers and
        constants.
        """

        def value(source: fx.Node) -> Any:
            if source.name in self._graph.states:
                return make(self._graph.states[source.name])
            if source.op == "get_attr":
                return self._graph.root.get_submodule(str(source.target))
            if self._graph.has_no_tensor(source):
                return self._graph.size_of_node(source, self._subject.size, self._subject.length)
            return self._values[source]

        args, kwargs = fx.node.map_arg(on_device((node.args, node.kwargs), self._device), value)
        target: Any = node.target
        schema = getattr(target, "_schema", None)
        mutates = (
            (schema is not None and schema.is_mutable)
            or "batch_norm" in str(target)
            or isinstance(target, Opaque)
        )
        region = region_of(node)

        def run_target(*args: Any, **kwargs: Any) -> Any:
            with arithmetic(self._subject.precision, self._device):
                return region.run(target, *args, **kwargs)

        # As a stage runs it, with the casts that autocast makes.
        plain = self._subject.precision == "float32" and region == WHOLE
        return Call(target if plain else run_target, args, dict(kwargs), mutates)

    def _outline(self, state: State) -> Tensor:
        """Return a parameter, buffer or constant, perhaps without values."""
        known = self._constants if state.kind == "constant" else self._subject.states
        return known[state.name]

    def _state(self, state: State) -> Tensor:
        """Return a parameter, buffer or constant with values.

        If it has no memory, a parameter is random, in the range of usual initialisations; a buffer
        has the values of the factory, because it may contain indices.
        """
        tensor = self._outline(state)
        if not is_deferred(tensor):
            return tensor
        if not (isinstance(tensor, nn.Parameter) and tensor.is_floating_point()):
            return self._job.initial_values(state.name).to(self._device)
        sizes, strides = tensor.shape, tensor.stride()
        bound = prod(sizes[1:]) ** -0.5
        filled = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=self._device)
        return nn.Parameter(filled.uniform_(-bound, bound), tensor.requires_grad)
