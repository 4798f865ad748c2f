"""A binary heap in arrays, ordered by time, then by a number that no two entries share."""

from __future__ import annotations

from pipectl.arrays import Floats, Integers
from pipectl.compiled import part_of_kernel


@part_of_kernel
def push(
    times: Floats, numbers: Integers, items: Integers, base: int, size: int,
    time: float, number: int, item: int,
) -> None:  # fmt: skip
    """Add an entry to the heap of ``size`` entries that starts at index ``base``."""
    place = size
    while place > 0:
        above = (place - 1) >> 1
        at = base + above
        if times[at] < time or (times[at] == time and numbers[at] < number):
            break
        times[base + place] = times[at]
        numbers[base + place] = numbers[at]
        items[base + place] = items[at]
        place = above
    times[base + place] = time
    numbers[base + place] = number
    items[base + place] = item


@part_of_kernel
def drop_first(times: Floats, numbers: Integers, items: Integers, base: int, size: int) -> None:
    """Remove the first entry, which is at ``base``, of a heap of ``size`` entries."""
    last = base + size - 1
    time, number, item = times[last], numbers[last], items[last]
    place, below = 0, 1
    while below < size - 1:
        at = base + below
        other = at + 1
        if below + 1 < size - 1 and (
            times[other] < times[at] or (times[other] == times[at] and numbers[other] < numbers[at])
        ):
            below += 1
            at += 1
        if time < times[at] or (time == times[at] and number < numbers[at]):
            break
        times[base + place] = times[at]
        numbers[base + place] = numbers[at]
        items[base + place] = items[at]
        place = below
        below = 2 * place + 1
    times[base + place] = time
    numbers[base + place] = number
    items[base + place] = item
