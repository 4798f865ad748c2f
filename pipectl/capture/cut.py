"""A cut of a captured graph: what each stage receives, sends, and seeds its backward with."""

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
        """What a stage receives: one slot a value, or one a use where uses travel apart."""
        found = []
        for lane, slots in self.lanes.items():
            if lane.kind is TransferKind.ACTIVATION and lane.target == stage:
                for value, _ in slots:
                    found += self._uses_apart(value, stage) or [Slot(value)]
        return sorted(found, key=self._order)

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
            apart = self._uses_apart(name, route.source) if self._returns(route.kind) else []
            self.lanes.setdefault(lane, []).extend(apart or [Slot(name)])

    @staticmethod
    def _returns(kind: TransferKind) -> bool:
        return kind is TransferKind.GRADIENT

    def _uses_apart(self, value: str, stage: int) -> list[Slot]:
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

    An operator goes where its parameters and buffers are; one without goes where the training
    graph's operator of that name is, or, if there is none, as early as its inputs allow.

    Raises:
        CaptureError: a parameter is only in a stage before the values it meets.
    """
    holders = _holders(training, plan)
    stage_of: dict[str, int] = {}
    lowest_of_group: dict[str, int] = {}
    for node in graph.operators:
        sources = graph.tensor_inputs(node)
        earliest = max((stage_of[s.name] for s in sources if s.name in stage_of), default=0)
        group = graph.groups.get(node.name)
        earliest = max(earliest, lowest_of_group.get(group or "", 0))
        names = [graph.states[s.name].name for s in sources if s.name in graph.states]
        allowed = [holders[name] for name in names if name in holders]
        stage = _first_allowed(allowed, earliest)
        if stage is None:
            raise CaptureError(
                f"model: in evaluation {node.name!r} needs {names[0]!r} after its stage",
                cure="use fewer stages, or the same order of layers in evaluation as in training",
            )
        if not allowed:
            stage = max(earliest, min(plan.get(node.name, earliest), max(plan.values())))
        stage_of[node.name] = stage
        if group is not None:
            lowest_of_group[group] = stage
    return stage_of


def _first_allowed(allowed: list[set[int]], earliest: int) -> int | None:
    """The first stage from ``earliest`` on that holds every state; any if none is held."""
    if not allowed:
        return earliest
    common = [stage for stage in set.intersection(*allowed) if stage >= earliest]
    return min(common, default=None)


def _holders(graph: CapturedGraph, stage_of: Mapping[str, int]) -> dict[str, set[int]]:
    """Stages that hold each parameter and buffer in training, by full name."""
    found: dict[str, set[int]] = {}
    for placeholder, state in graph.states.items():
        users = graph.users.get(placeholder, ())
        if users and state.kind != "constant":
            found[state.name] = {stage_of[user] for user in users}
    return found
