"""Two ranks, the first of which sends messages that are not what the second expects.

Started as ``mpiexec -n 2 python -m mpi4py wrong_messages.py FILE HOW...``, each ``MODE`` or
``MODE check``; a line of the file has the errors of both ranks in one case, as JSON. (What ranks
print might be lost when they abort.)
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from pipectl.capture import Lane, Slot
from pipectl.errors import WorkerError
from pipectl.graph import TransferKind
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.layout import Layout
from pipectl.runtime.transport import Line, Progress, Transport
from pipectl.runtime.transport.transfer import WHOLE, Pieces

A = Slot("a")
LANE = Lane(TransferKind.ACTIVATION, 3, 5)
KIB = 1024


@dataclass(frozen=True)
class Case:
    """Sizes of a message in 4-byte elements, and what happens to it."""

    sent: int
    expected: int
    dtype: torch.dtype = torch.float32
    damage: str = ""


CASES = {
    "short": Case(3, 6),
    "long": Case(6, 3),
    "nothing": Case(0, 6),
    "short, large": Case(500 * KIB, 700 * KIB),
    "long, large": Case(700 * KIB, 500 * KIB),
    "another type": Case(6, 6, torch.int32),
}
CHECKED = {
    # One whole piece of two: only checks tell it from a message whose second piece is late.
    "fewer pieces": Case(256 * KIB, 512 * KIB),
    "another byte": Case(6, 6, damage="byte"),
    "another micro-batch": Case(6, 6, damage="micro-batch"),
    "written meanwhile": Case(6, 6, damage="write"),
}


def main(file: str, *hows: str) -> None:
    world = MPI.COMM_WORLD
    kept: list[Any] = []
    for how in hows:
        mode, check = how.split()[0], "check" in how
        pieces = WHOLE if mode == "none" else Pieces(2**20, under_way=4)
        for name, case in {**CASES, **(CHECKED if check else {})}.items():
            with Progress(mode, pieces) as progress:
                transport = Transport(world.Dup(), CpuDevice(), {LANE: [A]}, progress, check=check)
                line, error = transport.line(LANE, 1 - world.rank), None
                kept.append((transport, line))
                try:
                    if world.rank:
                        receive(line, case)
                    else:
                        kept.append(send(line, case))
                except WorkerError as raised:
                    error = raised.message
                errors = world.gather(error)
                if errors is not None:
                    with Path(file).open("a") as lines:
                        lines.write(json.dumps([how, name, errors]) + "\n")
    world.Barrier()
    world.Abort(7)  # what was not received is still on its way


def send(line: Line, case: Case) -> Any:
    """The first message announces the size; before the second, it changes on one side."""
    line.finish_send(line.start_send(0, 2, {A: torch.zeros(case.expected)}))
    tensor = torch.ones(case.sent, dtype=case.dtype)
    line._places[2] = line._places_of([Layout.of(tensor)])
    sent = line.start_send(7 if case.damage == "micro-batch" else 1, 2, {A: tensor})
    if case.damage == "write":
        tensor[0] = 5.0
        line.finish_send(sent)
    return sent


def receive(line: Line, case: Case) -> None:
    line.finish_receive(line.start_receive(0, 2))
    compare = Line._compare

    def damaged(self: Line, posted: Any, buffers: Any = ()) -> None:
        if case.damage == "byte" and buffers:
            buffers[0].view(-1)[3] = -1.0
        compare(self, posted, buffers)

    Line._compare = damaged  # type: ignore[method-assign]
    try:
        line.finish_receive(line.start_receive(1, 2))
    finally:
        Line._compare = compare  # type: ignore[method-assign]


if __name__ == "__main__":
    main(*sys.argv[1:])
