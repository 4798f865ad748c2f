"""The choice of what to recompute against all subsets."""

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipectl.planner.throughput.recomputation import IMPOSSIBLE, POSSIBLE, UNKNOWN, cover

items = st.lists(st.tuples(st.integers(-2, 12), st.integers(0, 12)), max_size=9)


def covered(gains, costs, needed, budget):
    taken = np.zeros(len(gains), dtype=np.int64)
    columns = (np.array(column, dtype=np.int64) for column in (gains, costs))
    return cover(*columns, needed, budget, taken), taken.tolist()


@settings(max_examples=400, deadline=None)
@given(items, st.integers(1, 40), st.integers(0, 40))
def test_cover_equals_trying_everything(pairs, needed, budget) -> None:
    gains, costs = [gain for gain, _ in pairs], [cost for _, cost in pairs]
    found, taken = covered(gains, costs, needed, budget)

    def suits(subset):
        chosen = [pair for pair, is_in in zip(pairs, subset, strict=True) if is_in]
        enough = sum(gain for gain, _ in chosen if gain > 0) >= needed
        return enough and sum(cost for _, cost in chosen) <= budget

    possible = any(suits(subset) for subset in product((0, 1), repeat=len(pairs)))
    assert found == (POSSIBLE if possible else IMPOSSIBLE)
    if possible:
        assert suits(taken)


def test_the_greedy_rule_is_improved_upon() -> None:
    # By cost per gain the first comes first, and then the second is needed as well.
    assert covered([6, 10, 5], [3, 6, 5], 10, 7) == (POSSIBLE, [0, 1, 0])


def test_many_equal_layers_take_no_time() -> None:
    gains, costs = [10] * 200, list(range(1000, 1200))
    least = sum(range(1000, 1051))
    assert covered(gains, costs, 501, least)[0] == POSSIBLE
    assert covered(gains, costs, 501, least - 1)[0] == IMPOSSIBLE


def test_a_hopelessly_hard_choice_is_given_up() -> None:
    # Even gains cannot make an odd sum exactly, which no bound sees.
    gains = [2 * (1000 + 7 * index) for index in range(60)]
    assert covered(gains, gains, 60001, 60001)[0] == UNKNOWN
