"""The whole product: every schedule with every use of memory, on every number of ranks.

``make test-equality`` trains all of it. Every run of the tests trains :data:`SAMPLE`, beside the
table of cells.py. One combination does not exist: a backward on other ranks than the forward with
offload, since what would be offloaded leaves the rank at once; it is refused by name
(tests/schedule/test_lowering.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

RANKS = (2, 4, 8)
ONE_STAGE_A_RANK = ("gpipe", "1f1b", "1f1b-b", "zb-h1")
CHUNKED = ("interleaved", "looped-bfs", "zb-v", "dualpipev")
"""Schedules with two stages a rank, which are also trained on eight ranks."""
APART = ("1f1b-apart", "gpipe-inputs")
"""With the backward on other ranks, which say themselves what becomes of what it needs; also on
eight."""
MEMORY = ("", "recompute", "blocks", "disk", "host")
"""What becomes of what backwards need; "" if it stays, blocks if these recompute in turn."""
MODELS = ("gpt", "cnn", "dense")
"""With dropout; with batch norm and skips across a cut; with both, and skips across many cuts."""
BATCH = "smaller_last"
UNFLUSHED = {
    "pipedream": MEMORY,
    "pipedream-2bw": MEMORY,
}
UNFLUSHED_BATCH = {"pipedream": "few", "pipedream-2bw": "divisible"}
UNFLUSHED_MODELS = ("gpt", "cnn")
"""Those that the simulation of staleness knows."""


@dataclass(frozen=True)
class Cell:
    """Memory is what stages do with what their backward needs; "" if they keep it."""

    model: str
    schedule: str
    batch: str
    memory: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, (self.model, self.schedule, self.batch, self.memory)))


def flushed(ranks: int) -> Iterator[Cell]:
    """Cells to the bit like :func:`reference`."""
    schedules = CHUNKED if ranks > 4 else ONE_STAGE_A_RANK + CHUNKED
    for model, schedule, memory in product(MODELS, schedules, MEMORY):
        yield Cell(model, schedule, BATCH, memory)
    for model, schedule in product(MODELS, APART):
        yield Cell(model, schedule, BATCH)


def unflushed(ranks: int) -> Iterator[Cell]:
    """Cells to the bit like a simulation of their staleness."""
    for schedule, model in product(UNFLUSHED if ranks <= 4 else (), UNFLUSHED_MODELS):
        for memory in UNFLUSHED[schedule]:
            yield Cell(model, schedule, UNFLUSHED_BATCH[schedule], memory)


def reference(cell: Cell) -> Cell:
    """What one rank trains."""
    return Cell(cell.model, "gpipe", cell.batch)


def cells_over(ranks: int) -> list[Cell]:
    """All that is trained over so many ranks."""
    if ranks == 1:
        return [Cell(model, "gpipe", BATCH) for model in MODELS]
    return [*flushed(ranks), *unflushed(ranks)]


SAMPLE = {
    2: (
        Cell("dense", "1f1b-b", BATCH, "host"),
        Cell("gpt", "looped-bfs", BATCH, "recompute"),
    ),
    4: (
        Cell("cnn", "1f1b-b", BATCH),
        Cell("gpt", "1f1b-b", BATCH, "disk"),
        Cell("dense", "zb-h1", BATCH, "recompute"),
        Cell("dense", "looped-bfs", BATCH, "disk"),
        Cell("gpt", "zb-v", BATCH, "recompute"),
        Cell("cnn", "zb-v", BATCH, "disk"),
        Cell("cnn", "dualpipev", BATCH, "recompute"),
        Cell("dense", "zb-v", BATCH, "blocks"),
        Cell("gpt", "dualpipev", BATCH, "host"),
    ),
    8: (Cell("gpt", "interleaved", BATCH, "disk"),),
}
"""Cells by number of ranks: every schedule that the table has not with every use of memory."""
