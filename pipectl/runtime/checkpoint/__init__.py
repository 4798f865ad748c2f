"""Checkpoints: what ranks save, how it is written, and how a run resumes from it."""

from pipectl.runtime.checkpoint.saver import Keep, Saver
from pipectl.runtime.checkpoint.snapshot import Snapshot, plain_name, saved_names, take_snapshot
from pipectl.runtime.checkpoint.stored import StateDict, Stored, load, newest

__all__ = [
    "Keep", "Saver", "Snapshot", "StateDict", "Stored", "load", "newest", "plain_name",
    "saved_names", "take_snapshot",
]  # fmt: skip
