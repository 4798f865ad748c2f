"""The time of one step of a 1F1B-family schedule, stage by stage and without events.

The schedules of this family are one order of all actions: in turn t every stage s, last stage
first, does the backward of micro-batch t - warm_up[s], then every stage, first stage first, the
forward of micro-batch t. Three stages, warm-up (3, 2, 1)::

    turn   0     1     2     3        4
    s 2    0     1     2   a 3      b 4
    s 1    0     1   . 2   a 3      b 4         digits: forwards, letters: backwards
    s 0    0     1     2   a 3      b 4

If the warm-up never increases with the stage, all dependencies of an action come before it, so one
pass of (stages + transfers) x micro-batches steps computes all ends. It equals the event simulation
of the same plan if stages send only to their neighbours, no two transfers share a link and messages
are shorter than computations. Otherwise messages may start later in the simulation, because
receives are posted only a little ahead.

In the steady state, all ends advance by the same time per turn (a max-plus system at its
eigenvalue). Once this has held for a whole cycle of the backwards in flight, the turns up to the
last micro-batch are skipped.
"""

from __future__ import annotations

from typing import Any

from pipectl.arrays import Floats, Integers, Records, record
from pipectl.compiled import compiled

SAME = 1e-13
"""Advances count as equal if their difference is below this share of the time."""

STAGE = record(
    "group depth ahead behind",
    "forward_s backward_s reduce_s update_s summed_bytes end arrived idle before",
)
"""Per stage, in order:

- ``group`` of ranks, for :mod:`pipectl.planner.partition.estimate`;
- seconds of one full micro-batch, shared by the replicas; of the sum of gradients after the last
  backward; of the update; and the bytes of the sum.

The rest is filled in: ``depth``, forwards before the first backward; ``ahead`` and ``behind``, its
first message in either direction; the ``end`` of its last action, and that one turn ``before``; the
time at which the inputs of this turn have ``arrived``, and the seconds that it is ``idle`` until
those of the first turn are sent.
"""
WAY = record("source target", "hold_s late_s free_at before")
"""Per message of one direction, by ascending source; each has its own link:

- ``hold_s``: time in which the link takes no other message, for a full micro-batch;
- ``late_s``: latency, from the end of ``hold_s`` to the arrival.

The rest is filled in: the time at which the link is free, and that one turn ``before``.
"""


@compiled
def run(
    stages: Records,
    ahead: Records,
    behind: Records,
    warm_up: Integers,
    back: Floats,
    micro_batches: int,
    last_share: float,
) -> None:
    """Fill in the ends of all stages.

    Args:
        ahead, behind: activations to later stages, and gradients to earlier ones.
        warm_up: of every stage; never increases.
        back: scratch space for the arrival of the gradients of every stage, in a ring over
            micro-batches of first depth + 1 entries; shape [stages, at least as many].
        last_share: size of the last micro-batch relative to the others.
    """
    last, ring = micro_batches - 1, min(max(warm_up[0], 1), micro_batches) + 1
    begin(stages, ahead, behind, warm_up, micro_batches)
    for number in range(len(stages)):
        for slot in range(ring):
            back[number, slot] = 0.0
    steady, turn = 0, 0
    while turn < last + ring:
        _backwards(turn, ring, last, last_share, stages, behind, back)
        if turn <= last:
            _forwards(last_share if turn == last else 1.0, turn == 0, stages, ahead)
        if ring <= turn < last - 1 - ring:
            advance_s = _advance(stages, ahead, behind)
            steady = steady + 1 if advance_s >= 0.0 else 0
            if steady > ring:
                turn += _skip(last - 1 - turn, ring, advance_s, stages, ahead, behind, back)
        turn += 1


@compiled
def sum_gradients(stages: Records, held: Records, free_at: Floats) -> None:
    """Move the ends of all stages behind their sums of gradients.

    Sums that share a link take it one after another, the last stage's first, which usually ends
    first. So the last of them ends when it would if they took it in turns.

    Args:
        held: shared links by group of ranks.
        free_at: scratch space for every shared link.
    """
    for part in range(len(free_at)):
        free_at[part] = 0.0
    for number in range(len(stages) - 1, -1, -1):
        stage = stages[number]
        end = stage.end + stage.reduce_s
        if stage.reduce_s > 0.0:
            for place in range(held.shape[1]):
                link = held[stage.group, place]
                if link.part >= 0:
                    begun = max(stage.end, free_at[link.part])
                    free_at[link.part] = begun + link.s_per_byte * stage.summed_bytes
                    end = max(end, free_at[link.part])
        stage.end = end


