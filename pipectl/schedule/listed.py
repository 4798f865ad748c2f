"""Schedules of users: lists of the computations of every rank.

Each rank has one line. An action is a stage, a letter and a micro-batch::

    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1

``F`` is a forward and ``B`` a backward; ``I`` and ``W`` are the halves of a backward, for inputs
and weights. Blank cells, blank lines and lines that begin with ``#`` are ignored. This is the
*compute only* format of torch.distributed.pipelining. Of its other actions,
``(0F1;1B0)OVERLAP_F_B`` is read as both actions in sequence, and ``0REDUCE_GRAD`` is ignored,
because messages and sums follow from the lists.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from pipectl.errors import ScheduleError
from pipectl.plan import Plan
from pipectl.schedule.actions import Integers, Kind
from pipectl.schedule.order import Order, Schedule
from pipectl.schedule.sequences import BACKWARD, FORWARD, PART, execute

KINDS = {
    "F": Kind.FORWARD,
    "B": Kind.BACKWARD,
    "I": Kind.BACKWARD_INPUT,
    "W": Kind.BACKWARD_WEIGHT,
}
_LETTERS = {kind: letter for letter, kind in KINDS.items()}
_ACTION = re.compile(r"(\d{1,6})([FBIW])(\d{1,6})")
_LEFT_OUT = re.compile(r"\d+REDUCE_GRAD")
_BOTH = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_COMPLETE = (
    [Kind.FORWARD, Kind.BACKWARD],
    [Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT],
)
_HINT = "see docs/schedules.md: every action once, after all that it depends on"


class Entry(NamedTuple):
    """One action and its position in the file; line and position count from 1."""

    kind: Kind
    stage: int
    micro_batch: int
    line: int
    position: int

    @property
    def key(self) -> tuple[Kind, int, int]:
        """Kind, stage and micro-batch."""
        return self.kind, self.stage, self.micro_batch

    def __str__(self) -> str:
        return f"{self.stage}{_LETTERS[self.kind]}{self.micro_batch}"

    @property
    def place(self) -> str:
        """Line and position in words."""
        return f"line {self.line}, action {self.position}"


@dataclass(frozen=True)
class Listed:
    """A schedule as the user wrote it.

    Args:
        name: of the file, or of the function that made it.
        ranks: actions of each rank.
    """

    name: str
    ranks: tuple[tuple[Entry, ...], ...]

    @classmethod
    def read(cls, text: str, name: str) -> Listed:
        """Read and check the lists.

        Raises:
            ScheduleError: the lists are invalid; names the file, line and action.
        """
        reader, ranks = csv.reader(text.splitlines()), list[tuple[Entry, ...]]()
        try:
            for line, row in enumerate(reader, 1):
                if any(cell.strip() for cell in row) and not row[0].lstrip().startswith("#"):
                    ranks.append(tuple(_entries(row, line, name)))
        except csv.Error as error:
            raise ScheduleError(f"{name}:{reader.line_num}: {error}", hint=_HINT) from None
        listed = cls(name, tuple(ranks))
        listed._check()
        return listed

    @property
    def text(self) -> tuple[str, ...]:
        """One line per rank, as :meth:`read` reads it."""
        return tuple(",".join(map(str, entries)) for entries in self.ranks)

    @cached_property
    def stages(self) -> int:
        """Number of stages."""
        return 1 + max(entry.stage for entries in self.ranks for entry in entries)

    @cached_property
    def micro_batches(self) -> int:
        """Number of micro-batches."""
        return 1 + max(entry.micro_batch for entries in self.ranks for entry in entries)

    @cached_property
    def rank_of_stage(self) -> tuple[int, ...]:
        """Rank of each stage."""
        rank_of = {entry.stage: rank for rank, held in enumerate(self.ranks) for entry in held}
        return tuple(rank_of[stage] for stage in range(self.stages))

    @cached_property
    def splits(self) -> bool:
        """Whether backwards are split into halves."""
        return any(e.kind is Kind.BACKWARD_WEIGHT for held in self.ranks for e in held)

    @cached_property
    def warm_up(self) -> tuple[int, ...]:
        """Forwards of each stage before its first backward."""
        counts, over = [0] * self.stages, [False] * self.stages
        for entry in (entry for held in self.ranks for entry in held):
            forward = entry.kind is Kind.FORWARD
            over[entry.stage] = over[entry.stage] or not forward
            counts[entry.stage] += forward and not over[entry.stage]
        return tuple(counts)

    def unordered_stages(self) -> list[int]:
        """Return the stages whose gradients do not accumulate by ascending micro-batch."""
        halves = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # input halves compute those of norms
        kinds = halves if self.splits else (Kind.BACKWARD,)
        return sorted({entry.stage for kind in kinds for entry in self._out_of_order(kind)})

    def sequences(self) -> list[Integers]:
        """Return kind, stage and micro-batch of the actions, per rank; shape [actions, 3]."""
        return [
            np.array([entry.key for entry in self._halves(held)], dtype=np.int64).reshape(-1, 3)
            for held in self.ranks
        ]

    def _halves(self, held: Sequence[Entry]) -> Iterator[Entry]:
        """Yield the actions, with whole backwards as both halves if other backwards are split."""
        for entry in held:
            if self.splits and entry.kind is Kind.BACKWARD:
                yield entry._replace(kind=Kind.BACKWARD_INPUT)
                yield entry._replace(kind=Kind.BACKWARD_WEIGHT)
            else:
                yield entry

    def _out_of_order(self, kind: Kind) -> Iterator[Entry]:
        """Yield the actions of a kind that come after one of a later micro-batch."""
        latest = [-1] * self.stages
        for entry in (entry for held in self.ranks for entry in self._halves(held)):
            if entry.kind is kind:
                if entry.micro_batch < latest[entry.stage]:
                    yield entry
                latest[entry.stage] = max(latest[entry.stage], entry.micro_batch)

    def _check(self) -> None:
        """Check that every action occurs once, a stage is on one rank, and forwards ascend."""
        if not self.ranks:
            raise ScheduleError(f"{self.name}: no action", hint=_HINT)
        known: dict[tuple[Kind, int, int], Entry] = {}
        firsts: dict[int, Entry] = {}
        for entry in (entry for held in self.ranks for entry in held):
            if entry.key in known:
                raise self._fault(entry, f"is there before: {known[entry.key].place}")
            line = firsts.setdefault(entry.stage, entry).line
            if line != entry.line:
                raise self._fault(entry, f"stage {entry.stage} is on line {line} already")
            known[entry.key] = entry
        for stage, index in product(range(self.stages), range(self.micro_batches)):
            there = [kind for kind in _LETTERS if (kind, stage, index) in known]
            if there not in _COMPLETE:
                lacks_forward = Kind.FORWARD not in there
                missing = "a forward" if lacks_forward else "one backward, whole or both halves"
                words = ", ".join(f"{stage}{_LETTERS[kind]}{index}" for kind in there) or "nothing"
                fault = f"micro-batch {index} lacks {missing} in stage {stage}: there is {words}"
                raise ScheduleError(f"{self.name}: {fault}", hint=_HINT)
        for entry in self._out_of_order(Kind.FORWARD):
            raise self._fault(entry, "comes after a later micro-batch; forwards of a stage rise")

    def _fault(self, entry: Entry, what: str) -> ScheduleError:
        return ScheduleError(
            f"{self.name}:{entry.line}: action {entry.position}, {entry}: {what}", hint=_HINT
        )


def _entries(row: Sequence[str], line: int, name: str) -> Iterator[Entry]:
    """Yield the actions of one line; a line must have at least one."""
    actions: list[str] = []
    for cell in map(str.strip, row):
        both = _BOTH.fullmatch(cell)
        actions += map(str.strip, both[1].split(";") if both else [cell])
    actions = [text for text in actions if text and not _LEFT_OUT.fullmatch(text)]
    if not actions:
        raise ScheduleError(f"{name}:{line}: a line without an action", hint="leave the line out")
    for position, text in enumerate(actions, 1):
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{name}:{line}: action {position}: {text[:40]!r} is not an action such as 2F0 "
                "(stage, F, B, I or W, micro-batch)",
                hint="leave messages out: they follow from the lists",
            )
        yield Entry(KINDS[match[2]], int(match[1]), int(match[3]), line, position)


def schedule_of_lists(plan: Plan) -> Schedule:
    """Return the schedule of a plan that contains lists.

    Raises:
        ScheduleError: the lists are invalid, or do not fit the plan's stages and ranks.
    """
    listed = Listed.read("\n".join(plan.actions), plan.schedule)
    held = tuple(stage.ranks for stage in plan.stages)
    if held != tuple((rank,) for rank in listed.rank_of_stage):
        raise ScheduleError(
            f"schedule {plan.schedule}: its lists are of other stages or ranks than the plan's",
            hint="plan the job again",
        )
    if plan.micro_batches > listed.micro_batches:
        raise ScheduleError(
            f"schedule {plan.schedule}: its lists have {listed.micro_batches} micro-batches, the "
            f"plan {plan.micro_batches}",
            hint="plan the job again",
        )
    order = order_of(listed)
    return Schedule(
        plan.schedule,
        lambda *_: order,
        lambda _: [listed.warm_up],
        splits_backward=listed.splits,
    )


def order_of(listed: Listed) -> Order:
    """Return the order that follows from the lists.

    Raises:
        ScheduleError: ranks would wait for each other; names the actions.
    """
    execution = execute(listed.sequences(), listed.stages, listed.micro_batches)
    halves = [list(listed._halves(held)) for held in listed.ranks]
    at = execution.position
    rank = next((rank for rank, held in enumerate(halves) if at[rank] < len(held)), -1)
    if rank < 0:
        return execution.order
    path, waits = list[int](), list[str]()  # each rank waits for the next
    while rank not in path:
        path.append(rank)
        entry = halves[rank][at[rank]]
        wanted = next(need for need in _needs(listed, entry) if not execution.is_done[need])
        rank = listed.rank_of_stage[wanted[1]]
        awaited = next(e for e in halves[rank] if (PART[e.kind], *e.key[1:]) == wanted)
        waits.append(f"{entry.place}, {entry} waits for {awaited} ({awaited.place})")
    raise ScheduleError(
        f"{listed.name}: ranks wait for each other: {'; '.join(waits[path.index(rank) :])}",
        hint="change the order of these actions",
    )


def _needs(listed: Listed, entry: Entry) -> Iterator[tuple[int, int, int]]:
    """Yield the dependencies of an action in a chain of stages, the strictest case."""
    kind, stage, index = entry.key
    if kind is Kind.BACKWARD_WEIGHT:
        yield BACKWARD, stage, index
    elif kind is Kind.FORWARD:
        if stage:
            yield FORWARD, stage - 1, index
    else:
        yield FORWARD, stage, index
        if stage + 1 < listed.stages:
            yield BACKWARD, stage + 1, index
