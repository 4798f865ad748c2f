"""``profile.json``: the measured operator graph of a model, the input of the planner.

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
from pipectl.link import RowTimes
from pipectl.older_python import StrEnum
from pipectl.sorting import topological_order

SEEDED_HINT = (
    "draw initial values by functions of torch, numpy or random, which training.seed seeds, or "
    "load them (model.weights)"
)
"""For a model with other initial values each time it is built."""
_HEAP_SHARE = 0.15
"""Measured with glibc 2.36 on ResNet-18, ViT-B/16 and GPTs: 1% to 35% of what a step allocates,
without the memory that predictions count too much for MPI and the watcher."""
_NO_TEMPORARIES = "the memory of temporary values is not given: taken as none"


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
    """The least samples that all norms of a model take in training.

    Args:
        reason: why they take no fewer: the norm, its line and what torch says.
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
    """A file of the user's code that no import names, and that the model or the data have loaded:
    through a changed ``sys.path``, by a computed name, or by its path.

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


@dataclass(frozen=True)
class Profile(DataFile):
    """A measured operator graph.

    Args:
        name: name of the job or model.
        source: origin of the figures, shown to users.
        micro_batch_size: samples that all times and sizes are for.
        operators: the operators, in a topological order; a file may have them in any order.
        edges: (producer id, consumer id); a cycle is an error.
        fingerprint: of the captured graph, which ranks compare with their own; None for an imported
            profile, which cannot be submitted.
        optimizer: cost of the optimizer.
        stage: overhead of a stage.
        split: times of split backwards; None if they were not measured.
        process_baseline_bytes: memory of a rank before it holds a stage.
        capture_bytes: peak memory of a rank while it builds and captures the whole model; 0 on
            accelerators, or if it is not known.
        key: hash of the spec sections and factory files it depends on; detects a stale profile.
        assumptions: assumptions of the measurement, or of the import of an incomplete file.
        device: the device that it was measured on; None if an imported profile does not name it.
        edge_bytes: bytes across each edge, in the order of ``edges``, if they differ from the
            producer's ``output_bytes``, which plans use.
        cluster: the devices of an imported profile: ``accelerators`` (or ``devices``),
            ``memory_limit_bytes``, ``bandwidth_bytes_per_s``, and ``microbatches_in_batch``, the
            micro-batches of a step.
        loading_s: time to load a micro-batch, which is part of the forwards of the operators that
            read inputs and targets first; 0 if separate processes load.
        rows: row times on the node that the profile was measured on; zero if None.
        readings: whether all processes read the ``same`` samples (judged by a few of them), other
            ones ``by process``, or other ones at ``each`` reading; null if unknown.
        coupled: operators, except the loss, that compute over all samples (e.g. batch norm).
        carried: buffers that a forward writes and later forwards read, each with the operator that
            writes it last; replicas write copies of their own.
        own_code: operators that run code whose backward may differ between micro-batches
            (submodules that stay one operator, branches): a stage with one recomputes if its
            backward is on another rank.
        smallest: the smallest micro-batch that the model takes; null if it takes single samples.
        epoch: samples of an epoch, those of each length in ``data.buckets`` alone; empty if the
            data are iterable, or not known.
        halved_loss: whether the loss of a batch is the mean of the losses of its micro-batches;
            None if unknown.
        loss_unknown: why that is unknown; empty if it is known, or if a batch is one sample.
        evaluation_key: hash of the held-out data and of the metrics, which the next two are about;
            None if there are none.
        shared_samples: indices of some held-out samples, each with that of an equal one of the
            training data; empty if none were found.
        redrawn_samples: the same of samples that another process holds out, if ``shared_samples``
            are none: each process splits the rows anew.
        uneven_metrics: metrics that are functions and no means over samples, although they are
            averaged.
        code: files that the model and the data have loaded, and that no import names.
        redrawn: a parameter or buffer that has another initial value each time the model is built;
            null if none was found.
    """

    hint: ClassVar[str] = "write a new one with: pipectl profile JOB.yaml"
    name: str
    source: str
    micro_batch_size: Count
    operators: tuple[Operator, ...] = field(metadata={"key": "nodes"})
    edges: tuple[tuple[str, str], ...]
    fingerprint: str | None = None
    optimizer: OptimizerCost | None = None
    stage: StageOverhead = field(default_factory=StageOverhead)
    split: SplitBackward | None = None
    process_baseline_bytes: int | None = None
    capture_bytes: int = 0
    key: str | None = None
    assumptions: tuple[str, ...] = ()
    device: MeasuredOn | None = None
    edge_bytes: Annotated[Mapping[tuple[str, str], int], dict] = field(default_factory=dict)
    cluster: Mapping[str, Any] = field(default_factory=dict)
    loading_s: float = 0.0
    rows: RowTimes | None = None
    coupled: tuple[str, ...] = ()
    carried: tuple[tuple[str, str], ...] = ()
    own_code: tuple[str, ...] = ()
    readings: Readings | None = None
    smallest: SmallestMicroBatch | None = None
    epoch: tuple[Count, ...] = ()
    halved_loss: HalvedLoss | None = None
    loss_unknown: str = ""
    evaluation_key: str | None = None
    shared_samples: tuple[tuple[int, int], ...] = ()
    redrawn_samples: tuple[tuple[int, int], ...] = ()
    uneven_metrics: tuple[str, ...] = ()
    code: tuple[LoadedFile, ...] = ()
    redrawn: str | None = None

    def batches(self, batch_size: int, *, drop_last: bool) -> tuple[int, ...]:
        """Return the different sizes of the batches of an epoch, largest first.

        Args:
            batch_size: of a full batch.
            drop_last: whether others are left out.
        """
        sizes = {batch_size} if not self.epoch or drop_last else set[int]()
        for count in () if drop_last else self.epoch:
            full, rest = divmod(count, batch_size)
            sizes |= ({batch_size} if full else set()) | ({rest} if rest else set())
        return tuple(sorted(sizes, reverse=True))

    @property
    def heap_share(self) -> float:
        """Memory that a rank's allocator holds unused, relative to what a step allocates."""
        return _HEAP_SHARE if self.device is not None and self.device.kind == "cpu" else 0.0

    def scaled(self, factors: Mapping[str, tuple[float, float]]) -> Profile:
        """Return the profile with the times of some operators multiplied.

        Args:
            factors: of forward and backward, by the id of the operator.
        """
        operators = (
            operator.scaled(*factors[operator.id]) if operator.id in factors else operator
            for operator in self.operators
        )
        return replace(self, operators=tuple(operators))

    @cached_property
    def by_id(self) -> dict[str, Operator]:
        """Operators by id."""
        return {operator.id: operator for operator in self.operators}

    @cached_property
    def index_of(self) -> dict[str, int]:
        """Index of each operator by id."""
        return {operator.id: index for index, operator in enumerate(self.operators)}

    @cached_property
    def edge_indices(self) -> list[tuple[int, int]]:
        """Edges as pairs of operator indices."""
        return [(self.index_of[source], self.index_of[target]) for source, target in self.edges]

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the operators that read each operator's value, in ascending order."""
        readers: list[list[int]] = [[] for _ in self.operators]
        for source, target in self.edge_indices:
            readers[source].append(target)
        return tuple(tuple(sorted(each)) for each in readers)

    @cached_property
    def trained_parameters(self) -> tuple[tuple[tuple[str, int], ...], ...]:
        """(name, bytes) of the parameters of each operator that are trained.

        A parameter is trained if any operator computes a gradient of it: whoever else uses it
        updates a copy of its own.
        """
        names = {name for each in self.operators for name, _ in each.parameter_gradients}
        return tuple(
            tuple(pair for pair in each.parameters if pair[0] in names) for each in self.operators
        )

    @cached_property
    def has_several_sizes(self) -> bool:
        """Whether operators were measured at several micro-batch sizes."""
        return any(operator.timings for operator in self.operators)

    @property
    def optimizer_cost(self) -> OptimizerCost:
        """Cost of the optimizer; no state and no time if the profile does not contain it."""
        return self.optimizer or OptimizerCost(0.0, 0.0)

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON object, without absent optional fields."""
        document = {"version": VERSION, "units": {"time": "s", "bytes": "B"}, **write_value(self)}
        for key in ("nodes", "edges"):  # the long lists come last
            document[key] = document.pop(key)
        if self.edge_bytes:
            document["edge_bytes"] = [self.edge_bytes[edge] for edge in self.edges]
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, file: str = "profile") -> Profile:
        """Read a profile from its JSON object; see :meth:`load`."""
        present = {key: value for key, value in document.items() if value is not None}
        links = read_fields(_Edges, present, file=file, hint=cls.hint)
        edge_bytes = dict(zip(links.edges, links.edge_bytes, strict=False))
        if edge_bytes and len(links.edge_bytes) != len(links.edges):
            sizes = f"has {len(links.edge_bytes)} sizes for {len(links.edges)} edges"
            raise DataFileError(f"{file}: edge_bytes: {sizes}", hint=cls.hint)
        fields = {
            "source": "unknown",
            "micro_batch_size": present.get("profile_batch_size", 1),
            **present,
            "edges": list(dict.fromkeys(links.edges)),
            "edge_bytes": edge_bytes,
        }
        profile = super().from_json(fields, file=file)
        assumptions = dict.fromkeys((*profile.assumptions, *_assumptions(present)))
        profile = replace(profile, assumptions=tuple(assumptions))
        return _sort_operators(profile, file)


class _Edges(NamedTuple):
    edges: tuple[tuple[str, str], ...]
    edge_bytes: tuple[int, ...] = ()


def _assumptions(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the assumptions for fields that a valid file omits."""
    if not document.keys() & {"micro_batch_size", "profile_batch_size"}:
        yield "the micro-batch size is not given: taken as 1 sample"
    for node in document["nodes"]:
        if node.get("saved") is None:
            yield "saved bytes are not given: each operator is taken to keep its output"
        if node.get("memory") is None:
            yield _NO_TEMPORARIES
    if "optimizer" not in document:
        yield "optimizer cost is not given: taken as no state and no time"


def _sort_operators(profile: Profile, file: str) -> Profile:
    """Return the profile with its operators in the topological order closest to the file's order.

    Raises:
        DataFileError: ids are not unique, an edge or a buffer names an unknown id, or there is a
            cycle.
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
        for buffer, writer in profile.carried:
            if writer not in profile.by_id:
                fault = f"carried: {buffer!r}: no node has the id {writer!r}"
        for name in profile.own_code:
            if name not in profile.by_id:
                fault = f"own_code: no node has the id {name!r}"
    if fault:
        raise DataFileError(f"{file}: {fault}", hint=Profile.hint)
    every = range(len(profile.operators))
    order = topological_order(every, profile.edge_indices)
    if len(order) < len(every):
        stuck = sorted(set(every) - set(order))
        named = ", ".join(repr(profile.operators[index].id) for index in stuck[:5])
        raise DataFileError(
            f"{file}: edges: there is a cycle among or before {named}",
            hint="an operator cannot depend on its own result: remove one edge of the cycle",
        )
    return replace(profile, operators=tuple(profile.operators[index] for index in order))
