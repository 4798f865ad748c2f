"""Changes to the code of a stage: shared casts, backwards in two halves, and compilation, in this
order.

Every change is a pass (:class:`~pipectl.capture.stage.Pass`) that knows what the earlier ones have
left in the code: the compiler does not look into what is not an operator. A pass refuses code that
it cannot follow.

*Halves*: gradients of values first, gradients of weights later. Operators that multiply by weights
(linear layers, convolutions, products of matrices) become a :class:`_Split`. Its forward builds the
operator's own small autograd graph. Its backward computes only the gradients of the values from
that graph, and leaves a :class:`WeightHalf`, which computes those of the weights from the same
graph. So both halves run the kernels of a whole backward, on the same numbers. Between them, only
the operator's input and the gradient of its output are kept.

All other operators compute the gradients of their parameters in the first half: norms and
embeddings would gain little from a second one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge

from pipectl.capture.casts import Casting, copied_parameters
from pipectl.capture.graph import CapturedGraph, State
from pipectl.capture.randomness import SEEDERS, seed_backward
from pipectl.capture.stage import Pass, StageCode, fork_uses
from pipectl.errors import CaptureError
from pipectl.runtime.casts import SharedCast, SharedCasts
from pipectl.runtime.saved_tensors import gradients_of, run_backward, zeros_behind
from pipectl.torch_api import (
    HigherOrderOperator,
    OpOverload,
    edge_into,
    edge_of,
    is_of_compiler,
    pytree,
)

_ATEN = torch.ops.aten
SPLIT = frozenset(
    {
        _ATEN.linear.default,
        _ATEN.addmm.default,
        _ATEN.mm.default,
        _ATEN.matmul.default,
        _ATEN.conv1d.default,
        _ATEN.conv1d.padding,
        _ATEN.conv2d.default,
        _ATEN.conv2d.padding,
        _ATEN.conv3d.default,
        _ATEN.conv3d.padding,
        _ATEN.conv_transpose1d.default,
        _ATEN.conv_transpose2d.input,
        _ATEN.conv_transpose3d.input,
    }
)
"""Operators with much work for weights."""
_VIEWS = frozenset(
    {_ATEN.t.default, _ATEN.transpose.int, _ATEN.permute.default, _ATEN.numpy_T.default}
)
"""Operators that may stand between a weight and its operator."""


Backend = str | Callable[..., Any]


def share_casts(
    code: StageCode,
    graph: CapturedGraph,
    tensor_of: Callable[[State], Tensor],
    casting: Casting,
    casts: SharedCasts,
) -> StageCode:
    """Let the operators of a stage's code take casts that all its micro-batches share, where they
    would cast a parameter or buffer; changes the code.

    Args:
        graph: that the stage was cut from.
        tensor_of: returns a parameter, buffer or constant.
        casts: makes and keeps them.
    """
    module = code.module_for(Pass.CAST)
    captured = {node.name: node for node in graph.operators}
    for node in list(module.graph.nodes):
        source = captured.get(node.name)
        if source is None or node.op != "call_function":
            continue
        is_whole = node.target is source.target  # else it draws for all samples of a micro-batch
        places = casting.of if is_whole else copied_parameters
        leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
        taken: dict[fx.Node, fx.Node] = {}
        with module.graph.inserting_before(node):
            for place, dtype in places(graph, source, tensor_of).items():
                weight = leaves[place]
                if weight not in taken:
                    cast = SharedCast(casts, dtype)
                    taken[weight] = module.graph.call_function(cast, (weight,))
                leaves[place] = taken[weight]
        if taken:
            node.args, node.kwargs = pytree.tree_unflatten(leaves, structure)
    module.recompile()
    return code.after(Pass.CAST, module)


@dataclass
class WeightHalf:
    """The weight half of one micro-batch's backward.

    Attributes:
        roots, gradients: results of operators, and their gradients.
        weights: that get a gradient.
        adds_nothing: whether these gradients are zeros, whatever the values are.
    """

    roots: list[GradientEdge] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    adds_nothing: bool = False

    def run(self) -> None:
        """Add to the gradients of the weights."""
        if self.roots:
            weights = self.weights
            with zeros_behind(self.roots) if self.adds_nothing else nullcontext():
                run_backward(self.roots, self.gradients, weights, self.gradients, inputs=weights)


def split_backwards(
    code: StageCode, states: Mapping[str, State], current: Callable[[], WeightHalf]
) -> StageCode:
    """Make the operators of a stage's code defer the gradients of their weights; changes the code.

    Args:
        states: of the captured graph, by placeholder.
        current: returns the weight half of the micro-batch whose forward runs.
    """
    module = code.module_for(Pass.SPLIT)
    _, *arguments = module.graph.find_nodes(op="placeholder")
    bound = zip(code.states, arguments, strict=False)
    parameters = [node for slot, node in bound if states[slot.value].kind == "parameter"]
    weights = _weights(parameters)
    for node in module.graph.nodes:
        operands = [item for item in node.all_input_nodes if item in weights]
        if node.target in SPLIT and operands:
            places = [place for place, item in enumerate(node.args) if item in weights]
            leaves = tuple(weights[item] for item in operands)
            node.target = _Splitting(node.target, places, current)
            node.args = (leaves, *node.args)
    module.recompile()
    return code.after(Pass.SPLIT, module)


def _weights(parameters: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Parameters, and views and casts of them, that have only one user, each with its parameter."""
    parameter_of = {node: node for node in parameters if len(node.users) == 1}
    for node in list(parameter_of):
        user = next(iter(node.users))
        while _passes_on(user) and len(user.users) == 1:
            parameter_of[user] = node
            user = next(iter(user.users))
    return parameter_of


