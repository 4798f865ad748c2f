"""A cut of a captured graph: what each stage computes, receives and sends, and its code."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from pipectl.capture.graph import CapturedGraph
from pipectl.capture.operators import draws_backward, gives_views, is_random, seeder_of
from pipectl.capture.randomness import seed_backward, seed_of
from pipectl.capture.regions import WHOLE, Switch, region_of, without_gradient
from pipectl.capture.slices import Span, whole_draw
from pipectl.errors import CaptureError, MismatchError
from pipectl.lanes import Lane, TransferKind, is_chained, routes


class Slot(NamedTuple):
    """A tensor of a stage: a value, a state or an input, or one use of it.

    Args:
        value: operator whose value (or gradient) this is, or the placeholder of a state or input.
        use: the operator that uses it, if its gradient is kept or sent for each use; else "".
    """

    value: str
    use: str = ""


@dataclass(frozen=True, eq=False)
class Cut:
    """An assignment of every operator to a stage.

    Args:
        graph: a training or evaluation graph.
        stage_of: stage of every operator.
        training: whether gradients are sent back.
    """

    graph: CapturedGraph
    stage_of: Mapping[str, int]
    training: bool
    lanes: dict[Lane, list[Slot]] = field(default_factory=dict, init=False)
    split_uses: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._check()
        for node in self.graph.operators:
            self._route(node.name)

    @property
    def loss_stage(self) -> int:
        """The stage that computes the loss, and has the outputs in evaluation."""
        return self.stage_of[self.graph.loss]

    @cached_property
    def result_names(self) -> frozenset[str]:
        """Operators whose values are results of the whole graph: the loss and the outputs."""
        known = self.graph.position
        outputs = (name for name in self.graph.outputs if isinstance(name, str) and name in known)
        return frozenset({self.graph.loss, *outputs})

    def operators(self, stage: int) -> list[str]:
        """Return the operators of a stage, in graph order."""
        return [node.name for node in self.graph.operators if self.stage_of[node.name] == stage]

    def received(self, stage: int) -> list[Slot]:
        """Return the slots that a stage receives: per value, or per use if uses are separate."""
        received, position = list[Slot](), self.graph.position
        for lane, slots in self.lanes.items():
            if lane.kind is TransferKind.ACTIVATION and lane.target == stage:
                for value, _ in slots:
                    received += self._separate_uses(value, stage) or [Slot(value)]
        return sorted(received, key=lambda s: (position[s.value], position.get(s.use, -1)))

    def sent(self, stage: int) -> list[Slot]:
        """Return the slots of the activations that a stage sends, after the loss if it has it."""
        slots_sent = {Slot(self.graph.loss): None} if stage == self.loss_stage else {}
        for lane, slots in self.lanes.items():
            if lane.kind is TransferKind.ACTIVATION and lane.source == stage:
                slots_sent.update(dict.fromkeys(slots))
        return list(slots_sent)

    def returning(self, stage: int) -> list[Slot]:
        """Return the slots of the gradients that a stage receives; values used last come first."""
        returned: dict[Slot, None] = {}
        for lane, slots in self.lanes.items():
            if lane.kind is TransferKind.GRADIENT and lane.target == stage:
                returned.update(dict.fromkeys(slots))
        return sorted(returned, key=lambda slot: self.graph.last_use(slot.value), reverse=True)

    def in_segments(self, stage: int, firsts: Sequence[str]) -> Cut:
        """Return a cut in which the segments of one stage are stages, numbered from it; later
        stages move up.

        Args:
            firsts: the first operator of every segment but the first.
        """
        if not firsts:
            return self
        stage_of, segment = {}, stage
        for node in self.graph.operators:
            home = self.stage_of[node.name]
            if home == stage:
                segment += node.name in firsts
                stage_of[node.name] = segment
            else:
                stage_of[node.name] = home + len(firsts) * (home > stage)
        return Cut(self.graph, stage_of, training=self.training)

    def forked(self, stage: int) -> list[str]:
        """Return the values of a stage whose gradients come back separately for each use."""
        names = [name for name in self.split_uses if self.stage_of[name] == stage]
        return sorted(names, key=self.graph.position.__getitem__)

    def _route(self, name: str) -> None:
        stage = self.stage_of[name]
        users = self.graph.users.get(name, ())
        uses = [self.stage_of[user] for user in users]
        has_gradient = self.training and self.graph.requires_grad[name]
        if has_gradient and not is_chained(stage, uses):
            self.split_uses.add(name)
        if name in self.result_names and name != self.graph.loss:
            uses.append(self.loss_stage)
        for lane in routes(stage, uses, has_gradient=has_gradient):
            returns = lane.kind is TransferKind.GRADIENT
            separate = self._separate_uses(name, lane.source) if returns else []
            self.lanes.setdefault(lane, []).extend(separate or [Slot(name)])

    def _separate_uses(self, value: str, stage: int) -> list[Slot]:
        if value not in self.split_uses:
            return []
        users = self.graph.users[value]
        return [Slot(value, user) for user in users if self.stage_of[user] == stage]

    def _check(self) -> None:
        stage_of, hint = self.stage_of, "plan the job again"
        for node in self.graph.operators:
            if node.name not in stage_of:
                raise MismatchError(f"plan: has no stage for operator {node.name!r}", hint=hint)
        for source, target in self.graph.edges:
            if stage_of[source] > stage_of[target]:
                raise MismatchError(
                    f"plan: {target!r} (stage {stage_of[target]}) reads {source!r}, which a later "
                    f"stage ({stage_of[source]}) computes",
                    hint=hint,
                )
        for name, group in self.graph.groups.items():  # named by its first operator
            if stage_of[group] != stage_of[name]:
                raise MismatchError(
                    f"plan: {name!r} shares memory with {group!r} but is in another stage",
                    hint=hint,
                )


def evaluation_stages(
    graph: CapturedGraph, training: CapturedGraph, plan: Mapping[str, int]
) -> dict[str, int]:
    """Return a stage for every operator of the evaluation graph.

    An operator goes to the stage of its parameters and buffers, as early as its inputs and its
    group allow; if any assignment is possible, this one is. The loss waits for the outputs.

    Raises:
        CaptureError: a parameter is only in a stage before the values that it is used with.
    """
    # Stages that hold each parameter and buffer in training, by full name.
    holders = {
        state.name: {plan[user] for user in training.users[placeholder]}
        for placeholder, state in training.states.items()
        if state.kind != "constant" and training.users.get(placeholder)
    }
    sources = {n.name: [s.name for s in graph.tensor_inputs(n)] for n in graph.operators}
    states = {
        name: [n for n in (graph.states[s].name for s in read if s in graph.states) if n in holders]
        for name, read in sources.items()
    }
    sources[graph.loss] += [name for name in graph.outputs if name in sources]
    stage_of = dict.fromkeys(sources, 0)
    lowest_of_group = dict.fromkeys(graph.groups.values(), 0)
    changed = True
    while changed:  # a member of a group may have to wait for one that comes later
        changed = False
        for name, group in ((name, graph.groups.get(name, "")) for name in sources):
            stage = max(stage_of.get(source, 0) for source in (*sources[name], name))
            stage = max(stage, lowest_of_group.get(group, 0))
            if states[name]:
                common = set.intersection(*(holders[state] for state in states[name]))
                allowed = [each for each in common if each >= stage]
                if not allowed:
                    raise CaptureError(
                        f"model: in evaluation {name!r} needs {states[name][0]!r} after its stage",
                        hint="use fewer stages, or the same order of layers in evaluation as in "
                        "training",
                    )
                stage = min(allowed)
            changed = changed or stage != stage_of[name]
            stage_of[name] = stage
            if group:
                lowest_of_group[group] = stage
    return stage_of


class Pass(IntEnum):
    """What makes or changes the code of a stage, in the order in which this happens.

    Every pass may be left out but the first. :data:`MARK` adds the marks of a measurement between
    operators.
    """

    BUILD = 0
    CAST = 1
    SPLIT = 2
    COMPILE = 3
    MARK = 4


@dataclass(frozen=True, eq=False)
class StageCode:
    """A stage as a function.

    ``module(seed, *states, *inputs, *received)`` returns one tensor per entry of ``results``.

    Args:
        states: (placeholder, use) of each state argument; ``use`` is "" unless the parameter has
            one accumulator per use.
        inputs: names of the batch tensors that it reads.
        received: slots that it reads.
        results: slots that it returns: values that leave the stage, and each remote use of a value
            whose gradients come back separately for each use.
        last: the last pass that the code went through.
    """

    module: Callable[..., tuple[Tensor, ...]]
    states: tuple[Slot, ...]
    inputs: tuple[str, ...]
    received: tuple[Slot, ...]
    results: tuple[Slot, ...]
    last: Pass = Pass.BUILD

    def module_for(self, next_pass: Pass) -> fx.GraphModule:
        """Return the module, for a pass that is to change its operators.

        Raises:
            ValueError: the code went through this pass or a later one, or has no operators any
                more: it is compiled.
        """
        if self.last >= next_pass or not isinstance(self.module, fx.GraphModule):
            raise ValueError(
                f"code of a stage: {next_pass.name} cannot follow {self.last.name}; the order is "
                f"{', '.join(each.name for each in Pass)}, and nothing follows COMPILE"
            )
        return self.module

    def after(self, last: Pass, module: Callable[..., tuple[Tensor, ...]]) -> StageCode:
        """Return the code that a pass has made of this one."""
        return replace(self, module=module, last=last)


_CPU = torch.device("cpu")


def build_stage(cut: Cut, stage: int, span: Span | int, device: torch.device = _CPU) -> StageCode:
    """Build the code of ``stage`` for some samples of a micro-batch.

    Args:
        span: of the micro-batch; a number stands for a whole micro-batch of this size.
        device: where it runs and creates tensors.

    Raises:
        CaptureError: the graph was captured for another, fixed batch size.
    """
    graph, span = cut.graph, Span.of(span) if isinstance(span, int) else span
    if graph.fixed and not (span.is_whole and span.whole == graph.samples):
        raise CaptureError(
            f"model: captured for {graph.samples} samples, not for {span.size}",
            hint="let replicas take whole micro-batches",
        )
    place_subgraphs(graph.root, device)
    return _Builder(cut, stage, span, device).build()


def on_device(arguments: Any, device: torch.device) -> Any:
    """Replace the device in the arguments of an operator, which was captured on the CPU."""
    return fx.node.map_aggregate(
        arguments, lambda item: device if isinstance(item, torch.device) else item
    )


def place_subgraphs(root: fx.GraphModule, device: torch.device) -> None:
    """Let the branches and bodies that operators call compute on a device."""
    if device == _CPU:
        return
    for module in root.modules():
        if isinstance(module, fx.GraphModule) and module is not root:
            for node in module.graph.nodes:
                node.args, node.kwargs = on_device((node.args, node.kwargs), device)
            module.recompile()


def uses_of_parameter(graph: CapturedGraph, placeholder: str) -> tuple[str, ...]:
    """Return the operators that use a parameter, if several: each has its own accumulator."""
    users = graph.users.get(placeholder, ())
    several = graph.states[placeholder].kind == "parameter" and len(users) > 1
    return users if several else ()


class _Builder:
    """Copies the operators of a stage into a graph of its own.

    Attributes:
        local: the nodes of that graph for values, states, inputs and uses.
    """

    def __init__(self, cut: Cut, stage: int, span: Span, device: torch.device) -> None:
        self.cut, self.stage, self.span, self.device = cut, stage, span, device
        self.captured, self.graph = cut.graph, fx.Graph()
        self.switch = Switch(self.graph)
        self.received = cut.received(stage)
        self.local: dict[Slot, fx.Node] = {}

    def build(self) -> StageCode:
        captured, seed = self.captured, self.graph.placeholder("seed")
        nodes = [captured.operators[captured.position[n]] for n in self.cut.operators(self.stage)]
        read = [(source.name, node.name) for node in nodes for source in node.all_input_nodes]
        states = dict.fromkeys(self.state_slot(*one) for one in read if one[0] in captured.states)
        wanted = {name for name, _ in read}
        if self.stage == self.cut.loss_stage:
            wanted |= {name for name in captured.outputs if isinstance(name, str)}
        inputs = [name for name in captured.inputs if name in wanted]
        for slot in [*states, *map(Slot, inputs), *self.received]:
            self.local[slot] = self.graph.placeholder("_".join(filter(None, slot)))
        forks: dict[str, list[str]] = {}  # values to fork after the last operator that writes them
        for name in self.cut.forked(self.stage):
            forks.setdefault(captured.last_writer.get(name, name), []).append(name)
        for node in nodes:
            self.switch.to(region_of(node))
            seeder = seeder_of(node, captured.root)
            if seeder is not None:
                self.graph.call_function(seeder, (seed, seed_of(node.name)))
            copy = self.local[Slot(node.name)] = self.copy(node)
            has_backward = self.cut.training and captured.requires_grad[node.name]
            if has_backward and draws_backward(node, captured.root):
                self.graph.call_function(seed_backward, (copy, seed, seed_of(node.name)))
            for name in forks.get(node.name, ()):
                self.fork(name, node.name)
        self.switch.to(WHOLE)
        results = self.results()
        self.graph.output(tuple(self.local[slot] for slot in results))
        module = fx.GraphModule(captured.root, self.graph, class_name=f"Stage{self.stage}")
        return StageCode(module, tuple(states), tuple(inputs), tuple(self.received), tuple(results))

    def state_slot(self, placeholder: str, user: str) -> Slot:
        per_use = self.cut.training and uses_of_parameter(self.captured, placeholder)
        return Slot(placeholder, user if per_use else "")

    def copy(self, node: fx.Node) -> fx.Node:
        target: Any = node.target
        captured, samples = self.captured, self.span.size
        if not self.span.is_whole and is_random(node, captured.root):
            target = whole_draw(captured, node, self.span)
            samples = self.span.whole

        def local(source: fx.Node) -> Any:
            if source.op == "get_attr":
                return self.graph.get_attr(str(source.target))
            if captured.has_no_tensor(source):
                return captured.size_of_node(source, samples, self.span.length)
            if source.name in captured.states:
                return self.local[self.state_slot(source.name, node.name)]
            own_use = self.local.get(Slot(source.name, node.name))
            return own_use if own_use is not None else self.local[Slot(source.name)]

        args, kwargs = fx.node.map_arg(on_device((node.args, node.kwargs), self.device), local)
        copy = self.graph.create_node("call_function", target, args, kwargs, node.name)
        if region_of(node).gradients or not gives_views(target):
            return copy
        return self.graph.call_function(without_gradient, (copy, [*args, *kwargs.values()]))

    def fork(self, name: str, writer: str) -> None:
        """Give every later use of a value its own alias, with gradients summed in order."""
        position = self.captured.position
        users = [u for u in self.captured.users[name] if position[u] > position[writer]]
        self.switch.to(WHOLE)
        fork = self.graph.call_function(fork_uses, (self.local[Slot(name)], len(users)))
        for index, user in enumerate(users):
            item = self.graph.call_function(operator.getitem, (fork, index))
            self.local[Slot(name, user)] = item

    def results(self) -> list[Slot]:
        """Return the slots of what leaves the stage.

        Raises:
            CaptureError: the model returns a state that no operator of this stage reads.
        """
        captured, results = self.captured, dict[Slot, None]()
        if self.stage == self.cut.loss_stage:
            for name in (captured.loss, *captured.outputs):
                if name in captured.states and Slot(name) not in self.local:
                    raise CaptureError(
                        f"model: returns {captured.states[name].name!r}, which metrics would get "
                        "from another stage",
                        hint="return a copy of it (.clone()), or leave it out of what the model "
                        "returns",
                    )
                if isinstance(name, str):
                    results[Slot(name)] = None
        for lane, slots in self.cut.lanes.items():
            if lane.source == self.stage and lane.kind is TransferKind.ACTIVATION:
                results.update(dict.fromkeys(slots))
            elif lane.target == self.stage and lane.kind is TransferKind.GRADIENT:
                results.update((slot, None) for slot in slots if slot in self.local)
        return [slot for slot in results if slot not in self.received]


def fork_uses(value: Tensor, uses: int) -> tuple[Tensor, ...]:
    """Return one alias of ``value`` per use; gradients are summed last use first, as usual."""
    return _Fork.apply(value, uses)  # type: ignore[no-any-return, no-untyped-call]


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
    """Brings a received activation into a stage's autograd graph and stores its gradient.

    A leaf would convert the gradient to its own layout, and sums in another layout differ in bits;
    here the gradient keeps the layout that it has in one process.
    """

    @staticmethod
    def forward(
        ctx: Any, _: Tensor, value: Tensor, caught: dict[Slot, Tensor | None], slot: Slot
    ) -> Tensor:
        """Return an alias of ``value`` that requires a gradient because the first argument does."""
        ctx.set_materialize_grads(False)
        ctx.caught, ctx.slot = caught, slot
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None, None, None]:
        """Store the gradient; it goes no further."""
        ctx.caught[ctx.slot] = gradient
        return None, None, None, None
