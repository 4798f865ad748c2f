"""The plan itself, and its file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pipectl.cluster import OffloadTarget
from pipectl.errors import DataFileError
from pipectl.fields import Count, Rule, read_fields
from pipectl.files import read_json, write_json
from pipectl.graph import TransferKind
from pipectl.plan.stage import Stage
from pipectl.units import format_flops, plural

T = TypeVar("T")

VERSION = 1
MAX_MICRO_BATCHES = 2**16
"""More are a mistake, and would fill memory with rows of programs."""

MAX_NODES = 2**20
_CURE = "write a new one with: pipectl plan JOB.yaml"
_BETWEEN_STAGES = Rule(
    lambda kind: kind in (TransferKind.ACTIVATION, TransferKind.GRADIENT),
    "activation or gradient",
)


class Replication(StrEnum):
    """How the replicas of a stage share the work: whole micro-batches in turn, or the samples of
    every micro-batch."""

    WHOLE = "whole"
    SPLIT = "split"


@dataclass(frozen=True)
class Transfer:
    """Bytes that one full micro-batch moves from one stage to another."""

    kind: Annotated[TransferKind, _BETWEEN_STAGES]
    source: int
    target: int
    size_bytes: int


@dataclass(frozen=True)
class Prediction:
    """What the simulator says of the plan.

    Args:
        step_time_s: one optimizer step.
        bubble: share of the ranks' time in which they do not compute.
        utilisation: share of the step each rank computes.
        peak_memory_bytes: resident bytes of each rank, process baseline included.
        peak_flops_per_s: most floating-point operations per second of all ranks; None if unknown.
    """

    step_time_s: float
    bubble: float
    utilisation: tuple[float, ...]
    peak_memory_bytes: tuple[int, ...]
    peak_flops_per_s: float | None = None


@dataclass(frozen=True)
class Search:
    """How the stages were found.

    Args:
        max_stage_load_s: bottleneck of the chosen stages.
        lower_bound_s: no partition into as many stages has a lower bottleneck.
        exact: whether a partition attains the bound; the chosen one may still have a larger
            bottleneck, where the simulator found it faster.
        step_lower_bound_s: no plan with the numbers of stages and the micro-batch sizes that were
            tried has a shorter step, whatever its cuts, ranks and order; None if not known.
        gap: how far the plan's step is above that at most; 0.1 is 10 percent.
        finished: whether the search came to its end, and was not cut short by its budget.
    """

    planner: str
    max_stage_load_s: float
    lower_bound_s: float
    exact: bool
    planning_s: float
    step_lower_bound_s: float | None = None
    gap: float | None = None
    finished: bool = True

    def bounded(self, step_s: float, least_s: float) -> Search:
        """With a bound of the step, which a plan's own may undercut by what floats are rounded."""
        gap = max(0.0, step_s / least_s - 1) if least_s else None
        return replace(self, step_lower_bound_s=least_s, gap=gap)