def _passes_on(node: fx.Node) -> bool:
    return node.target in _VIEWS or isinstance(node.target, SharedCast)


class _Splitting:
    """An operator as a function of a graph, with a split backward.

    Args:
        places: of the weights among its arguments.
    """

    def __init__(
        self,
        target: Callable[..., Tensor],
        places: Sequence[int],
        current: Callable[[], WeightHalf],
    ) -> None:
        self._target, self._places, self._current = target, frozenset(places), current
        self._anchor = torch.zeros((), requires_grad=True)
        self.__name__ = "split"

    def __call__(self, leaves: Sequence[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        weights = [leaf for leaf in leaves if leaf.requires_grad]
        if not weights or not torch.is_grad_enabled():
            return self._target(*args, **kwargs)
        places, values = [], []
        for place, item in enumerate(args):
            if isinstance(item, Tensor) and place not in self._places:
                places.append(place)
                values.append(item)

        def run(values: Iterable[Tensor]) -> Tensor:
            arguments = list(args)
            for place, value in zip(places, values, strict=True):
                arguments[place] = value
            return self._target(*arguments, **kwargs)

        result: Tensor = _Split.apply(self._anchor, run, weights, self._current(), *values)  # type: ignore[no-untyped-call]
        return result


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        run: Callable[[Iterable[Tensor]], Tensor],
        weights: list[Tensor],
        weight_half: WeightHalf,
        *values: Tensor,
    ) -> Tensor:
        """The operator's result; the first argument makes it require a gradient."""
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            inner = [
                _Enter.apply(anchor, value) if value.requires_grad else value  # type: ignore[no-untyped-call]
                for value in values
            ]
            result = run(inner)
        ctx.edges = [edge_into(value) if value.requires_grad else None for value in inner]
        ctx.root, ctx.weights, ctx.weight_half = edge_of(result), weights, weight_half
        return result.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the values; those of the weights are deferred."""
        root, edges, half = ctx.root, ctx.edges, ctx.weight_half
        ctx.root = ctx.edges = ctx.weight_half = None
        gradient_of: dict[GradientEdge, Tensor | None] = {}
        if gradient is not None:
            entered = [edge for edge in edges if edge is not None]
            if entered:
                gradients = gradients_of(root, gradient, entered)
                gradient_of = dict(zip(entered, gradients, strict=True))
            half.roots.append(root)
            half.gradients.append(gradient)
            half.weights += ctx.weights
        return (None, None, None, None, *(gradient_of.get(edge) for edge in edges))


class _Enter(torch.autograd.Function):
    """The entry of an operator's graph; unlike a leaf, it does not keep the value."""

    @staticmethod
    def forward(_: Any, __: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(*_: Any) -> tuple[None, None]:
        return None, None


def compile_stage(
    code: StageCode, backend: Backend = "inductor", mode: str | None = None
) -> StageCode:
    """The same code, compiled at its first call, for the sizes that it is called with.

    Operators may be fused, so sums are rounded in another order, and results agree only within a
    tolerance. Random operators, and what seeds them, run uncompiled between compiled pieces: a
    compiler's own dropout draws other masks than the operator. So does all that is no operator of
    torch: a submodule that is kept whole, what begins and ends an autocast inside the model, and
    an operator with a split backward. Each has a state that a compiler would take for a constant
    (the weight half of the first micro-batch, for example). Casts that micro-batches share are
    arguments of the compiled code.

    Args:
        backend: of ``torch.compile``, or a name of one.
        mode: of ``torch.compile``, of a backend that knows modes.

    The first call raises CaptureError if nothing can be compiled.
    """
    return code.after(Pass.COMPILE, _Compiled(code.module_for(Pass.COMPILE), backend, mode))


def _is_followed(target: Any) -> bool:
    """Whether a compiler knows all that a call in the code of a stage depends on."""
    known = isinstance(target, OpOverload | HigherOrderOperator | BuiltinFunctionType)
    return known or target is fork_uses


def _take_out_casts(root: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """Give a graph further arguments in place of its shared casts; return code for these."""
    outside, values = fx.Graph(), dict[fx.Node, fx.Node]()
    casts = [node for node in graph.nodes if isinstance(node.target, SharedCast)]
    needed = set(casts)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    arguments = [*graph.find_nodes(op="placeholder")]  # a stage of constants has none
    for node in graph.nodes:
        if node in needed or node in arguments:
            values[node] = outside.node_copy(node, values.__getitem__)
    outside.output(tuple(values[cast] for cast in casts))
    for cast in casts:
        with graph.inserting_after(arguments[-1]):
            arguments.append(graph.placeholder(cast.name))
        cast.replace_all_uses_with(arguments[-1])
        graph.erase_node(cast)
    return fx.GraphModule(root, outside)


class _Compiled:
    """A compiled stage. The seed bypasses the compiler, which would recompile for each seed."""

    def __init__(self, module: fx.GraphModule, backend: Backend, mode: str | None) -> None:
        self._seed = 0
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        draws = False
        for node in [node for node in graph.nodes if node.op == "call_function"]:
            seeds = node.target in SEEDERS
            if seeds:
                node.target = self._seeding(node.target, node.args[1])
                node.args = ()
            elif node.target is seed_backward:
                result, _, key = node.args
                node.target, node.args = self._seeding_backward(key), (result,)
            elif not isinstance(node.target, SharedCast) and (
                draws or not _is_followed(node.target)
            ):
                node.target = _uncompiled(node.target)
            draws = seeds
        graph.erase_node(next(iter(graph.nodes)))
        self._casts = _take_out_casts(module, graph)
        module = fx.GraphModule(module, graph)
        self._run = torch.compile(module, backend=backend, mode=mode, dynamic=False)

    def __call__(self, seed: int, *arguments: Any) -> tuple[Tensor, ...]:
        self._seed = seed
        try:
            return self._run(*arguments, *self._casts.forward(*arguments))  # type: ignore[no-any-return]
        except Exception as error:
            if not is_of_compiler(error):
                raise
            raise CaptureError(
                f"training.compile: torch.compile fails: {str(error).splitlines()[0]}",
                hint="install a C++ compiler on the nodes (CXX may name it), "
                "or set training.compile: false",
            ) from error

    def _seeding(self, seeder: Callable[[int, int], None], key: int) -> Callable[[], None]:
        return _uncompiled(lambda: seeder(self._seed, key))

    def _seeding_backward(self, key: int) -> Callable[[Any], None]:
        return _uncompiled(lambda result: seed_backward(result, self._seed, key))


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return torch.compiler.disable(call)  # type: ignore[no-any-return, no-untyped-call]
