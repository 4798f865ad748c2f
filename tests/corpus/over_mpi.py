"""Trains models of the corpus over the ranks it is started on.

Started as ``mpiexec -n RANKS python -m mpi4py over_mpi.py DIRECTORY MODEL...``; every model is
trained on each rank alone, and then over all of them. Leaves its weights in
``DIRECTORY/alone-RANK/MODEL`` and ``DIRECTORY/together/MODEL``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import catalogue
import torch
from mpi4py import MPI

from pipectl.capture import CapturedJob
from pipectl.runs import RunDirectory
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.setup import Setup
from pipectl.runtime.trainer import Trainer
from pipectl.watch.board import Board

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "equality"))

from cells import Cell
from cuts import random_cut
from plans import make_plan

SCHEDULES = ("gpipe", "1f1b")
MICRO_BATCHES = 4  # as in the batch of the cell


def train(directory: Path, names: list[str], world: MPI.Comm) -> None:
    torch.set_num_threads(1)
    entries = {entry.name: entry for entry in catalogue.entries()}
    for number, name in enumerate(names):
        path = directory / f"{name}-{world.rank}.yaml"
        job = CapturedJob(catalogue.spec_of(entries[name], path, MICRO_BATCHES))
        first = {key: tensor.detach().clone() for key, tensor in job.states.items()}
        cell = Cell(name, SCHEDULES[number % 2], "divisible")
        for ranks, folder in ((MPI.COMM_SELF, f"alone-{world.rank}"), (world, "together")):
            for key, tensor in job.states.items():
                tensor.data = first[key].clone()
            run = RunDirectory(directory / folder / name)
            if ranks.rank == 0:
                run.trace.mkdir(parents=True)
            ranks.Barrier()
            graph = job.training_graph(catalogue.MICRO_BATCH)
            plan = make_plan(graph, random_cut(graph, ranks.size, number), cell, ranks.size)
            Trainer(Setup(ranks, job, plan, CpuDevice(), Board()), run, 1).train()


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2:], MPI.COMM_WORLD)