@dataclass(frozen=True)
class Plan:
    """A pipeline for one model on one cluster.

    Args:
        fingerprint: of the captured graph; None if the profile was imported (cannot be submitted).
        warm_up: forwards each stage runs before its first backward, over all its replicas.
        micro_batch_size: samples of every micro-batch but the last, which may be smaller.
        node_of_rank: node index of every rank, for which the plan was made.
        key: of the spec sections and factory files it was made from; tells a stale plan.
        assumptions: what the planner had to assume.
        offload_to: where what stages offload waits.
        replication: with whole micro-batches, replica i of r takes the micro-batches i, i + r, ...
        actions: where ``schedule`` is a user's own: what every rank computes, in its order; see
            :mod:`pipectl.schedule.listed`.
        shard_optimizer: whether each replica keeps the optimizer state of a part of its stage's
            parameters; the costs of the stages then count that part.
    """

    name: str
    fingerprint: str | None
    schedule: str
    warm_up: tuple[int, ...]
    batch_size: Count
    micro_batch_size: Count
    micro_batches: Count
    stages: tuple[Stage, ...]
    transfers: tuple[Transfer, ...]
    node_of_rank: tuple[int, ...]
    memory_limit_bytes: int | None = None
    prediction: Prediction | None = None
    search: Search | None = None
    key: str | None = None
    assumptions: tuple[str, ...] = field(default=())
    replication: Replication = Replication.WHOLE
    offload_to: OffloadTarget = OffloadTarget.HOST
    actions: tuple[str, ...] = ()
    shard_optimizer: bool = False

    @property
    def predicted_step_s(self) -> float:
        """Predicted time of one optimizer step; only plans with a prediction have one."""
        assert self.prediction is not None
        return self.prediction.step_time_s

    def describe_flops(self, step_s: float | None) -> str:
        """``3.41 TFLOP/s (12% of the peak)`` of a step so long; empty if nobody counted.

        Recomputed forwards do not count.
        """
        counts = [stage.cost.flops for stage in self.stages]
        flops = sum(count or 0 for count in counts) * sum(self.micro_batch_shares)
        if not step_s or not flops or None in counts:
            return ""
        peak = self.prediction.peak_flops_per_s if self.prediction else None
        share = f" ({flops / step_s / peak:.0%} of the peak)" if peak else ""
        return f"{format_flops(flops / step_s)}{share}"

    @property
    def ranks(self) -> int:
        """Number of MPI ranks the plan needs."""
        return len(self.node_of_rank)

    @property
    def summary(self) -> str:
        """``2 stages on 2 ranks, 1f1b, 8 micro-batches of 4 (batch 32)``."""
        used = {rank for stage in self.stages for rank in (*stage.ranks, *stage.backward_ranks)}
        ranks = plural(self.ranks, "rank")
        ranks = ranks if len(used) == self.ranks else f"{len(used)} of {ranks}"
        return (
            f"{plural(len(self.stages), 'stage')} on {ranks}, {self.schedule}, "
            f"{plural(self.micro_batches, 'micro-batch')} of {self.micro_batch_size} "
            f"(batch {self.batch_size})"
        )

    @property
    def most_sent_bytes(self) -> int:
        """The most that one stage sends another at once, or replicas of one each other."""
        between = (transfer.size_bytes for transfer in self.transfers)
        sums = (stage.cost.accumulated_bytes for stage in self.stages if stage.replicas > 1)
        return max((*between, *sums), default=0)

    @property
    def micro_batch_shares(self) -> tuple[float, ...]:
        """Size of every micro-batch relative to a full one; only the last can be below 1."""
        last = self.batch_size - (self.micro_batches - 1) * self.micro_batch_size
        return (1.0,) * (self.micro_batches - 1) + (last / self.micro_batch_size,)

    @cached_property
    def stage_of(self) -> Mapping[str, int]:
        """Stage index of every operator id."""
        return {node: index for index, stage in enumerate(self.stages) for node in stage.nodes}

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """Stages of which a rank runs a forward or a backward, ascending."""
        return tuple(
            index
            for index, stage in enumerate(self.stages)
            if rank in stage.ranks or rank in stage.backward_ranks
        )

    def derived(self, make: Callable[[Plan], T]) -> T:
        """``make(self)``, made once: what a module finds out about a plan is kept with it."""
        if make not in self._derived:
            self._derived[make] = make(self)
        found: T = self._derived[make]
        return found

    @cached_property
    def _derived(self) -> dict[Callable[[Plan], Any], Any]:
        return {}

    def save(self, path: Path) -> None:
        """Write ``plan.json`` whole."""
        write_json(path, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """The documented JSON object."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read and check a plan.

        Raises:
            DataFileError: naming the file and the field.
        """
        return cls.from_json(read_json(path, cure=_CURE), file=str(path))

    @classmethod
    def from_json(cls, document: dict[str, Any], *, file: str = "plan") -> Plan:
        """A plan from its JSON object; see :meth:`load`."""
        plan = read_fields(cls, document, file=file, cure=_CURE, version=VERSION)
        faults = list(_faults(plan))
        if faults:
            raise DataFileError(f"{file}: {'; '.join(faults)}", cure=_CURE)
        return plan


def _faults(plan: Plan) -> Iterator[str]:
    """In words, with the field; ranks and stages that are named exist, a node has one stage."""
    if not plan.stages:
        yield "stages: there is none"
    if len(plan.warm_up) != len(plan.stages):
        yield f"warm_up: {len(plan.warm_up)} entries for {len(plan.stages)} stages"
    yield from _counts_faults(plan)
    nodes = [node for stage in plan.stages for node in stage.nodes]
    if len(set(nodes)) != len(nodes):
        yield "stages: a node is in two stages"
    for index, stage in enumerate(plan.stages):
        yield from (f"stages[{index}].{fault}" for fault in _stage_faults(stage, plan.ranks))
    stages = range(len(plan.stages))
    if any(end not in stages for item in plan.transfers for end in (item.source, item.target)):
        yield "transfers: a stage that does not exist"


def _stage_faults(stage: Stage, ranks: int) -> Iterator[str]:
    for name, held in (("ranks", stage.ranks), ("backward_ranks", stage.backward_ranks)):
        known = all(0 <= rank < ranks for rank in held)
        if not known or len(set(held)) != len(held) or (not held and name == "ranks"):
            yield f"{name}: {list(held)} of {ranks} ranks"
    if stage.backward_ranks and len(stage.backward_ranks) != stage.replicas:
        yield f"backward_ranks: {len(stage.backward_ranks)} for {stage.replicas} replicas"
    if stage.blocks is not None:
        fault = stage.blocks.fault(stage.nodes)
        if fault is not None:
            yield f"blocks: {fault}"
        if not stage.recompute or stage.backward_ranks:
            yield "blocks: of a stage that does not recompute where its forward runs"


def _counts_faults(plan: Plan) -> Iterator[str]:
    least = -(-plan.batch_size // plan.micro_batch_size)
    if plan.micro_batches != least or least > MAX_MICRO_BATCHES:
        yield (
            f"micro_batches: {plan.micro_batches}; {plan.batch_size} samples in parts of "
            f"{plan.micro_batch_size} are {least}, and {MAX_MICRO_BATCHES} are the most"
        )
    if not all(0 <= node < MAX_NODES for node in plan.node_of_rank):
        yield f"node_of_rank: a node that is not from 0 to {MAX_NODES - 1}"
