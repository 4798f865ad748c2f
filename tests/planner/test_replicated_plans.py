"""Plans with replicated stages: who gets replicas, what they hold, and what the search rests on."""

from dataclasses import replace
from math import inf, nan
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipectl.errors import InfeasibleError
from pipectl.jobs.verify import differing
from pipectl.link import Link
from pipectl.plan import Replication
from pipectl.planner import PlanRequest, make_plan, search_plans
from pipectl.planner.bounds import work_bound_s
from pipectl.planner.candidates import in_turn
from pipectl.planner.choices import open_orders
from pipectl.planner.costs.links import Links
from pipectl.planner.evaluator import TIE
from pipectl.planner.graph.blocks import bitset, condense
from pipectl.planner.graph.downsets import CutSpace
from pipectl.planner.partition.layout import Choice, Layout, replica_moves
from pipectl.planner.partition.replicated import MAX_UNITS
from pipectl.planner.partition.tables import table_of
from pipectl.planner.plans import plan_of
from pipectl.planner.problem import Problem
from pipectl.planner.simple import even_copies
from pipectl.profile_parts import OperatorMemory, OptimizerCost, SmallestMicroBatch
from pipectl.runtime.compare import Comparison, Difference
from pipectl.schedule.one_f_one_b import ONE_F_ONE_B
from pipectl.simulate import simulate
from tests.planner.gate.checked_plans import FAST, after, cluster_of, planned
from tests.planner.gate.gate_corpus import GRAPHS, profile_of
from tests.planner.gate.graphs import chain, hungry

pytestmark = pytest.mark.slow

LINK, FAR = Link(1e-5, 1e9), Link(1e-3, 1e6)


def nodes_of(ranks, link=LINK):
    """Nodes of one rank each."""
    return cluster_of(*[1] * ranks, within=link)


def test_a_slow_rank_and_one_with_little_memory_are_left_out() -> None:
    """Both operators on three fast ranks, though rank 0 comes first; and one operator that fits on
    three ranks of four."""
    profile = chain(2, forward_s=0.02, backward_s=0.04)
    slow = cluster_of(1, 1, 1, 1, speeds=(0.25, 1.0, 1.0, 1.0), within=LINK)
    plan = planned(profile, slow, 30, replicas=None)
    assert {rank for stage in plan.stages for rank in stage.ranks} == {1, 2, 3}
    assert plan.predicted_step_s < 0.7 * planned(profile, slow, 30).predicted_step_s
    large, small = (cluster_of(1, memory_bytes=n, within=LINK).nodes[0] for n in (10**9, 10**7))
    mixed = replace(slow, nodes=(large, small, large, large))
    each = [{"parameters": (("p", 10**7),), "forward_s": 0.1, "backward_s": 0.2}, {}, {}]
    plan = planned(chain(each, forward_s=1e-3, backward_s=2e-3), mixed, 30, replicas=None)
    assert 1 not in plan.stages[0].ranks
    assert plan.stages[0].replicas == 3


@pytest.mark.parametrize(
    ("way", "speeds", "micro_batches", "batch", "busiest"),
    [
        # Two fast replicas take two of five micro-batches each, the slow one a single one.
        (Replication.WHOLE, (0.5, 1.0, 1.0), 5, 40, 16),
        # Parts of 1, 1, 2, 1, 1 and 2 samples: the larger ones are for the fast replicas.
        (Replication.SPLIT, (0.5, 1.0, 0.5, 0.5, 1.0, 0.5), 1, 8, 2),
    ],
)
def test_slow_replicas_get_the_smaller_part_of_an_uneven_division(
    way, speeds, micro_batches, batch, busiest
) -> None:
    cluster = cluster_of(*[1] * len(speeds), speeds=speeds, within=FAST)
    profile = replace(chain(1), optimizer=None)
    asked = {"replicas": None, "replication": way, "micro_batches": micro_batches}
    plan = planned(profile, cluster, batch, **asked)
    assert plan.predicted_step_s == pytest.approx(busiest * 3e-3 / 8, rel=0.02)


