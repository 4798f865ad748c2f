"""The time of one step of a 1F1B-family schedule whose replicas take whole micro-batches in turn.

The order of all actions is that of :mod:`pipectl.planner.partition.recurrence`, and a replica does
its part of it. Two replicas of stage 0 and one of stage 1, warm-up (3, 1)::

    turn      0     1     2     3        4
    s 1       0   a 1   b 2   c 3
    s 0, r 1        1                    b          digits: forwards, letters: backwards
    s 0, r 0  0           2   a          c 4

Each replica has the speed of its own device, and each pair of replicas a link of its own.
"""

from __future__ import annotations

from typing import NamedTuple

from pipectl.arrays import Floats, Integers, Records
from pipectl.compiled import compiled
from pipectl.planner.partition.pipelines import Pipelines
from pipectl.planner.partition.recurrence import begin, step_s, sum_gradients


class Turns(NamedTuple):
    """The replicas of pipelines.

    Args:
        ranks: of every replica; shape [pipelines, stages, most replicas].
        replicas: of every stage; shape [pipelines, stages].
        forward_s, backward_s: of a full micro-batch; of the shape of ``ranks``.
    """

    ranks: Integers
    replicas: Integers
    forward_s: Floats
    backward_s: Floats


@compiled
def steps_in_turn(
    pipelines: Pipelines,
    turns: Turns,
    warm_ups: Integers,
    micro_batches: int,
    last_share: float,
    together: bool,
    room: Records,
    free_at: Floats,
    back: Floats,
    ends: Floats,
    steps_s: Floats,
) -> None:
    """Fill in the step times of pipelines.

    Args:
        warm_ups: shape [pipelines, orders, stages].
        last_share: size of the last micro-batch relative to the others.
        together: whether all ranks update together.
        room: scratch space for the messages of one pipeline in both directions; shape
            [2, messages].
        free_at: scratch space for when the links of these are free; shape
            [2, messages, pairs of replicas].
        back: scratch space; see :func:`pipectl.planner.partition.recurrence.run`.
        ends: scratch space for the end of the last action of every replica; shape
            [stages, replicas].
        steps_s: shape [pipelines, orders].
    """
    for row in range(len(steps_s)):
        place = 2 * pipelines.cut[row]
        first, second = pipelines.first[place], pipelines.first[place + 1]
        ahead, behind = room[0, : second - first], room[1, : pipelines.first[place + 2] - second]
        _place(pipelines.ways[first:second], ahead)
        _place(pipelines.ways[second : second + len(behind)], behind)
        stages = pipelines.stages[row]
        for order in range(steps_s.shape[1]):
            begin(stages, ahead, behind, warm_ups[row, order], micro_batches)
            _clear(ends)
            _clear(back)
            _clear(free_at[0])
            _clear(free_at[1])
            _run(
                pipelines, turns, row, micro_batches, last_share, ahead, behind, free_at, back, ends
            )
            for number in range(len(stages)):
                stage = stages[number]
                for replica in range(turns.replicas[row, number]):
                    stage.end = max(stage.end, ends[number, replica])
            sum_gradients(stages, pipelines.held, pipelines.free_at)
            steps_s[row, order] = step_s(stages, together)


@compiled
def _place(given: Records, ways: Records) -> None:
    """Set the stages of the messages of one pipeline in one direction."""
    for number in range(len(ways)):
        way, known = ways[number], given[number]
        way.source, way.target = known.source, known.target


@compiled
def _clear(times_s: Floats) -> None:
    """Reset clocks."""
    for row in range(len(times_s)):
        for place in range(times_s.shape[1]):
            times_s[row, place] = 0.0


@compiled
def _run(
    pipelines: Pipelines,
    turns: Turns,
    row: int,
    micro_batches: int,
    last_share: float,
    ahead: Records,
    behind: Records,
    free_at: Floats,
    back: Floats,
    ends: Floats,
) -> None:
    """Fill in the ends of all replicas of one pipeline."""
    stages, last, ring = pipelines.stages[row], micro_batches - 1, back.shape[1]
    offset = pipelines.first[2 * pipelines.cut[row]]
    for turn in range(last + stages[0].depth + 1):
        for number in range(len(stages) - 1, -1, -1):
            stage = stages[number]
            index = turn - stage.depth
            if index < 0 or index > last:
                continue
            share, slot = last_share if index == last else 1.0, index % ring
            replica = index % turns.replicas[row, number]
            begun = max(ends[number, replica], back[number, slot])
            end = begun + turns.backward_s[row, number, replica] * share
            ends[number, replica] = end
            back[number, slot] = 0.0
            place = stage.behind
            while place < len(behind) and behind[place].source == number:
                target = behind[place].target
                arrived = _pass(
                    pipelines, turns, row, offset + len(ahead) + place, number, target, index,
                    share, end, free_at[1, place],
                )  # fmt: skip
                back[target, slot] = max(back[target, slot], arrived)
                place += 1
        if turn > last:
            continue
        share = last_share if turn == last else 1.0
        for number in range(len(stages)):
            stage = stages[number]
            replica = turn % turns.replicas[row, number]
            begun = max(ends[number, replica], stage.arrived)
            end = begun + turns.forward_s[row, number, replica] * share
            ends[number, replica] = end
            stage.arrived = 0.0
            place = stage.ahead
            while place < len(ahead) and ahead[place].source == number:
                target = ahead[place].target
                arrived = _pass(
                    pipelines, turns, row, offset + place, number, target, turn, share, end,
                    free_at[0, place],
                )  # fmt: skip
                stages[target].arrived = max(stages[target].arrived, arrived)
                if turn == 0:
                    stages[target].idle = max(stages[target].idle, end)
                place += 1


@compiled
def _pass(
    pipelines: Pipelines,
    turns: Turns,
    row: int,
    number: int,
    source: int,
    target: int,
    micro_batch: int,
    share: float,
    ready: float,
    free_at: Floats,
) -> float:
    """Send a message that is ready at some time; returns its arrival."""
    senders, receivers = turns.replicas[row, source], turns.replicas[row, target]
    sender, receiver = micro_batch % senders, micro_batch % receivers
    kind = pipelines.class_of[turns.ranks[row, source, sender], turns.ranks[row, target, receiver]]
    link = sender * receivers + receiver
    free_at[link] = max(free_at[link], ready) + pipelines.hold_s[kind, number] * share
    return float(free_at[link] + pipelines.late_s[kind])
