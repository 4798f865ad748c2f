"""``plan.json``: the stages, their ranks, the schedule, and what was predicted of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, ClassVar, TypeVar

from pipectl.cluster import OffloadTarget
from pipectl.errors import DataFileError
from pipectl.fields import VERSION, Count, DataFile, Rule
from pipectl.graph import TransferKind
from pipectl.units import format_flops, plural

T = TypeVar("T")

MAX_MICRO_BATCHES = 2**16
"""More are a mistake, and would fill memory with rows of programs."""
MAX_NODES = 2**20
_BETWEEN_STAGES = Rule(
    lambda kind: kind in (TransferKind.ACTIVATION, TransferKind.GRADIENT),
    "activation or gradient",
)


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
        flops: floating-point operations of forward and backward; None if nobody counted.
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
    flops: int | None = None

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


@dataclass(frozen=True)
class Blocks:
    """Parts of a stage that recompute one after the other, each just before its own backward.

    Only the forward of the last one can run again before the gradients of the stage's results are
    there; those of the others are within the stage's backward.

    Args:
        firsts: the first operator of every block but the first one, in graph order.
        forward_s: of all blocks.
        recompute_s: the forward of the last block.
        backward_s: backwards of all blocks, and forwards of all but the last.
        kept_bytes: what one micro-batch keeps from forward to backward: the inputs of all blocks.
        last_bytes: what the last block saves besides its inputs.
        peaks: as :attr:`StageCost.peaks`.
        recompute_peak_bytes: most bytes that the forward of the last block allocates at once.
    """

    firsts: tuple[str, ...]
    forward_s: float
    recompute_s: float
    backward_s: float
    kept_bytes: int
    last_bytes: int
    peaks: StagePeaks | None = None
    recompute_peak_bytes: int = 0

    def running(self, cost: StageCost) -> StageCost:
        """The cost of a stage that runs in these blocks."""
        return replace(
            cost,
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            saved_bytes=self.kept_bytes + self.last_bytes,
            input_bytes=self.kept_bytes,
            peaks=self.peaks,
            weight_s=cost.halves_s[1],
            deferred_bytes=cost.between_bytes,
        )


@dataclass(frozen=True)
class Stage:
    """A convex part of the graph, the ranks that hold it, and what they keep for its backward.

    Args:
        nodes: operator ids in graph order.
        ranks: one per replica.
        backward_ranks: where the backward of each replica runs, and its optimizer step; empty
            if on the same rank as its forward.
        recompute: whether only the stage's inputs are kept, and the rest computed once more.
        offload: whether what is kept leaves the device's memory until the backward.
        blocks: parts that recompute one after the other; None if all of the stage at once.
    """

    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    cost: StageCost
    backward_ranks: tuple[int, ...] = ()
    recompute: bool = False
    offload: bool = False
    blocks: Blocks | None = None

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return len(self.ranks)

    @property
    def load_s(self) -> float:
        """Time of a micro-batch on the replicas, which work side by side."""
        return (self.cost.forward_s + self.cost.backward_s) / self.replicas

    @property
    def updating_ranks(self) -> tuple[int, ...]:
        """Where the backward of each replica runs."""
        return self.backward_ranks or self.ranks

    @property
    def kept_bytes(self) -> int:
        """Kept from forward to backward by one full micro-batch, on the device or elsewhere."""
        return self.running.input_bytes if self.recompute else self.running.saved_bytes

    @cached_property
    def running(self) -> StageCost:
        """What it costs as it runs: in blocks if it has any; without the time of RECOMPUTE."""
        return self.cost if self.blocks is None else self.blocks.running(self.cost)

    @property
    def recompute_s(self) -> float:
        """Seconds of what runs again before the gradients of its results are there."""
        return self.cost.forward_s if self.blocks is None else self.blocks.recompute_s

    @property
    def recompute_peak_bytes(self) -> int:
        """The most that this allocates at once; 0 where nothing is known of temporary values."""
        if self.blocks is not None:
            return self.blocks.recompute_peak_bytes
        return 0 if self.cost.peaks is None else self.cost.peaks.forward_bytes

    @property
    def input_half_bytes(self) -> int:
        """What the first half of a split backward holds at once more than a whole backward."""
        # Of blocks, what weights need adds up while one after the other is recomputed.
        return self.running.grown_bytes if self.blocks is None else self.running.between_bytes

    @property
    def reduction_bytes(self) -> int:
        """Held by each replica, besides its gradients, while these are summed: a copy to send from,
        and what arrives, first the others' versions of its part, then the sums of theirs."""
        if self.replicas == 1:
            return 0
        return self.cost.accumulated_bytes * (2 * self.replicas - 1) // self.replicas


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
class Plan(DataFile):
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

    cure: ClassVar[str] = "write a new one with: pipectl plan JOB.yaml"
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
    assumptions: tuple[str, ...] = ()
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
        result: T = self._derived[make]
        return result

    @cached_property
    def _derived(self) -> dict[Callable[[Plan], Any], Any]:
        return {}

    def to_json(self) -> dict[str, Any]:
        """The documented JSON object."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, file: str = "plan") -> Plan:
        """A plan from its JSON object; see :meth:`load`."""
        plan = super().from_json(document, file=file)
        if faults := list(_faults(plan)):
            raise DataFileError(f"{file}: {'; '.join(faults)}", cure=cls.cure)
        return plan


def _faults(plan: Plan) -> Iterator[str]:
    """What does not fit together, in words, with the field."""
    if not plan.stages:
        yield "stages: there is none"
    if len(plan.warm_up) != len(plan.stages):
        yield f"warm_up: {len(plan.warm_up)} entries for {len(plan.stages)} stages"
    least = -(-plan.batch_size // plan.micro_batch_size)
    if plan.micro_batches != least or least > MAX_MICRO_BATCHES:
        yield (
            f"micro_batches: {plan.micro_batches}; {plan.batch_size} samples in parts of "
            f"{plan.micro_batch_size} are {least}, and {MAX_MICRO_BATCHES} are the most"
        )
    if not all(0 <= node < MAX_NODES for node in plan.node_of_rank):
        yield f"node_of_rank: a node that is not from 0 to {MAX_NODES - 1}"
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
    if (blocks := stage.blocks) is not None:
        place = {node: index for index, node in enumerate(stage.nodes)}
        places = [0, *(place.get(node, -1) for node in blocks.firsts)]
        if not all(early < late for early, late in pairwise(places)):
            yield f"blocks: begin with {list(blocks.firsts)}, not in the stage's order"
        if not stage.recompute or stage.backward_ranks:
            yield "blocks: of a stage that does not recompute where its forward runs"
