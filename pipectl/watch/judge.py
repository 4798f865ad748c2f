"""What the first node's watcher knows of all ranks, and which one is lost: no clock, no files.

A rank that is frozen says nothing of itself; its node's watcher sees that it is stopped. If the
watcher is silent too, the node is gone. Ranks that wait are never to blame, unless all of them do.
A rank that computes may only be slow, and is given much longer; one that saves, or has not begun to
train, all the time it takes.

Time is counted by the watcher's own wake-ups: while a whole job is suspended, none passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pipectl.watch.board import Sight
from pipectl.watch.files import NodeReport
from pipectl.watch.rank import FAILED, FAILS, OVER, STOPPED, Death

RESUME = "pipectl resume goes on from the last checkpoint"
PATIENCE = 20
"""Times the limit that a rank may compute without moving on."""
SETTLE_S = 0.3
"""After a death: others may be older, or a rank may have said why it fails."""
MAX_WAIT_S = 11.0
"""After a death, however many nodes there are: the first node's watcher ends a second later."""
_MISSED, _MISSED_S = 4, 5.0
"""Intervals, and seconds, after a death: a node that is not heard of since then is gone."""
_FILES_PER_S = 32
"""That all watchers together write; with more nodes, each writes more rarely."""
_LOST = 0.9
"""Of the limit: how long a rank may be stopped or silent. The rest is left for telling so."""
_CIRCLE = 2.0
"""Times the limit that all ranks may wait for each other: a message may be long on its way."""
_PACES = 3
_MEMORY = "set pipeline.memory_limit below what a rank gets, and plan again; pipectl resume goes on"
_MAX_HOPS, _MAX_GROUPS = 4, 6
"""Ranks of a chain, and groups of ranks that do the same, that are named."""


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


class RankState(NamedTuple):
    """What is known of a rank that has not ended.

    Args:
        still_s: for how long it has not moved on.
        stopped_s: for how long it has been stopped; 0 if it is not.
        silent_s: for how long nothing was heard from its node's watcher.
    """

    sight: Sight
    node: str
    still_s: float = 0.0
    stopped_s: float = 0.0
    silent_s: float = 0.0


class Verdict(NamedTuple):
    """A rank for which the run cannot go on.

    Args:
        stack: where it was, if that is known.
        at: seconds since the epoch, when it ended; None if it has not, as far as is known.
        earlier: how many ranks of its node had ended before.
    """

    rank: int
    message: str
    cure: str
    stack: str = ""
    at: float | None = None
    earlier: int = 0


def interval_s(nodes: int) -> float:
    """Between two signs of life of one of so many nodes, in seconds."""
    return max(1.0, nodes / _FILES_PER_S)


def limit_s(min_s: float, predicted_s: float, pace_s: float) -> float:
    """How long a rank may be missed: three steps, as they are predicted or as they are.

    Args:
        min_s: whatever steps take.
        predicted_s: a step, as the plan has it.
        pace_s: the longest last step of any rank.
    """
    return max(min_s, _PACES * max(predicted_s, pace_s))