def test_replicas_that_take_micro_batches_in_turn_are_improved_as_such() -> None:
    """Each move of the plan's borders and replicas makes it slower."""
    profile = profile_of("uneven-chain-6", 24)
    cluster = cluster_of(2, 2, 2, 2, speeds=(0.3, 1.0, 1.0), within=LINK, between=Link(5e-5, 1e8))
    request = PlanRequest("job", 64, replicas=None, replication=Replication.WHOLE)
    problem, plan = Problem(profile, cluster, request), make_plan(profile, cluster, request)
    partition = problem.partition_of(stage.nodes for stage in plan.stages)
    layout = Layout(partition, tuple(stage.ranks for stage in plan.stages))
    size, classes = plan.micro_batch_size, [pool.ranks for pool in problem.devices]
    loads = problem.costs.block_times(size)
    moves = replica_moves(layout, problem.graph, loads, classes, 8, keep_stages=False)
    for near in in_turn(problem, list(moves), size)[:3]:
        step_s = simulate(plan_of(problem, near.choice), cluster).step_time_s
        assert plan.predicted_step_s <= step_s * (1 + TIE)


def test_with_a_fixed_number_of_stages_two_are_merged_where_a_third_is_split() -> None:
    graph, ranks = condense(chain(6)), ((0,), (1,), (2, 3))
    layout = Layout((bitset([0]), bitset([1]), bitset(range(2, 6))), ranks)
    moves = {
        keep: list(replica_moves(layout, graph, [1.0] * 6, [range(4)], 4, keep_stages=keep))
        for keep in (True, False)
    }
    assert {len(move.partition) for move in moves[True]} == {3}
    assert {len(move.partition) for move in moves[False]} == {2, 3, 4}
    third = Layout((bitset([0, 1]), bitset([2, 3]), bitset([4, 5])), ((0, 1), (2,), (3,)))
    assert third in moves[True]
    assert third not in moves[False]


def test_a_plan_that_fits_is_found_beside_a_faster_one_that_does_not() -> None:
    """Only (n0, n1), (n2, n3) and two replicas of n4 fit; a move of it is faster."""
    costs = (  # times in ms; bytes in thousands
        *((24, 52, 1617, 106, 6105), (28, 36, 2148, 210, 1366), (21, 39, 1081, 58, 3706)),
        *((26, 30, 1605, 768, 5931), (8, 59, 3725, 496, 24365)),
    )
    each = [
        {
            "forward_s": forward * 1e-3,
            "backward_s": backward * 1e-3,
            "parameter_bytes": weights * 1000,
            "parameters": ((f"p{at}", weights * 1000),),
            "output_bytes": made * 1000,
            "gradient_bytes": made * 1000,
            "saved": ((f"s{at}", saved * 1000),),
        }
        for at, (forward, backward, weights, made, saved) in enumerate(costs)
    ]
    profile = replace(
        chain(each), process_baseline_bytes=10**6, optimizer=OptimizerCost(2.0, 5e-11)
    )
    asked = {"replicas": None, "replication": Replication.SPLIT, "micro_batches": 4}
    cluster = nodes_of(4, Link(1e-4, 1e8))
    plan = planned(profile, cluster, 16, memory_limit_bytes=29_130_000, **asked)
    assert [stage.replicas for stage in plan.stages] == [1, 1, 2]


@pytest.mark.parametrize("number", range(6))
def test_no_plan_is_slower_than_copies_of_even_stages(number) -> None:
    """On all ranks, on the fast ones, and on those with much memory."""
    draw, way = Random(number), [*Replication][number % 2]
    profile = profile_of(f"floor-{draw.choice([*GRAPHS])}-{number}", draw.randint(6, 12))
    speeds = draw.choice([(1.0,), (1.0, 0.5), (1.0, 1.0, 0.2)])
    cluster = cluster_of(*draw.choice([(4, 2), (2, 2, 2), (4, 4)]), speeds=speeds, within=LINK)
    request = PlanRequest("job", 48, replicas=None, replication=way)
    step_s, problem = planned_step_s(profile, cluster, request), Problem(profile, cluster, request)
    for size, layout in even_copies(problem):
        size //= 1 if way is Replication.SPLIT else len(layout.ranks[0])
        replicas = None if way is Replication.SPLIT else tuple(map(len, layout.ranks))
        for order in open_orders(request, len(layout.ranks), problem.micro_batches(size), replicas):
            plan = plan_of(problem, Choice(layout, size, *order, way))
            assert step_s <= simulate(plan, cluster).step_time_s * (1 + TIE)


