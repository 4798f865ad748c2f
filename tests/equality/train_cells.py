"""Trains cells of the equality table on the ranks it is started on.

Started as ``mpiexec -n RANKS python -m mpi4py train_cells.py DIRECTORY SET``. Set ``sample``, on
four ranks: what every run of the tests trains on up to four, since starting MPI takes long. Set
``others``: the rest of what so many ranks train. Every cell leaves its weights in
``DIRECTORY/SET/<ranks>/<cell>``. A process captures each model once, or has it from the process
that it was forked from; see all_captured.py.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from pipectl.capture import Cut
from pipectl.plan import Plan
from pipectl.runs import RunDirectory
from pipectl.runs.rebalance import Balance
from pipectl.runtime import replicas as replicas_module
from pipectl.runtime import stage as stage_module
from pipectl.runtime.checkpoint import newest
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.rebalancing import Move, Rebalancing
from pipectl.runtime.reduction import StageReduction
from pipectl.runtime.saved_tensors import SavedTensors
from pipectl.runtime.setup import Setup
from pipectl.runtime.stage_code import compile_stage
from pipectl.runtime.trainer import Trainer
from pipectl.runtime.waiting import barrier
from pipectl.schedule import is_unflushed
from pipectl.spec import load
from pipectl.watch.board import Board
from tests.equality import cells
from tests.equality.cell_jobs import captured, spec_text
from tests.equality.cells import Cell
from tests.equality.plans import plan_and_cut, stages_of_states

MOVES_EVERY = 10
"""One of so many cells goes on under another cut after a step or two."""


def can_move(plan: Plan) -> bool:
    return not is_unflushed(plan) and all(stage.replicas == 1 for stage in plan.stages)


def train(directory: Path, communicator: MPI.Comm, *, sample: bool) -> None:
    """Every cell through a random cut, drawn by its number."""
    for number, cell in enumerate(cells.every_cell(communicator.size).values()):
        if (cell in cells.sampled(communicator.size)) is sample:
            run = RunDirectory(directory / str(communicator.size) / str(cell))
            train_cell(run, communicator, cell, number)


def train_cell(run: RunDirectory, communicator: MPI.Comm, cell: Cell, number: int) -> None:
    if communicator.rank == 0:
        run.trace.mkdir(parents=True)
        run.start.path.mkdir(parents=True)
        run.job.write_text(spec_text(cell))
    communicator.Barrier()
    job = captured(cell.model, plain=cell.plain).of(load(run.job))
    graph = job.training_graph(2)
    plan, stages = plan_and_cut(graph, cell, communicator.size, number)
    lent = Lent(communicator)
    EARLY.clear()
    moving = Moving(plan) if not number % MOVES_EVERY and can_move(plan) else None
    stored, moves = None, 0
    while True:
        setup = Setup(lent, job, plan, CpuDevice(), Board(), stored=stored)
        with closing(setup):
            moved = Trainer(setup, run.start, stored=stored, rebalancing=moving).train()
        lent.take_back()
        if not moved:
            break
        moving, moves = None, moves + 1
        stored = newest(communicator, run.checkpoints, print)
        plan, stages = plan_and_cut(graph, cell, communicator.size, -1 - number)
    if communicator.rank == 0:
        notes = {
            "early_sums": EARLY,
            "split_uses": sorted(Cut(graph, stages, training=True).split_uses),
            "stages": stages_of_states(graph, stages),
            "moves": moves,
        }
        (run.path / "notes.json").write_text(json.dumps(notes))


def train_sample(directory: Path, world: MPI.Comm) -> None:
    """On four ranks, then on three beside one, then on two."""
    train(directory, world, sample=True)
    train(directory, world.Split(world.rank // 3), sample=True)
    barrier(world)  # which leaves the cores to those that still train
    pair = world.Split(world.rank // 2)
    if world.rank < 2:
        train(directory, pair, sample=True)
    barrier(world)


class Lent(MPI.Intracomm):
    """Frees what was made of it: MPI has some two thousand communicators in all."""

    def __init__(self, _: MPI.Comm) -> None:
        self.made: list[MPI.Comm] = []

    def Dup(self, info: MPI.Info | None = None) -> Any:  # noqa: N802
        self.made.append(MPI.Intracomm(super().Dup(info)))
        return self.made[-1]

    def Create_group(self, group: MPI.Group, tag: int = 0) -> Any:  # noqa: N802
        self.made.append(MPI.Intracomm(super().Create_group(group, tag)))
        return self.made[-1]

    def take_back(self) -> None:
        for made in self.made:
            made.Free()
        self.made.clear()


class Moving(Rebalancing):
    """Lets the training go on under another cut as soon as it can."""

    def __init__(self, plan: Plan) -> None:
        self.found = Move(plan, "tried", Balance(True, 1.0, 1.0, 1), ())

    def begin(self) -> None: ...

    def look(self, step: int, ranks: object) -> None: ...

    def drop(self) -> None:
        raise AssertionError("the state could not be saved")


EARLY: list[bool] = []
"""Of every sum that is started: whether a part of it was on its way before."""


class Noted(StageReduction):
    """Notes how early its sums are."""

    def start(self) -> None:
        EARLY.append(any(bucket.started for bucket in self._buckets))
        super().start()


if __name__ == "__main__":
    os.fsync = lambda _: None  # nothing here need outlive the machine
    torch.set_num_threads(1)
    SavedTensors.min_bytes = 0
    replicas_module.StageReduction = Noted  # type: ignore[attr-defined]
    # What reaches the compiler is tried here; the compiler itself would take minutes.
    compile_quickly = partial(compile_stage, backend="aot_eager")
    stage_module.compile_stage = compile_quickly  # type: ignore[attr-defined]
    directory, world = Path(sys.argv[1]) / sys.argv[2], MPI.COMM_WORLD
    if sys.argv[2] == "sample":
        train_sample(directory, world)
    else:
        train(directory, world, sample=False)
