"""The least step of a plan with replicas, against the event simulator on any small cluster."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pipectl.cluster import Cluster, Device, Node
from pipectl.graph import TransferKind
from pipectl.link import Link
from pipectl.plan import Plan, Replication, Stage, StageCost, Transfer
from pipectl.planner.proof.links import Ways
from pipectl.planner.proof.plan_bound import plan_bound_s
from pipectl.schedule.one_f_one_b import policy_a, policy_b
from pipectl.simulate import simulate

KINDS = [Device("slow"), Device("fast", 3.0)]


@st.composite
def clusters(draw, *, alone=False):
    """Up to five ranks.

    Args:
        alone: whether every rank has a node with a core of its own.
    """
    latency_s = draw(st.sampled_from([0.0, 0.0625]))
    within = Link(latency_s, 1e6)
    if draw(st.booleans()) and not alone:
        within = replace(within, timings=((1000, latency_s + 0.03), (500_000, latency_s + 0.2)))
    between = replace(
        within,
        bandwidth_bytes_per_s=5e5,
        timings=(),
        duplex=draw(st.booleans()) or alone,
        shared=draw(st.booleans()),
        interface=draw(st.booleans()) and not alone,
    )
    nodes = []
    for index in range(draw(st.integers(1, 5))):
        ranks = 1 if alone else draw(st.integers(1, 2))
        cores = draw(st.integers(1, ranks))
        nodes.append(Node(f"n{index}", ranks, cores, draw(st.sampled_from(KINDS))))
    return Cluster("c", "test", tuple(nodes[:5]), within, between)


@st.composite
def plans(draw, cluster, *, least_s=0.0, most_s=1.0):
    """Chains of stages with replicas on any ranks, some with a message that skips stages."""
    ranks = draw(st.permutations(range(cluster.ranks)))
    replicas, left = [], min(5, cluster.ranks)
    while left and (not replicas or draw(st.booleans())):
        replicas.append(draw(st.integers(1, left)))
        left -= replicas[-1]
    count, micro_batches = len(replicas), draw(st.integers(1, 9))
    way = draw(st.sampled_from(list(Replication)))
    times = st.integers(0, 8).map(lambda value: least_s + value * 0.125)
    stages = []
    for index, number in enumerate(replicas):
        held = tuple(ranks.pop() for _ in range(number))
        size = draw(st.sampled_from([0, 50_000]))
        cost = StageCost(draw(times), draw(times), draw(st.sampled_from([0, 0.25])), size, 0, 0)
        stages.append(Stage((f"n{index}",), held, cost))
    pairs = [(i, i + 1) for i in range(count - 1)] + ([(0, count - 1)] if count > 2 else [])
    sizes = st.integers(0, 8).map(lambda value: int(value / 8 * most_s * 1e6))
    transfers = [
        transfer
        for one, other in pairs
        for transfer in (
            Transfer(TransferKind.ACTIVATION, one, other, draw(sizes)),
            Transfer(TransferKind.GRADIENT, other, one, draw(sizes)),
        )
    ]
    policy = draw(st.sampled_from([policy_a, policy_b, lambda stages, most, _: (most,) * stages]))
    depths = policy(count, micro_batches, replicas if way is Replication.WHOLE else None)
    last = draw(st.sampled_from([3, 6]))
    return Plan(
        name="test",
        fingerprint=None,
        schedule="1f1b",
        warm_up=depths,
        batch_size=6 * (micro_batches - 1) + last,
        micro_batch_size=6,
        micro_batches=micro_batches,
        stages=tuple(stages),
        transfers=tuple(transfers),
        node_of_rank=cluster.node_of_rank,
        replication=way,
    )


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_it_is_never_above_the_event_simulator(data):
    """Whatever ranks share: cores, links, interfaces; whatever their messages take."""
    cluster = data.draw(clusters())
    plan = data.draw(plans(cluster))
    simulated_s = simulate(plan, cluster).step_time_s
    assert plan_bound_s(plan, cluster, Ways(cluster)) <= simulated_s * (1 + 1e-12)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_it_equals_the_event_simulator_where_nothing_is_shared_and_messages_are_short(data):
    cluster = data.draw(clusters(alone=True))
    plan = data.draw(plans(cluster, least_s=1.0, most_s=0.125))
    simulated_s = simulate(plan, cluster).step_time_s
    bound_s = plan_bound_s(plan, cluster, Ways(cluster))
    assert bound_s <= simulated_s * (1 + 1e-12)
    if all(stage.replicas == 1 for stage in plan.stages):
        assert bound_s >= simulated_s * (1 - 1e-12)
    assert plan_bound_s(plan, cluster, Ways(cluster), simulated_s * 0.999) >= bound_s
