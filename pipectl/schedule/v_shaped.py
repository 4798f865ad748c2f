"""Two stages per rank in a V: ZB-V, DualPipeV, V-Half and V-Min.

Of 2p stages, rank r holds stages r and 2p - 1 - r, its first and its second *chunk*. Activations go
down the ranks and come back up, so the rank that begins the model also computes its loss. Forward,
input half and weight half of a backward are drawn equally long; digits are forwards, small letters
(a = micro-batch 0) input halves, capitals weight halves.

ZB-V has idle time only at the start and the end. Four stages on two ranks, six micro-batches::

    stage 0  012......3aA...4bB...5cC...dD...eEfF
    stage 1  .0.1...2aA...3bB...4cC...5dD...e.fE.F
    stage 2  ..0.1aA...2bB...3cC...4dD...5eE.f..F
    stage 3  ...0aA1bB...2cC...3dD...4eE..5fF

Every rank keeps at most p whole micro-batches, as the first stage of 1F1B does. Sources: Qi et al.,
"Zero Bubble Pipeline Parallelism", ICLR 2024, and "Pipeline Parallelism with Controllable Memory",
NeurIPS 2024.

DualPipeV pairs a forward of one stage with every backward of the other::

    stage 0  012....3...aA4...bB5...cC...dD..eE.fF
    stage 1  .0.1.2...aA3...bB4...cC5...dD..eE.f.F
    stage 2  ..0.1.aA2...bB3...cC4...dD5..eE..f.F
    stage 3  ...0aA1.bB2...cC3...dD4..eE5..fF

In the long middle part, a rank repeats the forward of its first stage, the backward of the second,
the forward of the second and the backward of the first, so that each hides the messages of the one
before it. A rank keeps p + 1/2 whole micro-batches. Source: DeepSeek-AI's DualPipe, cut in half
(DualPipeV); here a forward and a backward run one after the other instead of at the same time, and
every backward is split.

V-Half and V-Min keep a half and a third of the activations of 1F1B. Six stages on three ranks, four
micro-batches. V-Half::

    stage 0  01......2...aA3...bB....cC...dD
    stage 1  .0...1....2a.A..3b.B...c.C..dD
    stage 2  ..0...1...aA2...bB3...cC...dD
    stage 3  ...0...1aA...2bB...3cC...dD
    stage 4  ....0..a1A..b.2B..c.3C..d.D
    stage 5  .....0aA.1bB...2cC...3dD

V-Min::

    stage 0  0.....1.....2a..A.3b..B..c..C..dD
    stage 1  .0.....1....a2A...b3B...cC....dD
    stage 2  ..0.....1..a.A2..b.B3..c.C...d.D
    stage 3  ...0.....1a.A..2b.B..3c.C...d.D
    stage 4  ....0...a.1A...b2B...c3C...dD
    stage 5  .....0.aA..1..bB.2..cC.3..dD

Every micro-batch takes the same path through the ranks, six turns (the six actions of a rank) after
the previous micro-batch. A rank therefore keeps as many activations as the lifetime of one, divided
by six turns. The path is defined by the turns between neighbouring ranks. With one turn everywhere
(V-Min), the activations of both stages of a rank together live about 4p turns: a third of the p
whole micro-batches that 1F1B keeps. V-Half takes two turns for each step down the ranks, in
forwards and backwards, and about 6p turns. If two actions of a rank would share a turn,
micro-batches wait at an end of the V. A rank keeps at most p/2 + 3/2 (V-Half) or p/3 + 4/3 (V-Min)
micro-batches. Source: Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024,
section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import product

import numpy as np

from pipectl.schedule.actions import Integers, Kind
from pipectl.schedule.order import Order, Placement, Schedule, Shape, Turns, WarmUp
from pipectl.schedule.sequences import execute

Step = tuple[Kind, int]
"""Kind of action, and its chunk."""
Orders = Callable[[int, int], Order]
"""(ranks, micro-batches) -> the order of the stages of a V."""

F0, F1 = (Kind.FORWARD, 0), (Kind.FORWARD, 1)
I0, I1 = (Kind.BACKWARD_INPUT, 0), (Kind.BACKWARD_INPUT, 1)
W0, W1 = (Kind.BACKWARD_WEIGHT, 0), (Kind.BACKWARD_WEIGHT, 1)
_INTERVAL = 6
"""Turns from one micro-batch to the next in V-Half and V-Min."""


class Listing:
    """Builds the list of one rank of a V; each step takes the next micro-batch."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._stages = rank, 2 * ranks - 1 - rank
        self._next: dict[Step, int] = {}
        self._parts: list[Integers] = []

    def repeat(self, times: int, *steps: Step) -> None:
        """Append different steps, in sequence, so many times."""
        rows = np.empty((times, len(steps), 3), dtype=np.int64)
        for place, (kind, chunk) in enumerate(steps):
            first = self._next.get((kind, chunk), 0)
            rows[:, place, 0], rows[:, place, 1] = kind, self._stages[chunk]
            rows[:, place, 2] = np.arange(first, first + times)
            self._next[kind, chunk] = first + times
        self._parts.append(rows.reshape(-1, 3))

    def up_to(self, micro_batches: int) -> Integers:
        """Return the list without further micro-batches; shape [actions, 3]."""
        rows = np.concatenate(self._parts)
        kept: Integers = rows[rows[:, 2] < micro_batches]
        return kept


