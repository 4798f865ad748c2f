"""Readings of runs whose files no longer change, kept in one file beside the runs.

It is derived: what does not match the files of its run, or cannot be read, is as good as absent.
Commands may write it at the same time; the last one wins, and nothing is lost but time.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipectl import __version__
from pipectl.errors import DataFileError, UsageError
from pipectl.files import write_text
from pipectl.jobs.places import cache_directory
from pipectl.jobs.reading import Facts, Reading, from_json, to_json
from pipectl.runs import Record, RunDirectory, list_runs

MANY = 50
"""Runs, from which on it pays to keep what is read of them."""
_HEAD = f"pipectl {__version__} readings 1"
_QUIET_NS = 10 * 10**9
"""A file that changed more recently may change again within one tick of its clock."""
_LARGEST = 2**14
"""Bytes of one run's entry; runs of a thousand ranks are read anew."""


class KeptReadings:
    """The readings of the runs in one directory.

    Args:
        base: the directory of the run directories.
    """

    def __init__(self, base: Path) -> None:
        self._base = base.absolute()
        self._path = cache_directory(self._base) / "readings.cache"
        self._entries = _load(self._path)
        self._changes = 0

    def record(self, run: RunDirectory) -> Record | None:
        """The kept record of a run; it counts if its :meth:`reading` then does."""
        entry = self._entries.get(self._name(run))
        try:
            return None if entry is None else Record.from_json(entry["record"], file=str(run.path))
        except (LookupError, TypeError, ValueError, DataFileError):
            return None

    def reading(self, run: RunDirectory, facts: Facts) -> Reading | None:
        """What the files of a run say, if these are the facts with which it was kept."""
        entry = self._entries.get(self._name(run))
        try:
            return None if entry is None or _facts(entry) != facts else from_json(entry["reading"])
        except (LookupError, TypeError, ValueError):
            return None

    def keep(
        self, run: RunDirectory, record: Record | None, reading: Reading, facts: Facts
    ) -> None:
        """Keep a reading, unless its files may still change.

        Args:
            facts: from before it was read.
        """
        latest = max((fact[2] for fact in facts if fact is not None), default=0)
        if record is None or record.job_id is None or time.time_ns() - latest < _QUIET_NS:
            return
        with suppress(DataFileError):
            if Record.load(run.record) == record:
                self._add(run, record, reading, facts)

    def _add(self, run: RunDirectory, record: Record, reading: Reading, facts: Facts) -> None:
        entry = {"facts": facts, "record": asdict(record), "reading": to_json(reading)}
        text = json.dumps(entry)
        if len(text) <= _LARGEST:
            self._entries[self._name(run)] = json.loads(text)
            self._changes += 1

    def forget(self, runs: Collection[RunDirectory]) -> None:
        """Drop what is kept of runs that have changed."""
        for run in runs:
            self._entries.pop(self._name(run), None)
            self._changes += 1

    def save(self) -> None:
        """Write the file if anything has changed, without runs that are gone.

        Where nothing can be written, nothing is.
        """
        if not self._changes:
            return
        names = {self._name(run) for run in list_runs(self._base)}
        kept = {name: entry for name, entry in self._entries.items() if name in names}
        with suppress(UsageError, OSError):
            self._path.parent.mkdir(exist_ok=True)
            write_text(self._path, _sealed(json.dumps(kept)), durable=False)
        self._changes = 0

    def _name(self, run: RunDirectory) -> str:
        return run.name if run.path.parent == self._base else str(run.path)


@contextmanager
def kept_readings(base: Path, looked_at: int) -> Iterator[KeptReadings | None]:
    """The readings of the runs in a directory, which are saved behind it.

    Args:
        looked_at: the number of runs; None is given where there are so few that it does not pay.
    """
    if looked_at <= MANY:
        yield None
        return
    kept = KeptReadings(base)
    yield kept
    kept.save()


def _sealed(text: str) -> str:
    return f"{_HEAD} {hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def _load(path: Path) -> dict[str, Any]:
    """The entries of a file that is whole, of this version of pipectl; else none."""
    try:
        content = path.read_text(encoding="utf-8")
        text = content.partition("\n")[2]
        entries = json.loads(text) if content == _sealed(text) else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _facts(entry: dict[str, Any]) -> Facts:
    return tuple(None if fact is None else tuple(fact) for fact in entry["facts"])
