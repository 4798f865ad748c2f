"""The closed recurrence against the event simulator, on clusters of one rank a node."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipectl.cluster import Cluster, Device, Node
from pipectl.graph import TransferKind
from pipectl.link import Link
from pipectl.plan import Plan, Stage, StageCost, Transfer
from pipectl.planner.partition.estimate import Pipelines, step_times
from pipectl.planner.partition.recurrence import STAGE, WAY
from pipectl.schedule.one_f_one_b import policy_a, policy_b
from pipectl.simulate import simulate

BYTES_PER_S = 1e6


def cluster_of(count, latency_s):
    link = Link(latency_s, BYTES_PER_S)
    nodes = tuple(Node(f"node{i}", 1, 1, Device("cpu")) for i in range(count))
    return Cluster("test", "test", nodes, link, link)


def plan_of(forward, backward, warm_up, micro_batches, transfers, last=8):
    stages = tuple(
        Stage((f"n{i}",), (i,), StageCost(f, b, 0.25, 0, 0, 0))
        for i, (f, b) in enumerate(zip(forward, backward, strict=True))
    )
    return Plan(
        name="test",
        fingerprint=None,
        schedule="1f1b",
        warm_up=warm_up,
        batch_size=8 * (micro_batches - 1) + last,
        micro_batch_size=8,
        micro_batches=micro_batches,
        stages=stages,
        transfers=transfers,
        node_of_rank=tuple(range(len(stages))),
    )


def step_time_s(
    forward_s,
    backward_s,
    warm_up,
    ahead,
    behind,
    micro_batches,
    *,
    reduce_s=0.0,
    update_s=0.0,
    last_share=1.0,
):
    """Time of a step by the recurrence.

    Args:
        ahead, behind: (source, target, hold_s, late_s) of activations and gradients.
    """
    stages = np.zeros((1, len(forward_s)), dtype=STAGE)
    stages["forward_s"], stages["backward_s"] = [forward_s], [backward_s]
    stages["reduce_s"], stages["update_s"] = reduce_s, update_s
    rows = [*sorted(ahead), *sorted(behind)]
    ways = np.zeros(len(rows), dtype=WAY)
    ways["source"], ways["target"] = [row[0] for row in rows], [row[1] for row in rows]
    late_s = [row[3] for row in rows] or [0.0]
    pipelines = Pipelines(
        stages,
        ways,
        np.array([[row[2] for row in rows]], dtype=np.float64),
        np.array(late_s[:1]),
        np.array([0, len(ahead), len(rows)]),
        np.zeros(1, dtype=np.int64),
        np.zeros((1, 1), dtype=np.int64),
    )
    depths = np.array([warm_up], dtype=np.int64)
    room, back = np.zeros((2, len(rows)), dtype=WAY), np.zeros((len(forward_s), micro_batches + 2))
    steps_s = np.zeros((1, 1))
    step_times(pipelines, depths, micro_batches, last_share, 0, 1, room, back, steps_s)
    return float(steps_s[0, 0])


def recurrence_s(plan, latency_s):
    """The recurrence on what the plan says."""

    ways = [
        [
            (t.source, t.target, t.size_bytes / BYTES_PER_S, latency_s)
            for t in plan.transfers
            if t.kind is kind
        ]
        for kind in (TransferKind.ACTIVATION, TransferKind.GRADIENT)
    ]
    costs = [stage.cost for stage in plan.stages]
    return step_time_s(
        [c.forward_s for c in costs],
        [c.backward_s for c in costs],
        plan.warm_up,
        *ways,
        plan.micro_batches,
        update_s=[c.update_s for c in costs],
        last_share=plan.micro_batch_shares[-1],
    )


@st.composite
def plans(draw, least_s=0.0, most_s=1.0, *, skips=True):
    """Chains of stages.

    Args:
        least_s: shortest computation.
        most_s: longest time of a message.
        skips: whether some have one transfer that skips stages. Its receiver, which has other
            receives posted, may make it begin late.
    """
    count = draw(st.integers(1, 5))
    micro_batches = draw(st.integers(1, 12))
    times = st.integers(0, 8).map(lambda value: least_s + value * 0.125)
    forward = draw(st.lists(times, min_size=count, max_size=count))
    backward = draw(st.lists(times, min_size=count, max_size=count))
    pairs = [(i, i + 1) for i in range(count - 1)]
    if skips and count > 2:
        pairs += draw(st.sampled_from([[], [(0, count - 1)]]))
    sizes = st.integers(0, 8).map(lambda value: int(value / 8 * most_s * BYTES_PER_S))
    transfers = []
    for source, target in pairs:
        transfers.append(Transfer(TransferKind.ACTIVATION, source, target, draw(sizes)))
        transfers.append(Transfer(TransferKind.GRADIENT, target, source, draw(sizes)))
    policies = policy_a, policy_b, lambda stages, most: (most,) * stages
    depths = draw(st.sampled_from(policies))(count, micro_batches)
    last = draw(st.sampled_from([4, 8]))
    return plan_of(forward, backward, depths, micro_batches, tuple(transfers), last)


@settings(max_examples=100, deadline=None)
@given(plan=plans(least_s=1.0, most_s=0.25, skips=False), latency_s=st.sampled_from([0.0, 0.0625]))
def test_it_equals_the_event_simulator_where_messages_are_shorter_than_computations(
    plan, latency_s
):
    simulated_s = simulate(plan, cluster_of(plan.ranks, latency_s)).step_time_s
    assert recurrence_s(plan, latency_s) == pytest.approx(simulated_s, rel=1e-12)


@settings(max_examples=100, deadline=None)
@given(plan=plans(), latency_s=st.sampled_from([0.0, 0.0625]))
def test_it_is_never_above_the_event_simulator(plan, latency_s):
    """Ranks post their receives a message or two ahead, so longer messages can begin late."""
    simulated_s = simulate(plan, cluster_of(plan.ranks, latency_s)).step_time_s
    assert recurrence_s(plan, latency_s) <= simulated_s * (1 + 1e-12)


def slow_s(forward, backward, there, back, reduce, warm_up, micro_batches):
    """The rules in plain words: each action begins when its stage is free and its input there."""
    count = len(forward)
    done = {}
    free, sent, returned = [0.0] * count, [0.0] * count, [0.0] * count
    todo = [
        [("F", i) for i in range(min(w, micro_batches))]
        + [
            action
            for i in range(micro_batches)
            for action in (("B", i), ("F", i + w))
            if action[1] < micro_batches
        ]
        for w in warm_up
    ]
    while any(todo):
        for stage in range(count):
            if not todo[stage]:
                continue
            kind, i = todo[stage][0]
            if kind == "F":
                ready = done.get(("arrived", stage, i)) if stage else 0.0
            else:
                ready = done.get(("back", stage, i)) if stage < count - 1 else 0.0
            if ready is None:
                continue
            todo[stage].pop(0)
            free[stage] = max(free[stage], ready) + (forward if kind == "F" else backward)[stage]
            if kind == "F" and stage < count - 1:
                sent[stage] = max(sent[stage], free[stage]) + there[stage]
                done["arrived", stage + 1, i] = sent[stage]
            if kind == "B" and stage:
                returned[stage] = max(returned[stage], free[stage]) + back[stage - 1]
                done["back", stage - 1, i] = returned[stage]
    return max(end + more for end, more in zip(free, reduce, strict=True))


@pytest.mark.parametrize("micro_batches", [1, 2, 7, 60, 500])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_it_follows_the_rules_also_where_it_skips_turns(micro_batches, depth):
    random = np.random.default_rng(micro_batches * 10 + depth)
    for _ in range(20):
        count = int(random.integers(1, 6))
        forward, backward, reduce = random.integers(1, 9, (3, count)) * 0.1
        there, back = random.integers(0, 9, (2, count - 1)) * 0.1
        warm_up = [min(micro_batches, depth * (count - s - 1) + 1) for s in range(count)]
        ways = [(i, i + 1, t, 0.0) for i, t in enumerate(there)]
        ways_back = [(i + 1, i, t, 0.0) for i, t in enumerate(back)]
        found_s = step_time_s(
            forward, backward, warm_up, ways, ways_back, micro_batches, reduce_s=reduce
        )
        expected_s = slow_s(forward, backward, there, back, reduce, warm_up, micro_batches)
        assert found_s == pytest.approx(expected_s, rel=1e-10)


def test_a_reduction_hides_behind_earlier_stages():
    """Two stages, one micro-batch: 1 + 1 forward, 1 + 1 backward; the second reduces meanwhile."""
    ways = [(0, 1, 0.0, 0.0)], [(1, 0, 0.0, 0.0)]
    for reduce, expected in (([0.0, 0.5], 4.0), ([0.0, 2.0], 5.0), ([0.5, 0.0], 4.5)):
        assert step_time_s([1.0, 1.0], [1.0, 1.0], [1, 1], *ways, 1, reduce_s=reduce) == expected
