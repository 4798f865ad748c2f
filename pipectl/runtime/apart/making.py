"""Which half of a stage a rank has, and what travels between the halves."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pipectl.capture import Cut, Lane, Slot
from pipectl.graph import TransferKind
from pipectl.plan import Stage
from pipectl.runtime.apart.agreement import Announcements
from pipectl.runtime.apart.backward_half import BackwardHalf
from pipectl.runtime.apart.ends import Ends, places_of
from pipectl.runtime.apart.forward_half import ForwardHalf
from pipectl.runtime.apart.refusal import check_operators
from pipectl.runtime.device import Device

Cuts = Mapping[tuple[bool, int], Cut]
"""By (training, micro-batch size)."""


def make_half(
    stage: Stage,
    index: int,
    rank: int,
    announcements: Announcements,
    cuts: Cuts,
    states: Mapping[str, Tensor],
    device: Device,
    precision: str,
) -> ForwardHalf | BackwardHalf:
    """The half of a stage that a rank has.

    Args:
        index: of the stage.
        announcements, others: see :class:`Ends` and :class:`StageRuntime`.

    Raises:
        MismatchError: the stage's backward cannot run on another rank.
    """
    training = {key: cut for key, cut in cuts.items() if key[0]}
    cut = next(iter(training.values()))
    if not stage.recompute:
        check_operators(cut, index)
    ranks = stage.ranks[0], stage.updating_ranks[0]
    ahead = rank == ranks[0]
    ends = Ends(ranks[ahead], places_of(cut, index), stage.recompute, announcements)
    if ahead:
        return ForwardHalf(ends, index, cuts, states, device, precision)
    return BackwardHalf(ends, index, training, states, device, precision)


def add_lanes(cut: Cut, states: Mapping[str, Tensor], lanes: list[Lane]) -> None:
    """Let a cut have the lanes between the halves of its stages, and empty ones a plan has."""
    for lane in lanes:
        slots: list[Slot] = []
        if lane.kind is TransferKind.SAVED:
            slots = [Slot(str(place)) for place in range(places_of(cut, lane.source))]
        elif lane.kind is TransferKind.WEIGHT:
            slots = [Slot(name) for name in trained_parameters(cut, lane.source, states)]
        cut.lanes.setdefault(lane, slots)


def trained_parameters(cut: Cut, stage: int, states: Mapping[str, Tensor]) -> list[str]:
    """Full names of the parameters of a stage that are not frozen, sorted."""
    return sorted(
        state.name
        for placeholder, state in cut.graph.states.items()
        if state.kind == "parameter"
        and states[state.name].requires_grad
        and any(cut.stage_of[user] == stage for user in cut.graph.users.get(placeholder, ()))
    )
