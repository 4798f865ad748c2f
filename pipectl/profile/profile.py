"""The profile itself, and its file.

Times are in seconds and sizes in bytes, for one micro-batch of ``micro_batch_size`` samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pipectl.errors import DataFileError
from pipectl.fields import Count, read_fields, write_value
from pipectl.files import read_json, write_json
from pipectl.graph import topological_order
from pipectl.profile.operators import NO_TEMPORARIES, Operator, OptimizerCost, StageOverhead
from pipectl.row_times import RowTimes

VERSION = 1
_CURE = "write a new one with: pipectl profile JOB.yaml"


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
class Profile:
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

    def save(self, path: Path) -> None:
        """Write ``profile.json`` whole; see :func:`pipectl.files.write_json`."""
        write_json(path, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """The documented JSON object, without absent options."""
        document = {"version": VERSION, "units": {"time": "s", "bytes": "B"}, **write_value(self)}
        for key in ("nodes", "edges"):  # the long ones come last
            document[key] = document.pop(key)
        if self.edge_bytes:
            document["edge_bytes"] = [self.edge_bytes[edge] for edge in self.edges]
        return document

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read and check a profile.

        Raises:
            DataFileError: naming the file and the field that is missing or wrong.
        """
        return cls.from_json(read_json(path, cure=_CURE), file=str(path))

    @classmethod
    def from_json(cls, document: dict[str, Any], *, file: str = "profile") -> Profile:
        """A profile from its JSON object; see :meth:`load`."""
        given = {key: value for key, value in document.items() if value is not None}
        links = read_fields(_Edges, given, file=file, cure=_CURE, version=VERSION)
        edge_bytes = dict(zip(links.edges, links.edge_bytes, strict=False))
        if edge_bytes and len(links.edge_bytes) != len(links.edges):
            sizes = f"has {len(links.edge_bytes)} sizes for {len(links.edges)} edges"
            raise DataFileError(f"{file}: edge_bytes: {sizes}", cure=_CURE)
        fields = {
            "source": "unknown",
            "micro_batch_size": given.get("profile_batch_size", 1),
            **given,
            "edges": list(dict.fromkeys(links.edges)),
            "edge_bytes": edge_bytes,
        }
        profile = read_fields(cls, fields, file=file, cure=_CURE)
        assumptions = dict.fromkeys((*profile.assumptions, *_assumptions(given)))
        profile = replace(profile, assumptions=tuple(assumptions))
        _check_graph(profile, file)
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
            yield NO_TEMPORARIES
    if "optimizer" not in given:
        yield "optimizer cost is not given: taken as no state and no time"


def _check_graph(profile: Profile, file: str) -> None:
    """Ids are unique and edges name them."""
    if not profile.operators:
        raise DataFileError(f"{file}: nodes: the graph is empty", cure=_CURE)
    if len(profile.by_id) != len(profile.operators):
        counts = Counter(operator.id for operator in profile.operators)
        twice = next(name for name, count in counts.items() if count > 1)
        raise DataFileError(f"{file}: nodes: id {twice!r} occurs twice", cure=_CURE)
    for source, target in profile.edges:
        for end in (source, target):
            if end not in profile.by_id:
                raise DataFileError(f"{file}: edges: no node has the id {end!r}", cure=_CURE)


def _sorted(profile: Profile, file: str) -> Profile:
    """The profile with its operators in the topological order that changes theirs least."""
    every = range(len(profile.operators))
    order = topological_order(every, profile.edge_indices)
    if len(order) < len(every):
        stuck = sorted(set(every) - set(order))
        named = ", ".join(repr(profile.operators[index].id) for index in stuck[:5])
        raise DataFileError(
            f"{file}: edges: there is a cycle; it is among, or in front of, {named}",
            cure="an operator cannot depend on its own result: remove one edge of the cycle",
        )
    return replace(profile, operators=tuple(profile.operators[index] for index in order))
