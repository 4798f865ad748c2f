"""Finished profiles, kept for reuse under a hash of everything that they depend on.

A file of the cache is JSON: what was measured (its identity), when, where, and the profile. One
that is damaged, or whose identity is not the one looked for, is as good as absent.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pipectl
from pipectl.errors import DataFileError
from pipectl.fields import Reader
from pipectl.files import read_json, write_json
from pipectl.profile import MeasuredOn, Profile
from pipectl.spec import profile_key

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

VERSION = 1
_KEPT = 32
_MEASURING = ("capture", "profiler")


@dataclass(frozen=True)
class Entry:
    """A finished profile.

    Args:
        measured_at: seconds since the epoch.
        host: on which it was measured.
        seconds: that measuring took.
    """

    profile: Profile
    measured_at: float
    host: str
    seconds: float


def identity_of(spec: JobSpec, device: MeasuredOn, effort: str) -> dict[str, Any]:
    """Everything that a profile depends on, as JSON."""
    pipeline = spec.pipeline
    free = [] if pipeline.micro_batches is not None else [pipeline.stages, spec.resources.ranks]
    return {
        "key": profile_key(spec),
        "shapes": [spec.training.batch_size, pipeline.micro_batches, *free],
        "device": asdict(device),
        "effort": effort,
        "python": platform.python_version(),
        "pipectl": [pipectl.__version__, _measuring_code()],
    }


class ProfileCache:
    """The profiles in one directory.

    Args:
        directory: exists.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def journal(self, identity: Mapping[str, Any]) -> Path:
        """Where the measuring of ``identity`` keeps what it has so far."""
        return self._directory / f"{_digest(identity)}.journal"

    def find(self, identity: Mapping[str, Any]) -> Entry | None:
        """The profile of ``identity``, if there is a sound one."""
        path = self._path(identity)
        try:
            document = read_json(path, cure="")
            if document.get("identity") != identity:
                return None
            reader = Reader(document, file=str(path), cure="")
            reader.check_version(VERSION)
            return _entry(reader, document)
        except DataFileError:
            return None

    def keep(self, identity: Mapping[str, Any], entry: Entry) -> None:
        """Store a profile."""
        document = {
            "version": VERSION,
            "identity": identity,
            "measured_at": entry.measured_at,
            "host": entry.host,
            "seconds": entry.seconds,
            "profile": entry.profile.to_json(),
        }
        write_json(self._path(identity), document)

    def make_room(self) -> None:
        """Keep the newest profiles and journals."""
        ages = []
        for path in (*self._directory.glob("*.json"), *self._directory.glob("*.journal")):
            with suppress(OSError):
                ages.append((path.stat().st_mtime, path))
        for _, path in sorted(ages)[:-_KEPT]:
            with suppress(OSError):
                path.unlink()

    def _path(self, identity: Mapping[str, Any]) -> Path:
        return self._directory / f"{_digest(identity)}.json"


def _entry(reader: Reader, document: Mapping[str, Any]) -> Entry:
    reader.section("profile")
    return Entry(
        profile=Profile.from_json(document["profile"]),
        measured_at=reader.number("measured_at"),
        host=reader.text("host"),
        seconds=reader.number("seconds"),
    )


def _digest(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


@cache
def _measuring_code() -> str:
    """Hash of the code that measures: what it finds may change without a new version."""
    package = Path(pipectl.__file__).parent
    files = sorted(path for part in _MEASURING for path in (package / part).glob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]
