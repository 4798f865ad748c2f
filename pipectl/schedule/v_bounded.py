"""V-Half and V-Min: two stages per rank in a V, with a half and a third of the activations of 1F1B.

Six stages on three ranks, four micro-batches; stages 0 and 5 are the first rank's. Forward, input
half and weight half of a backward equally long; digits are forwards, small letters (a = micro-batch
0) input halves, capitals weight halves. V-Half::

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
the micro-batch before it. A rank therefore keeps as many activations as one lives, divided by six
turns. The path is given by the turns between neighbouring ranks. With one turn everywhere,
activations of both stages of a rank together live about 4p turns: a third of the p whole
micro-batches that 1F1B keeps (V-Min). V-Half takes two turns for each step down the ranks, forwards
and backwards, and about 6p turns. If two actions of a rank would share a turn, micro-batches wait
at an end of the V. A rank keeps at most p/2 + 3/2 (V-Half) or p/3 + 4/3 (V-Min) micro-batches.
Source: Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, section 3.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

from pipectl.schedule.order import Order, Schedule, Turns
from pipectl.schedule.sequences import v_shaped

_INTERVAL = 6
"""Turns from one micro-batch to the next."""


@lru_cache(maxsize=64)
def _path(ranks: int, down: int) -> tuple[tuple[int, ...], ...]:
    """Turns of the forward, the input half and the weight half of micro-batch 0, by stage.

    Args:
        down: turns from a rank to the next, for forwards and backwards down the ranks; up it is 1.
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


def _bounded(name: str, down: int) -> Schedule:
    def order(ranks: int, _: int) -> Order:
        def turns(first: tuple[int, ...]) -> Turns:
            return lambda stage, micro_batch: first[stage] + _INTERVAL * micro_batch

        return Order(*map(turns, _path(ranks, down)))

    return v_shaped(name, order)


V_HALF, V_MIN = _bounded("v-half", down=2), _bounded("v-min", down=1)
