"""The code of one stage at one batch size: its part of the graph as a callable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pipectl.capture.cut import Cut, Slot
from pipectl.capture.graph import CapturedGraph
from pipectl.capture.operators import gives_views, is_random, seeder_of
from pipectl.capture.randomness import seed_of
from pipectl.capture.regions import WHOLE, Switch, region_of, without_gradient
from pipectl.capture.slices import Rows, whole_draw
from pipectl.errors import CaptureError


@dataclass(frozen=True, eq=False)
class StageCode:
    """A stage as a function.

    ``module(seed, *states, *inputs, *received)`` returns one tensor per entry of ``results``.

    Args:
        states: (placeholder, use) of each state argument; ``use`` is "" unless the parameter has
            one accumulator per use.
        inputs: names of the batch tensors it reads.
        received: slots it reads.
        results: slots it gives: values that leave the stage, and each remote use of a value whose
            gradients return use by use.
    """

    module: Callable[..., tuple[Tensor, ...]]
    states: tuple[Slot, ...]
    inputs: tuple[str, ...]
    received: tuple[Slot, ...]
    results: tuple[Slot, ...]


_CPU = torch.device("cpu")


def build_stage(cut: Cut, stage: int, rows: Rows | int, device: torch.device = _CPU) -> StageCode:
    """The code of ``stage`` for some samples of a micro-batch.

    Args:
        rows: of the micro-batch; a number stands for a whole one of so many samples.
        device: that it runs on, and creates tensors on.

    Raises:
        CaptureError: the graph was captured for another, fixed, batch size.
    """
    graph, rows = cut.graph, Rows.of(rows) if isinstance(rows, int) else rows
    if graph.fixed and not (rows.is_whole and rows.whole == graph.batch_size):
        raise CaptureError(
            f"model: captured for {graph.batch_size} samples, not for {rows.size}",
            cure="let replicas take whole micro-batches",
        )
    place_subgraphs(graph.root, device)
    return _Builder(cut, stage, rows, device).build()


def on_device(arguments: Any, device: torch.device) -> Any:
    """Arguments of an operator, which was captured on the CPU."""
    return fx.node.map_aggregate(
        arguments, lambda item: device if isinstance(item, torch.device) else item
    )


def place_subgraphs(root: fx.GraphModule, device: torch.device) -> None:
    """Have the branches and bodies that operators of a graph call compute on a device."""
    if device == _CPU:
        return
    for module in root.modules():
        if isinstance(module, fx.GraphModule) and module is not root:
            for node in module.graph.nodes:
                node.args, node.kwargs = on_device((node.args, node.kwargs), device)
            module.recompile()


def uses_of_parameter(graph: CapturedGraph, placeholder: str) -> tuple[str, ...]:
    """The operators that use a parameter, if they are several: each has its own accumulator."""
    users = graph.users.get(placeholder, ())
    several = graph.states[placeholder].kind == "parameter" and len(users) > 1
    return users if several else ()


class _Builder:
    """Copies a stage's operators into a graph of its own."""

    def __init__(self, cut: Cut, stage: int, rows: Rows, device: torch.device) -> None:
        self._cut = cut
        self._captured = cut.graph
        self._rows = rows
        self._stage = stage
        self._device = device
        self._graph = fx.Graph()
        self._switch = Switch(self._graph)
        self._names = cut.operators(stage)
        self._received = cut.received(stage)
        self._local: dict[Slot, fx.Node] = {}

    def build(self) -> StageCode:
        seed = self._graph.placeholder("seed")
        captured = self._captured
        states = dict.fromkeys(
            self._state_slot(source.name, node.name)
            for node in self._nodes()
            for source in node.all_input_nodes
            if source.name in captured.states
        )
        wanted = {source.name for node in self._nodes() for source in node.all_input_nodes}
        if self._stage == self._cut.loss_stage:
            wanted |= {name for name in captured.outputs if isinstance(name, str)}
        inputs = [name for name in captured.inputs if name in wanted]
        for slot in [*states, *map(Slot, inputs), *self._received]:
            self._local[slot] = self._graph.placeholder("_".join(filter(None, slot)))
        forks: dict[str, list[str]] = {}  # values to fork after the last operator that writes them
        for name in self._cut.forked(self._stage):
            forks.setdefault(captured.last_writer.get(name, name), []).append(name)
        for node in self._nodes():
            self._switch.to(region_of(node))
            seeder = seeder_of(node, self._captured.root)
            if seeder is not None:
                self._graph.call_function(seeder, (seed, seed_of(node.name)))
            self._local[Slot(node.name)] = self._copy(node)
            for name in forks.get(node.name, ()):
                self._fork(name, node.name)
        self._switch.to(WHOLE)
        results = self._results()
        self._graph.output(tuple(self._local[slot] for slot in results))
        module = fx.GraphModule(self._captured.root, self._graph, class_name=f"Stage{self._stage}")
        return StageCode(
            module, tuple(states), tuple(inputs), tuple(self._received), tuple(results)
        )

    def _nodes(self) -> list[fx.Node]:
        position = self._captured.position
        return [self._captured.operators[position[name]] for name in self._names]

    def _state_slot(self, placeholder: str, user: str) -> Slot:
        per_use = self._cut.training and uses_of_parameter(self._captured, placeholder)
        return Slot(placeholder, user if per_use else "")

    def _copy(self, node: fx.Node) -> fx.Node:
        target: Any = node.target
        batch = self._rows.size
        if not self._rows.is_whole and is_random(node, self._captured.root):
            target = whole_draw(self._captured, node, self._rows)
            batch = self._rows.whole

        def local(source: fx.Node) -> Any:
            if source.op == "get_attr":
                return self._graph.get_attr(str(source.target))
            if self._captured.is_size(source):
                return self._captured.size_at(source, batch, self._rows.length)
            if source.name in self._captured.states:
                return self._local[self._state_slot(source.name, node.name)]
            own_use = self._local.get(Slot(source.name, node.name))
            return own_use if own_use is not None else self._local[Slot(source.name)]

        args, kwargs = fx.node.map_arg(on_device((node.args, node.kwargs), self._device), local)
        copy = self._graph.create_node("call_function", target, args, kwargs, node.name)
        if region_of(node).gradients or not gives_views(target):
            return copy
        return self._graph.call_function(without_gradient, (copy, [*args, *kwargs.values()]))

    def _fork(self, name: str, writer: str) -> None:
        """Give every later use of a value an alias of its own, with gradients summed in order."""
        position = self._captured.position
        users = [u for u in self._captured.users[name] if position[u] > position[writer]]
        self._switch.to(WHOLE)
        fork = self._graph.call_function(fork_uses, (self._local[Slot(name)], len(users)))
        for index, user in enumerate(users):
            item = self._graph.call_function(_item, (fork, index))
            self._local[Slot(name, user)] = item

    def _results(self) -> list[Slot]:
        results: dict[Slot, None] = {}
        if self._stage == self._cut.loss_stage:
            for name in (self._captured.loss, *self._captured.outputs):
                if isinstance(name, str):
                    results[self._returned(name)] = None
        for lane, slots in self._cut.lanes.items():
            if lane.source == self._stage and lane.kind == "activation":
                results.update(dict.fromkeys(slots))
            elif lane.target == self._stage and lane.kind == "gradient":
                results.update((slot, None) for slot in slots if slot in self._local)
        return [slot for slot in results if slot not in self._received]

    def _returned(self, name: str) -> Slot:
        """The slot of the loss or of what the model returned.

        Raises:
            CaptureError: a parameter or buffer that no operator of this stage reads.
        """
        if name in self._captured.states and Slot(name) not in self._local:
            raise CaptureError(
                f"model: returns {self._captured.states[name].name!r}, which metrics would get "
                "from another stage",
                cure="return a copy of it (.clone()), or leave it out of what the model returns",
            )
        return Slot(name)


