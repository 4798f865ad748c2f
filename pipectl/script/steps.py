"""How many steps of its optimizer a script makes, by the loops around the step.

Where a loop may run any number of times, as far as the text and the variables tell, the number of
steps is not known; it is never guessed from the other loops.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from itertools import takewhile
from typing import NamedTuple

from pipectl.script.limits import limit_of, rounds_of_while
from pipectl.script.loops import (
    Around,
    batches_in,
    begins_anew,
    is_over_data,
    jumps,
    loop_of_library,
    loops_around,
    loops_at,
    statements_around,
    statements_in,
    steps_of_trainer,
)
from pipectl.script.parts import Parts
from pipectl.script.program import Place
from pipectl.script.rounds import index_of_first, phases_of, rounds_of
from pipectl.script.values import value_of


class Steps(NamedTuple):
    """The optimizer steps of a whole script.

    Args:
        total: None if it is not known.
        words: how they are counted, or why they are not.
        place: where the script says so.
    """

    total: int | None
    words: str
    place: Place | None


def steps_of(parts: Parts) -> Steps:
    """Return the optimizer steps of the whole script.

    They follow from the loops around the step: those over a ``range``, and one over the loader.
    """
    frames = parts.seen.frames
    limit, end = _limit_of_steps(parts)
    if (known := steps_of_trainer(frames, parts.known_steps_per_epoch)) is not None:
        return Steps(known, f"{known}, by the trainer", parts.seen.stepped)
    found = _count(parts)
    if limit is not None and (found.total is None or limit < found.total):
        return Steps(limit, f"{limit}, by the script's own count", end)
    return found


def _count(parts: Parts) -> Steps:
    """Multiply how often the loops run."""
    counts, words, place, over_data = list[int](), list[str](), parts.loading.place, False
    if (line := loop_of_library(parts.seen.frames)) is not None:
        return Steps(None, "a library has the loop around the step", line)
    loops = list(loops_of_job(parts))
    for loop in loops:
        text = _text_of(loop)
        if not over_data and is_over_data(loop, parts.loading.places):
            over_data, count = True, _steps_in(loop, parts)
            words.append(f"{count} a time over the data")
        else:
            count = _rounds(loop, parts, innermost=loop is loops[0])
            if count is not None and not math.isinf(count) and not _phases(loop):
                words.append(f"{int(count)} times ({text})")
                place = loop.file, loop.node.lineno
        if count is None or math.isinf(count):
            line = loop.file, loop.node.lineno
            return Steps(None, f"how often this loop runs is not known: {text}", line)
        counts.append(int(count))
    if not words:
        return Steps(None, "no loop around the step was found", parts.seen.stepped)
    if not over_data:
        counted = _batches_counted(loops[0], parts)
        if counted is None:
            line = loops[0].file, loops[0].node.lineno
            return Steps(None, f"not every round makes a step: {_text_of(loops[0])}", line)
        counts[0] = max(counts[0] // counted, 1)
    total = math.prod(counts)
    return Steps(total, f"{total}: {', '.join(reversed(words))}", place)


def _text_of(loop: Around) -> str:
    if isinstance(loop.node, ast.While):
        return f"while {ast.unparse(loop.node.test)}"
    return ast.unparse(loop.node.iter)


def loops_of_job(parts: Parts) -> Iterator[Around]:
    """Yield the loops around the step that keep the optimizer, innermost first."""
    made = parts.seen.made_by.get(id(parts.optimizer), ())
    return takewhile(lambda each: not begins_anew(each, made), loops_around(parts.seen.frames))


def _steps_in(loop: Around, parts: Parts) -> float | None:
    """The steps of one time over the data."""
    batches = batches_in(loop, parts.loading.places, parts.batches)
    if batches is None or math.isinf(batches):
        return None
    if batches == parts.batches:
        return parts.steps_per_epoch
    return max(int(batches) // parts.accumulation, 1)


def _rounds(loop: Around, parts: Parts, *, innermost: bool) -> float | None:
    """The rounds of a loop that is not over the data; None if they are not known."""
    if isinstance(loop.node, ast.While):
        known = None if innermost else rounds_of_while(loop)
        return known and known[0]
    if phases := _phases(loop):
        return 1 if _is_decided(loop, parts, phases) else None
    return rounds_of(loop.node.iter, loop.names)


def _phases(loop: Around) -> list[object]:
    """The phases of an epoch that a loop goes through: ``["train", "val"]``."""
    if isinstance(loop.node, ast.While):
        return []
    phases = phases_of(loop.node.iter, loop.names)
    return phases if len(phases) > 1 else []


def _is_decided(loop: Around, parts: Parts, phases: list[object]) -> bool:
    """Whether an ``if`` in a loop lets only one of its phases make steps."""
    for each in statements_around(parts.seen.frames, (ast.If, ast.For, ast.While)):
        if each.node.lineno == loop.node.lineno and each.file == loop.file:
            return False
        if isinstance(each.node, ast.If):
            read = (x for x in ast.walk(each.node.test) if isinstance(x, ast.Name | ast.Attribute))
            values = [value_of(x, each.names) for x in read]
            if any(isinstance(x, bool) or (isinstance(x, str) and x in phases) for x in values):
                return True
    return False


def _batches_counted(loop: Around, parts: Parts) -> int | None:
    """How many rounds of a loop that is not over the data make a step; None if that is not known.

    They may each read one of several batches that a step accumulates, or all of them.
    """
    accumulation, places = parts.accumulation, parts.seen.recorder.recordings[0].places
    around_backward = {(place[0], node.lineno) for place in places for node in loops_at(place)}
    if around_backward - {_key(each) for each in loops_around(parts.seen.frames)}:
        return 1
    if isinstance(loop.node, ast.While):
        return accumulation
    index = index_of_first(loop.node, loop.names)
    if index is not None:
        return index + 1 if index + 1 in (1, accumulation) else None
    is_skipped = any(isinstance(x, ast.Continue) for x in statements_in(loop.node.body))
    for each in statements_around(parts.seen.frames, (ast.If, ast.For, ast.While)):
        if _key(each) == _key(loop):
            return accumulation if is_skipped else 1
        if isinstance(each.node, ast.If):
            return accumulation
    return accumulation


def _key(each: Around) -> Place:
    return each.file, each.node.lineno


def _limit_of_steps(parts: Parts) -> tuple[int | None, Place | None]:
    """Return the smallest number of steps after which the script ends its loops, and where."""
    frames = parts.seen.frames
    places = [(file, line) for file, line, _, _ in jumps(frames, parts.loading.places)]
    places += [_key(each) for each in loops_around(frames)]
    limits = [(limit_of(frames, place[1], parts.accumulation), place) for place in places]
    return min(((n, place) for n, place in limits if n), default=(None, None))
