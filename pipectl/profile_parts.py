"""What ``profile.json`` is made of: operators, and what else was measured or found of a model.

Times are in seconds and sizes in bytes, as in :mod:`pipectl.profile`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import ceil
from typing import Annotated, Any, Literal

from pipectl.fields import (
    Count,
    FieldError,
    NamedBytes,
    Size,
    read_value,
)
from pipectl.older_python import StrEnum

SEEDED_HINT = (
    "draw initial values by functions of torch, numpy or random, which training.seed seeds, or "
    "load them (model.weights)"
)
"""For a model with other initial values each time it is built."""


def _to_times(value: Any) -> dict[int, tuple[float, float]]:
    """Convert ``{micro-batch size: [forward_s, backward_s]}``."""
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
    """Memory of one operator, for one micro-batch of the profile's size.

    Args:
        made_bytes: storage that its value adds; 0 for a view of another value.
        storage: id of the value whose storage its value lies in; its own id if it adds storage.
        forward_bytes: peak bytes allocated in its forward, including its value and saved bytes.
        backward_bytes: peak bytes allocated in its backward, including gradients.
        gradients: (value or parameter, bytes) of each gradient that its backward returns; 0 bytes
            if it lies in the storage of the incoming gradient.
        buffers: (full name, bytes) of each buffer that it uses.
    """

    made_bytes: int
    storage: str
    forward_bytes: int
    backward_bytes: int
    gradients: NamedBytes = ()
    buffers: NamedBytes = ()


@dataclass(frozen=True)
class Operator:
    """One operator of the graph, with the cost of its forward and backward.

    Args:
        id: name of the graph node, unique within the profile.
        name: name shown to users, e.g. ``blocks.3.attention.linear``.
        forward_s, backward_s: time of its forward and of its backward.
        parameter_bytes: size of its parameters.
        parameters: (full name, bytes) of each parameter used; stored once per stage.
        output_bytes: bytes that cross a cut after this operator, once per consumer stage.
        gradient_bytes: bytes of the gradient that comes back; 0 if the value has no gradient. As
            many as the output if None.
        saved: (value, bytes) kept from forward to backward; equal values share one storage.
        casts: (name, bytes) of each cast of a parameter or buffer that it uses; stored once per
            stage, for all micro-batches of a step.
        timings: micro-batch size to (forward_s, backward_s), for sizes other than the profile's;
            without them, times are taken to be proportional.
        cached: as ``timings``, for every measured size, in a stage whose data stays in the
            processor's cache between two micro-batches; empty if this makes no difference.
        group: operators of the same group must share a stage; ``colocate`` means the same.
        signature: digest of the operator and its arguments, to find where two graphs differ.
        memory: memory that it allocates while it runs; if None, temporary values need none.
        flops: floating-point operations of one forward and backward (matrix products, convolutions
            and attention, as torch counts them); None if unknown.
        phase: ``forward`` or ``backward`` in imported graphs with separate operators for the two,
            whose values go one way (``gradient_bytes`` is then 0); None if one operator does both.
        memory_bytes: of imported profiles: all memory that it takes in a stage, if only that is
            known.
        transfer_s: of imported profiles: time to move its output to or from the host, if it does
            not follow from ``output_bytes``.
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
    casts: NamedBytes = ()
    timings: Times = field(default_factory=dict)
    cached: Times = field(default_factory=dict)
    group: Annotated[str | None, _to_group] = None
    signature: str | None = None
    memory: OperatorMemory | None = None
    flops: int | None = None
    phase: Phase | None = None
    memory_bytes: Size | None = None
    transfer_s: float | None = None

    def is_own(self, name: str) -> bool:
        """Return whether the operator makes a saved value only for its backward."""
        return name.startswith(f"{self.id}:")

    @cached_property
    def allocations(self) -> OperatorMemory:
        """What it allocates; if not measured, no temporaries, and its value in own storage."""
        if self.memory is not None:
            return self.memory
        own = sum(size for name, size in self.saved if self.is_own(name))
        made, given = self.output_bytes, sum(size for _, size in self.parameters)
        return OperatorMemory(made, self.id, made + own, given, self.parameters)

    @cached_property
    def parameter_gradients(self) -> tuple[tuple[str, int], ...]:
        """(name, bytes) of the parameters whose gradients its backward computes."""
        names = {name for name, _ in self.parameters}
        return tuple(pair for pair in self.allocations.gradients if pair[0] in names)

    def scaled(self, forward: float, backward: float) -> Operator:
        """Return the operator with its forward and backward times multiplied by these factors."""

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
        """Return the fields with defaults for those that a file may omit.

        Raises:
            FieldError: the operator is marked as ``cpu_only``.
        """
        if fields.get("cpu_only"):
            raise FieldError(
                "stages on CPUs in addition to the devices are not supported", "cpu_only"
            )
        known = {key: value for key, value in fields.items() if value is not None}
        node_id, output_bytes = known.get("id"), known.get("output_bytes")
        if not known.get("parameters"):
            size = known.get("parameter_bytes")
            known["parameters"] = [[node_id, size]] if size else []
        return {
            "name": node_id,
            "gradient_bytes": 0 if "phase" in known else output_bytes,
            "saved": [[node_id, output_bytes]],
            "group": known.get("colocate"),  # the name in files of other tools, with a number
            **known,
        }


