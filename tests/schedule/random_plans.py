"""Random plans of the whole search space."""

from dataclasses import replace

from hypothesis import strategies as st

from pipectl.lanes import routes
from pipectl.plan import Plan, Replication, Segments, Stage, StageCost, Transfer
from pipectl.schedule import SCHEDULES, default_warm_up
from pipectl.schedule.order import Placement

COST = StageCost(
    1.0, 2.0, 0.5, parameter_bytes=100, optimizer_bytes=50, saved_bytes=10, input_bytes=4
)
RANKS = 6
FLUSHED = [name for name, schedule in SCHEDULES.items() if schedule.flushes]


@st.composite
def plans(draw):
    """Stages on six ranks: replicas, apart backwards, recomputation, offload."""
    schedule = SCHEDULES[draw(st.sampled_from(FLUSHED))]
    micro_batches, size = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    places = draw(_places(schedule.placement))
    may_be_apart = schedule.placement is Placement.STRAIGHT and not schedule.splits_backward
    stages = [draw(_stage(ranks, may_be_apart)) for ranks in places]
    count = len(stages)
    falls = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    warm_up = [1 + sum(falls[stage:]) for stage in range(count)]
    return replace(
        _plan(stages, micro_batches, size, draw(st.integers(0, size - 1)), draw(_transfers(count))),
        schedule=schedule.name,
        warm_up=tuple(warm_up if schedule.chooses_warm_up else [1] * count),
        replication=draw(st.sampled_from(Replication)),
    )


@st.composite
def overlapping_plans(draw):
    """Plans whose steps overlap; some backwards are on ranks of their own, one rank may be idle."""
    one = draw(st.booleans())
    alone = draw(st.lists(st.booleans(), min_size=1, max_size=5))
    micro_batches = 1 if one else draw(st.integers(1, 7))
    stages = [Stage(("n",), (0,), COST, recompute=draw(st.booleans()))] * len(alone)
    transfers = draw(_transfers(len(alone)))
    plan = _plan(stages, micro_batches, 3, draw(st.integers(0, 1)), transfers)
    plan = apart(replace(plan, schedule="pipedream" if one else "pipedream-2bw"), alone)
    return replace(plan, node_of_rank=plan.node_of_rank + (0,) * draw(st.integers(0, 1)))


def _plan(stages, micro_batches, size, missing, transfers):
    """A plan whose last micro-batch misses some samples."""
    return Plan(
        name="random",
        fingerprint=None,
        schedule="",
        warm_up=(),
        batch_size=micro_batches * size - missing,
        micro_batch_size=size,
        micro_batches=micro_batches,
        stages=tuple(stages),
        transfers=tuple(transfers),
        node_of_rank=(0,) * RANKS,
    )


def _some_ranks(count):
    return st.permutations(range(RANKS)).map(lambda ranks: tuple(ranks[:count]))


@st.composite
def _places(draw, placement):
    """Ranks of each stage: any, or those of one to three sets in turn, or there and back."""
    if placement is Placement.STRAIGHT:
        counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
        return [draw(_some_ranks(count)) for count in counts]
    order = draw(_some_ranks(RANKS))
    sizes = draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))
    sets = [order[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]
    if placement is Placement.V_SHAPED:
        return [*sets, *sets[::-1]]
    return sets * draw(st.integers(1, 3))


@st.composite
def _stage(draw, ranks, may_be_apart):
    """A stage on these ranks; without replicas, its backward may be on another."""
    apart = may_be_apart and len(ranks) == 1 and draw(st.booleans())
    recompute = draw(st.booleans())
    in_blocks = recompute and not apart and draw(st.booleans())
    return Stage(
        ("n",),
        ranks,
        replace(COST, deferred_bytes=draw(st.sampled_from([None, 7, 13]))),
        backward_ranks=draw(_some_ranks(1)) if apart else (),
        recompute=recompute,
        offload=draw(st.booleans()),
        segments=Segments(("n",), 1.0, 0.5, 2.5, 5, 3) if in_blocks else None,
    )


@st.composite
def _transfers(draw, stages):
    """Each stage to the next, and perhaps a value of the first one for others."""
    values = [(stage, (stage + 1,), True) for stage in range(stages - 1)]
    uses = draw(st.sampled_from([(), (2,), (1, 2), (2, 1), (1, 3, 2)]))
    if stages > max(uses, default=stages):
        values += [(0, uses, draw(st.booleans()))]
    return [
        Transfer(*lane, 6)
        for producer, uses, has_gradient in values
        for lane in routes(producer, uses, has_gradient=has_gradient)
    ]


def apart(plan, alone):
    """A plan whose steps overlap, with a rank more for the backward of some stages."""
    first = [stage + sum(alone[:stage]) for stage in range(len(plan.stages))]
    held = [
        replace(stage, ranks=(rank,), backward_ranks=(rank + 1,) if two else ())
        for stage, rank, two in zip(plan.stages, first, alone, strict=True)
    ]
    warm_up = default_warm_up(plan.schedule, len(held), plan.micro_batches, apart=alone)
    ranks = (0,) * (len(held) + sum(alone))
    return replace(plan, stages=tuple(held), node_of_rank=ranks, warm_up=warm_up)