def fork_uses(value: Tensor, uses: int) -> tuple[Tensor, ...]:
    """Aliases of ``value``, one per use; gradients are summed last use first, as autograd does."""
    return _Fork.apply(value, uses)  # type: ignore[no-any-return, no-untyped-call]


def _item(values: tuple[Tensor, ...], index: int) -> Tensor:
    return values[index]


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, uses: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for _ in range(uses))

    @staticmethod
    def backward(_: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        total: Tensor | None = None
        for gradient in reversed(gradients):
            if gradient is not None:
                total = gradient if total is None else total + gradient
        return total, None


class Receive(torch.autograd.Function):
    """Enters a received activation into a stage's graph and catches its gradient.

    A leaf would force the gradient into its own layout, and sums over another layout differ in
    bits; here the gradient keeps the layout that one process gives it.
    """

    @staticmethod
    def forward(
        ctx: Any, _: Tensor, value: Tensor, caught: dict[Slot, Tensor | None], slot: Slot
    ) -> Tensor:
        """An alias of ``value`` that requires gradient because the first argument does."""
        ctx.set_materialize_grads(False)
        ctx.caught, ctx.slot = caught, slot
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None, None, None]:
        """Keep the gradient; it goes no further."""
        ctx.caught[ctx.slot] = gradient
        return None, None, None, None