def test_any_replicas_on_many_ranks_are_no_slower_than_a_number_of_them() -> None:
    """A pipeline needs four ranks for its memory; copies take all ranks."""
    profile = hungry(16, 10**6)
    cluster = cluster_of(*[8] * 8, within=Link(1e-5, 1e10), between=Link(1e-4, 1e9))
    limited = {"memory_limit_bytes": 6_000_000, "recompute": None, "batch_size": 256}
    request = PlanRequest("job", replicas=None, **limited)
    step_s = planned_step_s(profile, cluster, request)
    for copies in (4, 8, 16):
        assert step_s <= planned_step_s(profile, cluster, replace(request, replicas=copies))


@pytest.mark.parametrize("replicas", [None, 2])
def test_open_replicas_and_open_schedules_meet(replicas) -> None:
    """With few micro-batches per rank, copies of an interleaved pipeline are fastest."""
    profile, cluster = profile_of("combo-chain-3", 24), cluster_of(4, 4, within=LINK)
    request = PlanRequest("job", 32, replicas=replicas, every_schedule=True)
    step_s = planned_step_s(profile, cluster, request)
    for schedule in ("interleaved", "1f1b"):
        named = replace(request, replicas=2, schedule=schedule, every_schedule=False)
        assert step_s <= planned_step_s(profile, cluster, named) * (1 + TIE)
    closed = replace(request, every_schedule=False)
    assert step_s < planned_step_s(profile, cluster, closed)


def planned_step_s(profile, cluster, request):
    """The step of the plan of a request; infinite if there is none."""
    try:
        return make_plan(profile, cluster, request).predicted_step_s
    except InfeasibleError:
        return inf


@pytest.mark.parametrize(("way", "batch"), [(Replication.WHOLE, 16), (Replication.SPLIT, 2)])
def test_no_rank_is_kept_that_would_have_nothing_to_do(way, batch):
    """Two micro-batches of which a replica takes the whole, or one of two samples."""
    count = 2 if way is Replication.WHOLE else 1
    asked = {"micro_batches": count, "replicas": None, "replication": way}
    plan = planned(chain(1, forward_s=1.0, backward_s=2.0), nodes_of(3), batch, **asked)
    assert [stage.replicas for stage in plan.stages] == [2]


def test_slow_links_are_not_worth_replicas() -> None:
    """Of seven ranks, five stages leave two; the bound is that of plans without replicas."""
    profile = chain(20, parameter_bytes=10**6, parameters=(("p", 10**6),))
    cluster, asked = nodes_of(7, FAR), {"stages": 5, "replicas": None}
    plan = planned(profile, cluster, 32, **asked)
    assert max(stage.replicas for stage in plan.stages) == 1
    problem = Problem(profile, cluster, PlanRequest("job", 32, **asked))
    assert plan.search.step_lower_bound_s == pytest.approx(work_bound_s(problem))


@pytest.mark.parametrize("asked", [{"stages": 5}, {"warm_up": (14, 12, 8, 6, 2)}])
def test_a_given_number_of_stages_gets_replicas_for_the_ranks_that_are_left(asked) -> None:
    plan, alone = (
        planned(chain(20), nodes_of(7, FAST), 32, replicas=replicas, **asked)
        for replicas in (None, 1)
    )
    assert len(plan.stages) == 5
    assert sum(stage.replicas for stage in plan.stages) == 7
    assert plan.predicted_step_s < 0.8 * alone.predicted_step_s


def test_a_given_number_of_stages_is_looked_for_on_many_ranks() -> None:
    """Though fewer stages would be faster."""
    cluster = nodes_of(MAX_UNITS + 1, FAST)
    plans = search_plans(chain(12), cluster, PlanRequest("job", 64, stages=5, replicas=None))
    assert max(stage.replicas for stage in plans[0].stages) > 1
    assert {len(plan.stages) for plan in plans} == {5}