@dataclass(frozen=True)
class StepMemory:
    """Temporary memory of an optimizer step, in bytes per byte of parameters.

    Args:
        current: for the parameter that is being updated.
        previous: for the parameter before it, whose temporary values a loop may still hold.
        everything: for all parameters, if they are updated together.
    """

    current: float = 0.0
    previous: float = 0.0
    everything: float = 0.0

    def peak_bytes(self, parameters: Sequence[int]) -> int:
        """Return the peak bytes for parameters of these sizes, in the optimizer's order."""
        pairs = pairwise((0, *parameters))
        alone = max((self.current * now + self.previous * last for last, now in pairs), default=0)
        return ceil(alone + self.everything * sum(parameters))


@dataclass(frozen=True)
class OptimizerCost:
    """Cost of the optimizer per byte of parameters.

    Args:
        state_bytes_per_parameter_byte: bytes of optimizer state.
        step_s_per_byte: seconds of an optimizer step.
        step_memory: its temporary memory.
    """

    state_bytes_per_parameter_byte: float = field(metadata={"key": "state_bytes_per_parameter"})
    step_s_per_byte: float
    step_memory: StepMemory = field(default_factory=StepMemory)


@dataclass(frozen=True)
class StageOverhead:
    """Seconds that a stage takes in addition to its operators, and the size of the cache.

    Args:
        forward_s, backward_s: per forward and per backward.
        received_s, sent_s: per value with gradient that enters or leaves the stage.
        gradient_received_s, gradient_sent_s: per gradient that enters or leaves the stage.
        cache_bytes: a stage with a smaller working set runs from the cache, one with a working set
            1.5 times as large does not; None if unknown.
    """

    forward_s: float = 0.0
    received_s: float = 0.0
    sent_s: float = 0.0
    backward_s: float = 0.0
    gradient_received_s: float = 0.0
    gradient_sent_s: float = 0.0
    cache_bytes: int | None = None


@dataclass(frozen=True)
class SplitBackward:
    """Times of stages whose backwards are split, beside those of whole backwards.

    Args:
        forward_s: added to a forward, per operator that is split.
        input_share, weight_share: time of the half for inputs and of the half for weights, relative
            to the whole backward of the operators that are split.
        input_s, weight_s: added to each half, per operator that is split.
    """

    forward_s: float = 0.0
    input_share: float = 0.5
    input_s: float = 0.0
    weight_share: float = 0.5
    weight_s: float = 0.0


@dataclass(frozen=True)
class MeasuredOn:
    """The device that a profile was measured on, and when.

    Args:
        kind: device kind as in ``cluster.json``, e.g. ``cpu``.
        model: name of the processor or accelerator.
        cores: number of cores that the measuring process could use.
        threads: number of threads that an operator could use.
        torch: version of torch.
        neighbours: number of processes that computed at the same time.
        host: name of the machine.
        measured_at: end of the measurement, in seconds since the epoch.
        seconds: duration of the measurement.
        resumed: number of measurements taken over from an interrupted attempt.
        memory_bytes: what tensors can have of an accelerator's memory: without what the driver,
            kernels and libraries hold, and what torch's allocator held unused while the model was
            measured. None for CPUs.
    """

    kind: str
    model: str = "unknown"
    cores: Count = 1
    threads: Count = 1
    torch: str = "unknown"
    neighbours: int = 0
    host: str | None = None
    measured_at: float | None = None
    seconds: float | None = None
    resumed: int = 0
    memory_bytes: int | None = None


@dataclass(frozen=True)
class SmallestMicroBatch:
    """The least samples of a micro-batch that a model takes in training.

    Args:
        reason: why it takes no fewer: a norm, its line and what torch says; or the line that
            computes something else for one sample.
    """

    samples: Count
    reason: str


class Readings(StrEnum):
    """Whether samples are the same at each reading: in all processes, in each, or never."""

    SAME = "same"
    BY_PROCESS = "by process"
    EACH = "each"


@dataclass(frozen=True)
class HalvedLoss:
    """The loss of some samples beside that of their halves, weighted as two micro-batches are.

    Args:
        samples: number of samples, of which each half has as many.
        whole: their loss as one micro-batch.
        halves: their loss as two micro-batches.
        difference: of the gradients with which the backward of the model begins, relative to the
            larger ones.
        depends: whether the difference is more than rounding, so that the number of micro-batches
            changes what is trained.
    """

    samples: Count
    whole: float
    halves: float
    difference: float
    depends: bool

    def __str__(self) -> str:
        return (
            f"the loss of a batch is {'not ' if self.depends else ''}the mean of the losses of its "
            f"micro-batches ({self.samples} samples: {self.whole:.4g}, in two halves: "
            f"{self.halves:.4g}; gradients differ by {self.difference:.1%})"
        )


@dataclass(frozen=True)
class LoadedFile:
    """A file that the model or the data have loaded, and that no import names: code, through a
    changed ``sys.path``, by a computed name or by its path; or settings that the code has opened.

    Args:
        path: absolute.
        digest: SHA-256 of its content.
        names: dotted names under which Python finds it where its directory is searched.
        package: directory of the package that it belongs to, if that is so large that no copies of
            its files are kept.
    """

    path: str
    digest: str
    names: tuple[str, ...] = ()
    package: str | None = None
