"""Which module computes the first value of a stage that is not finite.

A forward whose result is not finite is run once more, operator by operator. Infinite values alone
prove nothing: masks of attention are infinite on purpose. So the search begins at the first NaN, or
else at the result, and goes back as long as a value with a gradient, or a NaN, comes in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx

from pipectl.capture import Slot, build_stage
from pipectl.capture.graph import CapturedGraph
from pipectl.capture.model_with_loss import own_name, own_path
from pipectl.capture.operators import calling_module
from pipectl.capture.refusals import place_of_node
from pipectl.capture.regions import arithmetic
from pipectl.capture.stage import StageCode
from pipectl.runtime.layout import Tensors
from pipectl.runtime.segment import MicroBatch
from pipectl.runtime.stage import Stage


def find_not_finite(
    stage: Stage, micro_batch: MicroBatch, inputs: Mapping[str, Tensor], arrived: Tensors
) -> str:
    """Return what :func:`describe_first` says of a forward, whose arguments these are.

    Returns:
        An empty text if the forward cannot be run again.
    """
    with suppress(Exception):  # it must not hide the fault that it is to explain
        cut = stage.cuts[True, micro_batch.span]
        code = build_stage(cut, stage.index, micro_batch.span, stage.device)
        code = stage.share_casts(code, cut.graph)
        states: Sequence[Tensor] = [stage.argument(cut, slot) for slot in code.states]
        if stage.versions is not None:
            states = stage.versions.of_age(micro_batch.age).replaced_in(states)
        batch = [inputs[name] for name in code.inputs]
        received = [arrived[Slot(slot.value)] for slot in code.received]
        with arithmetic(stage.precision, stage.device):
            return describe_first(code, cut.graph, micro_batch.seed, states, batch, received)
    return ""


def describe_first(
    code: StageCode,
    graph: CapturedGraph,
    seed: int,
    states: Sequence[Tensor],
    batch: Sequence[Tensor],
    received: Sequence[Tensor | None],
) -> str:
    """Return what computes the first value that is not finite: the module, and the user's line.

    Args:
        code: of the stage, as it was built, or with shared casts of weights.
        graph: that it is a part of.
        seed: of random operators.
        states, batch, received: as in the forward; they are not changed.

    Returns:
        An empty text if all values are finite, or if only received ones are not.
    """
    module = code.module
    assert isinstance(module, fx.GraphModule)
    given = (*states, *batch, *received)
    values = [None if each is None else each.detach().clone() for each in given]
    names = [slot.value for slot in code.states]
    weights = {i + 1 for i, name in enumerate(names) if graph.states[name].kind == "parameter"}
    for index, name in enumerate(names):
        # A buffer that the loss does not depend on is a result: this forward may have written it.
        if name in graph.written and graph.states[name].name not in graph.carried:
            values[index] = torch.zeros_like(states[index])
    finder = _Finder(module, graph, weights)
    with torch.no_grad():
        finder.run(seed, *values)
    node = finder.first()
    if node is None:
        return ""
    if node.op != "placeholder":
        own = graph.operators[graph.position[node.name]]
        path = own_path(calling_module(own))
        what = f"module {path!r}" if path else "the model or the loss"
        return f"the first value that is not finite is computed by {what}{place_of_node(own)}"
    index = finder.arguments.index(node) - 1
    if index < len(names):
        name = own_name(graph.states[names[index]].name)
        return f"{name!r} is not finite before this forward"
    return "the data have a value that is NaN" if index < len(names) + len(batch) else ""


class _Finder(fx.Interpreter):
    """Runs a graph, and marks the values that are not finite.

    Args:
        weights: indices of the arguments that are parameters.

    Attributes:
        arguments: placeholders, in order.
    """

    def __init__(self, module: fx.GraphModule, graph: CapturedGraph, weights: set[int]) -> None:
        super().__init__(module)
        self.arguments = [*module.graph.find_nodes(op="placeholder")]
        (self._output,) = module.graph.find_nodes(op="output")
        self._weights = {self.arguments[index] for index in weights}
        self._graph = graph
        self._bad: dict[fx.Node, bool] = {}
        """Nodes whose value is not finite, in order, and whether it has a NaN."""

    def run_node(self, n: fx.Node) -> Any:
        """Run an operator."""
        value = super().run_node(n)
        if isinstance(value, Tensor) and value.is_floating_point() and n.op != "output":
            has_nan = bool(value.isnan().any())
            if n.name in self._graph.position:
                matters = self._graph.requires_grad.get(n.name, False)
            else:  # a weight, or another name of a value
                matters = n in self._weights or any(each in self._bad for each in n.all_input_nodes)
            if has_nan or (matters and not bool(value.isfinite().all())):
                self._bad[n] = has_nan
        return value

    def first(self) -> fx.Node | None:
        """The node at which the search ends; None if all values are finite."""
        nans = (node for node, has_nan in self._bad.items() if has_nan)
        results = (node for node in self._output.all_input_nodes if node in self._bad)
        node = next(nans, next(results, None))
        while node is not None:
            before = [each for each in node.all_input_nodes if each in self._bad]
            if not before:
                break
            node = before[0]
        while (
            node is not None and node.op != "placeholder" and node.name not in self._graph.position
        ):
            node = next(iter(node.all_input_nodes), None)
        return node
