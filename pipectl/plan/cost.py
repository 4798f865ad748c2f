"""What a stage costs: seconds of its actions, and bytes it holds and allocates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StagePeaks:
    """Most bytes a stage allocates at once, above what it held before; full micro-batches.

    Args:
        forward_bytes: in a forward; saved bytes included, received values not.
        backward_bytes: in a backward that adds to gradients from before.
        first_backward_bytes: in a backward that makes the parameters' gradients.
        update_bytes: in an optimizer step.
    """

    forward_bytes: int
    backward_bytes: int
    first_backward_bytes: int
    update_bytes: int


@dataclass(frozen=True)
class StageCost:
    """Predicted cost of a stage: seconds for one full micro-batch, and resident bytes.

    Args:
        update_s: optimizer step of the stage, once per step.
        parameter_bytes: parameters.
        optimizer_bytes: optimizer state.
        saved_bytes: kept from forward to backward by one micro-batch, without recomputation.
        input_bytes: the part of them that recomputation starts from.
        gradient_bytes: of the parameters, from the first backward of a step to its end; as much
            as the parameters if None.
        buffer_bytes: buffers, such as BatchNorm's statistics.
        peaks: of the most samples that a replica takes at once; None where nothing is known of
            temporary values.
        weight_s: the part of ``backward_s`` in which a split backward makes the gradients of the
            parameters; half of it if None.
        deferred_bytes: kept by one micro-batch between the halves of a split backward; as much as
            ``saved_bytes`` if None.
    """

    forward_s: float
    backward_s: float
    update_s: float
    parameter_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    gradient_bytes: int | None = None
    buffer_bytes: int = 0
    input_bytes: int = 0
    peaks: StagePeaks | None = None
    weight_s: float | None = None
    deferred_bytes: int | None = None

    @property
    def halves_s(self) -> tuple[float, float]:
        """Seconds of the input half and of the weight half of a split backward."""
        weight_s = self.backward_s / 2 if self.weight_s is None else self.weight_s
        return self.backward_s - weight_s, weight_s

    @property
    def between_bytes(self) -> int:
        """Kept by one micro-batch between the halves of a split backward."""
        return self.saved_bytes if self.deferred_bytes is None else self.deferred_bytes

    @property
    def grown_bytes(self) -> int:
        """By how much one micro-batch keeps more between these halves than before them."""
        return max(0, self.between_bytes - self.saved_bytes)

    @property
    def freed_bytes(self) -> int:
        """By how much one micro-batch keeps less between these halves than before them."""
        return max(0, self.saved_bytes - self.between_bytes)

    @property
    def accumulated_bytes(self) -> int:
        """The parameters' gradients."""
        return self.parameter_bytes if self.gradient_bytes is None else self.gradient_bytes

    @property
    def resident_bytes(self) -> int:
        """What is there from one step to the next: parameters, optimizer state and buffers."""
        return self.parameter_bytes + self.optimizer_bytes + self.buffer_bytes
