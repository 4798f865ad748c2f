"""Trains on the ranks it is started on, and notes how many bytes of tensors each held at most.

Started as ``mpiexec -n RANKS python -m mpi4py peaks.py RUN...``, with job and plan in every run
directory. Each rank writes what it held in the last step into ``RUN/peak-<rank>``.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from pipectl.capture import CapturedJob
from pipectl.plan import Plan
from pipectl.profiler.machine import record_allocated
from pipectl.runs import RunDirectory
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.pages import MessagePages, Pages
from pipectl.runtime.saved_tensors import SavedTensors
from pipectl.runtime.setup import Setup
from pipectl.runtime.trainer import Trainer
from pipectl.spec import load
from pipectl.watch.board import Board


def measure(run: RunDirectory, world: MPI.Comm) -> int:
    """Train; what is there before the last step is added as it is."""
    setup = Setup(world, CapturedJob(load(run.job)), Plan.load(run.plan), CpuDevice(), Board())
    trainer = Trainer(setup, run.start)
    train_step, peaks = setup.training.run, list[int]()

    def record(*given: Any) -> None:
        gc.collect()  # what earlier steps left must not be freed meanwhile
        with record_allocated(torch.device("cpu")) as recording:
            train_step(*given)
        peaks.append(recording.phases[-1].peak_bytes)

    setup.training.run = record  # type: ignore[method-assign]
    trainer.train()
    optimizer = trainer._step_end.updater.optimizer
    states = [] if optimizer is None else [list(s.values()) for s in optimizer.state.values()]
    held = [t for values in states for t in values if isinstance(t, Tensor)]
    for stage in setup.stages.values():
        held += [*stage.parameters.values(), *stage.buffers.values()]
    return peaks[-1] + sum(tensor.nbytes for tensor in held)


if __name__ == "__main__":
    torch.set_num_threads(1)
    SavedTensors.min_bytes = 0
    # Torch knows how much of its own memory is in use.
    Pages.take = lambda _, size: torch.empty(size, dtype=torch.uint8)  # type: ignore[method-assign]
    MessagePages.take = lambda _, sizes, dtype: torch.empty(sizes, dtype=dtype)  # type: ignore[method-assign]
    for directory in sys.argv[1:]:
        run = RunDirectory(Path(directory))
        peak = measure(run, MPI.COMM_WORLD)
        (run.path / f"peak-{MPI.COMM_WORLD.rank}").write_text(str(peak))
