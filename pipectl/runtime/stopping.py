"""Ending early, at a checkpoint, when the job script asks for it.

A signal reaches launchers and ranks in as many ways as there are launchers, so the script leaves a
file instead. Rank 0 looks for it once a second; what it found at the end of one step, all ranks
know at the end of the next, without waiting for one another.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from pipectl.runtime.waiting import wait

_LOOK_S = 1.0


class Stopping:
    """Whether all ranks stop behind a step.

    Args:
        communicator: of its own.
        asked: the file.
    """

    def __init__(self, communicator: MPI.Comm, asked: Path) -> None:
        self._communicator = communicator
        self._asked = asked
        self._looked_at = float("-inf")
        self._found = np.zeros(1, dtype=np.int8)
        self._telling: MPI.Request | None = None

    def behind_step(self) -> bool:
        """Whether to stop now, as was told a step ago; collective."""
        stop = self._told()
        if not stop:
            self._tell()
        return stop

    def behind_stretch(self) -> bool:
        """Whether to stop now, as rank 0 finds at this moment; collective."""
        self._tell()
        return self._told()

    def finish(self) -> None:
        """Hear what was told last; collective."""
        self._told()

    def _told(self) -> bool:
        if self._telling is None:
            return False
        wait([self._telling])
        self._telling = None
        return bool(self._found[0])

    def _tell(self) -> None:
        if self._communicator.rank == 0:
            self._found[0] = self._looks()
        self._telling = self._communicator.Ibcast(self._found, 0)

    def _looks(self) -> bool:
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return False
        self._looked_at = now
        try:
            return self._asked.exists()
        except OSError:  # the file system is away
            return False
