"""Control groups of this process, of either version, and the memory that they leave it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_LIMITS = "memory.max", "memory.limit_in_bytes"
"""Files with the limit of a group, which may be ``max`` or a number beyond any memory."""


def memory_of_machine(root: Path = Path("/")) -> int:
    """Return the bytes of memory that the processes of this control group may use together: those
    of the machine, or the limit of the group or of one that contains it."""
    limits = [limit for group in groups_of("memory", root) if (limit := _limit_of(group))]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits])


def groups_of(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield the directories of the control groups of this process that may limit it.

    Args:
        controller: what they limit, such as ``cpu``.
        root: directory that contains ``proc`` and the mounts of control groups.
    """
    with suppress(OSError, ValueError, LookupError):
        of_controller = {}
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            of_controller.update(dict.fromkeys(controllers.split(","), group))
        for line in (root / "proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            left, _, right = line.partition(" - ")
            top, mount = left.split()[3:5]
            kind, _, options = right.split()[:3]
            if kind == "cgroup2":
                group = of_controller.get("", "")
            elif kind == "cgroup" and controller in options.split(","):
                group = of_controller.get(controller, "")
            else:
                continue
            inner = Path(group)
            inner = inner.relative_to(top) if inner.is_relative_to(top) else Path()
            base = root / mount.lstrip("/")
            yield from (base / part for part in (inner, *inner.parents))


def _limit_of(group: Path) -> int | None:
    """The bytes that a control group may use; None if that is not limited."""
    for name in _LIMITS:
        with suppress(OSError, ValueError):
            return int((group / name).read_text(encoding="ascii"))
    return None
