"""The exact balance against an enumeration of every chain of convex stages, and its promises."""

from functools import cache
from itertools import combinations
from math import inf

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipectl.planner.balance.balance import balance
from pipectl.planner.balance.load_model import BalanceRequest
from pipectl.planner.graph.blocks import condense
from pipectl.profile import Profile
from tests.planner.gate.checked_plans import after
from tests.planner.gate.graphs import make_operator, next_stages

pytestmark = pytest.mark.slow

FREE = {"backward_s": 0.0, "parameter_bytes": 0, "output_bytes": 0, "gradient_bytes": 0}


def operator(index, **more):
    """Of a second forward, and nothing else that is not said."""
    return make_operator(index, **{**FREE, "forward_s": 1.0, **more})


def profile_of(operators, edges):
    return Profile("graph", "test", 1, tuple(operators), tuple(edges))


@st.composite
def profiles(draw):
    """Small DAGs with groups, free operators and memory."""
    count = draw(st.integers(1, 9))
    pairs = list(combinations(range(count), 2))
    arcs = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=12)) if pairs else []
    operators = [
        operator(
            index,
            forward_s=float(draw(st.integers(0, 5))),
            backward_s=float(draw(st.integers(0, 2))),
            transfer_s=draw(st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0])),
            memory_bytes=draw(st.integers(0, 3)),
            group=draw(st.sampled_from([None, None, None, "a", "b"])),
        )
        for index in range(count)
    ]
    return profile_of(operators, [(f"n{u}", f"n{v}") for u, v in sorted(arcs)])


requests = st.builds(
    BalanceRequest,
    devices=st.integers(0, 4),
    memory_limit_bytes=st.sampled_from([None, None, 4, 8]),
    communication_scale=st.sampled_from([1.0, 2.0]),
)


def load(profile, request, inside):
    """Load of a stage, straight from the definition; None if it does not fit."""
    members = [o for o in profile.operators if o.id in inside]
    limit = request.memory_limit_bytes
    if limit is not None and sum(o.memory_bytes or 0 for o in members) > limit:
        return None
    total = sum(o.forward_s + o.backward_s for o in members)
    for o in profile.operators:
        users = {o.id} | {target for source, target in profile.edges if source == o.id}
        if users & inside and users - inside:
            total += o.transfer_s * request.communication_scale
    return total


def enumerated(profile, request):
    """The smallest largest load over all chains of stages, by trying every set as the next."""
    graph = condense(profile)
    loads = cache(
        lambda blocks: load(
            profile, request, {profile.operators[i].id for i in graph.operators_of(blocks)}
        )
    )

    @cache
    def rest(done, devices):
        if done == graph.everything:
            return 0.0
        chains = (
            max(load_s, rest(done | stage, devices - 1))
            for stage in (next_stages(graph, done) if devices else ())
            if (load_s := loads(stage)) is not None
        )
        return min(chains, default=inf)

    return rest(0, request.devices)


def check_stages(profile, request, found):
    """The stages are admissible and have the loads they are said to have."""
    place = {node: s for s, stage in enumerate(found.stages) for node in stage.nodes}
    assert sorted(place) == sorted(o.id for o in profile.operators)
    assert all(place[source] <= place[target] for source, target in profile.edges)
    groups = {(o.group, place[o.id]) for o in profile.operators if o.group}
    assert len(groups) == len({group for group, _ in groups})
    assert len(found.stages) <= request.devices
    for stage in found.stages:
        again = load(profile, request, set(stage.nodes))
        assert again == pytest.approx(stage.load_s, rel=1e-12)
    assert found.value_s == max(stage.load_s for stage in found.stages)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.data_too_large])
@given(
    profiles(),
    requests,
    st.one_of(st.none(), st.none(), st.integers(0, 6)),
    st.sampled_from([20_000, 20_000, 1]),
)
def test_value_is_that_of_the_enumeration_and_the_bound_holds(
    profile, request, looks, max_downsets
):
    """Also if the search ends early, or if there are too many downsets for it to be exact."""
    expired = after(10**9 if looks is None else looks)
    found = balance(profile, request, expired, max_downsets=max_downsets)
    whole = looks is None and max_downsets > 1
    expected = enumerated(profile, request)
    if found is None:
        assert expected == inf or not whole
        return
    check_stages(profile, request, found)
    assert found.lower_bound_s <= expected * (1 + 1e-9)
    assert found.value_s >= expected * (1 - 1e-9)
    if whole:
        assert found.exact
        assert found.value_s == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert found.gap <= 1e-9


def test_bandwidth_counts_both_ways_at_both_ends():
    pair = profile_of([operator(0, output_bytes=3), operator(1)], [("n0", "n1")])
    found = balance(pair, BalanceRequest(2, bandwidth_bytes_per_s=60.0))
    assert found.value_s == pytest.approx(1.0 + 2 * 3 / 60.0)


def test_backward_operators_follow_their_forward_ones():
    """The backward runs the other way, in the stages of its groups; its values cross, too. n4 reads
    the gradient of n1 and makes that of n0: no stage may hold it in front of n0."""
    forward = [operator(i, phase="forward", group=str(i), transfer_s=0.25) for i in range(2)]
    backward = [operator(i + 2, phase="backward", group=str(i), transfer_s=0.25) for i in range(2)]
    alone = operator(4, phase="backward")
    edges = [("n0", "n1"), ("n1", "n3"), ("n3", "n4"), ("n4", "n2")]
    found = balance(profile_of([*forward, *backward, alone], edges), BalanceRequest(3))
    assert [stage.nodes for stage in found.stages] == [("n0", "n2"), ("n4",), ("n1", "n3")]
    assert found.value_s == 2.5
