"""From the lists of a user's schedule to the order of a plan; and why lists cannot run."""

from __future__ import annotations

from collections.abc import Iterator

from pipectl.errors import ScheduleError
from pipectl.plan import Plan
from pipectl.schedule.actions import Kind
from pipectl.schedule.listed import Entry, Listed
from pipectl.schedule.order import Order

_CURE = "change the order of these actions"


def listed_order(plan: Plan) -> Order:
    """The order of a plan that holds lists.

    Raises:
        ScheduleError: the lists are wrong, or not of this plan's stages and ranks.
    """
    listed = Listed.read("\n".join(plan.actions), plan.schedule)
    held = tuple(stage.ranks for stage in plan.stages)
    if held != tuple((rank,) for rank in listed.rank_of_stage):
        raise ScheduleError(
            f"schedule {plan.schedule}: its lists are of other stages or ranks than the plan's",
            cure="plan the job again",
        )
    if plan.micro_batches > listed.micro_batches:
        raise ScheduleError(
            f"schedule {plan.schedule}: its lists have {listed.micro_batches} micro-batches, the "
            f"plan {plan.micro_batches}",
            cure="plan the job again",
        )
    return order_of(listed)


def order_of(listed: Listed) -> Order:
    """Turns that follow from the lists.

    Raises:
        ScheduleError: ranks would wait for each other, and for what.
    """
    from pipectl.schedule.sequences import order_of_sequences  # compiles, for which few have a use

    stuck = _stuck(listed)
    if stuck:
        sentences = "; ".join(stuck)
        raise ScheduleError(f"{listed.name}: ranks wait for each other: {sentences}", cure=_CURE)
    return order_of_sequences(listed.sequences(), listed.stages, listed.micro_batches)


def _stuck(listed: Listed) -> list[str]:
    """Who waits for whom where lists cannot run, in a circle; nothing if they can."""
    at = [0] * len(listed.ranks)
    done: set[tuple[Kind, int, int]] = set()
    able = list(range(len(listed.ranks)))
    waiting: dict[tuple[Kind, int, int], list[int]] = {}
    while able:
        rank = able.pop()
        held = listed.ranks[rank]
        while at[rank] < len(held):
            entry = held[at[rank]]
            missing = next((key for key in _needs(listed, entry) if not _is_done(key, done)), None)
            if missing is not None:
                waiting.setdefault(_plain(missing), []).append(rank)
                break
            done.add(entry.key)
            at[rank] += 1
            able += waiting.pop(_plain(entry.key), [])
    return _circle(listed, at, done)


def _plain(key: tuple[Kind, int, int]) -> tuple[Kind, int, int]:
    """The same key for a whole backward and for its input half."""
    kind, *rest = key
    return (Kind.BACKWARD if kind is Kind.BACKWARD_INPUT else kind, rest[0], rest[1])


def _is_done(key: tuple[Kind, int, int], done: set[tuple[Kind, int, int]]) -> bool:
    kind, stage, index = key
    if kind is Kind.BACKWARD and (Kind.BACKWARD_INPUT, stage, index) in done:
        return True
    return key in done


def _needs(listed: Listed, entry: Entry) -> Iterator[tuple[Kind, int, int]]:
    """What comes before an action: in a chain of stages, the strictest there can be."""
    kind, stage, index = entry.key
    if kind is Kind.FORWARD:
        if stage:
            yield Kind.FORWARD, stage - 1, index
    elif kind is Kind.BACKWARD_WEIGHT:
        yield Kind.BACKWARD, stage, index
    else:
        yield Kind.FORWARD, stage, index
        if stage + 1 < listed.stages:
            yield Kind.BACKWARD, stage + 1, index


def _circle(listed: Listed, at: list[int], done: set[tuple[Kind, int, int]]) -> list[str]:
    """One sentence a rank, from one that waits to the one it waits for."""
    stopped = [rank for rank, held in enumerate(listed.ranks) if at[rank] < len(held)]
    found: list[str] = []
    path: list[int] = []
    rank = stopped[0] if stopped else -1
    while rank >= 0 and rank not in path:
        path.append(rank)
        entry = listed.ranks[rank][at[rank]]
        missing = next(key for key in _needs(listed, entry) if not _is_done(key, done))
        awaited = _entry_of(listed, missing)
        found.append(f"{entry.place}, {entry} waits for {awaited} ({awaited.place})")
        rank = listed.rank_of_stage[awaited.stage]
    return found[path.index(rank) :] if path else []


def _entry_of(listed: Listed, key: tuple[Kind, int, int]) -> Entry:
    """Where an action stands; a backward may stand there in halves."""
    kind, stage, index = key
    kinds = (kind, Kind.BACKWARD_INPUT) if kind is Kind.BACKWARD else (kind,)
    held = listed.ranks[listed.rank_of_stage[stage]]
    return next(e for e in held if e.kind in kinds and (e.stage, e.micro_batch) == (stage, index))
