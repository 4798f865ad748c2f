"""Measuring the operators of a job's model, and telling whether a measurement is still good."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.files import make_directory
from pipectl.profile import Profile
from pipectl.spec import profile_key

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

Progress = Callable[[int, int, str], None]


def measure(spec: JobSpec, path: Path, progress: Progress | None = None) -> Profile:
    """Profile the model on this machine and write ``path``.

    Raises:
        CaptureError: the model cannot be built or captured; ``path`` is untouched.
    """
    from pipectl.profiler import profile_job

    make_directory(path.parent)
    profile = profile_job(spec, progress)
    profile.save(path)
    return profile


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
