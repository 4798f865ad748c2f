"""What one pass of the engine gets, and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from pipectl.capture.randomness import seed_of
from pipectl.runtime.passes import Batch
from pipectl.runtime.recording import Recording
from pipectl.runtime.wiring import Range, Wiring
from pipectl.schedule import Action


@dataclass
class StepInput:
    """What one pass of a program works on.

    Args:
        sizes: samples of every micro-batch.
        weights: weight in the loss of every micro-batch, or of this rank's part of it; empty in
            evaluation.
        batches: yields (inputs, targets) of every micro-batch; empty where no stage reads them.
        seed: parts from which random operators are seeded.
        scale: of the loss in backwards.
        wiring: of the pass; None for the engine's own.
        pieces: what ``batches`` yields, where that is not every micro-batch as a whole.
        recording: is told when every row began and ended.
    """

    sizes: Sequence[int]
    weights: Sequence[float]
    batches: Iterator[Batch]
    seed: tuple[int | str, ...]
    scale: float = 1.0
    wiring: Wiring | None = None
    pieces: Mapping[int, Range] | None = None
    recording: Recording | None = None

    def seed_of(self, micro_batch: int) -> int:
        """What random operators of one micro-batch are seeded from."""
        return seed_of(*self.seed, micro_batch)


@dataclass
class StepOutput:
    """What one pass gave on this rank.

    Attributes:
        losses: loss of every micro-batch, or part of one, that this rank computes, in order.
        busy_s: time in forwards and backwards.
    """

    losses: list[Tensor] = field(default_factory=list)
    busy_s: float = 0.0


Update = Callable[[Action, StepOutput], None]
"""Called at an UPDATE, with what the pass gave so far."""
