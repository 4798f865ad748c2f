"""Which parameters and buffers an operator casts when it runs under autocast.

Torch does not say which operators cast their arguments, and devices differ. So an operator runs on
fake tensors, which shows its casts. Then it runs again on their results: if it does the same except
for the casts, a stage may make them itself, once for many runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from pipectl.capture.graph import CapturedGraph, State
from pipectl.capture.operators import gives_views
from pipectl.capture.regions import arithmetic, casts, region_of
from pipectl.capture.tensors import storage_of
from pipectl.torch_api import COPY_TO, FakeTensorMode, OpOverload, TorchDispatchMode, pytree

Casts = Mapping[int, torch.dtype]
"""Types to which an operator casts some of its arguments, by index among their leaves."""


class Casting:
    """The casts that operators make of states, and of views of states.

    Args:
        precision: as in the spec.
        device: where the operators run.
    """

    def __init__(self, precision: str, device: torch.device) -> None:
        self._precision, self._device = precision, device
        self._mode = FakeTensorMode()
        self._known: dict[Any, Casts] = {}

    def of(
        self, graph: CapturedGraph, node: fx.Node, tensor_of: Callable[[State], Tensor]
    ) -> Casts:
        """Return the casts of an operator, without those of states that the graph writes.

        Args:
            tensor_of: returns a state, perhaps without values.
        """
        if copied := copied_parameters(graph, node, tensor_of):
            return copied
        region, target = region_of(node), node.target
        is_cast = casts(self._precision) or any(each.enabled for each in region.autocasts)
        if not (is_cast and isinstance(target, OpOverload)):
            return {}
        behind = {state_behind(graph, source) for source in node.all_input_nodes} - {None}
        if behind <= graph.written.keys():
            return {}
        states = {name: tensor_of(graph.states[name]) for name in behind if name is not None}
        lasting: set[int] = set()
        with self._mode, torch.enable_grad():
            values = _Fakes(graph, states, self._device, lasting)
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        places = [
            index
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and storage_of(leaf) in lasting
        ]
        flags = [(x.requires_grad, x.is_leaf) for x in leaves if isinstance(x, Tensor)]
        key = target, region, str(structure), _described(leaves), str((flags, places))
        if key not in self._known:

            def run(leaves: Sequence[Any]) -> list[_Call]:
                args, kwargs = pytree.tree_unflatten(leaves, structure)
                context = arithmetic(self._precision, self._device)
                with self._mode, torch.enable_grad(), context, _Trace() as trace:
                    region.run(target, *args, **kwargs)
                return list(trace.calls)

            self._known[key] = _find_casts(run, leaves, places)
        return self._known[key]


class _Fakes(dict[fx.Node, Any]):
    """Values of a graph without memory, of the size that it was captured with.

    Args:
        states: by the name of their nodes.
        lasting: gets the storages of states that no operator writes.
    """

    def __init__(
        self,
        graph: CapturedGraph,
        states: Mapping[str, Tensor],
        device: torch.device,
        lasting: set[int],
    ) -> None:
        super().__init__()
        self._graph, self._states = graph, states
        self._device, self._lasting = device, lasting

    def __missing__(self, node: fx.Node) -> Any:
        self[node] = value = self._make(node)
        return value

    def _make(self, node: fx.Node) -> Any:
        graph, target = self._graph, node.target
        if node.name in graph.states:
            state = self._states[node.name]
            captured = node.meta["val"].dtype
            tensor = self._blank(state, captured).requires_grad_(state.requires_grad)
            if node.name not in graph.written:
                self._lasting.add(storage_of(tensor))
            return tensor
        if graph.has_no_tensor(node):
            return graph.size_of_node(node, graph.samples, graph.length)
        if state_behind(graph, node) is not None:
            assert callable(target)
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.__getitem__)
            return target(*args, **kwargs)
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return value
        return self._blank(value).requires_grad_(graph.requires_grad.get(node.name, False))

    def _blank(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        sizes, strides = (
            [size if isinstance(size, int) else size.node.hint for size in sizes]
            for sizes in (like.shape, like.stride())
        )
        return torch.empty_strided(sizes, strides, dtype=dtype or like.dtype, device=self._device)


def copied_parameters(
    graph: CapturedGraph, node: fx.Node, tensor_of: Callable[[State], Tensor]
) -> Casts:
    """Return the parameters that an operator takes in another type than they have themselves: the
    model was captured with such copies of them; see :mod:`.half_weights`.
    """
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    types = {
        index: (leaf.meta["val"].dtype, tensor_of(graph.states[leaf.name]).dtype)
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, fx.Node)
        and leaf.name in graph.states
        and graph.states[leaf.name].kind == "parameter"
    }
    return {index: captured for index, (captured, own) in types.items() if captured is not own}


def state_behind(graph: CapturedGraph, node: fx.Node) -> str | None:
    """Return the state which a value is, or of which it may be a view; None if there is none."""
    while node.name not in graph.states:
        is_view = gives_views(node.target) or node.target is operator.getitem
        sources = [] if node.op != "call_function" else graph.tensor_inputs(node)
        if not is_view or len(sources) != 1:
            return None
        (node,) = sources
    return node.name


class _Call(NamedTuple):
    """A call of an operator of torch while another one runs."""

    target: OpOverload
    arguments: list[Any]
    kwargs: Mapping[str, Any]
    result: Any


class _Trace(TorchDispatchMode):
    """Records what operators call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim":  # questions about a tensor
            self.calls.append(_Call(func, pytree.tree_leaves(args), kwargs or {}, result))
        return result


def _find_casts(
    run: Callable[[Sequence[Any]], list[_Call]], leaves: Sequence[Any], places: Sequence[int]
) -> Casts:
    """Return the casts of arguments that may be made before an operator runs.

    An argument that is cast twice is not among them: its two gradients would be added before they
    are cast back.

    Args:
        run: runs the operator.
        leaves: its arguments.
        places: of those that may be cast.
    """
    calls = run(leaves)
    found: dict[int, _Call] = {}
    for place in places:
        uses = [call for call in calls if any(x is leaves[place] for x in call.arguments)]
        if len(uses) == 1 and _is_cast(uses[0]):
            found[place] = uses[0]
    others = list(leaves)
    for place, call in found.items():
        others[place] = call.result.detach().requires_grad_(leaves[place].requires_grad)
    rest = [_line(call) for call in calls if not any(call is cast for cast in found.values())]
    if not found or rest != [_line(call) for call in run(others)]:
        return {}
    return {place: call.result.dtype for place, call in found.items()}


def _is_cast(call: _Call) -> bool:
    given = {name for name, value in call.kwargs.items() if value is not None}
    return call.target is COPY_TO and given == {"dtype"}


def _line(call: _Call) -> str:
    return f"{call.target} {_described(call.arguments)} {call.kwargs}"


def _described(leaves: Sequence[Any]) -> str:
    """Return what arguments are, without their values; equal tensors have equal numbers."""
    numbers: dict[int, int] = {}
    forms = [
        (x.dtype, *x.shape, x.stride(), numbers.setdefault(id(x), len(numbers)))
        if isinstance(x, Tensor)
        else x
        for x in leaves
    ]
    return str(forms)