def _orders_of(listed: Callable[[int, int, int], Integers]) -> Orders:
    """Return a function that makes the orders of a V from lists.

    Args:
        listed: (rank, ranks, micro_batches) -> actions of the rank.
    """

    @lru_cache(maxsize=16)
    def order(ranks: int, micro_batches: int) -> Order:
        lists = [listed(rank, ranks, micro_batches) for rank in range(ranks)]
        return execute(lists, 2 * ranks, micro_batches).order

    return order


def _v_shaped(name: str, orders: Orders) -> Schedule:
    """Return a V-shaped schedule with split backwards."""

    def warm_ups(shape: Shape) -> list[WarmUp]:
        order = orders(shape.ranks, shape.micro_batches)
        return [order.warm_up(shape.stages, shape.micro_batches)]

    return Schedule(
        name,
        lambda shape, _: orders(shape.ranks, shape.micro_batches),
        warm_ups,
        placement=Placement.V_SHAPED,
        stages_per_rank=(2,),
        splits_backward=True,
    )


def _zb_v(rank: int, ranks: int, micro_batches: int) -> Integers:
    """With fewer than 2p - 1 micro-batches, the turns of missing ones stay empty."""
    count, behind = max(micro_batches, 2 * ranks - 1), ranks - rank
    listing = Listing(rank, ranks)
    listing.repeat(2 * behind - 1, F0)
    listing.repeat(rank, F1, F0)
    listing.repeat(behind, F1, I1, W1)
    listing.repeat(count - ranks, F0, I0, W0, F1, I1, W1)
    listing.repeat(rank, I0, I1)
    listing.repeat(behind, I0, W0)
    listing.repeat(rank, W1)
    listing.repeat(rank, W0)
    return listing.up_to(micro_batches)


def _dual_pipe_v(rank: int, ranks: int, micro_batches: int) -> Integers:
    """With fewer than 2p micro-batches, the turns of missing ones stay empty."""
    count, behind = max(micro_batches, 2 * ranks), ranks - rank - 1
    listing = Listing(rank, ranks)
    listing.repeat(2 * behind, F0)
    listing.repeat(rank + 1, F0, F1)
    listing.repeat(behind, I1, W1, F1)
    listing.repeat(count - 2 * ranks + rank + 1, F0, I1, W1, F1, I0, W0)
    listing.repeat(behind, I1, W1, F1, I0, W0)
    # Only backwards are left; in the second half of them, weight halves wait for idle time.
    waiting = []
    for place in range(2 * (rank + 1)):
        half, weight = ((I1, W1), (I0, W0))[place % 2]
        listing.repeat(1, half)
        if place > rank:
            waiting.append(weight)
        else:
            listing.repeat(1, weight)
    for _ in range(behind):
        listing.repeat(1, waiting.pop(0), I0)
        waiting.append(W0)
    for weight in waiting:
        listing.repeat(1, weight)
    return listing.up_to(micro_batches)


@lru_cache(maxsize=64)
def _path(ranks: int, down: int) -> tuple[tuple[int, ...], ...]:
    """Return the turns of forward, input half and weight half of micro-batch 0, by stage.

    Args:
        down: turns from a rank to the next down the ranks; up the ranks it is 1.
    """
    last = ranks - 1
    for waits in sorted(product(range(_INTERVAL), repeat=3), key=sum):
        first_up = down * last + 1 + waits[0]
        first_down = first_up + last + 1 + waits[1]
        second_up = first_down + down * last + 1 + waits[2]
        begins = [
            (down * rank, first_up + last - rank, first_down + down * rank, second_up + last - rank)
            for rank in range(ranks)
        ]
        if all(len({turn % _INTERVAL for turn in turns}) == len(turns) for turns in begins):
            break
    forward, backward, weight = ([0] * 2 * ranks for _ in range(3))
    for rank, turns in enumerate(begins):
        stages = rank, 2 * ranks - 1 - rank
        forward[stages[0]], forward[stages[1]], backward[stages[1]], backward[stages[0]] = turns
        free = sorted(set(range(_INTERVAL)) - {turn % _INTERVAL for turn in turns})

        def after(turn: int, slot: int) -> int:
            return turn + (slot - turn) % _INTERVAL

        choices = (tuple(map(after, turns[2:], slots)) for slots in (free, free[::-1]))
        weight[stages[1]], weight[stages[0]] = min(choices, key=sum)
    return tuple(map(tuple, (forward, backward, weight)))


def _periodic_v(name: str, down: int) -> Schedule:
    def order(ranks: int, _: int) -> Order:
        def turns(first: tuple[int, ...]) -> Turns:
            return lambda stage, micro_batch: first[stage] + _INTERVAL * micro_batch

        return Order(*map(turns, _path(ranks, down)))

    return _v_shaped(name, order)


ZB_V = _v_shaped("zb-v", _orders_of(_zb_v))
DUAL_PIPE_V = _v_shaped("dualpipev", _orders_of(_dual_pipe_v))
V_HALF, V_MIN = _periodic_v("v-half", down=2), _periodic_v("v-min", down=1)