@pytest.mark.parametrize("blocks", [False, None])
@pytest.mark.parametrize("way", Replication)
def test_replicas_recompute_if_all_stages_shall_or_where_nothing_else_fits(way, blocks) -> None:
    profile, cluster = hungry(12, 10**6), nodes_of(4, FAST)

    def plan(**more):
        asked = {"stages": 2, "schedule": "gpipe", "replicas": 2, "replication": way}
        return planned(profile, cluster, 32, **asked, segments=blocks, **more)

    with pytest.raises(InfeasibleError):
        plan(memory_limit_bytes=4_000_000)
    for more, again in (
        ({"recompute": None, "memory_limit_bytes": 4_000_000}, True),
        ({"recompute": None}, False),
        ({"recompute": True}, True),
    ):
        assert all(stage.recompute == again for stage in plan(**more).stages)
    free = planned(profile, cluster, 32, recompute=True, replicas=None, replication=way)
    assert max(stage.replicas for stage in free.stages) > 1
    assert all(stage.recompute for stage in free.stages)


def test_copies_whose_sums_need_more_memory_than_one_alone_get_more_stages() -> None:
    """One stage is fastest, and fits alone; the sum over two replicas does not."""
    each = [{"parameters": ((f"p{at}", 10**6),)} for at in range(4)]
    slow = nodes_of(4, Link(1e-3, 1e6))
    plan = planned(chain(each), slow, replicas=2, memory_limit_bytes=5000 + 21 * 10**6)
    assert [stage.replicas for stage in plan.stages] == [2, 2]


@pytest.mark.parametrize("way", Replication)
@pytest.mark.parametrize(("ranks", "operators"), [(7, 20), (MAX_UNITS + 1, 12)])
def test_a_stage_that_reads_what_it_has_written_gets_no_replicas_unasked(
    way, ranks, operators
) -> None:
    each = [{"forward_s": 0.01 if i == 3 else 1.0} for i in range(operators)]
    plain = chain(each)
    profile, cluster = replace(plain, carried=(("mean", "n3"),)), nodes_of(ranks, FAST)

    def replicas(profile, count):
        plan = planned(profile, cluster, 64, replicas=count, replication=way)
        (stage,) = (stage for stage in plan.stages if "n3" in stage.nodes)
        return plan, stage.replicas, max(each.replicas for each in plan.stages)

    assert replicas(plain, None)[1] > 1
    plan, its, most = replicas(profile, None)
    assert its == 1 < most
    unequal = Comparison(Difference(1, "loss", 1.0), 1.0, ())
    assert differing(plan, profile, unequal) == []
    plan, its, _ = replicas(profile, 2)
    assert its == 2
    (said,) = differing(plan, profile, unequal)
    equal = replace(unequal, first=None, losses=((1.0, 1.0), (nan, nan)))
    assert differing(plan, profile, replace(equal, losses=()), ["a.calls"]) == []
    assert "loss of step 2 is not finite" in differing(plan, profile, equal)[0]
    assert "changed a.calls, outside" in differing(plan, None, unequal, ["a.calls"])[0]
    stage = next(i for i, stage in enumerate(plan.stages) if "n3" in stage.nodes)
    assert said.startswith("in training, forwards write and read 'mean', and the 2 replicas of ")
    assert f"stage {stage} " in said


def test_other_numbers_of_micro_batches_than_asked_for_are_said() -> None:
    asked = {"replicas": 2, "micro_batches": 3}
    plan = planned(chain(6), nodes_of(4), 16, **asked)
    assert plan.micro_batches == 4
    assert plan.assumptions[-1] == (
        "3 micro-batches of 16 samples cannot be of one size with a smaller last one and be "
        "shared evenly by 2 replicas: 4 of 4 samples instead"
    )
    plan = planned(chain(6), nodes_of(4), 16, **asked, replication=Replication.SPLIT)
    assert (plan.micro_batches, plan.micro_batch_size) == (3, 6)


def test_a_last_micro_batch_of_fewer_samples_than_replicas_is_split_unless_the_model_refuses() -> (
    None
):
    asked = {"replicas": 2, "replication": Replication.SPLIT, "batches": (16, 1)}
    assert planned(chain(6), nodes_of(4), 16, **asked).stages[0].replicas == 2
    smallest = SmallestMicroBatch(2, "model: why")
    asked |= {"batches": (16, 3), "micro_batches": 4, "smallest": smallest}
    with pytest.raises(InfeasibleError, match="parts of fewer than 2 samples: model: why"):
        planned(chain(6), nodes_of(4), 16, **asked)


