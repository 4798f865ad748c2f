"""``profile.json``: the measured operator graph of a model, the input of the planner.

Times are in seconds and sizes in bytes, for one micro-batch of ``micro_batch_size`` samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, NamedTuple

from pipectl.errors import DataFileError
from pipectl.fields import (
    VERSION,
    Count,
    DataFile,
    read_fields,
    write_value,
)
from pipectl.link import RowTimes
from pipectl.profile_parts import (
    HalvedLoss,
    LoadedFile,
    MeasuredOn,
    Operator,
    OptimizerCost,
    Readings,
    SmallestMicroBatch,
    SplitBackward,
    StageOverhead,
)
from pipectl.sorting import topological_order

_HEAP_SHARE = 0.15
"""Measured with glibc 2.36 on ResNet-18, ViT-B/16 and GPTs: 1% to 35% of what a step allocates,
without the memory that predictions count too much for MPI and the watcher."""
_NO_TEMPORARIES = "the memory of temporary values is not given: taken as none"


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
        own_code: operators that run code that another rank can run backwards only after their
            forward, since it may differ between micro-batches (submodules that stay one operator,
            branches) or keeps tensors in attributes (autograd functions): a stage with one
            recomputes if its backward is on another rank.
        smallest: the smallest micro-batch that the model takes; null if it takes single samples.
        epoch: samples of an epoch, those of each length in ``data.buckets`` alone; empty if the
            data are iterable, or not known.
        halved_loss: whether the loss of a batch is the mean of the losses of its micro-batches;
            None if unknown.
        loss_unknown: why that is unknown; empty if it is known, or if a batch is one sample.
        evaluation_key: hash of the held-out data and of the metrics, which the next four are
            about; None if there are none.
        held_out: held-out samples, those of each length in ``data.buckets`` alone; empty if
            there are none, or their number is not known.
        shared_samples: indices of some held-out samples, each with that of an equal one of the
            training data; empty if none were found.
        redrawn_samples: the same of samples that another process holds out, if ``shared_samples``
            are none: each process splits the rows anew.
        uneven_metrics: metrics that are functions and no means over samples, although they are
            averaged.
        code: files that the model and the data have loaded, and that no import names.
        redrawn: a parameter, buffer or other tensor of the model that has another initial value
            each time the model is built; null if none was found.
        script_samples: samples of a step of the job's script by itself; null without one.
        script_values: what `init` would write for the job's script, by key of the job, if the
            script or its arguments have changed since it was compared; empty if they have not.
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
    held_out: tuple[Count, ...] = ()
    shared_samples: tuple[tuple[int, int], ...] = ()
    redrawn_samples: tuple[tuple[int, int], ...] = ()
    uneven_metrics: tuple[str, ...] = ()
    code: tuple[LoadedFile, ...] = ()
    redrawn: str | None = None
    script_samples: Count | None = None
    script_values: Mapping[str, Any] = field(default_factory=dict)

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
