"""Files of watchers: one per node, by which they tell each other how ranks are, and reports.

A node's file is replaced whole. Nobody else can write there, but a file may be damaged: everything
in it is checked. A report of a rank that failed is a file for ``status``, and text for the log.
"""

from __future__ import annotations

import json
import os
import select
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pipectl.errors import PipectlError, UsageError
from pipectl.files import write_json, write_text
from pipectl.printable import printable
from pipectl.watch.board import Sight
from pipectl.watch.rank import DIED, OVER, STATES, Death

VERSION = 1
_MAX_BYTES = 1 << 24
_MAX_NUMBER = 2**53
_PIECE = 4096
"""Bytes that a pipe takes at once whenever it says that it takes any."""
_PATIENCE_MS = 1000
DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What :func:`parse_report` and the reading of JSON raise for what no watcher has written."""
_Fields = TypeVar("_Fields", bound=tuple[Any, ...])


class RankReport(NamedTuple):
    """How one rank is.

    Args:
        state: see :mod:`pipectl.watch.rank`.
        death: of one that has died.
    """

    state: str
    sight: Sight
    death: Death | None = None


class NodeReport(NamedTuple):
    """How the ranks of one node are.

    Args:
        node: its name.
        ends: whether all ranks are to be killed; said by the first node's watcher.
        knows: whether that one knows of a rank that has ended, and so will say why.
        stalled: who waits for whom, when no rank has moved on for long; said by that one, too.
    """

    node: str
    ranks: Mapping[int, RankReport]
    ends: bool = False
    knows: bool = False
    stalled: str = ""

    @property
    def is_over(self) -> bool:
        """Whether all of them have ended."""
        return all(each.state in OVER for each in self.ranks.values())

    def news(self) -> tuple[Any, ...]:
        """What is worth a word at once."""
        states = [each.state for each in self.ranks.values()]
        return states, self.ends, self.knows, self.stalled


def node_path(folder: Path, node: int) -> Path:
    """The file of a node; they are counted by their first ranks."""
    return folder / f"node-{node:04d}.json"


class NodeFile:
    """The file of one node.

    Args:
        start: a word for this start of the ranks; what is of another one is not read.
    """

    def __init__(self, path: Path, start: str) -> None:
        self.path, self._start = path, start
        self._stamp: tuple[int, int] | None = None
        self.fault = ""

    def write(self, report: NodeReport, now: float) -> None:
        """Replace it; if the disk is full, at least its time of change says that we live."""
        ranks = [
            {
                "rank": rank,
                "state": each.state,
                "sight": each.sight._asdict(),
                "death": None if each.death is None else each.death._asdict(),
            }
            for rank, each in report.ranks.items()
        ]
        head = {"version": VERSION, "start": self._start, "time": now}
        text = json.dumps({**head, **report._asdict(), "ranks": ranks})
        try:
            write_text(self.path, f"{text}\n", mode=0o600, durable=False)
        except (UsageError, OSError):
            with suppress(OSError):
                os.utime(self.path)

    def read(self) -> NodeReport | None:
        """What it says; None if it was not written since the last look, or cannot be read.

        It is opened each time: network file systems look for changes only then.
        """
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_BYTES:
                raise ValueError("no file of a watcher")
            stamp = found.st_ino, found.st_mtime_ns
            if stamp == self._stamp:
                return None
            text = os.read(handle, _MAX_BYTES)
            self._stamp = stamp
            self.fault = ""
            document = json.loads(text)
            return parse_report(document) if document["start"] == self._start else None
        except (OSError, *DAMAGE):
            self.fault = f"{self.path.parent.name}/{self.path.name} is damaged or cannot be read"
            return None
        finally:
            os.close(handle)


def parse_report(document: Mapping[str, Any]) -> NodeReport:
    """What a file says.

    Raises:
        ValueError: no watcher has written it; so does any other of ``DAMAGE``.
    """
    if document["version"] != VERSION:
        raise ValueError(f"version {document['version']!r}")
    fields = {name: document[name] for name in ("node", "ends", "knows", "stalled")}
    checked = _checked(NodeReport("", {}), {**fields, "ranks": {}})
    ranks: dict[int, RankReport] = {}
    for item in document["ranks"]:
        rank, state, death = item["rank"], item["state"], item["death"]
        if not _is_like(rank, 0) or rank < 0 or state not in STATES:
            raise ValueError(f"rank {rank!r} in state {state!r}")
        ended = _checked(Death(), death) if state == DIED else None
        ranks[rank] = RankReport(state, _checked(Sight(), item["sight"]), ended)
    return checked._replace(ranks=ranks)


def _checked(default: _Fields, document: Mapping[str, Any]) -> _Fields:
    """A tuple of the types that its default has; text is fit for terminals."""
    fields = {}
    for name, usual in default._asdict().items():  # type: ignore[attr-defined]
        value = document[name]
        if not _is_like(value, usual):
            raise ValueError(f"{name} is {type(value).__name__}")
        fields[name] = printable(value) if isinstance(value, str) else value
    return type(default)(**fields)


def _is_like(value: Any, usual: Any) -> bool:
    if isinstance(usual, bool | str | dict):
        return type(value) is type(usual)
    numbers = (int, float) if isinstance(usual, float) else (int,)
    return type(value) in numbers and abs(value) < _MAX_NUMBER


def report_text(document: Mapping[str, Any]) -> str:
    """The same for people, fit for terminals; it ends with a line end.

    Args:
        document: of any error file, some fields of which may be missing.
    """
    known = {name: document.get(name) for name in ("rank", "stage", "step")}
    where = [f"{name} {value}" for name, value in known.items() if value is not None]
    kind, action, cure = (document.get(name) for name in ("type", "action", "cure"))
    place = ", ".join([*where, *([str(action)] if action else [])])
    parts = [f"pipectl: {place}: {f'{kind}: ' if kind else ''}{document.get('message')}"]
    parts += [str(document.get("traceback") or ""), f"pipectl: {cure}" if cure else ""]
    return "".join(f"{printable(part.rstrip())}\n" for part in parts if part)


def write_report(path: Path, document: Mapping[str, Any]) -> None:
    """Write the error file. A disk that fails keeps it from being written."""
    with suppress(PipectlError, OSError):
        write_json(path, document)


def write_log(log: int, text: str) -> None:
    """Write to a file descriptor what its reader takes, and never wait long for one that is stuck.

    The reader of the job's log may be gone, or frozen; nothing may end or hang by that.
    """
    data = text.encode(errors="replace")
    poll = select.poll()
    poll.register(log, select.POLLOUT)
    with suppress(OSError):
        while data and poll.poll(_PATIENCE_MS):
            data = data[os.write(log, data[:_PIECE]) :]