def test_loads_stay_finite_if_many_blocks_may_have_no_replicas() -> None:
    plain = chain(300)
    profile = replace(plain, carried=tuple((f"mean {i}", f"n{i}") for i in range(120)))
    problem = Problem(profile, nodes_of(8), PlanRequest("job", 16, replicas=None))
    space = CutSpace.of(problem.graph, profile)
    work_s = table_of(problem, space, 16, (16, 8)).work_s
    assert work_s[1].max() < 1e6 * work_s[0].max()


@pytest.mark.parametrize("replicas", [1, None])
def test_frozen_parameters_have_neither_gradients_nor_state(replicas) -> None:
    """Three large frozen operators; whoever counts them as trained finds no room for them."""
    each = []
    for i in range(12):
        gradients = ((f"p{i}", 100),) if i > 2 else ()
        each.append({"memory": OperatorMemory(1000, f"n{i}", 1000, 1000, gradients)})
    for i in range(3):
        each[i] |= {"parameters": ((f"p{i}", 10**6),), "forward_s": 1e-6, "backward_s": 1e-6}
    asked = {"stages": 3, "replicas": replicas, "memory_limit_bytes": 1_200_000}
    assert planned(chain(each), nodes_of(3), 16, **asked)


@settings(max_examples=20, deadline=None)
@given(
    frozen=st.sets(st.integers(0, 5)),
    size=st.integers(0, 10**9),
    replicas=st.sampled_from([1, 2, None]),
    shard=st.booleans(),
)
def test_the_size_of_frozen_parameters_changes_no_step(frozen, size, replicas, shard) -> None:
    """Neither their update nor a sum of their gradients takes time."""
    steps = []
    for bytes_ in (0, size):
        each = []
        for i in range(6):
            gradients = () if i in frozen else ((f"p{i}", 10**6),)
            each.append(
                {
                    "memory": OperatorMemory(1000, f"n{i}", 1000, 1000, gradients),
                    "parameters": ((f"p{i}", bytes_ if i in frozen else 10**6),),
                }
            )
        asked = {"replicas": replicas, "shard_optimizer": shard}
        plan = planned(chain(each), nodes_of(4), 16, **asked)
        assert plan.search.step_lower_bound_s <= plan.predicted_step_s * (1 + 1e-9)
        steps.append(plan.predicted_step_s)
    assert steps[0] == steps[1]


@pytest.mark.parametrize(("sizes", "most"), [([100] * 4, 200), ([700, 100, 100], 700)])
def test_a_replica_updates_only_what_it_owns(sizes, most) -> None:
    request = PlanRequest("job", 16, replicas=2, shard_optimizer=True)
    layout = Layout(((1 << len(sizes)) - 1,), ((0, 1),))
    choice = Choice(layout, 4, ONE_F_ONE_B.name, (1,))
    (stage,) = plan_of(Problem(owning(*sizes), nodes_of(2), request), choice).stages
    assert stage.cost.update_s == pytest.approx(most * 1e-9)


def test_a_search_that_is_cut_short_returns_its_best() -> None:
    """The more time there is, the better."""
    cluster = cluster_of(2, 2, within=Link(1e-5, 1e8), between=Link(1e-4, 1e6))
    uneven = chain([{"parameters": ((f"p{at}", 10**4),)} for at in range(9)])
    steps = []
    for most in (1, 10, 100, 1000, 10_000):
        plan = planned(uneven, cluster, expired=after(most), replicas=None)
        steps.append(plan.predicted_step_s)
    assert plan.search.finished
    assert steps[-1] <= min(steps) * (1 + 1e-3)
    assert steps[0] > steps[-1]


# Shared-out state of the optimizer


def owning(*sizes):
    """A chain of operators with a parameter each, and an optimizer with much state."""
    found = chain([{"parameters": ((f"p{i}", size),)} for i, size in enumerate(sizes)])
    return replace(found, optimizer=OptimizerCost(6.0, 1e-9))