@compiled
def step_s(stages: Records, together: bool) -> float:
    """Time of a step.

    Args:
        stages: with their ends.
        together: whether updates begin when the last stage is ready.
    """
    ready_s = update_s = alone_s = 0.0
    for number in range(len(stages)):
        stage = stages[number]
        ready_s, update_s = max(ready_s, stage.end), max(update_s, stage.update_s)
        alone_s = max(alone_s, stage.end + stage.update_s - stage.idle)
    return ready_s + update_s if together else alone_s


@compiled
def begin(
    stages: Records, ahead: Records, behind: Records, warm_up: Integers, micro_batches: int
) -> None:
    """Reset all clocks, and find the depth and the first messages of every stage."""
    there = returned = 0
    for number in range(len(stages)):
        stage = stages[number]
        stage.depth = min(max(warm_up[number], 1), micro_batches)
        stage.end = stage.arrived = stage.idle = stage.before = 0.0
        stage.ahead, stage.behind = there, returned
        there, returned = _clear(ahead, there, number), _clear(behind, returned, number)


@compiled
def _clear(ways: Records, place: int, source: int) -> int:
    """Free the links of a stage's messages; returns the place of the next stage's."""
    while place < len(ways) and ways[place].source == source:
        ways[place].free_at = ways[place].before = 0.0
        place += 1
    return place


@compiled
def _backwards(
    turn: int,
    ring: int,
    last: int,
    last_share: float,
    stages: Records,
    behind: Records,
    back: Floats,
) -> None:
    """Run the backwards of one turn, the last stage first, and send their gradients."""
    for number in range(len(stages) - 1, -1, -1):
        stage = stages[number]
        index = turn - stage.depth
        if index < 0 or index > last:
            continue
        share, slot = last_share if index == last else 1.0, index % ring
        stage.end = max(stage.end, back[number, slot]) + stage.backward_s * share
        back[number, slot] = 0.0
        place = stage.behind
        while place < len(behind) and behind[place].source == number:
            arrived = _pass(behind[place], stage.end, share)
            target = behind[place].target
            back[target, slot] = max(back[target, slot], arrived)
            place += 1


@compiled
def _forwards(share: float, first: bool, stages: Records, ahead: Records) -> None:
    """Run the forwards of one turn, the first stage first, and send their activations."""
    for number in range(len(stages)):
        stage = stages[number]
        stage.end = max(stage.end, stage.arrived) + stage.forward_s * share
        stage.arrived = 0.0
        place = stage.ahead
        while place < len(ahead) and ahead[place].source == number:
            target = stages[ahead[place].target]
            target.arrived = max(target.arrived, _pass(ahead[place], stage.end, share))
            if first:
                target.idle = max(target.idle, stage.end)
            place += 1


@compiled
def _pass(way: Any, ready: float, share: float) -> float:
    """Send a message that is ready at some time; returns its arrival."""
    way.free_at = max(way.free_at, ready) + way.hold_s * share
    return float(way.free_at + way.late_s)


@compiled
def _advance(stages: Records, ahead: Records, behind: Records) -> float:
    """The time by which all clocks advanced since the last call; -1 if they differ."""
    step, alike = stages[0].end - stages[0].before, True
    for number in range(len(stages)):
        stage = stages[number]
        alike = alike and abs(stage.end - stage.before - step) <= SAME * stage.end
        stage.before = stage.end
    for ways in (ahead, behind):
        for place in range(len(ways)):
            way = ways[place]
            alike = alike and abs(way.free_at - way.before - step) <= SAME * way.free_at
            way.before = way.free_at
    return step if alike else -1.0


@compiled
def _skip(
    turns: int,
    ring: int,
    advance_s: float,
    stages: Records,
    ahead: Records,
    behind: Records,
    back: Floats,
) -> int:
    """Skip as many whole rings of turns as fit; returns the number of turns."""
    passed = turns // ring * ring
    shift = passed * advance_s
    for ways in (ahead, behind):
        for place in range(len(ways)):
            ways[place].free_at += shift
    for number in range(len(stages)):
        stages[number].end += shift
        for slot in range(ring):
            if back[number, slot] > 0.0:
                back[number, slot] += shift
    return passed
