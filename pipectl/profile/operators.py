"""What operators, stages and an optimizer cost: the parts of ``profile.json``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil
from typing import Annotated, Any, Literal

from pipectl.fields import FieldError, NamedBytes, Size, read_value

NO_TEMPORARIES = "the memory of temporary values is not given: taken as none"


def _to_times(value: Any) -> dict[int, tuple[float, float]]:
    """From ``{micro-batch size: [forward_s, backward_s]}``."""
    times = read_value(Mapping[str, tuple[float, float]], value)
    if not all(re.fullmatch("0*[1-9][0-9]{0,17}", size) for size in times):
        raise FieldError("must be {micro-batch size: [forward_s, backward_s]}")
    return {int(size): pair for size, pair in times.items()}


def _to_group(value: Any) -> str | None:
    return None if value == "" else str(value)


Times = Annotated[Mapping[int, tuple[float, float]], _to_times]
Phase = Literal["forward", "backward"]


@dataclass(frozen=True)
class OperatorMemory:
    """Live bytes of one operator, for one micro-batch of the profile's size.

    Args:
        made_bytes: storages that its value brings; 0 where it lies in memory of another value.
        storage: the value whose memory its own lies in; its own id if it brings storages.
        forward_bytes: most it allocates at once in its forward, value and saved bytes included.
        backward_bytes: most it allocates at once in its backward, gradients included.
        gradients: (value or parameter, bytes) of what its backward gives; 0 bytes where that is
            the memory of the gradient it got.
        buffers: (full name, bytes) of each buffer it uses.
    """

    made_bytes: int
    storage: str
    forward_bytes: int
    backward_bytes: int
    gradients: NamedBytes = ()
    buffers: NamedBytes = ()


@dataclass(frozen=True)
class Operator:
    """One operator of the graph with the cost of its forward and backward.

    Args:
        id: unique within the profile; the graph node's name.
        name: what people read, e.g. ``blocks.3.attention.linear``.
        parameters: (full name, bytes) of each parameter used; a parameter that several operators
            of one stage use is stored once.
        output_bytes: what crosses a cut behind this operator, once per consumer stage.
        gradient_bytes: what comes back; 0 for integer values and values without gradient.
        saved: (value, bytes) kept from forward to backward; equal values are one storage.
        timings: micro-batch size to (forward_s, backward_s), for sizes besides the profile's own.
        cached: the same for a stage whose data stays in the processor's cache between two
            micro-batches, for every measured size; empty where that makes no difference.
        group: operators of an equal group must share a stage.
        signature: digest of the operator and its arguments; tells where two graphs differ.
        memory: what it allocates while it runs; None where that was not measured.
        flops: floating-point operations of one forward and backward; None if nobody counted.
        phase: ``forward`` or ``backward`` in graphs where the two are operators of their own, whose
            values go one way; None where one operator does both.
        memory_bytes: all memory it takes in a stage, where only that is known.
        transfer_s: to move its output between an accelerator and the host; None if it follows
            from ``output_bytes``.
    """

    id: str
    name: str
    forward_s: float
    backward_s: float
    parameter_bytes: Size
    output_bytes: Size
    gradient_bytes: Size
    parameters: NamedBytes = ()
    saved: NamedBytes = field(default=(), metadata={"explicit": True})
    timings: Times = field(default_factory=dict)
    cached: Times = field(default_factory=dict)
    group: Annotated[str | None, _to_group] = None
    signature: str | None = None
    memory: OperatorMemory | None = None
    flops: int | None = None
    phase: Phase | None = None
    memory_bytes: Size | None = None
    transfer_s: float | None = None

    def scaled(self, forward: float, backward: float) -> Operator:
        """With the times of forward and backward multiplied, at every size."""

        def times(known: Times) -> Times:
            return {size: (f * forward, b * backward) for size, (f, b) in known.items()}

        return replace(
            self,
            forward_s=self.forward_s * forward,
            backward_s=self.backward_s * backward,
            timings=times(self.timings),
            cached=times(self.cached),
        )

    @staticmethod
    def complete_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """With what a file may leave out."""
        if fields.get("cpu_only"):
            raise FieldError("stages on CPUs beside the devices are not planned", "cpu_only")
        known = {key: value for key, value in fields.items() if value is not None}
        node_id, output_bytes = known.get("id"), known.get("output_bytes")
        if not known.get("parameters"):
            size = known.get("parameter_bytes")
            known["parameters"] = [[node_id, size]] if size else []
        return {
            "name": node_id,
            "gradient_bytes": 0 if "phase" in known else output_bytes,
            "saved": [[node_id, output_bytes]],
            "group": known.get("colocate"),  # as some call it, and number it
            **known,
        }


@dataclass(frozen=True)
class StepMemory:
    """Temporary values of an optimizer's step, in bytes per byte of parameters.

    Args:
        current: of the parameter that is being updated.
        previous: of the one before it, whose temporary values a loop may still hold.
        everything: of all parameters, where they are updated together.
    """

    current: float = 0.0
    previous: float = 0.0
    everything: float = 0.0

    def peak_bytes(self, parameters: Sequence[int]) -> int:
        """The most at once, for parameters of these sizes in the optimizer's order."""
        pairs = pairwise((0, *parameters))
        alone = max((self.current * now + self.previous * last for last, now in pairs), default=0)
        return ceil(alone + self.everything * sum(parameters))


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
