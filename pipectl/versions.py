"""The versions of torch that pipectl supports, and the versions that are installed."""

from __future__ import annotations

import platform
import re

from pipectl import __version__

OLDEST_TORCH, NEWEST_TORCH = "2.13", "2.15"
"""The first and the last release of torch with which the tests pass."""


def tested_torch() -> str:
    """Return the supported range: ``torch 2.13 to 2.15``."""
    return f"torch {OLDEST_TORCH} to {NEWEST_TORCH}"


def untested_torch() -> str | None:
    """Return a warning if the installed torch is outside the tested range, else None."""
    installed = installed_version("torch")
    release, oldest, newest = (
        [int(number) for number in re.findall(r"\d+", text or "")[:2]]  # major and minor
        for text in (installed, OLDEST_TORCH, NEWEST_TORCH)
    )
    if installed is None or oldest <= release <= newest:
        return None
    return f"tested with {tested_torch()}; this is {installed}"


def installed_versions() -> str:
    """Return for example ``pipectl 0.1.0, torch 2.13.0, mpi4py 4.1.1, Python 3.12.3``, for reports.

    Reads the metadata of packages without importing them.
    """
    others = {name: installed_version(name) or "not installed" for name in ("torch", "mpi4py")}
    versions = {"pipectl": __version__, **others, "Python": platform.python_version()}
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
