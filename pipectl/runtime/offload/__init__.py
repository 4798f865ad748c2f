"""Offload: what a micro-batch keeps for its backward, out of the device's memory meanwhile."""

from pipectl.runtime.offload.stage import (
    Mover,
    StageOffload,
    check_space,
    mover_of,
    offload_directory,
)
from pipectl.runtime.offload.stores import DiskStore, HostStore, Store

__all__ = [
    "DiskStore",
    "HostStore",
    "Mover",
    "StageOffload",
    "Store",
    "check_space",
    "mover_of",
    "offload_directory",
]