@pytest.mark.parametrize("ranks", [2, MAX_UNITS + 1])
@pytest.mark.parametrize("replicas", [2, None])
def test_shared_out_state_lets_a_plan_fit(replicas, ranks) -> None:
    """Whole it takes 32 MB; with two replicas, 20, and 6 more for the sums of gradients."""
    profile = owning(*[10**6] * 4)
    limited = {"stages": 1, "replicas": replicas, "memory_limit_bytes": 27_000_000}
    plan = planned(profile, nodes_of(ranks, FAST), 16, **limited, shard_optimizer=True)
    assert plan.stages[0].replicas > 1
    assert plan.stages[0].cost.optimizer_bytes < 24_000_000
    with pytest.raises(InfeasibleError):
        planned(profile, nodes_of(ranks, FAST), 16, **limited)


def state_bytes(profile, layout):
    """Of every stage, on the rank that has the most."""
    ranks = 1 + max(max(held) for held in layout.ranks)
    request = PlanRequest("job", 16, replicas=2, shard_optimizer=True)
    choice = Choice(layout, 4, ONE_F_ONE_B.name, (1,) * len(layout.ranks))
    plan = plan_of(Problem(profile, nodes_of(ranks), request), choice)
    return [stage.cost.optimizer_bytes for stage in plan.stages]


@pytest.mark.parametrize(
    ("sizes", "replicas", "most"),
    [([100] * 4, 2, 200), ([700, 100, 100], 2, 700), ([900, 100, 500, 400, 400, 100], 3, 900)],
)
def test_the_owner_of_most_state_counts(sizes, replicas, most) -> None:
    """Parameters stay whole, and go to whoever has least so far, the largest first."""
    layout = Layout(((1 << len(sizes)) - 1,), (tuple(range(replicas)),))
    assert state_bytes(owning(*sizes), layout) == [6 * most]


def test_all_replicas_keep_the_state_of_parameters_with_several_uses() -> None:
    profile = owning(100, 100, 100)
    tied = [replace(o, parameters=(*o.parameters, ("tied", 1000))) for o in profile.operators[:2]]
    profile = replace(profile, operators=(*tied, profile.operators[2]))
    assert state_bytes(profile, Layout((0b011, 0b100), ((0, 1), (2, 3)))) == [6 * 1100, 6 * 100]


@pytest.mark.parametrize("seed", range(4))
def test_replicas_are_not_put_across_a_link_that_all_sums_share(seed) -> None:
    """Sums over the one link between two nodes take longer than the activations that pass it."""
    draw = Random(seed)
    each = []
    for i in range(8):
        sent = draw.randint(10**6, 10**7)
        held = {"parameters": ((f"p{i}", draw.randint(5, 9) * 10**7),), "saved": ((f"n{i}", sent),)}
        each.append({**held, "output_bytes": sent, "gradient_bytes": sent})
    profile = chain(each, forward_s=1e-2, backward_s=2e-2)
    cluster = cluster_of(4, 4, within=Link(1e-5, 2e10), between=Link(1e-5, 1e9))
    plan = planned(profile, cluster, stages=4, replicas=2)
    nodes = [{cluster.node_of_rank[rank] for rank in stage.ranks} for stage in plan.stages]
    assert [len(each) for each in nodes] == [1] * 4
    across = tuple((stage, stage + 4) for stage in range(4))
    copies = zip(plan.stages, across, strict=True)
    other = replace(plan, stages=tuple(replace(stage, ranks=ranks) for stage, ranks in copies))
    gradient_bytes = sum(stage.cost.accumulated_bytes for stage in plan.stages)
    assert simulate(other, cluster).step_time_s >= gradient_bytes / 1e9
    assert plan.predicted_step_s < simulate(other, cluster).step_time_s


def test_messages_between_replicas_pass_all_links_between_them() -> None:
    """Two halves over one link between nodes take as long as the whole; over two, half of it."""
    links, apart = (
        Links(cluster_of(2, 2, within=Link(1e-5, 1e8), between=Link(1e-4, 1e6, shared=shared)))
        for shared in (True, False)
    )
    assert links.transfer_s(1e6, [0, 1], [2, 3]) == pytest.approx((1.0, 1e-4))
    assert links.transfer_s(1e6, [0], [1]) == pytest.approx((1e-2, 1e-5))
    assert apart.transfer_s(1e6, [0, 1], [2, 3]) == pytest.approx((0.5, 1e-4))
    assert links.transfer_s(1e6, [0], [0]) == (0.0, 0.0)
