"""Measuring the operators of a job's model, and telling whether a measurement is still good."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipectl.errors import UsageError
from pipectl.faults import with_file
from pipectl.fields import Reader
from pipectl.files import is_stream, make_directory, make_directory_of, read_json
from pipectl.jobs.cache import Entry, ProfileCache, identity_of
from pipectl.jobs.device import this_device
from pipectl.jobs.places import cache_directory, on_login_node
from pipectl.profile import MeasuredOn, Profile
from pipectl.spec import profile_key

if TYPE_CHECKING:
    from pipectl.profiler.journal import Journal
    from pipectl.spec import JobSpec

LOADING = "loading torch"
_CURE = "measure again with: pipectl profile JOB.yaml --submit"
Progress = Callable[[int, int, str], None]
"""Called with (done, total, what is or was done); a total of 0 says that nobody knows how long."""


@dataclass(frozen=True)
class Wish:
    """How to measure.

    Args:
        effort: ``fast``, ``normal`` or ``thorough``.
        device_kind: name of this kind of device in the cluster; None for the usual one.
        again: whether to measure even what is known.
    """

    effort: str = "normal"
    device_kind: str | None = None
    again: bool = False


@dataclass(frozen=True)
class Measurement:
    """A profile and how it came to be.

    Args:
        cached: whether nothing was measured now.
        resumed: measurements taken over from an interrupted attempt.
    """

    entry: Entry
    cached: bool
    resumed: int = 0

    @property
    def profile(self) -> Profile:
        """The profile."""
        return self.entry.profile

    def to_json(self) -> dict[str, Any]:
        """How it came to be; the profile itself has a file of its own."""
        return {
            "cached": self.cached,
            "resumed": self.resumed,
            "measured_at": self.entry.measured_at,
            "host": self.entry.host,
            "seconds": round(self.entry.seconds, 3),
        }

    @classmethod
    def load(cls, profile: Path, how: Path) -> Measurement:
        """The measurement whose two files these are.

        Raises:
            DataFileError: one is missing or damaged.
        """
        reader = Reader(read_json(how, cure=_CURE), file=str(how), cure=_CURE)
        entry = Entry(
            profile=Profile.load(profile),
            measured_at=reader.number("measured_at"),
            host=reader.text("host"),
            seconds=reader.number("seconds"),
        )
        return cls(entry, reader.flag("cached"), reader.integer("resumed"))


class Interrupted(KeyboardInterrupt):
    """Measuring was interrupted.

    Args:
        kept: measurements that the next attempt will not repeat.
    """

    def __init__(self, kept: int) -> None:
        super().__init__(kept)
        self.kept = kept


def measure(
    spec: JobSpec,
    path: Path,
    progress: Progress | None = None,
    wish: Wish | None = None,
    *,
    base: Path | None = None,
) -> Measurement:
    """Write the profile of a job on this machine to ``path``: a known one, or measured now.

    Until the new profile is whole, ``path`` stays as it is.

    Args:
        base: the output directory, whose cache is used; by default the spec's.

    Raises:
        CaptureError: the model cannot be built or captured.
        Interrupted: by the user; what was measured so far is used the next time.
        UsageError: ``path`` or the cache cannot be written.
    """
    make_directory_of(path)
    try:
        found = measured(spec, progress, wish, base=base)
    except Exception as error:
        fault = with_file(error, None if is_stream(path) else path.with_suffix(".fault.txt"))
        if fault is not error:
            raise fault from error
        raise
    found.profile.save(path)
    return found


def measured(
    spec: JobSpec,
    progress: Progress | None = None,
    wish: Wish | None = None,
    *,
    base: Path | None = None,
) -> Measurement:
    """What :func:`measure` does, without a file of its own."""
    directory = cache_directory(Path(spec.output.directory) if base is None else base)
    make_directory(directory)
    return _found(spec, progress, wish or Wish(), ProfileCache(directory))


def require_compute_node(scheduler: str) -> None:
    """A login node is no place to measure on: it is shared, and often another machine.

    Raises:
        UsageError: this is one, as far as can be told.
    """
    if on_login_node(scheduler):
        raise UsageError(
            f"jobs go to {scheduler} from here, so this seems to be a login node, whose times say "
            "nothing about the nodes that train",
            cure="measure in an allocation: add --submit (and --wait to follow it);\n"
            "to measure on this machine all the same: --here",
        )


def fresh_profile(spec: JobSpec, path: Path) -> Profile | None:
    """The profile in ``path``; None if there is none or the spec or its files have changed since.

    Raises:
        DataFileError: there is one, but it cannot be read; it is for the user to remove it.
    """
    if not path.exists():
        return None
    profile = Profile.load(path)
    return profile if is_fresh(spec, profile) else None


def is_fresh(spec: JobSpec, profile: Profile) -> bool:
    """Whether a profile is of this spec; one without a key comes from elsewhere and is believed."""
    return profile.key is None or profile.key == profile_key(spec)


def _found(spec: JobSpec, progress: Progress | None, wish: Wish, kept: ProfileCache) -> Measurement:
    device = this_device(spec, wish.device_kind)
    identity = identity_of(spec, device, wish.effort)
    known = None if wish.again else kept.find(identity)
    if known is not None:
        renamed = replace(known.profile, name=spec.name)
        return Measurement(replace(known, profile=renamed), cached=True)
    from pipectl.profiler.journal import Journal

    with Journal(kept.journal(identity), identity) as journal:
        entry = _measure_now(spec, progress, wish, device, journal)
        kept.keep(identity, entry)
        journal.remove()
    kept.make_room()
    return Measurement(entry, cached=False, resumed=journal.resumed)


def _measure_now(
    spec: JobSpec, progress: Progress | None, wish: Wish, device: MeasuredOn, journal: Journal
) -> Entry:
    if progress is not None:
        progress(0, 0, LOADING)
    from pipectl.profiler import profile_job
    from pipectl.profiler.effort import Effort

    started = time.time()
    try:
        profile = profile_job(spec, progress, effort=Effort(wish.effort), journal=journal)
    except KeyboardInterrupt as stop:
        raise Interrupted(len(journal)) from stop
    neighbours = profile.device.neighbours if profile.device else 0
    profile = replace(profile, device=replace(device, neighbours=neighbours))
    now = time.time()
    return Entry(profile, now, socket.gethostname(), now - started)
