"""What ranks do, in words: who waits for whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pipectl.watch.board import Sight

_MAX_HOPS = 4
"""Ranks of a chain that are named."""
_MAX_GROUPS = 6
"""Of ranks that do the same."""


class Names(NamedTuple):
    """What numbers on a board stand for.

    Args:
        kinds: of rows, in capitals, such as ``RECEIVE_WAIT``.
        lanes: what messages hold, such as ``activation``.
    """

    kinds: Sequence[str]
    lanes: Sequence[str]

    def kind(self, sight: Sight) -> str:
        """Of the row under way; empty outside of the program."""
        return self.kinds[sight.kind] if 0 <= sight.kind < len(self.kinds) else ""

    def lane(self, sight: Sight) -> str:
        """What the message holds that is waited for."""
        return self.lanes[sight.lane] if 0 <= sight.lane < len(self.lanes) else "message"


def action(sight: Sight, names: Names) -> str:
    """What the rank does, as error reports have it: ``FORWARD micro-batch 4``, or its phase."""
    kind = names.kind(sight)
    return f"{kind}{_micro_batch(sight, ' micro-batch')}" if kind else sight.phase


def ranges(ranks: Iterable[int]) -> str:
    """``0, 2-5`` for 0, 2, 3, 4, 5."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def everybody(sights: Mapping[int, Sight], names: Names) -> str:
    """What all ranks do, those together that do the same."""
    groups: dict[str, list[int]] = {}
    for rank, sight in sorted(sights.items()):
        groups.setdefault(_does(sight, names), []).append(rank)
    words = []
    for doing, ranks in list(groups.items())[:_MAX_GROUPS]:
        verb, _, rest = doing.partition(" ")
        many = f"ranks {ranges(ranks)} {'wait' if verb == 'waits' else 'are'} {rest}"
        words.append(many if len(ranks) > 1 else f"rank {ranks[0]} {doing}")
    left = sum(map(len, list(groups.values())[_MAX_GROUPS:]))
    return "; ".join([*words, *([f"{left} more ranks do something else"] if left else [])])


def chain(rank: int, sights: Mapping[int, Sight], names: Names, culprit: int | None = None) -> str:
    """Whom a rank waits for, and for whom that one waits, and so on.

    Ranks count that have just begun to wait for a message, or that it is coming in for.

    Args:
        sights: of the ranks that are heard of.
        culprit: does what it does whomever it waits for; the chain ends there.
    """
    if culprit is not None and culprit in sights:
        sights = {**sights, culprit: sights[culprit]._replace(waiting=False, peer=-1)}
    path, text = [rank], f"rank {rank} {_does(sights[rank], names)}"
    while (sight := sights.get(path[-1])) is not None and sight.peer >= 0:
        if sight.peer in path or len(path) == _MAX_HOPS:
            return text + (", and so in a circle" if sight.peer in path else ", and so on")
        path.append(sight.peer)
        other = sights.get(sight.peer)
        text += f", which {_does(other, names) if other else 'was never heard of'}"
    return text


def _awaited(sight: Sight, names: Names) -> str:
    """What a waiting rank waits for."""
    kind = names.kind(sight)
    if sight.peer < 0:
        stage = f"stage {sight.stage}, " if kind and sight.stage >= 0 else ""
        return f"waits for the other ranks ({stage}{_short(sight, names)})"
    number = "s" if sight.micro_batch < 0 else f" {sight.micro_batch}"
    message = f"{names.lane(sight)}{number}"
    if kind == "SEND_WAIT":
        return f"waits for rank {sight.peer} to take {message} of stage {sight.stage}"
    return f"waits for {message} of stage {sight.peer_stage} from rank {sight.peer}"


def _does(sight: Sight, names: Names) -> str:
    if sight.waiting or sight.peer >= 0:
        return _awaited(sight, names)
    return f"is {'in ' if names.kind(sight) else ''}{_short(sight, names)}"


def _short(sight: Sight, names: Names) -> str:
    """``backward 4``, or the phase."""
    kind = names.kind(sight)
    if not kind:
        return sight.phase or "starting"
    return f"{kind.lower().replace('_', ' ')}{_micro_batch(sight)}"


def _micro_batch(sight: Sight, word: str = "") -> str:
    """Nothing for a row that belongs to none."""
    return "" if sight.micro_batch < 0 else f"{word} {sight.micro_batch}"
