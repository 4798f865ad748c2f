"""The autograd graph of a stage without values: what a backward on another rank runs through.

The stage's code runs once for every size without computing anything. Autograd records it like any
other run. Where it saves a tensor, it saves the tensor's number instead, and finds in the backward
of a micro-batch what the forward's rank sent under that number. Parameters are the real ones, so
gradients accumulate in them.

Everything above the operators' kernels is as ever: autograd and autocast see ordinary tensors, so
they record the same graph as with values, views that are written included. (On fake tensors torch
records such views otherwise, and gradients may come in another layout.) Memory that nobody writes
takes no room on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipectl.capture import Slot
from pipectl.capture.operators import arguments_by_name
from pipectl.capture.regions import arithmetic
from pipectl.capture.stage import Receive, StageCode
from pipectl.errors import MismatchError
from pipectl.runtime.layout import Layout
from pipectl.runtime.saved_tensors import kept_apart

_ATEN = torch.ops.aten
_NORMS = frozenset(
    {
        _ATEN.native_layer_norm.default,
        _ATEN.native_group_norm.default,
        _ATEN.native_batch_norm.default,
        _ATEN._native_batch_norm_legit.default,
        _ATEN._native_batch_norm_legit.no_stats,
        _ATEN._batch_norm_with_update.default,
    }
)
"""Operators whose statistics are as wide as their parameters, which fake tensors do not know."""

TOGETHER = "set pipeline.backward to together: its backward has to stay with its forward"
_PLAIN = (int, float, str, type(None), torch.dtype, torch.device)
"""What an autograd function may keep as attributes: it is the same on both ranks."""
Form = tuple[torch.dtype, tuple[int, ...]]
"""Type and sizes of a tensor."""


class Call(NamedTuple):
    """What a stage's code is called with, but for its states.

    Args:
        inputs: layouts of the batch tensors.
        received: layouts of the received values, and whether each has a gradient.
    """

    inputs: tuple[Layout, ...] = ()
    received: tuple[tuple[Layout, bool], ...] = ()


class Graph:
    """A stage's autograd graph at one size.

    Args:
        states: the arguments of the code; parameters get gradients.
        precision: as in the spec.

    Attributes:
        saved: type and sizes of every tensor that autograd would have saved, in order.
        structure: names of all nodes, in an order that follows from the graph.

    Raises:
        MismatchError: the code looks at values, which it has none of here.
    """

    def __init__(
        self,
        stage: int,
        code: StageCode,
        states: Sequence[Tensor],
        call: Call,
        precision: str,
        device: torch.device,
    ) -> None:
        self._code = code
        self._leaves = [state for state in states if state.requires_grad]
        self._values: list[Tensor | None] = []
        self._caught: dict[Slot, Tensor | None] = {}
        self._device = device
        self.saved: list[Form] = []
        self._edges: dict[Slot, GradientEdge] = {}
        self._forms: dict[Slot, Form] = {}
        try:
            self._record(states, call, precision)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise MismatchError(
                f"plan.json: stages[{stage}] has its backward on another rank, but its code does "
                f"not run without values: {type(error).__name__}: {reason}",
                cure=TOGETHER,
            ) from error
        nodes = _nodes_behind(edge.node for edge in self._edges.values())
        self.structure = [node.name() for node in nodes]
        _check_functions(stage, nodes)
        self._is_read_once = all(_is_read_once(node) for node in nodes)

    def backward(
        self, values: list[Tensor], gradients: Mapping[Slot, Tensor]
    ) -> dict[Slot, Tensor | None]:
        """Run the backward of a micro-batch; parameter gradients accumulate.

        Args:
            values: of the saved tensors, in order; the list is emptied.
            gradients: of results and received values, in the order in which they are roots.

        Returns:
            Gradients of the received values.
        """
        roots = [self._edges[slot] for slot in gradients]
        self._values = [*values]
        values.clear()
        others = chain(gradients.values(), self._caught.values())
        if roots:
            with kept_apart(self._leaves, others):
                torch.autograd.backward(roots, list(gradients.values()), retain_graph=True)
        self._values = []
        found = dict(self._caught)
        self._caught.clear()
        return found

    def has(self, slot: Slot) -> bool:
        """Whether a gradient of a result or received value goes anywhere."""
        return slot in self._edges

    def filled(self, slot: Slot, value: float) -> Tensor:
        """A gradient of a result, the same everywhere."""
        dtype, sizes = self._forms[slot]
        return torch.full(sizes, value, dtype=dtype, device=self._device)

    def _record(self, states: Sequence[Tensor], call: Call, precision: str) -> None:
        anchor = torch.zeros((), requires_grad=True)
        with Valueless(), torch.enable_grad(), saved_tensors_hooks(self._pack, self._unpack):
            inputs = [self._blank(layout) for layout in call.inputs]
            received: dict[Slot, Tensor] = {}
            for slot, (layout, grad) in zip(self._code.received, call.received, strict=True):
                value = self._blank(layout)
                received[slot] = (
                    Receive.apply(anchor, value, self._caught, slot) if grad else value  # type: ignore[no-untyped-call]
                )
            with arithmetic(precision, self._device):
                results = self._code.module(0, *states, *inputs, *received.values())
        named = {**received, **dict(zip(self._code.results, results, strict=True))}
        self._forms = {slot: (t.dtype, tuple(t.shape)) for slot, t in named.items()}
        self._edges = {s: get_gradient_edge(t) for s, t in named.items() if t.requires_grad}

    def _blank(self, layout: Layout) -> Tensor:
        form = layout.sizes, layout.strides
        return torch.empty_strided(*form, dtype=layout.dtype, device=self._device)

    def _pack(self, tensor: Tensor) -> int:
        self.saved.append((tensor.dtype, tuple(tensor.shape)))
        return len(self.saved) - 1

    def _unpack(self, number: int) -> Tensor:
        value = self._values[number]
        assert value is not None
        if self._is_read_once:
            self._values[number] = None  # its memory is free when this node is done
        return value


def structure_of(edges: Iterable[GradientEdge]) -> list[str]:
    """Names of all nodes behind edges of a graph; see :attr:`Graph.structure`."""
    return [node.name() for node in _nodes_behind(edge.node for edge in edges)]


def _nodes_behind(roots: Iterable[Node]) -> list[Node]:
    """All nodes of an autograd graph, each once, in an order that follows from its edges."""
    seen: dict[Node, None] = {}
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen[node] = None
            waiting += [after for after, _ in node.next_functions if after is not None]
    return list(seen)


def _is_read_once(node: Node) -> bool:
    """Whether it asks for each saved tensor once: true of all but the user's own functions."""
    function = getattr(node, "_forward_cls", None)
    return function is None or function.__module__ == Receive.__module__


