"""How the two ranks of a stage agree on what its messages of saved values hold.

Once for every size, in the warm-up pass, the forward's rank tells the backward's rank how the
stage's code was called, what autograd saved, and what graph it made. The other makes the graph
without values from the same call, and compares: kernels that differ with the data, or a torch that
chooses others without values, show here and not in wrong gradients.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from pipectl.errors import MismatchError
from pipectl.runtime.apart.packet import Contents
from pipectl.runtime.apart.trace import TOGETHER, Form, Given, Graph
from pipectl.runtime.layout import Layout
from pipectl.runtime.transport import Progress
from pipectl.runtime.waiting import wait


@dataclass(frozen=True)
class Agreement:
    """What holds for all micro-batches of one size in one stage.

    Args:
        forms: type and sizes of every saved tensor, in order.
        structure: of the autograd graph; see :attr:`Graph.structure`.
    """

    given: Given
    contents: Contents
    forms: tuple[Form, ...]
    structure: tuple[str, ...]

    def check(self, stage: int, graph: Graph) -> None:
        """Compare with the graph that another rank made without values.

        Raises:
            MismatchError: naming the first difference.
        """
        found = _difference("node", self.structure, graph.structure) or _difference(
            "saved tensor", self.forms, graph.saved
        )
        if found:
            raise MismatchError(
                f"plan.json: stages[{stage}] has its backward on another rank, which does not get "
                f"the graph of its forward: {found}",
                cure=TOGETHER,
            )

    def to_json(self) -> dict[str, Any]:
        """For a message."""
        return {
            "inputs": [layout.to_json() for layout in self.given.inputs],
            "received": [[item.to_json(), grad] for item, grad in self.given.received],
            "contents": self.contents.to_json(),
            "forms": [_form_to_json(form) for form in self.forms],
            "structure": self.structure,
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Agreement:
        """The inverse of :meth:`to_json`."""
        layouts = tuple(Layout.from_json(item) for item in fields["inputs"])
        received = tuple((Layout.from_json(item), grad) for item, grad in fields["received"])
        forms = (Layout.from_json([dtype, sizes, ()]) for dtype, sizes in fields["forms"])
        return cls(
            Given(layouts, received),
            Contents.from_json(fields["contents"]),
            tuple((form.dtype, form.sizes) for form in forms),
            tuple(fields["structure"]),
        )


class Announcements:
    """Carries agreements from the forward's rank to the backward's.

    Args:
        communicator: of its own.
    """

    def __init__(self, communicator: MPI.Comm, progress: Progress) -> None:
        self._communicator = communicator
        self._progress = progress
        self._sent: list[tuple[bytes, MPI.Request]] = []

    def tell(self, stage: int, rank: int, agreement: Agreement) -> None:
        """Begin to tell another rank; agreements of a stage arrive in the order they were told."""
        text = json.dumps(agreement.to_json()).encode()
        self._sent.append((text, self._communicator.Isend([text, MPI.BYTE], rank, stage)))

    def hear(self, stage: int, rank: int) -> Agreement:
        """Wait for the next agreement of a stage."""
        status = MPI.Status()
        self._progress.until(lambda: bool(self._communicator.Iprobe(rank, stage, status)))
        text = bytearray(status.Get_count(MPI.BYTE))
        wait([self._communicator.Irecv([text, MPI.BYTE], rank, stage)])
        return Agreement.from_json(json.loads(text))


def _form_to_json(form: Form) -> list[Any]:
    return Layout(form[0], form[1], ()).to_json()[:2]


def _difference(what: str, told: Sequence[Any], found: Sequence[Any]) -> str:
    """The first difference of two sequences, in words; empty if there is none."""
    if len(told) != len(found):
        return f"{len(told)} {what}s instead of {len(found)}"
    pairs = enumerate(zip(told, found, strict=True))
    return next(
        (f"{what} {index} is {one} instead of {other}" for index, (one, other) in pairs
         if one != other), ""
    )  # fmt: skip
