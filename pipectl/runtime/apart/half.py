"""What both halves of a stage have in common."""

from __future__ import annotations

from typing import Any

from pipectl.runtime.apart.agreement import Agreement
from pipectl.runtime.apart.ends import Ends
from pipectl.runtime.apart.refusal import refuse_compiled
from pipectl.runtime.stage import StageRuntime


class Half(StageRuntime):
    """A stage whose forward and backward run on different ranks, on one of them.

    Args:
        ends: of the messages between the halves.
        others: see :class:`StageRuntime`.
    """

    def __init__(self, ends: Ends, *args: Any) -> None:
        super().__init__(*args)
        self._ends = ends
        self._agreed: dict[int, Agreement] = {}

    def compile(self) -> None:
        """Compile the training code, which the other half can follow only by computing it again."""
        if not self._ends.recomputes:
            refuse_compiled(self.index)
        super().compile()
