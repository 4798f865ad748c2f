"""What the watchers of nodes tell each other: one file per node, replaced whole.

Nobody else can write there, but a file may be damaged: everything in it is checked.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pipectl.errors import UsageError
from pipectl.files import write_text
from pipectl.printable import printable
from pipectl.watch.board import Sight
from pipectl.watch.rank import DIED, Death, described

VERSION = 1
_MAX_BYTES = 1 << 24
_MAX_NUMBER = 2**53
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
        if not _is_like(rank, 0) or rank < 0 or not described(state):
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
