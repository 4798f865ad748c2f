"""A cut of a captured graph: what each stage computes, receives, sends and gets back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from pipectl.capture.graph import CapturedGraph
from pipectl.errors import CaptureError, MismatchError
from pipectl.graph import TransferKind, is_chained, routes


class Slot(NamedTuple):
    """One tensor of a message.

    Args:
        value: operator whose value (or gradient) travels.
        use: the operator that uses it, where each use's gradient travels on its own; else "".
    """

    value: str
    use: str = ""


class Lane(NamedTuple):
    """A directed connection between two stages: one message per micro-batch."""

    kind: TransferKind
    source: int
    target: int


@dataclass(frozen=True, eq=False)
class Cut:
    """An assignment of every operator to a stage.

    Args:
        graph: a training or evaluation graph.
        stage_of: stage of every operator.
        training: whether gradients return.
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
        """Operators whose values are results of the whole step: the loss and wanted outputs."""
        known = self.graph.position
        outputs = (name for name in self.graph.outputs if isinstance(name, str) and name in known)
        return frozenset({self.graph.loss, *outputs})

    def operators(self, stage: int) -> list[str]:
        """The operators of a stage, in graph order."""
        return [node.name for node in self.graph.operators if self.stage_of[node.name] == stage]

    def received(self, stage: int) -> list[Slot]:
        """What a stage receives: one slot per value, or one per use if uses travel separately."""
        received = []
        for lane, slots in self.lanes.items():
            if lane.kind is TransferKind.ACTIVATION and lane.target == stage:
                for value, _ in slots:
                    received += self._separate_uses(value, stage) or [Slot(value)]
        return sorted(received, key=self._order)

    def forked(self, stage: int) -> list[str]:
        """Values of a stage whose gradients come back use by use."""
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
        for route in routes(name, stage, uses, has_gradient=has_gradient):
            lane = Lane(route.kind, route.source, route.target)
            returns = route.kind is TransferKind.GRADIENT
            separate = self._separate_uses(name, route.source) if returns else []
            self.lanes.setdefault(lane, []).extend(separate or [Slot(name)])

    def _separate_uses(self, value: str, stage: int) -> list[Slot]:
        if value not in self.split_uses:
            return []
        users = self.graph.users[value]
        return [Slot(value, user) for user in users if self.stage_of[user] == stage]

    def _order(self, slot: Slot) -> tuple[int, int]:
        position = self.graph.position
        return position[slot.value], position.get(slot.use, -1)

    def _check(self) -> None:
        missing = [n.name for n in self.graph.operators if n.name not in self.stage_of]
        if missing:
            raise MismatchError(
                f"plan: has no stage for operator {missing[0]!r}", cure="plan the job again"
            )
        for source, target in self.graph.edges:
            if self.stage_of[source] > self.stage_of[target]:
                raise MismatchError(
                    f"plan: {target!r} (stage {self.stage_of[target]}) reads {source!r}, "
                    f"which a later stage ({self.stage_of[source]}) computes",
                    cure="plan the job again",
                )
        by_group: dict[str, int] = {}
        for name, group in self.graph.groups.items():
            if by_group.setdefault(group, self.stage_of[name]) != self.stage_of[name]:
                raise MismatchError(
                    f"plan: {name!r} shares memory with {group!r} but is in another stage",
                    cure="plan the job again",
                )


def evaluation_stages(
    graph: CapturedGraph, training: CapturedGraph, plan: Mapping[str, int]
) -> dict[str, int]:
    """Stages for the operators of the evaluation graph.

    An operator goes where its parameters and buffers are, and every operator as early as its
    inputs and its group allow: whatever is possible at all is possible that way. The loss waits for
    the outputs, which are wanted where it is.

    Raises:
        CaptureError: a parameter is only in a stage before the values it meets.
    """
    # Stages that hold each parameter and buffer in training, by full name.
    holders = {
        state.name: {plan[user] for user in training.users[placeholder]}
        for placeholder, state in training.states.items()
        if state.kind != "constant" and training.users.get(placeholder)
    }
    read = {
        node.name: [
            graph.states[s.name].name for s in graph.tensor_inputs(node) if s.name in graph.states
        ]
        for node in graph.operators
    }
    state_names = {
        operator: [name for name in names if name in holders] for operator, names in read.items()
    }
    sources = {n.name: [s.name for s in graph.tensor_inputs(n)] for n in graph.operators}
    sources[graph.loss] += [name for name in graph.outputs if name in sources]
    stage_of = dict.fromkeys(sources, 0)
    lowest_of_group = dict.fromkeys(graph.groups.values(), 0)
    changed = True
    while changed:  # a member of a group may have to wait for one that comes later
        changed = False
        for name, group in ((name, graph.groups.get(name, "")) for name in sources):
            stage = max(stage_of.get(source, 0) for source in (*sources[name], name))
            stage = max(stage, lowest_of_group.get(group, 0))
            if state_names[name]:
                common = set.intersection(*(holders[state] for state in state_names[name]))
                allowed = [each for each in common if each >= stage]
                if not allowed:
                    raise CaptureError(
                        f"model: in evaluation {name!r} needs {state_names[name][0]!r} after its "
                        "stage",
                        cure="use fewer stages, or the same order of layers in evaluation as in "
                        "training",
                    )
                stage = min(allowed)
            changed = changed or stage != stage_of[name]
            stage_of[name] = stage
            if group:
                lowest_of_group[group] = stage
    return stage_of
