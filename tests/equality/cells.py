"""The equality table: what is trained, on how many ranks, and what its result is compared with.

``make test-equality`` trains :func:`every_cell`, every run of the tests :data:`SAMPLE`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from itertools import product
from typing import Any

RANKS = (1, 2, 3, 4, 8)
SCHEDULES = ("gpipe", "1f1b", "1f1b-b", "zb-h1")
CHUNKED = ("interleaved", "looped-bfs", "zb-v", "dualpipev", "v-half", "v-min")
OWN = {"folded": False, "back_to_front": True}
"""Schedules of users, as lists of actions: name to whether backwards run by falling micro-batch."""
CHUNKS = {**dict.fromkeys(CHUNKED, 2), **dict.fromkeys(OWN, 2)}
"""Stages per rank, if not one."""
APART = {"1f1b-apart": "1f1b", "gpipe-inputs": "gpipe"}
"""Schedules with the backward of every stage on the rank after that of its forward: the second
sends only what stages receive, and computes the rest again."""
UNFLUSHED = {"pipedream": "few", "pipedream-2bw": "divisible"}
"""Schedules whose steps overlap, and the batch that they are trained with."""
PAIRED = {"pipedream-apart": "pipedream", "pipedream-2bw-apart": "pipedream-2bw"}
"""Schedules with half as many stages, each on two ranks; on one rank, and on an odd number of them,
one stage keeps its backward."""
OVERLAPPING = (*UNFLUSHED, *PAIRED)
DEEPER = "1f1b-b"
"""1F1B with the deeper warm-up."""
PLANNED_AS = {**APART, **PAIRED, DEEPER: "1f1b"}
"""The schedule of the plan, if its name is not the one in the table."""
MEMORY: dict[str, dict[str, Any]] = {
    "recompute": {"recompute": True},
    "disk": {"offload": True},
    "host": {"offload": True},
    "recompute_disk": {"recompute": True, "offload": True},
    "blocks": {"recompute": True},
    "blocks_disk": {"recompute": True, "offload": True},
}
"""Fields of the stages; the name also says where is offloaded to, and whether in blocks."""
ONLY_1F1B = ("recompute_disk", "blocks_disk")
WITH_APART = ("disk", "host")
"""With backwards on other ranks: what arrives for these is offloaded."""
BATCH = "smaller_last"
FEWER_BATCHES = (BATCH, "few")
ALL_BATCHES = (*FEWER_BATCHES, "divisible", "one_left_over")
MODELS = ("tied", "cnn", "dense")
"""With dropout and a weight used at both ends; with batch norm and skips across a cut; with both of
them, and skips across many cuts."""
VARIANTS = (
    "gpt", "frozen", "gpt_bf16", "cnn_bf16", "tied_bf16_weights", "cnn_bf16_weights", "gpt_float16",
    "cnn_float16", "own_precision",
)  # fmt: skip
"""Models that are like others but for one thing."""
COMPILED = "gated"
"""The model of stages that torch.compile compiles; one of its layers is kept whole."""
BUCKETS = "gpt_buckets"
"""The model whose batches have several lengths."""


class Kind(Enum):
    """What a training is compared with."""

    SAME = "one rank, to the bit"
    REORDERED = "one rank, but gradients are added in another order"
    STALE = "a simulation of its staleness"
    REPLICAS = "one rank, within rounding"
    COMPILED = "one rank without a compiler, within rounding"
    PLAIN = "a loop in plain PyTorch"


@dataclass(frozen=True)
class Cell:
    """One training.

    Args:
        memory: what stages do with what their backward needs; "" if they keep it.
        replicas: of each stage, or of each place in the round of stages; trained with SGD.
        way: how replicas share a micro-batch.
        corrected: whether updates make up for the age of the gradients before them.
        plain: without dropout, to be compared with a loop in plain PyTorch.
    """

    model: str
    schedule: str
    batch: str
    memory: str = ""
    replicas: tuple[int, ...] = ()
    way: str = "whole"
    shard: bool = False
    compiled: bool = False
    corrected: bool = False
    plain: bool = False

    def __str__(self) -> str:
        parts = [self.model, self.schedule, self.batch, self.memory]
        if self.replicas:
            parts += ["x".join(map(str, self.replicas)), self.way]
            parts.append("sharded" * self.shard)
        parts += ["compiled" * self.compiled, "corrected" * self.corrected, "plain" * self.plain]
        return "-".join(filter(None, parts))

    @property
    def kind(self) -> Kind:
        if self.plain:
            return Kind.PLAIN
        if self.replicas:
            return Kind.REPLICAS
        if self.compiled:
            return Kind.COMPILED
        if self.schedule in OVERLAPPING:
            return Kind.STALE
        return Kind.REORDERED if OWN.get(self.schedule) else Kind.SAME

    @property
    def reference(self) -> Cell | None:
        """What it equals, trained on one rank."""
        if self.kind in (Kind.REPLICAS, Kind.COMPILED):
            return shared(self.model, 1, batch=self.batch)
        if self.kind in (Kind.SAME, Kind.REORDERED):
            return Cell(self.model, "gpipe", self.batch)
        return None


def shared(
    model: str, *replicas: int, schedule: str = "1f1b", batch: str = BATCH, **more: Any
) -> Cell:
    return Cell(model, schedule, batch, replicas=replicas, **more)


SHARED = (
    shared("gpt", 2),
    shared("gpt", 2, way="split"),
    shared("gpt_bf16", 2, shard=True),
    shared("gpt", 1, 2, way="split", memory="recompute"),
    shared("tied", 1, 2, way="split"),
    shared("gpt", 3, batch="one_left_over"),
    shared("gpt", 2, 2, shard=True),
    shared("gpt", 2, 2, schedule="interleaved"),
    shared("gpt", 1, 3, way="split", schedule="zb-h1", batch="few"),
    shared("tied", 2, 1, 1),
    shared("gpt_float16", 2, 2),
    shared("cnn", 2, 2, schedule="dualpipev"),
    shared("gpt_buckets", 2, 2, shard=True),
)
"""Cells with replicas that every run of the tests trains."""
FURTHER_SHARED = (
    shared("cnn", 2),
    shared("cnn", 2, 1, memory="host"),
    shared("frozen", 2, 1, shard=True),
    shared("gpt_buckets", 1, 2, way="split"),
    shared("gpt", 3, 1, way="split", batch="few"),
    shared("cnn", 1, 2, 1),
    shared("gpt", 2, 2, schedule="zb-h1"),
    shared("gpt", 2, shard=True),
    shared("gpt", 2, schedule="gpipe"),
    shared("tied", 2),
    shared("gpt_buckets", 2),
    shared("gpt", 1, 2),
    shared("gpt", 2, 1, schedule="gpipe"),
    shared("gpt", 2, 1, way="split", memory="host"),
    shared("frozen", 1, 2, way="split"),
    shared("gpt", 1, 2, way="split", compiled=True),
    shared("gpt", 1, 3),
    shared("gpt", 2, 2),
    shared("gpt", 2, 2, memory="recompute"),
    shared("gpt", 2, 2, schedule="looped-bfs", memory="disk"),
    shared("gpt", 2, 2, schedule="zb-v"),
    shared("gpt", 2, 2, way="split", schedule="interleaved", batch="few"),
    shared("tied", 2, 1, 1, way="split"),
)


def every_cell(ranks: int) -> dict[str, Cell]:
    """All that is trained over so many ranks, by name."""
    found = [*_with_memory(ranks)]
    if ranks <= 4:
        found += [*_variants(ranks), *_unflushed(ranks), *_buckets(ranks)]
    if ranks == 2:
        found += _compiled()
    references = [*SHARED, *FURTHER_SHARED, *_compiled()]
    for cell in references if ranks == 1 else (*SHARED, *FURTHER_SHARED):
        if ranks in (1, sum(cell.replicas)):
            found.append(cell.reference if ranks == 1 else cell)
    if ranks == 1:
        flat = [cell for cell in found if cell.schedule == "1f1b" and not cell.replicas]
        found += [replace(cell, plain=True) for cell in flat if not cell.memory]
    return {str(cell): cell for cell in found}


def _schedules(ranks: int) -> tuple[str, ...]:
    """Over more ranks than there are cores, only those with many stages."""
    return (*(SCHEDULES if ranks <= 4 else ()), *CHUNKED, *(APART if ranks > 1 else ()))


def _with_memory(ranks: int) -> Iterator[Cell]:
    for model, schedule in product(MODELS, _schedules(ranks)):
        uses = WITH_APART if schedule in APART else MEMORY
        for memory in ("", *uses) if ranks in (2, 4, 8) else ("",):
            if memory not in ONLY_1F1B or schedule == "1f1b":
                yield Cell(model, schedule, BATCH, memory)


def _variants(ranks: int) -> Iterator[Cell]:
    """Of models and of batches: with all schedules on four ranks, with a few on others."""
    for model, schedule in product((*MODELS, *VARIANTS), _schedules(ranks)):
        if ranks == 4 or (ranks == 1 and schedule in ("gpipe", "1f1b")):
            for batch in ALL_BATCHES if model in ("gpt", "tied", "cnn") else FEWER_BATCHES:
                if schedule not in APART or "16" not in model:
                    yield Cell(model, schedule, batch)
    for memory in MEMORY if ranks in (2, 4) else ():  # casts stay, and recomputed forwards use them
        yield Cell("gpt_bf16", "1f1b", BATCH, memory)
        yield Cell("cnn_bf16_weights", "1f1b", BATCH, memory)
    for model, schedule in product(VARIANTS, ("1f1b", "zb-h1", "1f1b-apart")):
        if ranks in (2, 3) and (schedule not in APART or "16" not in model):
            yield Cell(model, schedule, BATCH)
    if ranks > 1:  # other cuts in half precision may be refused with backwards on other ranks
        yield Cell("gpt_float16", "1f1b-apart", "few")
        yield Cell("tied_bf16_weights", "1f1b-apart", "few")
    for schedule in OWN:
        yield Cell("tied", schedule, "divisible")


def _compiled() -> Iterator[Cell]:
    """On two ranks: every schedule that flushes, and every use of memory."""
    for schedule in (*SCHEDULES, *CHUNKED, "gpipe-inputs"):
        yield Cell(COMPILED, schedule, BATCH, compiled=True)
    for memory, schedule in product(MEMORY, ("1f1b", "zb-h1", "zb-v")):
        if memory not in ONLY_1F1B or schedule == "1f1b":
            yield Cell(COMPILED, schedule, BATCH, memory, compiled=True)


def _unflushed(ranks: int) -> Iterator[Cell]:
    """Of the models that the simulation of staleness knows."""
    for (schedule, batch), model in product(UNFLUSHED.items(), ("gpt", "cnn")):
        for memory in ("", *MEMORY) if ranks in (2, 4) else ("",):
            if memory not in ONLY_1F1B:
                yield Cell(model, schedule, batch, memory)
    for model, memory in product(("gpt", "cnn"), ("", "recompute", *WITH_APART)):
        yield Cell(model, "pipedream-apart", "few", memory)
    for model in ("gpt", "frozen"):
        yield Cell(model, "pipedream-2bw", BATCH if model == "gpt" else "divisible")
    yield Cell("gpt", "pipedream-2bw-apart", BATCH)
    for model, batch in (("gpt", BATCH), ("cnn", "divisible"), ("frozen", BATCH)):
        yield Cell(model, "pipedream-2bw", batch, corrected=True)
    yield Cell("gpt", "pipedream-2bw-apart", BATCH, corrected=True)
    for schedule in ("pipedream", "pipedream-apart"):
        yield Cell("gpt_bf16", schedule, "few")


def _buckets(ranks: int) -> Iterator[Cell]:
    for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", *APART):
        if schedule not in APART or ranks > 1:
            yield Cell(BUCKETS, schedule, BATCH)
            yield Cell(BUCKETS, schedule, "few")
    for memory in ("recompute", "blocks_disk"):
        yield Cell(BUCKETS, "1f1b", BATCH, memory)
    for schedule, batch in UNFLUSHED.items():
        yield Cell(BUCKETS, schedule, batch)


SAMPLE = {
    1: """
        gpt-gpipe-smaller_last tied-interleaved-smaller_last cnn-zb-v-smaller_last gpt-pipedream-few
        gpt-pipedream-2bw-smaller_last gpt-pipedream-apart-few gpt-pipedream-2bw-apart-smaller_last
        gpt-1f1b-one_left_over-plain gpt-1f1b-few-plain cnn-1f1b-smaller_last-plain
        tied-1f1b-smaller_last-plain frozen-1f1b-smaller_last-plain
        own_precision-1f1b-smaller_last-plain gpt_buckets-1f1b-smaller_last-plain
        cnn_bf16-1f1b-smaller_last-plain cnn_float16-1f1b-smaller_last-plain
        cnn_bf16_weights-1f1b-smaller_last-plain
        """,
    2: """
        tied-v-min-smaller_last-recompute tied-1f1b-apart-smaller_last-disk
        cnn-1f1b-smaller_last-recompute_disk dense-v-half-smaller_last-disk
        frozen-zb-h1-smaller_last gpt_buckets-1f1b-apart-smaller_last gpt-pipedream-few-disk
        gpt_bf16-1f1b-smaller_last-recompute_disk gpt_bf16-pipedream-apart-few
        gpt-pipedream-2bw-smaller_last-corrected tied_bf16_weights-zb-h1-smaller_last
        cnn_bf16_weights-1f1b-smaller_last-blocks_disk gated-zb-h1-smaller_last-compiled
        gated-zb-v-smaller_last-recompute-compiled
        """,
    3: """
        tied-gpipe-inputs-smaller_last tied-zb-h1-smaller_last tied-folded-divisible
        cnn-1f1b-apart-smaller_last dense-interleaved-smaller_last
        gpt-pipedream-2bw-apart-smaller_last
        """,
    4: """
        tied-gpipe-smaller_last-blocks tied-1f1b-divisible tied-1f1b-b-smaller_last-disk
        tied-1f1b-smaller_last-recompute_disk tied-1f1b-smaller_last-blocks_disk
        tied-interleaved-smaller_last-disk tied-looped-bfs-smaller_last tied-zb-v-smaller_last
        tied-dualpipev-smaller_last-host tied-v-half-smaller_last tied-back_to_front-divisible
        cnn-gpipe-smaller_last cnn-1f1b-smaller_last cnn-1f1b-smaller_last-blocks_disk
        cnn-1f1b-b-smaller_last cnn-zb-v-one_left_over cnn-dualpipev-smaller_last-recompute
        cnn-v-min-few cnn-1f1b-apart-smaller_last-host cnn-gpipe-inputs-smaller_last
        dense-zb-h1-smaller_last-recompute dense-looped-bfs-smaller_last-disk
        dense-zb-v-smaller_last-blocks frozen-1f1b-few gpt_bf16-1f1b-smaller_last
        cnn_bf16-1f1b-smaller_last gpt_float16-1f1b-few gpt_float16-zb-h1-smaller_last
        cnn_float16-1f1b-smaller_last own_precision-gpipe-inputs-few
        gpt_buckets-1f1b-smaller_last-blocks_disk gpt-pipedream-few gpt-pipedream-2bw-smaller_last
        cnn-pipedream-2bw-divisible-host gpt-pipedream-apart-few
        gpt-pipedream-2bw-apart-smaller_last cnn-pipedream-2bw-divisible-corrected
        """,
    8: "",
}
"""Cells by number of ranks: every schedule and every use of memory with a model that has skips and
with one that has tied weights, every other model in the schedules that treat it differently,
every kind of batch, and a compiler with whole and split backwards."""


@cache
def sampled(ranks: int) -> list[Cell]:
    """The cells that every run of the tests trains over so many ranks."""
    every = every_cell(ranks)
    chosen = [every[name] for name in SAMPLE[ranks].split()]
    chosen += [cell for cell in SHARED if sum(cell.replicas) == ranks]
    if ranks == 1:
        others = [cell for count in RANKS[1:] for cell in sampled(count)]
        references = [cell.reference for cell in (*others, *chosen)]
        chosen += [cell for cell in references if cell is not None]
    return list(dict.fromkeys(chosen))
