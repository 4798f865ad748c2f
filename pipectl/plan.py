"""``plan.json``: the stages, their ranks, the schedule and the prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Annotated, Any, ClassVar, TypeVar

from pipectl.cluster import MAX_RANKS, TOO_MANY_RANKS, Cluster, OffloadTarget
from pipectl.errors import DataFileError
from pipectl.fields import VERSION, Count, DataFile, Rule
from pipectl.lanes import TransferKind
from pipectl.older_python import StrEnum
from pipectl.units import format_bytes, format_flops, format_time, plural

T = TypeVar("T")

MAX_MICRO_BATCHES = 2**16
"""More micro-batches are a mistake and would fill the memory with program rows."""
_BETWEEN_STAGES = Rule(
    lambda kind: kind in (TransferKind.ACTIVATION, TransferKind.GRADIENT),
    "activation or gradient",
)


LONG_STEP_S = 1.0
"""From this length, ranks begin a step only after all have ended the backwards of the last one, so
that a request to stop is answered at once."""


@dataclass(frozen=True)
class StagePeaks:
    """Peak bytes that a stage allocates in addition to what it holds, for full micro-batches.

    Args:
        forward_bytes: in a forward, including saved bytes, excluding received values.
        backward_bytes: in a backward that adds to existing gradients.
        first_backward_bytes: in a backward that allocates the parameter gradients.
        update_bytes: in an optimizer step.
        left_bytes: values that a forward drops after it has allocated what it keeps.
        evaluation_bytes: in the forward of an evaluation, with the messages of its micro-batches;
            0 without one.
    """

    forward_bytes: int
    backward_bytes: int
    first_backward_bytes: int
    update_bytes: int
    left_bytes: int = 0
    evaluation_bytes: int = 0


@dataclass(frozen=True)
class StageCost:
    """Predicted cost of a stage: seconds per full micro-batch, and resident bytes.

    Args:
        forward_s, backward_s: forward and backward of a micro-batch with all its samples.
        update_s: optimizer step, once per step.
        parameter_bytes: all parameters, frozen ones as well.
        optimizer_bytes: optimizer state; with ``shard_optimizer``, the part of one replica.
        saved_bytes: kept per micro-batch from forward to backward, without recomputation.
        input_bytes: the part of ``saved_bytes`` from which recomputation starts.
        gradient_bytes: gradients, from first backward to update; None: ``parameter_bytes``.
        buffer_bytes: buffers, such as the statistics of BatchNorm.
        peaks: for the largest share of a micro-batch on a replica; None if unknown.
        weight_s: weight half of a split backward, a part of ``backward_s``; None: half of it.
        deferred_bytes: kept per micro-batch between these halves; None: as ``saved_bytes``.
        deferred_block_bytes: the largest gradient among these that it computes; None if unknown.
        flops: floating-point operations of forward and backward; None if unknown.
        trained_bytes: parameters that an update changes; None: ``parameter_bytes``.
        cast_bytes: casts of parameters to half precision, which all micro-batches of a step share.
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
    deferred_block_bytes: int | None = None
    flops: int | None = None
    trained_bytes: int | None = None
    cast_bytes: int = 0

    @property
    def changed_bytes(self) -> int:
        """Bytes of the parameters that an update changes."""
        return self.parameter_bytes if self.trained_bytes is None else self.trained_bytes

    def scaled(self, factor: float) -> StageCost:
        """Return the cost with the times of forwards and backwards multiplied by a factor."""
        return replace(
            self,
            forward_s=self.forward_s * factor,
            backward_s=self.backward_s * factor,
            weight_s=None if self.weight_s is None else self.weight_s * factor,
        )

    @property
    def halves_s(self) -> tuple[float, float]:
        """Seconds of the input half and the weight half of a split backward."""
        weight_s = self.backward_s / 2 if self.weight_s is None else self.weight_s
        return self.backward_s - weight_s, weight_s

    @property
    def between_bytes(self) -> int:
        """Bytes kept per micro-batch between the halves of a split backward."""
        return self.saved_bytes if self.deferred_bytes is None else self.deferred_bytes

    @property
    def grown_bytes(self) -> int:
        """Bytes that an input half adds to what is kept per micro-batch."""
        return max(0, self.between_bytes - self.saved_bytes)

    @property
    def freed_bytes(self) -> int:
        """Bytes that an input half releases of what is kept per micro-batch."""
        return max(0, self.saved_bytes - self.between_bytes)

    @property
    def accumulated_bytes(self) -> int:
        """Bytes of the parameter gradients."""
        return self.parameter_bytes if self.gradient_bytes is None else self.gradient_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes kept between steps: parameters, optimizer state and buffers."""
        return self.parameter_bytes + self.optimizer_bytes + self.buffer_bytes


@dataclass(frozen=True)
class Segments:
    """Parts of a stage that are recomputed one after another, each just before its own backward.

    Only the forward of the last one can be recomputed before the gradients of the stage's outputs
    arrive. The other forwards are recomputed within the stage's backward.

    Args:
        firsts: first operator of every segment except the first, in graph order.
        forward_s: forwards of all segments.
        recompute_s: forward of the last segment.
        backward_s: backwards of all segments, and forwards of all segments except the last.
        kept_bytes: kept per micro-batch from forward to backward: the inputs of all segments.
        last_bytes: saved by the last segment in addition to its inputs.
        peaks: as in the cost of the stage, for a stage that runs in these segments.
        recompute_peak_bytes: peak bytes that the forward of the last segment allocates.
    """

    firsts: tuple[str, ...]
    forward_s: float
    recompute_s: float
    backward_s: float
    kept_bytes: int
    last_bytes: int
    peaks: StagePeaks | None = None
    recompute_peak_bytes: int = 0

    def scaled(self, factor: float) -> Segments:
        """Return the segments with all times multiplied by a factor."""
        return replace(
            self,
            forward_s=self.forward_s * factor,
            recompute_s=self.recompute_s * factor,
            backward_s=self.backward_s * factor,
        )

    def running(self, cost: StageCost) -> StageCost:
        """Return the cost of a stage that runs in these segments."""
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
    """A convex part of the graph, its ranks, and what they keep for the backward.

    Args:
        nodes: operator ids in graph order.
        ranks: one per replica.
        cost: predicted cost.
        backward_ranks: ranks of the backward and the optimizer step; empty if equal to ``ranks``.
        recompute: whether to keep only the stage's inputs and to recompute the rest.
        offload: whether kept values leave the device's memory until the backward.
        segments: parts that are recomputed one after another; None: the whole stage at once.
    """

    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    cost: StageCost
    backward_ranks: tuple[int, ...] = ()
    recompute: bool = False
    offload: bool = False
    segments: Segments | None = field(default=None, metadata={"key": "blocks"})

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return len(self.ranks)

    @property
    def every_rank(self) -> tuple[int, ...]:
        """Its ranks, and those of its backward."""
        return (*self.ranks, *self.backward_ranks)

    @property
    def load_s(self) -> float:
        """Seconds per micro-batch, divided by the number of replicas."""
        return (self.cost.forward_s + self.cost.backward_s) / self.replicas

    @property
    def updating_ranks(self) -> tuple[int, ...]:
        """Rank of the backward of each replica."""
        return self.backward_ranks or self.ranks

    @property
    def kept_bytes(self) -> int:
        """Bytes kept per full micro-batch from forward to backward, on the device or elsewhere."""
        return self.running.input_bytes if self.recompute else self.running.saved_bytes

    @cached_property
    def running(self) -> StageCost:
        """Cost of the stage as it runs, by segments if it has any, without time of RECOMPUTE."""
        return self.cost if self.segments is None else self.segments.running(self.cost)

    @property
    def recompute_s(self) -> float:
        """Seconds of the forward that is recomputed before the gradients of its outputs arrive."""
        return self.cost.forward_s if self.segments is None else self.segments.recompute_s

    @property
    def recompute_peak_bytes(self) -> int:
        """Peak bytes that the recomputed forward allocates; 0 if temporary values are unknown."""
        if self.segments is not None:
            return self.segments.recompute_peak_bytes
        return 0 if self.cost.peaks is None else self.cost.peaks.forward_bytes

    @property
    def input_half_bytes(self) -> int:
        """Peak bytes of the input half of a split backward beyond those of a whole one."""
        # With segments, the values for the weight halves accumulate over those that are recomputed.
        return self.running.grown_bytes if self.segments is None else self.running.between_bytes

    def reduction_bytes(self, roots: Sequence[int] = ()) -> int:
        """Bytes that each replica needs to sum gradients: a copy to send, and a buffer for the
        others' versions of its part and then for the sums of their parts.

        Args:
            roots: how many sums of gradients each replica sends; by default one.
        """
        if self.replicas == 1:
            return 0
        sent = max(roots, default=1)
        copies = sent * (2 * self.replicas - 1) if sent > 1 else self.replicas  # parts are copied
        received = max(sum(roots) - min(roots), self.replicas - 1) if roots else self.replicas - 1
        return self.cost.accumulated_bytes * (copies + received) // self.replicas


class Replication(StrEnum):
    """How replicas share work: whole micro-batches in turn, or samples of each micro-batch."""

    WHOLE = "whole"
    SPLIT = "split"


@dataclass(frozen=True)
class Transfer:
    """Bytes that one full micro-batch sends from one stage to another.

    Args:
        kind: ``activation`` or ``gradient``.
        source, target: index of the sending and of the receiving stage.
        size_bytes: bytes per full micro-batch.
    """

    kind: Annotated[TransferKind, _BETWEEN_STAGES]
    source: int
    target: int
    size_bytes: int


@dataclass(frozen=True)
class Prediction:
    """Prediction of the simulator for a plan.

    Args:
        step_time_s: seconds of one optimizer step.
        bubble: share of the ranks' time without computation.
        utilisation: share of the step in which each rank computes.
        peak_memory_bytes: peak bytes of each rank, including the process baseline.
        peak_flops_per_s: total peak FLOP/s of all ranks; None if unknown.
    """

    step_time_s: float
    bubble: float
    utilisation: tuple[float, ...]
    peak_memory_bytes: tuple[int, ...]
    peak_flops_per_s: float | None = None


@dataclass(frozen=True)
class Search:
    """How the planner chose the stages.

    Args:
        planner: name of the planner.
        planning_s: time of the search.
        step_lower_bound_s: lower bound of the step time for any cuts, ranks and order, with the
            numbers of stages and the micro-batch sizes that were tried; None if unknown.
        gap: relative excess of the plan's step time over that bound; 0.1 is 10 percent.
        finished: whether the search was completed within its budget.
    """

    planner: str
    planning_s: float
    step_lower_bound_s: float | None = None
    gap: float | None = None
    finished: bool = True

    def bounded(self, step_s: float, least_s: float) -> Search:
        """Return the search with a lower bound of the step time, in seconds.

        The gap is 0 if, by rounding, the plan's step is shorter than the bound.
        """
        gap = max(0.0, step_s / least_s - 1) if least_s else None
        return replace(self, step_lower_bound_s=least_s, gap=gap)


@dataclass(frozen=True)
class Plan(DataFile):
    """A pipeline for one model on one cluster.

    Args:
        name: name of the job or model.
        fingerprint: of the captured graph; None if the profile was imported (cannot be submitted).
        schedule: name of the schedule, or the user's own.
        warm_up: forwards of each stage before its first backward, over all its replicas.
        batch_size: samples per step.
        micro_batch_size: samples per micro-batch; the last one may have fewer.
        micro_batches: micro-batches per step.
        stages: the stages, in the order of the graph.
        transfers: messages that one micro-batch sends between two stages.
        node_of_rank: node index of each rank.
        memory_limit_bytes: memory limit of the job, per rank; None if it has none.
        prediction: prediction of the simulator.
        search: how the planner chose the stages.
        key: hash of all that it depends on: parts of the job, the profile and the cluster; detects
            a stale plan.
        assumptions: what neither profile nor cluster said, one sentence each.
        replication: ``whole``: replica i of r takes micro-batches i, i + r, ...; ``split``: samples
            of every micro-batch.
        offload_to: where stages offload to: ``host`` or ``disk``.
        actions: computations of each rank, if the schedule is the user's own, as in its file.
        shard_optimizer: whether each replica keeps the optimizer state of only a part of its
            stage's parameters; the costs of the stages count that part.
        updates_together: whether ranks wait for each other before they update, to clip gradients
            for instance; otherwise a rank begins its next step while others end theirs.
        reproducible: whether results do not depend on the number of replicas; each then takes
            neighbouring micro-batches.
    """

    hint: ClassVar[str] = "write a new one with: pipectl plan JOB.yaml"
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
    prediction: Prediction | None = field(default=None, metadata={"key": "predicted"})
    search: Search | None = None
    key: str | None = None
    assumptions: tuple[str, ...] = ()
    replication: Replication = Replication.WHOLE
    offload_to: OffloadTarget = OffloadTarget.HOST
    actions: tuple[str, ...] = ()
    shard_optimizer: bool = False
    updates_together: bool = True
    reproducible: bool = False

    @property
    def predicted_step_s(self) -> float:
        """Predicted seconds of one optimizer step; the plan must have a prediction."""
        assert self.prediction is not None
        return self.prediction.step_time_s

    def updates_together_on(self, cluster: Cluster) -> bool:
        """Return whether all ranks are taken to wait for each other before they update.

        They are on shared cores, where steps would slow each other down, and if a rank waits in
        the next step for weights that another one updates (PipeFB).
        """
        elsewhere = any(stage.backward_ranks for stage in self.stages)
        return self.updates_together or elsewhere or cluster.is_crowded

    def describe_flops(self, step_s: float | None) -> str:
        """Return for example ``3.41 TFLOP/s (12% of the peak)``; empty if the FLOPs are unknown.

        Recomputed forwards do not count.

        Args:
            step_s: measured or predicted seconds of a step.
        """
        counts = [stage.cost.flops for stage in self.stages]
        flops = sum(count or 0 for count in counts) * sum(self.micro_batch_shares)
        if not step_s or not flops or None in counts:
            return ""
        peak = self.prediction.peak_flops_per_s if self.prediction else None
        share = f" ({flops / step_s / peak:.0%} of the peak)" if peak else ""
        return f"{format_flops(flops / step_s)}{share}"

    def describe_prediction(
        self, cluster: Cluster, range_s: tuple[float, float] | None = None
    ) -> Iterator[str]:
        """Yield lines with step time, throughput and bubble, and with memory; none if there is no
        prediction.

        Args:
            cluster: the machines that the plan is for.
            range_s: range of the step time, if links are assumed.
        """
        if self.prediction is None:
            return
        step_s, peaks = self.prediction.step_time_s, self.prediction.peak_memory_bytes
        rate = f"{self.batch_size / step_s:.1f} samples/s, " if step_s else ""
        if flops := self.describe_flops(step_s):
            rate += f"{flops}, "
        point = f"{format_time(step_s)} per step, {rate}bubble {self.prediction.bubble:.1%}"
        if range_s is None:
            yield f"predicted: {point}"
        else:
            ends = " to ".join(map(format_time, range_s))
            yield f"predicted: {ends} per step; links are assumed (profile --links measures them)"
            yield f"as assumed: {point}"
        fullest = peaks.index(max(peaks))
        limit = cluster.memory_of(fullest, self.memory_limit_bytes)
        within = f", limit {format_bytes(int(limit))}" if limit < inf else ""
        yield f"memory: at most {format_bytes(max(peaks))} per rank (rank {fullest}){within}"

    @property
    def ranks(self) -> int:
        """Number of MPI ranks."""
        return len(self.node_of_rank)

    @property
    def summary(self) -> str:
        """For example ``2 stages on 2 ranks, 1f1b, 8 micro-batches of 4 (batch 32)``."""
        used = {rank for stage in self.stages for rank in stage.every_rank}
        ranks = plural(self.ranks, "rank")
        ranks = ranks if len(used) == self.ranks else f"{len(used)} of {ranks}"
        return (
            f"{plural(len(self.stages), 'stage')} on {ranks}, {self.schedule}, "
            f"{plural(self.micro_batches, 'micro-batch')} of {self.micro_batch_size} "
            f"(batch {self.batch_size})"
        )

    @property
    def most_sent_bytes(self) -> int:
        """Most bytes that one stage sends to another, or that the replicas of a stage sum."""
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
        """Stage index of each operator id."""
        return {node: index for index, stage in enumerate(self.stages) for node in stage.nodes}

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the stages, ascending, of which a rank runs the forward or the backward."""
        return tuple(
            index
            for index, stage in enumerate(self.stages)
            if rank in stage.ranks or rank in stage.backward_ranks
        )

    def derived(self, make: Callable[[Plan], T]) -> T:
        """Return ``make(self)``, computed once per plan."""
        if make not in self._derived:
            self._derived[make] = make(self)
        result: T = self._derived[make]
        return result

    @cached_property
    def _derived(self) -> dict[Callable[[Plan], Any], Any]:
        return {}

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON object."""
        document = _by_key(Plan, asdict(self))
        stages = tuple(_by_key(Stage, stage) for stage in document["stages"])
        return {"version": VERSION, **document, "stages": stages}

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, file: str = "plan") -> Plan:
        """Read a plan from its JSON object; see :meth:`load`."""
        plan = super().from_json(document, file=file)
        if faults := list(_faults(plan)):
            raise DataFileError(f"{file}: {'; '.join(faults)}", hint=cls.hint)
        return plan


def _by_key(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a dataclass by their keys in the file."""
    return {each.metadata.get("key", each.name): values[each.name] for each in fields(kind)}


def _faults(plan: Plan) -> Iterator[str]:
    """Yield every inconsistency in words, with the name of the field."""
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
    if plan.ranks > MAX_RANKS:
        yield f"node_of_rank: {TOO_MANY_RANKS.format(plan.ranks)}"
    if not all(0 <= node < MAX_RANKS for node in plan.node_of_rank):
        yield f"node_of_rank: a node that is not from 0 to {MAX_RANKS - 1}"
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
    if (segments := stage.segments) is not None:
        place = {node: index for index, node in enumerate(stage.nodes)}
        places = [0, *(place.get(node, -1) for node in segments.firsts)]
        if not all(early < late for early, late in pairwise(places)):
            yield f"blocks: begin with {list(segments.firsts)}, not in the stage's order"
        if not stage.recompute or stage.backward_ranks:
            yield "blocks: of a stage that does not recompute where its forward runs"
