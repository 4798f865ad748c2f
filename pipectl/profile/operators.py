"""The nodes of a profile: operators, what they cost, and their JSON objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipectl.fields import Reader
from pipectl.profile.memory import OperatorMemory

NO_TEMPORARIES = "the memory of temporary values is not given: taken as none"
NO_SAVED = "saved bytes are not given: each operator is taken to keep its output"
PHASES = ("forward", "backward")


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
    parameter_bytes: int
    output_bytes: int
    gradient_bytes: int
    parameters: tuple[tuple[str, int], ...] = ()
    saved: tuple[tuple[str, int], ...] = ()
    timings: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    cached: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    group: str | None = None
    signature: str | None = None
    memory: OperatorMemory | None = None
    phase: str | None = None
    memory_bytes: int | None = None
    transfer_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The documented JSON object, without absent options."""
        item: dict[str, Any] = {
            "id": self.id,
            "name": self.name,
            "forward_s": self.forward_s,
            "backward_s": self.backward_s,
            "parameter_bytes": self.parameter_bytes,
            "output_bytes": self.output_bytes,
            "gradient_bytes": self.gradient_bytes,
        }
        if self.parameters:
            item["parameters"] = [list(pair) for pair in self.parameters]
        item["saved"] = [list(pair) for pair in self.saved]
        if self.timings:
            item["timings"] = _timings_json(self.timings)
        if self.cached:
            item["cached"] = _timings_json(self.cached)
        if self.memory is not None:
            item["memory"] = self.memory.to_json()
        for key in ("group", "signature", "phase", "memory_bytes", "transfer_s"):
            if getattr(self, key) is not None:
                item[key] = getattr(self, key)
        return item

    @classmethod
    def from_json(cls, item: Reader, assumptions: list[str]) -> Operator:
        """One node of a profile.

        Args:
            assumptions: gets what was taken for absent fields.

        Raises:
            DataFileError: naming the field that is missing or wrong.
        """
        node_id = item.text("id")
        output_bytes = item.size("output_bytes")
        if "saved" not in item:
            assumptions.append(NO_SAVED)
        if "memory" not in item:
            assumptions.append(NO_TEMPORARIES)
        parameter_bytes = item.size("parameter_bytes")
        named = item.pairs("parameters")
        phase = _phase(item)
        if item.flag("cpu_only", default=False):
            raise item.error("cpu_only", "stages on CPUs beside the devices are not planned")
        return cls(
            id=node_id,
            name=item.text("name", default=node_id),
            forward_s=item.number("forward_s"),
            backward_s=item.number("backward_s"),
            parameter_bytes=parameter_bytes,
            output_bytes=output_bytes,
            gradient_bytes=item.size("gradient_bytes", default=0 if phase else output_bytes),
            parameters=named or (((node_id, parameter_bytes),) if parameter_bytes else ()),
            saved=item.pairs("saved") if "saved" in item else ((node_id, output_bytes),),
            timings=item.timings("timings"),
            cached=item.timings("cached"),
            group=_group(item),
            signature=item.optional_text("signature"),
            memory=item.optional("memory", OperatorMemory.from_json),
            phase=phase,
            memory_bytes=item.size("memory_bytes") if "memory_bytes" in item else None,
            transfer_s=item.optional_number("transfer_s"),
        )


def _timings_json(times: Mapping[int, tuple[float, float]]) -> dict[str, list[float]]:
    return {str(size): list(pair) for size, pair in sorted(times.items())}


def _group(item: Reader) -> str | None:
    """The operator's group; imported files name it ``colocate`` and may number it."""
    found = item.value("group", item.value("colocate", ""))
    return str(found) if found != "" else None


def _phase(item: Reader) -> str | None:
    phase = item.optional_text("phase")
    if phase not in (None, *PHASES):
        raise item.error("phase", f"must be {' or '.join(PHASES)}, not {phase!r}")
    return phase
