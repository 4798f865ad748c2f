"""How many steps of its optimizer a script makes, by the loops around the step.

Where a loop may run any number of times, as far as the text and the variables tell, the number of
steps is not known; it is never guessed from the other loops.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from pipectl.script.limits import End, end_of, is_never, rounds_of_while
from pipectl.script.loops import (
    Around,
    batches_in,
    begins_anew,
    is_over_data,
    jumps,
    leaves_out,
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

_MAX_ROUNDS = 10**6
"""Of loops that are followed one by one; a script of more makes steps for years."""
_JumpOfLoop = tuple[Around, int, str, bool]
"""See :func:`~pipectl.script.loops.jumps`."""


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
    frames, stepped = parts.seen.frames, parts.seen.stepped
    if (read := leaves_out(frames, parts.batches)) is not None:
        words = f"the trainer reads {read} of the {parts.batches} batches of an epoch, and the job "
        return Steps(None, words + "all of them", stepped)
    if (known := steps_of_trainer(frames, parts.known_steps_per_epoch)) is not None:
        return Steps(known, f"{known}, by the trainer", stepped)
    if (line := loop_of_library(frames)) is not None:
        return Steps(None, "a library has the loop around the step", line)
    ends, unread = ends_of(parts), unread_jumps(parts)
    for loop, number, statement, over_data in unread:
        if over_data and statement != "continue":
            words = f"when the `{statement}` in line {number} ends this loop is not known"
            return Steps(None, words, _key(loop))
    found = _count(parts, ends)
    if not any(ends) or found.counts is None:
        return found.steps
    total = _ran(found.counts, ends, 0, iter(range(_MAX_ROUNDS)))
    first = min((end.steps, i, end) for i, each in enumerate(ends) for end in each)
    loop, end = list(loops_of_job(parts))[first[1]], first[2]
    if total == found.steps.total:
        return found.steps
    if math.isinf(total) or (total > end.steps and (unread or end.of_batches)):
        words = f"how often loops run after this count has ended one is not known: {_text_of(loop)}"
        return Steps(None, words, (loop.file, end.line))
    return Steps(int(total), f"{int(total)}, by the script's own count", (loop.file, end.line))


def _ran(
    counts: Sequence[float], ends: Sequence[Sequence[End]], done: float, budget: Iterator[int]
) -> float:
    """The steps that are made once loops have run, where some were made before; infinite if that
    takes more rounds than a budget has.

    Args:
        counts: how often each loop runs by itself, innermost first.
        ends: of each loop.
    """
    if len(counts) == 1:
        stops = [done + counts[0]]
        for end in ends[0]:
            first = done if end.before else done + 1
            stops += [max(end.steps, first)] if not end.is_exact or end.steps >= first else []
        return min(stops)
    rounds = 0
    while rounds < counts[-1] and not any(x.is_met(done) for x in ends[-1] if x.before):
        if next(budget, None) is None:
            return math.inf
        done, rounds = _ran(counts[:-1], ends[:-1], done, budget), rounds + 1
        if math.isinf(done) or any(x.is_met(done) for x in ends[-1] if not x.before):
            break
    return done


class _Counts(NamedTuple):
    """How often each loop around the step runs by itself, and the steps where none ends early.

    Args:
        counts: innermost first, infinite for one that only its end ends; None if one is not known.
    """

    steps: Steps
    counts: list[float] | None


def _count(parts: Parts, ends: Sequence[Sequence[End]]) -> _Counts:
    """Multiply how often the loops run."""
    counts, words, place, over_data = list[float](), list[str](), parts.loading.place, False
    loops, missing = list(loops_of_job(parts)), list[Steps]()
    for number, loop in enumerate(loops):
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
            missing.append(Steps(None, f"how often this loop runs is not known: {text}", line))
            if not all(ends[number:]):  # one around it goes on with no more than the rest of it
                return _Counts(missing[0], None)
            count = math.inf
        counts.append(count)
    if not loops:
        nowhere = Steps(None, "no loop around the step was found", parts.seen.stepped)
        return _Counts(nowhere, None)
    if not over_data and not math.isinf(counts[0]):
        counted = _batches_counted(loops[0], parts)
        if counted is None:
            line = loops[0].file, loops[0].node.lineno
            missing.append(Steps(None, f"not every round makes a step: {_text_of(loops[0])}", line))
        counts[0] = math.inf if counted is None else max(counts[0] // counted, 1)
    if missing:
        return _Counts(missing[0], counts if all(ends) or counts[0] < math.inf else None)
    total = int(math.prod(counts))
    return _Counts(Steps(total, f"{total}: {', '.join(reversed(words))}", place), counts)


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
    of_phase = _set_by(loop)
    for each in statements_around(parts.seen.frames, (ast.If, ast.For, ast.While)):
        if each.node.lineno == loop.node.lineno and each.file == loop.file:
            return False
        if isinstance(each.node, ast.If):
            for read in ast.walk(each.node.test):
                if not isinstance(read, ast.Name | ast.Attribute):
                    continue
                value = value_of(read, each.names)
                if isinstance(value, str) and value in phases:
                    return True
                if isinstance(value, bool) and ast.unparse(read) in of_phase:
                    return True
    return False


def _set_by(loop: Around) -> set[str]:
    """The variables that a loop sets in each of its rounds, and not only in loops within it."""
    assigned = [x for x in statements_in(loop.node.body) if isinstance(x, ast.Assign)]
    targets = [loop.node.target, *(target for each in assigned for target in each.targets)]
    return {
        ast.unparse(x)
        for target in targets
        for x in ast.walk(target)
        if isinstance(x, ast.Name | ast.Attribute) and isinstance(x.ctx, ast.Store)
    }


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


def ends_of(parts: Parts) -> list[list[End]]:
    """Return the counts of steps that end each loop around the step, innermost first."""
    loops, frames = list(loops_of_job(parts)), parts.seen.frames
    # Where batches are left in every epoch, steps are not those of all batches.
    found: list[list[End]] = [[] for _ in loops]
    for loop, line, statement in _endings(parts):
        end = end_of(frames, loops, loop, line, parts.accumulation)
        if end is None or (end.of_batches and parts.batches_left):
            continue
        for number, other in enumerate(loops):
            is_left = statement == "return" and (other.file, other.line) == (loop.file, loop.line)
            if _key(other) == _key(loop) or (is_left and other.node.lineno < loop.node.lineno):
                found[number].append(end)
    return found


def _endings(parts: Parts) -> Iterator[tuple[Around, int, str]]:
    """Yield the statements that may end a loop by a count: loop, line and statement."""
    for loop in loops_of_job(parts):
        if isinstance(loop.node, ast.While):
            yield loop, loop.node.lineno, "while"
    for loop, line, statement, _ in jumps(parts.seen.frames, parts.loading.places):
        yield loop, line, statement


def unread_jumps(parts: Parts) -> list[_JumpOfLoop]:
    """Return what ends loops, or rounds of them, early by anything but a count of steps."""
    frames, data = parts.seen.frames, parts.loading.places
    read = {end.line for each in ends_of(parts) for end in each}
    for loop in loops_around(frames):
        if isinstance(loop.node, ast.While) and (known := rounds_of_while(loop)) is not None:
            read.add(known[1])
    return [
        each
        for each in jumps(frames, data)
        if each[1] not in read and not is_never(each[0], each[1])
    ]
