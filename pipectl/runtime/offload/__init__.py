"""Offload: what a micro-batch keeps for its backward, out of the device's memory meanwhile."""

from pipectl.runtime.offload.mover import Mover, mover_of
from pipectl.runtime.offload.pool import Pool, unpack
from pipectl.runtime.offload.space import check_space, offload_directory
from pipectl.runtime.offload.stage import StageOffload
from pipectl.runtime.offload.stores import DiskStore, HostStore, Store

__all__ = [
    "DiskStore",
    "HostStore",
    "Mover",
    "Pool",
    "StageOffload",
    "Store",
    "check_space",
    "mover_of",
    "offload_directory",
    "unpack",
]
