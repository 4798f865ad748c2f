"""Two ranks, the first of which sends messages of other sizes than the second expects.

Started as ``mpiexec -n 2 python -m mpi4py wrong_size.py FILE HOW...``, each ``MODE`` or
``MODE check``; the second rank writes the error of every case as a line of JSON. (What it prints
might be lost when ranks abort.)
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from mpi4py import MPI

from pipectl.capture import Lane, Slot
from pipectl.errors import WorkerError
from pipectl.graph import TransferKind
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.layout import Layout
from pipectl.runtime.transport import Line, Posted, Progress, Transport
from pipectl.runtime.transport.transfer import WHOLE, Pieces

A = Slot("a")
LANE = Lane(TransferKind.ACTIVATION, 3, 5)
KIB = 1024


@dataclass(frozen=True)
class Case:
    """Sizes of a message in 4-byte elements."""

    sent: int
    expected: int
    dtype: torch.dtype = torch.float32


CASES = {
    "short": Case(3, 6),
    "long": Case(6, 3),
    "nothing": Case(0, 6),
    "short, large": Case(500 * KIB, 700 * KIB),
    "long, large": Case(700 * KIB, 500 * KIB),
    "another type": Case(6, 6, torch.int32),
}
CHECKED = {"fewer pieces": Case(256 * KIB, 512 * KIB)}
"""One whole piece of two: only checks tell it from a message whose second piece is late."""


def main(file: str, *hows: str) -> None:
    world, kept = MPI.COMM_WORLD, []
    for how in hows:
        mode, check = how.split()[0], "check" in how
        pieces = WHOLE if mode == "none" else Pieces(2**20, under_way=4)
        for name, case in {**CASES, **(CHECKED if check else {})}.items():
            with Progress(mode, pieces) as progress:
                transport = Transport(world.Dup(), CpuDevice(), {LANE: [A]}, progress, check=check)
                line = transport.line(LANE, 1 - world.rank)
                kept.append((transport, exchange(world, line, case)))
                if world.rank == 1:
                    error = received(line)
                    with Path(file).open("a") as lines:
                        lines.write(json.dumps([how, name, error]) + "\n")
                world.Barrier()
    world.Abort(7)  # what was not received is still on its way


def exchange(world: MPI.Comm, line: Line, case: Case) -> list[Posted]:
    """The first message announces the size; before the second, it changes on one side."""
    tensor = torch.zeros(case.expected)
    if world.rank == 1:
        line.finish_receive(line.start_receive(0, 2))
        return []
    line.finish_send(line.start_send(0, 2, {A: tensor}))
    other = torch.ones(case.sent, dtype=case.dtype)
    line._places[2] = line._places_of([replace(Layout.of(other))])
    return [line.start_send(1, 2, {A: other})]


def received(line: Line) -> str | None:
    try:
        line.finish_receive(line.start_receive(1, 2))
    except WorkerError as error:
        return error.message
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
