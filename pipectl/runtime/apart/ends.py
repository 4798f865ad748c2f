"""What the two halves of a stage have in common."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pipectl.capture import Cut, Slot
from pipectl.capture.stage import StageCode
from pipectl.runtime.apart.agreement import Announcements
from pipectl.runtime.stage import StageRuntime

_MOST_PLACES = 512


@dataclass(frozen=True)
class Ends:
    """Of the messages between two halves, seen from one of them.

    Args:
        other_rank: of the other half.
        places: tensors that a message of saved values may have.
        recomputes: whether it holds only what a forward starts from.
    """

    other_rank: int
    places: int
    recomputes: bool
    announcements: Announcements


def places_of(cut: Cut, stage: int) -> int:
    """Tensors that a message of saved values may have; what is more travels with the small ones.

    Some operators save one tensor, few more than three.
    """
    return min(_MOST_PLACES, 8 + 3 * len(cut.operators(stage)))


def values_received(code: StageCode) -> list[Slot]:
    """The slots of the values that a stage receives, each once."""
    return list(dict.fromkeys(Slot(slot.value) for slot in code.received))


def lasting_states(stage: StageRuntime, size: int) -> dict[int, Tensor]:
    """The state arguments that no forward writes, by index: both halves have the same."""
    written = {index for index, _ in written_states(stage, size)}
    arguments = enumerate(stage.arguments(size))
    return {index: tensor for index, tensor in arguments if index not in written}


def written_states(stage: StageRuntime, size: int) -> list[tuple[int, Tensor]]:
    """The state arguments that forwards write, with their indices."""
    written, code = stage.graph(size).written, stage.codes[True, size]
    arguments = stage.arguments(size)
    return [(i, arguments[i]) for i, slot in enumerate(code.states) if slot.value in written]