def _check_functions(stage: int, nodes: Sequence[Node]) -> None:
    """Refuse autograd functions that keep values in attributes, where nobody finds them."""
    for node in nodes:
        kept: dict[str, Any] = getattr(node, "__dict__", {})
        if not all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(kept)):
            raise MismatchError(
                f"plan.json: stages[{stage}] has its backward on another rank, but "
                f"{node.name()} keeps more than numbers as attributes",
                cure="keep tensors with ctx.save_for_backward(), or set pipeline.backward to "
                "together",
            )


class Valueless(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, operators give tensors of the right form with arbitrary contents.

    Raises:
        RuntimeError: from an operator whose result's form depends on values.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._forms = FakeTensorMode()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The result of one operator."""
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        with self._forms:
            known = pytree.tree_map_only(Tensor, blank, (args, kwargs))
            result = func(*known[0], **known[1])
            if func in _NORMS:
                result = _with_wide_statistics(result, args)
        if not func._schema.is_mutable:
            return pytree.tree_map_only(Tensor, blank, result)
        # Results that are arguments are those arguments; the others are new.
        given = arguments_by_name(func._schema, args, kwargs)
        results = result if isinstance(result, tuple) else (result,)
        made = []
        for form, returned in zip(results, func._schema.returns, strict=True):
            alias = returned.alias_info
            if alias is None:
                made.append(pytree.tree_map_only(Tensor, blank, form))
                continue
            same = (
                each.name
                for each in func._schema.arguments
                if each.alias_info is not None and each.alias_info.before_set == alias.before_set
            )
            made.append(given[next(same)])
        return tuple(made) if isinstance(result, tuple) else made[0]


def _with_wide_statistics(result: tuple[Tensor, ...], args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Results of a norm on a CPU: parameters wider than the values give wider statistics."""
    values, *parameters = (item for item in args if isinstance(item, Tensor))
    if values.device.type != "cpu" or not parameters or parameters[0].dtype == values.dtype:
        return result
    wide = parameters[0].dtype
    return result[0], *(x.to(wide) if x.dtype == values.dtype else x for x in result[1:])


def blank(like: Tensor) -> Tensor:
    """A tensor of the same form in memory of its own."""
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
