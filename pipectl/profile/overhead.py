"""What a step and a stage take besides operators: the optimizer, and the work at borders."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipectl.profile.memory import StepMemory


@dataclass(frozen=True)
class OptimizerCost:
    """Optimizer state per parameter byte, and the time of a step per parameter byte.

    Args:
        step_memory: temporary values of a step.
    """

    state_bytes_per_parameter_byte: float = field(metadata={"key": "state_bytes_per_parameter"})
    step_s_per_byte: float
    step_memory: StepMemory = field(default_factory=StepMemory)


@dataclass(frozen=True)
class StageOverhead:
    """What a stage takes besides its operators, in seconds; and when its data stays in the cache.

    Args:
        forward_s, backward_s: of every forward and backward.
        received_s, sent_s: of every value with gradient that enters and leaves a stage.
        gradient_received_s, gradient_sent_s: of every gradient.
        cache_bytes: a stage that works on less finds its data in the cache; None if unknown.
    """

    forward_s: float = 0.0
    received_s: float = 0.0
    sent_s: float = 0.0
    backward_s: float = 0.0
    gradient_received_s: float = 0.0
    gradient_sent_s: float = 0.0
    cache_bytes: int | None = None

    def uncached(self, working_set_bytes: float) -> float:
        """Share of its operators' way from cached to other times that a stage goes.

        Args:
            working_set_bytes: what it touches in one forward and backward.
        """
        if not self.cache_bytes:
            return 1.0
        return min(1.0, max(0.0, 2 * (working_set_bytes / self.cache_bytes - 1)))
