"""Trains cells of the equality table on the ranks it is started on.

Started as ``mpiexec -n RANKS python -m mpi4py train_cells.py DIRECTORY SET``. Set ``sample``: what
every run of the tests trains; started on four, all of it that up to four train, since starting MPI
takes long. Set ``others``: the rest of what so many ranks train. Every cell leaves its weights in
``DIRECTORY/SET/<ranks>/<cell>``, and on one rank without dropout in ``DIRECTORY/SET/plain/<cell>``.
A process captures each model once, or has it from the process that it was forked from; see
all_captured.py.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import cells
import replica_cells
import torch
from cell_jobs import captured, spec_text
from cells import CHUNKS, PAIRED, Cell
from cuts import random_cut
from mpi4py import MPI
from plans import make_plan, stages_of_states

from pipectl.capture import CapturedGraph, CapturedJob, Cut
from pipectl.plan import Plan
from pipectl.runs import RunDirectory
from pipectl.runtime import replicas as replicas_module
from pipectl.runtime import stage as stage_module
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.reduction import StageReduction
from pipectl.runtime.saved_tensors import SavedTensors
from pipectl.runtime.setup import Setup
from pipectl.runtime.stage_code import compile_stage
from pipectl.runtime.trainer import Trainer
from pipectl.runtime.waiting import barrier
from pipectl.spec import load
from pipectl.watch.board import Board


def train(directory: Path, communicator: MPI.Comm, *, sample: bool) -> None:
    """Every cell through a random cut of its own."""
    training, ranks = Training(directory, communicator), communicator.size
    every = [*cells.every_cell(ranks).values()]
    chosen = set(cells.sampled(ranks))
    for number, cell in enumerate(every):
        if (cell in chosen) is sample:
            train_cell(training, cell, number)
    for shared in replica_cells.cells_of(ranks, sample=sample):
        job = training.job(shared, shared_text(shared))
        training.run(shared, job, *shared_plan(shared, job.training_graph(2)))


def train_plain(directory: Path, communicator: MPI.Comm, *, sample: bool) -> None:
    training = Training(directory, communicator, plain=True)
    for number, cell in enumerate(cells.plain_cells(sample=sample)):
        train_cell(training, cell, number)


def train_cell(training: Training, cell: Cell, number: int) -> None:
    """Through a random cut, drawn by the number of the cell."""
    ranks = training.communicator.size
    job = training.job(cell, spec_text(cell, plain=training.plain))
    graph = job.training_graph(2)
    count = -(-ranks // 2) if cell.schedule in PAIRED else ranks * CHUNKS.get(cell.schedule, 1)
    stages = random_cut(graph, count, number)
    training.run(cell, job, make_plan(graph, stages, cell, ranks), stages)


def train_sample_on_four_and_fewer(directory: Path, world: MPI.Comm) -> None:
    """On four ranks; on three beside one; on two beside the one that trains without dropout."""
    train(directory, world, sample=True)
    train(directory, world.Split(world.rank // 3), sample=True)
    barrier(world)  # which leaves the cores to those that still train
    part = world.Split((0, 0, 1, 2)[world.rank])
    if world.rank < 2:
        train(directory, part, sample=True)
    elif world.rank == 2:
        train_plain(directory, part, sample=True)
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


EARLY: list[bool] = []
"""Of every sum that is started: whether a part of it was on its way before."""


class Noted(StageReduction):
    """Notes how early its sums are."""

    def start(self) -> None:
        EARLY.append(any(bucket.started for bucket in self._buckets))
        super().start()


class Training:
    """Trains cell after cell; a model is captured once."""

    def __init__(self, directory: Path, communicator: MPI.Comm, *, plain: bool = False) -> None:
        self.folder = directory / ("plain" if plain else str(communicator.size))
        self.communicator = communicator
        self.plain = plain

    def job(self, cell: Any, text: str) -> CapturedJob:
        run = RunDirectory(self.folder / str(cell))
        if self.communicator.rank == 0:
            run.trace.mkdir(parents=True)
            run.job.write_text(text)
        self.communicator.Barrier()
        spec = load(run.job)
        return captured(cell.model, plain=self.plain).of(spec)

    def run(self, cell: Any, job: CapturedJob, plan: Plan, stages: dict[str, int]) -> None:
        run = RunDirectory(self.folder / str(cell))
        if self.communicator.rank == 0:
            graph = job.training_graph(2)
            split = Cut(graph, stages, training=True).split_uses
            (run.path / "split_uses.json").write_text(json.dumps(sorted(split)))
            (run.path / "stages.json").write_text(json.dumps(stages_of_states(graph, stages)))
        lent = Lent(self.communicator)
        EARLY.clear()
        Trainer(Setup(lent, job, plan, CpuDevice(), Board()), run, 1).train()
        lent.take_back()
        if self.communicator.rank == 0:
            (run.path / "early_sums.json").write_text(json.dumps(EARLY))


def shared_plan(cell: Any, graph: CapturedGraph) -> tuple[Plan, dict[str, int]]:
    held = len(cell.replicas)
    stages = held * CHUNKS.get(cell.schedule, 1)
    return replica_cells.shared_plan(
        cell,
        graph,
        stages,
        lambda seed: random_cut(graph, stages, seed),
        lambda found: make_plan(graph, found, cell, held),
    )


def shared_text(cell: Any) -> str:
    """With SGD: under Adam, a tiny gradient of either sign moves a weight by the full rate."""
    text = spec_text(cell, plain=False)
    text = text.replace("AdamW', kwargs: {lr: 0.003}", "SGD', kwargs: {lr: 0.1}")
    return text.replace("{steps:", "{compile: true, steps:") if cell.compiled else text


if __name__ == "__main__":
    os.fsync = lambda _: None  # nothing here need outlive the machine
    torch.set_num_threads(1)
    SavedTensors.min_bytes = 0
    replicas_module.StageReduction = Noted  # type: ignore[attr-defined]
    # What reaches the compiler is tried here; the compiler itself would take minutes.
    compile_quickly = partial(compile_stage, backend="aot_eager")
    stage_module.compile_stage = compile_quickly  # type: ignore[attr-defined]
    directory, world = Path(sys.argv[1]) / sys.argv[2], MPI.COMM_WORLD
    if sys.argv[2] == "sample" and world.size == 4:
        train_sample_on_four_and_fewer(directory, world)
    else:
        train(directory, world, sample=sys.argv[2] == "sample")
        if world.size == 1:
            train_plain(directory, world, sample=False)