class JobView:
    """All ranks, by what their nodes' watchers say.

    Args:
        nodes: how many there are.
        min_s: a rank is never missed sooner, see :func:`limit_s`.
        predicted_s: a step.
    """

    def __init__(self, nodes: int, min_s: float, predicted_s: float, names: Names) -> None:
        self._interval_s = interval_s(nodes)
        self._min_s, self._predicted_s, self._names = min_s, predicted_s, names
        self._nodes: dict[int, NodeReport] = {}
        self._node_of: dict[int, int] = {}
        self._heard: dict[int, float] = {}
        self._moved: dict[int, float] = {}
        self._stopped: dict[int, float] = {}
        self._deaths: dict[int, Death] = {}
        self._first_death = self._warned_s = 0.0
        self._explained = False

    def hear(self, node: int, report: NodeReport, now: float) -> None:
        """Take in what the watcher of a node says."""
        before = self._nodes.get(node)
        for rank, each in report.ranks.items():
            old = before.ranks.get(rank) if before is not None else None
            if old is None or old.sight.progress != each.sight.progress:
                self._moved[rank] = now
            if each.state == STOPPED:
                self._stopped.setdefault(rank, now)
            else:
                self._stopped.pop(rank, None)
            self._explained |= each.state in (FAILS, FAILED)
            if each.death is not None and rank not in self._deaths:
                self._first_death = self._first_death if self._deaths else now
                self._deaths[rank] = each.death
            self._node_of[rank] = node
        self._nodes[node], self._heard[node] = report, now

    def judge(self, now: float) -> Verdict | None:
        """Why the run cannot go on; None while it can, or if the ranks said so themselves."""
        if self._explained:
            return None
        if self._deaths:
            return self._judge_deaths(now)
        return judge_ranks(self._ranks(now), self.limit_s, self._names)

    def is_over(self, now: float) -> bool:
        """Whether a rank has ended, so that all others must."""
        return self._explained or bool(self._deaths and now - self._first_death >= SETTLE_S)

    @property
    def is_ending(self) -> bool:
        """Whether a rank has ended, or fails, so that all others soon must."""
        return self._explained or bool(self._deaths)

    def warn(self, now: float) -> str:
        """Who waits for whom, when for too long no rank moves on; once, then ever more rarely."""
        ranks = self._ranks(now)
        still_s = min((rank.still_s for rank in ranks.values()), default=0.0)
        if still_s < self.limit_s:
            self._warned_s = 0.0
            return ""
        if len(ranks) < len(self._node_of) or self._deaths or still_s < 2 * self._warned_s:
            return ""
        self._warned_s = still_s
        return f"no rank has moved on for {still_s:.0f} s: {describe_waits(ranks, self._names)}"

    @property
    def moves(self) -> bool:
        """Whether no warning stands."""
        return self._warned_s == 0.0

    @property
    def limit_s(self) -> float:
        """How long a rank may be missed."""
        reports = (each for report in self._nodes.values() for each in report.ranks.values())
        pace_s = max((each.sight.pace_s for each in reports), default=0.0)
        limit = limit_s(self._min_s, self._predicted_s, pace_s)
        return max(limit, (_MISSED * self._interval_s) if len(self._nodes) > 1 else 0.0)

    def all_have_ended(self, *, but: int) -> bool:
        """Whether no rank lives, apart from those of one node."""
        return all(report.is_over for node, report in self._nodes.items() if node != but)

    def sight(self, rank: int) -> Sight:
        """What a rank was last seen doing."""
        return self._nodes[self._node_of[rank]].ranks[rank].sight

    def node(self, rank: int) -> str:
        """The name of the node that it runs on."""
        return self._nodes[self._node_of[rank]].node

    def _judge_deaths(self, now: float) -> Verdict | None:
        """The first; none if all were asked to end, as when a job is cancelled.

        If a node is gone, launchers kill all ranks but those: that it is not heard of is what
        tells. What was read together with the first death may have been written before it.
        """
        since_s = now - self._first_death
        if since_s < SETTLE_S or all(death.is_wanted for death in self._deaths.values()):
            return None
        for node, at in self._heard.items():
            report = self._nodes[node]
            if at <= self._first_death and not report.is_over:
                if since_s <= min(max(_MISSED * self._interval_s, _MISSED_S), MAX_WAIT_S):
                    return None
                where = f" on {report.node}" if report.node else ""
                message = f"nothing is heard of it{where} any more: the node is gone"
                return Verdict(min(report.ranks), message, RESUME)
        return judge_death(*first_death(self._deaths, self._node_of))

    def _ranks(self, now: float) -> dict[int, RankState]:
        return {
            rank: RankState(
                each.sight,
                report.node,
                still_s=now - self._moved[rank],
                stopped_s=now - self._stopped[rank] if rank in self._stopped else 0.0,
                silent_s=now - self._heard[node],
            )
            for node, report in sorted(self._nodes.items())
            for rank, each in sorted(report.ranks.items())
            if each.state not in OVER
        }


def first_death(deaths: Mapping[int, Death], node_of: Mapping[int, int]) -> tuple[int, Death]:
    """The rank that died first: of each node the one its kernel saw first, of these by time."""
    firsts: dict[int, int] = {}
    for rank in sorted(deaths, key=lambda rank: (deaths[rank].earlier, deaths[rank].at)):
        firsts.setdefault(node_of[rank], rank)
    first = min(firsts.values(), key=lambda rank: deaths[rank].at)
    return first, deaths[first]


def judge_death(rank: int, death: Death) -> Verdict:
    """How a rank ended that did not say so."""
    cure, stack = RESUME, ""
    if death.launcher:
        message = f"{death.launcher} that started it is gone"
        cure = "it was killed, or its node is gone; " + RESUME
    elif death.words:
        message, stack = f"its process crashed: {death.words.splitlines()[0]}", death.words
    elif death.for_memory:
        message, cure = "killed by the kernel, for lack of memory on its node", _MEMORY
    elif death.asked:
        message = "its process was sent a signal to end (SIGTERM or SIGINT), by itself"
    else:
        message = "its process was killed (SIGKILL, say), or ended without a word"
        if death.with_launcher:
            message += "; the launcher is gone, too"
    return Verdict(rank, message, cure, stack, death.at, death.earlier)


