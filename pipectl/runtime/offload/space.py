"""Whether the disks of all nodes hold what their ranks will offload, before anything starts."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipectl.errors import WorkerError
from pipectl.plan import OffloadTarget, Plan
from pipectl.runtime.waiting import gather_all
from pipectl.schedule import lower, peak_host_bytes
from pipectl.units import format_bytes

if TYPE_CHECKING:
    from mpi4py import MPI


class _Found(NamedTuple):
    """What one rank needs, and where.

    Args:
        disk: tells file systems of a node apart.
        free_bytes: None where the directory cannot be written.
    """

    node: str
    disk: int
    need_bytes: int
    free_bytes: int | None


def offload_directory() -> Path:
    """``TMPDIR`` of this node, even if it cannot be written, or else what the system has."""
    return Path(os.environ.get("TMPDIR") or tempfile.gettempdir())


def check_space(communicator: MPI.Comm, plan: Plan, node: str, directory: Path) -> None:
    """Compare needs and free space on every node; collective.

    Args:
        node: of this rank.

    Raises:
        WorkerError: on all ranks, naming the first one whose disk is too small.
    """
    if plan.offload_to is not OffloadTarget.DISK or not any(s.offload for s in plan.stages):
        return
    need = peak_host_bytes(plan, lower(plan, communicator.rank))
    everybody = gather_all(communicator, (_look(node, directory, need), str(directory)))
    for rank, (mine, where) in enumerate(everybody):
        if not mine.need_bytes:
            continue
        together = sum(
            other.need_bytes
            for other, _ in everybody
            if (other.node, other.disk) == (mine.node, mine.disk)
        )
        if mine.free_bytes is None or together > mine.free_bytes:
            raise _too_small(rank, mine, where, together)


def _look(node: str, directory: Path, need: int) -> _Found:
    try:
        writable = os.access(directory, os.W_OK | os.X_OK)
        free = shutil.disk_usage(directory).free if writable else None
        return _Found(node, directory.stat().st_dev, need, free)
    except OSError:
        return _Found(node, -1, need, None)


def _too_small(rank: int, found: _Found, directory: str, together: int) -> WorkerError:
    where = f"rank {rank}: no space for offload in {directory} on {found.node}"
    cure = "set TMPDIR in environment.variables to a directory with more space on the nodes"
    if found.free_bytes is None:
        return WorkerError(f"{where}: it is no directory that can be written", cure=cure)
    return WorkerError(
        f"{where}: need {format_bytes(together)} for all its ranks there, "
        f"have {format_bytes(found.free_bytes)}",
        cure=cure,
    )
