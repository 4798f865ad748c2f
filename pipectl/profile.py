"""``profile.json``: the measured operator graph of a model. The input of the planner.

Times are in seconds and sizes in bytes, for one micro-batch of ``micro_batch_size`` samples.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import ceil
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pipectl.errors import DataFileError
from pipectl.fields import (
    VERSION,
    Count,
    DataFile,
    FieldError,
    NamedBytes,
    Size,
    read_fields,
    read_value,
    write_value,
)
from pipectl.graph import topological_order
from pipectl.link import RowTimes

_NO_TEMPORARIES = "the memory of temporary values is not given: taken as none"


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


@dataclass(frozen=True)
class MeasuredOn:
    """What a profile was measured on.

    Args:
        kind: of the device, as ``cluster.json`` calls it, e.g. ``cpu``.
        model: of the processor or accelerator, in its maker's words.
        cores: that the measuring process could use.
        threads: that an operator could use.
        torch: version.
        neighbours: processes that computed beside the measured one.
    """

    kind: str
    model: str = "unknown"
    cores: Count = 1
    threads: Count = 1
    torch: str = "unknown"
    neighbours: int = 0


@dataclass(frozen=True)
class Profile(DataFile):
    """A measured operator graph.

    Args:
        operators: in graph order, which is a topological order.
        stage: what a stage adds to its operators.
        edges: (producer id, consumer id), without duplicates.
        fingerprint: of the captured graph; None for an imported profile, which cannot be submitted.
        key: of the spec sections and factory files it was measured from; tells a stale profile.
        assumptions: what was assumed in measuring, or in reading a file that did not say.
        device: None where an imported profile does not say.
        edge_bytes: what crosses an edge where that is not its producer's ``output_bytes``.
        cluster: what an imported profile says of the devices it is meant for, as it says it.
        loading_s: to load a micro-batch, which the forwards of the operators that read inputs and
            targets first contain; 0 where processes beside the ranks load.
        rows: what rows of programs take on the node it was measured on; None if nobody measured.
        coupled: names of the operators that compute over all samples of a micro-batch, as batch
            norm does, besides the loss.
    """

    cure: ClassVar[str] = "write a new one with: pipectl profile JOB.yaml"
    name: str
    source: str
    micro_batch_size: Count
    operators: tuple[Operator, ...] = field(metadata={"key": "nodes"})
    edges: tuple[tuple[str, str], ...]
    fingerprint: str | None = None
    optimizer: OptimizerCost | None = None
    stage: StageOverhead = field(default_factory=StageOverhead)
    process_baseline_bytes: int | None = None
    key: str | None = None
    assumptions: tuple[str, ...] = ()
    device: MeasuredOn | None = None
    edge_bytes: Annotated[Mapping[tuple[str, str], int], dict] = field(default_factory=dict)
    cluster: Mapping[str, Any] = field(default_factory=dict)
    loading_s: float = 0.0
    rows: RowTimes | None = None
    coupled: tuple[str, ...] = ()

    @cached_property
    def by_id(self) -> dict[str, Operator]:
        """Operators by their id."""
        return {operator.id: operator for operator in self.operators}

    @cached_property
    def index_of(self) -> dict[str, int]:
        """Place of every operator by its id."""
        return {operator.id: index for index, operator in enumerate(self.operators)}

    @cached_property
    def edge_indices(self) -> list[tuple[int, int]]:
        """The edges between places of operators."""
        return [(self.index_of[source], self.index_of[target]) for source, target in self.edges]

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Places of the operators that read each operator's value, ascending."""
        found: list[list[int]] = [[] for _ in self.operators]
        for source, target in self.edge_indices:
            found[source].append(target)
        return tuple(tuple(sorted(readers)) for readers in found)

    @cached_property
    def has_several_sizes(self) -> bool:
        """Whether operators were measured at several micro-batch sizes."""
        return any(operator.timings for operator in self.operators)

    @property
    def optimizer_cost(self) -> OptimizerCost:
        """That of the optimizer: no state and no time where the profile does not say."""
        return self.optimizer or OptimizerCost(0.0, 0.0)

    def to_json(self) -> dict[str, Any]:
        """The documented JSON object, without absent options."""
        document = {"version": VERSION, "units": {"time": "s", "bytes": "B"}, **write_value(self)}
        for key in ("nodes", "edges"):  # the long ones come last
            document[key] = document.pop(key)
        if self.edge_bytes:
            document["edge_bytes"] = [self.edge_bytes[edge] for edge in self.edges]
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, file: str = "profile") -> Profile:
        """A profile from its JSON object; see :meth:`load`."""
        given = {key: value for key, value in document.items() if value is not None}
        links = read_fields(_Edges, given, file=file, cure=cls.cure)
        edge_bytes = dict(zip(links.edges, links.edge_bytes, strict=False))
        if edge_bytes and len(links.edge_bytes) != len(links.edges):
            sizes = f"has {len(links.edge_bytes)} sizes for {len(links.edges)} edges"
            raise DataFileError(f"{file}: edge_bytes: {sizes}", cure=cls.cure)
        fields = {
            "source": "unknown",
            "micro_batch_size": given.get("profile_batch_size", 1),
            **given,
            "edges": list(dict.fromkeys(links.edges)),
            "edge_bytes": edge_bytes,
        }
        profile = super().from_json(fields, file=file)
        assumptions = dict.fromkeys((*profile.assumptions, *_assumptions(given)))
        profile = replace(profile, assumptions=tuple(assumptions))
        return _sorted(profile, file)


class _Edges(NamedTuple):
    edges: tuple[tuple[str, str], ...]
    edge_bytes: tuple[int, ...] = ()


def _assumptions(given: Mapping[str, Any]) -> Iterator[str]:
    """What is taken for fields that a file, which is sound, leaves out."""
    if not given.keys() & {"micro_batch_size", "profile_batch_size"}:
        yield "the micro-batch size is not given: taken as 1 sample"
    for node in given["nodes"]:
        if node.get("saved") is None:
            yield "saved bytes are not given: each operator is taken to keep its output"
        if node.get("memory") is None:
            yield _NO_TEMPORARIES
    if "optimizer" not in given:
        yield "optimizer cost is not given: taken as no state and no time"


def _sorted(profile: Profile, file: str) -> Profile:
    """The profile with its operators in the topological order that changes theirs least.

    Raises:
        DataFileError: ids are not unique, edges name none, or there is a cycle.
    """
    fault = ""
    if not profile.operators:
        fault = "nodes: the graph is empty"
    elif len(profile.by_id) != len(profile.operators):
        counts = Counter(operator.id for operator in profile.operators)
        twice = next(name for name, count in counts.items() if count > 1)
        fault = f"nodes: id {twice!r} occurs twice"
    else:
        ends = (end for edge in profile.edges for end in edge)
        if (unknown := next((end for end in ends if end not in profile.by_id), None)) is not None:
            fault = f"edges: no node has the id {unknown!r}"
    if fault:
        raise DataFileError(f"{file}: {fault}", cure=Profile.cure)
    every = range(len(profile.operators))
    order = topological_order(every, profile.edge_indices)
    if len(order) < len(every):
        stuck = sorted(set(every) - set(order))
        named = ", ".join(repr(profile.operators[index].id) for index in stuck[:5])
        raise DataFileError(
            f"{file}: edges: there is a cycle among or before {named}",
            cure="an operator cannot depend on its own result: remove one edge of the cycle",
        )
    return replace(profile, operators=tuple(profile.operators[index] for index in order))