def judge_ranks(ranks: Mapping[int, RankState], limit: float, names: Names) -> Verdict | None:
    """The rank that is lost; None while none is.

    Args:
        ranks: all that were heard of at least once and have not ended.
        limit: see :func:`limit_s`.
    """

    def blame(rank: int, message: str, cure: str) -> Verdict:
        words = describe_waits(ranks, names, rank)
        return Verdict(rank, f"{message}; {words}" if words else message, cure)

    stopped = {rank: each.stopped_s for rank, each in ranks.items() if each.stopped_s > 0}
    if stopped and len(stopped) == len(ranks):  # suspended as a whole, and will go on
        return None
    for rank, stopped_s in stopped.items():
        if stopped_s >= _LOST * limit:
            message = f"its process is stopped (SIGSTOP), for {stopped_s:.0f} s now"
            return blame(rank, message, RESUME)
    silent = [rank for rank, each in ranks.items() if each.silent_s >= _LOST * limit]
    heard = [each for rank, each in ranks.items() if rank not in silent]
    if silent and all(each.still_s >= limit / 2 for each in heard):  # else only word is lost
        lost = ranks[silent[0]]
        where = f" on {lost.node}" if lost.node else ""
        message = f"nothing was heard of it{where} for {lost.silent_s:.0f} s: the node is gone"
        return blame(silent[0], message, RESUME)
    # No rank moves on, though all are alive.
    still_s = min((each.still_s for each in ranks.values()), default=0.0)
    step = max((each.sight.step for each in ranks.values()), default=0)
    if step and not all(names.kind(each.sight) for each in ranks.values()):  # a slow disk, say
        return None
    busy = [rank for rank, each in ranks.items() if not each.sight.waiting]
    if busy and step > 1 and still_s >= PATIENCE * limit:
        doing = f"has been in {action(ranks[busy[0]].sight, names)} for {still_s:.0f} s"
        cure = "see what it does there, with py-spy dump say; launch.hang_after allows more time"
        return blame(busy[0], f"{doing}, and no rank has moved on", cure)
    if not busy and len(ranks) > 1 and still_s >= _CIRCLE * limit:
        message = f"all ranks have waited for each other for {still_s:.0f} s"
        cure = "a message was lost: look at the network; launch.hang_after allows more time"
        return blame(min(ranks), message, cure)
    return None


def describe_waits(ranks: Mapping[int, RankState], names: Names, culprit: int | None = None) -> str:
    """Who waits for whom: of all chains one that leads to the culprit, if any does.

    Without a culprit, and if no rank waits for a message, what each of them does.
    """
    sights = {rank: each.sight for rank, each in ranks.items()}
    direct = [rank for rank, sight in sights.items() if sight.peer == culprit]
    if culprit is None:
        direct = [rank for rank, sight in sights.items() if sight.waiting and sight.peer >= 0]
        if not direct:
            return _describe_all(sights, names)
    waiting = [rank for rank, sight in sights.items() if sight.waiting and rank != culprit]
    first = next(iter(direct or waiting), None)
    return "" if first is None else describe_chain(first, sights, names, culprit)


def describe_chain(
    rank: int, sights: Mapping[int, Sight], names: Names, culprit: int | None = None
) -> str:
    """Whom a rank waits for, and for whom that one waits, and so on.

    Ranks count that have just begun to wait for a message, or that it is coming in for.

    Args:
        sights: of the ranks that are heard of.
        culprit: does what it does whomever it waits for; the chain ends there.
    """
    if culprit is not None and culprit in sights:
        sights = {**sights, culprit: sights[culprit]._replace(waiting=False, peer=-1)}
    path, text = [rank], f"rank {rank} {_describe(sights[rank], names)}"
    while (sight := sights.get(path[-1])) is not None and sight.peer >= 0:
        if sight.peer in path or len(path) == _MAX_HOPS:
            return text + (", and so in a circle" if sight.peer in path else ", and so on")
        path.append(sight.peer)
        other = sights.get(sight.peer)
        text += f", which {_describe(other, names) if other else 'was never heard of'}"
    return text


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


def _describe_all(sights: Mapping[int, Sight], names: Names) -> str:
    """What all ranks do, those together that do the same."""
    groups: dict[str, list[int]] = {}
    for rank, sight in sorted(sights.items()):
        groups.setdefault(_describe(sight, names), []).append(rank)
    words = []
    for doing, ranks in list(groups.items())[:_MAX_GROUPS]:
        verb, _, rest = doing.partition(" ")
        many = f"ranks {ranges(ranks)} {'wait' if verb == 'waits' else 'are'} {rest}"
        words.append(many if len(ranks) > 1 else f"rank {ranks[0]} {doing}")
    left = sum(map(len, list(groups.values())[_MAX_GROUPS:]))
    return "; ".join([*words, *([f"{left} more ranks do something else"] if left else [])])


def _describe(sight: Sight, names: Names) -> str:
    """``is in backward 4``, ``waits for activation 5 of stage 2 from rank 2``."""
    kind = names.kind(sight)
    doing = f"{kind.lower().replace('_', ' ')}{_micro_batch(sight)}"
    doing = doing if kind else sight.phase or "starting"
    if not (sight.waiting or sight.peer >= 0):
        return f"is {'in ' if kind else ''}{doing}"
    if sight.peer < 0:
        stage = f"stage {sight.stage}, " if kind and sight.stage >= 0 else ""
        return f"waits for the other ranks ({stage}{doing})"
    number = "s" if sight.micro_batch < 0 else f" {sight.micro_batch}"
    message = f"{names.lane(sight)}{number}"
    if kind == "SEND_WAIT":
        return f"waits for rank {sight.peer} to take {message} of stage {sight.stage}"
    return f"waits for {message} of stage {sight.peer_stage} from rank {sight.peer}"


def _micro_batch(sight: Sight, word: str = "") -> str:
    """Nothing for a row that belongs to none."""
    return "" if sight.micro_batch < 0 else f"{word} {sight.micro_batch}"
