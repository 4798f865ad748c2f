"""What the rows of one program must be, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipectl.errors import ScheduleError
from pipectl.schedule.actions import Action, Actions, Integers, Kind, Program
from pipectl.schedule.placement import Portion

ONCE = Portion(np.array([-1]))
"""What belongs to no micro-batch."""

_WITH_CHANNEL = (Kind.SEND_START, Kind.SEND_WAIT, Kind.RECEIVE_START, Kind.RECEIVE_WAIT)
_HAS_CHANNEL = np.isin(np.arange(len(Kind)), _WITH_CHANNEL)


class Item(NamedTuple):
    """All rows of a kind of one stage or channel."""

    kind: Kind
    owner: int

    def __str__(self) -> str:
        of = "channel" if self.kind in _WITH_CHANNEL else "stage"
        return f"{self.kind.name} of {of} {self.owner}"


class Audit:
    """One rank's program; remembers which rows have been looked at."""

    def __init__(self, rank: int, program: Program) -> None:
        self.rank = rank
        self._rows = program.body
        self._seen = np.zeros(len(self._rows), dtype=bool)
        self._order, self._bounds = self._sorted()

    def _sorted(self) -> tuple[Integers, dict[Item, tuple[int, int]]]:
        """Rows by item and micro-batch, and where each item's are."""
        kind, stage, index, channel = (
            self._rows.column(name) for name in ("kind", "stage", "micro_batch", "channel")
        )
        owner = np.where(_HAS_CHANNEL[kind], channel, stage).astype(np.int64)
        owners, width = int(owner.max(initial=-1)) + 2, int(index.max(initial=-1)) + 2
        number = (kind * owners + owner + 1) * width + index + 1
        order = number.argsort(kind="stable")
        item = number[order] // width
        edges = np.flatnonzero(item[1:] != item[:-1]) + 1
        bounds = [0, *edges.tolist(), len(order)] if len(order) else [0]
        firsts = (divmod(first, owners) for first in item[bounds[:-1]].tolist())
        items = [Item(Kind(kind), owner - 1) for kind, owner in firsts]
        return order, dict(zip(items, pairwise(bounds), strict=True))

    def rows(self, item: Item) -> Integers:
        """Positions of an item's rows by micro-batch, whichever there are."""
        first, last = self._bounds.get(item, (0, 0))
        return self._order[first:last]

    def expect(self, item: Item, portion: Portion, stage: int | None = None) -> None:
        """An item's rows must be exactly a portion.

        Args:
            stage: of rows that belong to a channel.

        Raises:
            ScheduleError: a micro-batch is missing, twice, too much, or has other samples.
        """
        rows = self.rows(item)
        names = ("micro_batch", "start", "stop")
        found = [self._rows.column(name)[rows] for name in names]
        if not np.array_equal(found[0], portion.micro_batches):
            raise fault(
                f"rank {self.rank} has {item} for micro-batches {short(found[0])} instead of "
                f"once for each of {short(portion.micro_batches)}"
            )
        for name, have, wanted in zip(names[1:], found[1:], portion[1:], strict=True):
            if np.any(have != wanted):
                raise fault(
                    f"rank {self.rank} has {item} with {name} at samples {short(have)} instead "
                    f"of {wanted if isinstance(wanted, int) else short(wanted)}"
                )
        if stage is not None and np.any(self._rows.column("stage")[rows] != stage):
            raise fault(f"rank {self.rank} has {item} for another stage than {stage}")
        self._seen[rows] = True

    def micro_batches(self, item: Item) -> Integers:
        """Micro-batches of an item's rows."""
        found: Integers = self._rows.column("micro_batch")[self.rows(item)]
        return found

    def check_order(self, first: Item, second: Item) -> None:
        """The rows of ``first`` come before those of ``second``, for every micro-batch of both.

        An item of no micro-batch has one row, which comes before, or behind, all of the other's.
        """
        positions = [self.rows(first), self.rows(second)]
        index = [self.micro_batches(first), self.micro_batches(second)]
        if any(np.array_equal(item, ONCE.micro_batches) for item in index):
            late = positions[0].max(initial=-1) >= positions[1].min(initial=len(self._rows))
            where = ""
        else:
            both, one, other = _common(*index)
            wrong = np.flatnonzero(positions[0][one] >= positions[1][other])
            late = bool(len(wrong))
            where = f" for micro-batch {both[wrong[0]]}" if late else ""
        if late:
            raise fault(f"rank {self.rank}: {second} comes before {first}{where}")

    def check_chain(self, *items: Item) -> None:
        """Each item comes before the next."""
        for first, second in pairwise(items):
            self.check_order(first, second)

    def check_rising(self, item: Item, what: str) -> None:
        """The rows of an item come by rising micro-batch."""
        rows = self.rows(item)
        if np.any(np.diff(rows) < 0):
            order = self.micro_batches(item)[np.argsort(rows)]
            raise fault(
                f"rank {self.rank} {what} of stage {item.owner} in micro-batch order "
                f"{short(order)}, which is not ascending"
            )

    def check_nothing_else(self, updated: int) -> None:
        """Every row has been looked at but one UPDATE, the last.

        Args:
            updated: its stage.
        """
        rest, kinds = self._rest()
        if kinds != ["UPDATE"] or rest[0] != len(self._rows) - 1:
            raise fault(
                f"rank {self.rank} has {short(kinds)} beyond its stages and channels; "
                "one UPDATE at the end belongs there"
            )
        expected = Action(Kind.UPDATE, updated)
        if self._rows.rows[-1].tolist() != list(expected):
            raise fault(f"rank {self.rank} ends in {self._rows.rows[-1]} instead of {expected}")

    def check_newest(self, sends: Item, updates: Item) -> None:
        """Each update is sent before the next, the first message before any."""
        rows = self.rows(sends)
        if np.any(np.searchsorted(self.rows(updates), rows) != np.arange(len(rows))):
            raise fault(f"rank {self.rank} has {sends} with weights of another version")

    def check_steps(self, updates: Item, ended: Item, versions: Actions) -> None:
        """Of steps that are not flushed: each updates behind its own backwards, with weights of the
        right age in all that it computes, and there is nothing that has not been looked at.

        Args:
            ended: its backwards; the forwards, where a rank has no others.
            versions: these rows with the right ages.
        """
        rows = self.rows(updates)
        ends = np.searchsorted(rows, self.rows(ended))
        steps = np.searchsorted(self.micro_batches(updates), self.micro_batches(ended))
        if not np.array_equal(ends, steps):
            raise fault(f"rank {self.rank} updates stage {updates.owner} within a step")
        wrong = np.flatnonzero((self._rows.rows != versions.rows).any(axis=1))
        if len(wrong):
            raise fault(
                f"rank {self.rank} has {self._rows.rows[wrong[0]]} with weights of another age "
                f"than {versions.rows[wrong[0]]}"
            )
        if self._rest()[1]:
            raise fault(
                f"rank {self.rank} has {short(self._rest()[1])} beyond its stages and channels"
            )

    def _rest(self) -> tuple[Integers, list[str]]:
        """Rows that nobody has looked at, and their kinds."""
        rest = np.flatnonzero(~self._seen)
        return rest, [Kind(kind).name for kind in self._rows.column("kind")[rest]]


def _common(
    ones: Integers, others: Integers
) -> tuple[Integers, Integers | slice, Integers | slice]:
    """Micro-batches that are in both, rising, and their places there."""
    if np.array_equal(ones, others):
        return ones, slice(None), slice(None)
    return np.intersect1d(ones, others, assume_unique=True, return_indices=True)


def fault(message: str) -> ScheduleError:
    """The error for programs that cannot run."""
    return ScheduleError(
        f"rank programs: {message}", cure="write a new plan: pipectl plan JOB.yaml"
    )


def short(items: Sequence[object] | Integers, most: int = 12) -> str:
    """A list of at most some items."""
    shown = ", ".join(str(item) for item in items[:most])
    return f"[{shown}{', ...' if len(items) > most else ''}]"
