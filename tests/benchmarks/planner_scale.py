"""Planning at scale

    python tests/benchmarks/planner_scale.py [RANKS ...]

A profile shaped like GPT-3 (96 blocks, 20 operators each, times from a roofline) on nodes of 8
devices with 80 GiB, 1536 samples per step; one stage per rank, no replicas. Seconds include
everything but imports and compiling.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Profile
from pipectl.profile_parts import Operator, OptimizerCost
from tests.benchmarks.jobs import peak_of, print_table

BLOCKS = 96
FLOPS = 1.5e14
"""Of a device in a large matrix product."""
BANDWIDTH = 1.5e12
"""Of its memory, bytes a second."""
HALF = 2
"""Bytes of a number."""
MEMORY_BYTES = 80 * 2**30
BATCH = 1536
COUNTS = [64, 256, 1024]
COLUMNS = ["ranks", "planning s", "stages", "micro-batches", "step s", "gap", "largest peak GiB"]


@dataclass(frozen=True)
class Shape:
    """Of a GPT; by default GPT-3's."""

    width: int = 12288
    heads: int = 96
    length: int = 2048
    vocabulary: int = 50257


Layer = tuple[str, str, float, int, int, bool]
"""Name, inputs, and of one sample: operations, numbers that it makes, its weights, and whether it
keeps its result."""


def block(shape: Shape, before: str, at: str) -> Iterator[Layer]:
    """The 20 operators of a block behind another one; names begin with ``at``."""
    width, length = shape.width, shape.length
    stream, scores = length * width, shape.heads * length * length
    square, product = 2 * length * width * width, 2 * length * length * width
    for name, inputs, operations, numbers, weights, saves in (
        ("norm1", "-", 0, stream, 2 * width, True),
        ("q", "norm1", square, stream, width * width, True),
        ("q_heads", "q", 0, stream, 0, False),
        ("k", "norm1", square, stream, width * width, True),
        ("k_heads", "k", 0, stream, 0, False),
        ("v", "norm1", square, stream, width * width, True),
        ("v_heads", "v", 0, stream, 0, False),
        ("scores", "q_heads k_heads", product, scores, 0, False),
        ("mask", "scores", 0, scores, 0, False),
        ("softmax", "mask", 0, scores, 0, False),
        ("mix", "softmax v_heads", product, stream, 0, True),
        ("join", "mix", 0, stream, 0, False),
        ("out", "join", square, stream, width * width, True),
        ("dropout1", "out", 0, stream, 0, True),
        ("add1", "- dropout1", 0, stream, 0, False),
        ("norm2", "add1", 0, stream, 2 * width, True),
        ("up", "norm2", 4 * square, 4 * stream, 4 * width * width, True),
        ("gelu", "up", 0, 4 * stream, 0, True),
        ("down", "gelu", 4 * square, stream, 4 * width * width, True),
        ("dropout2", "down", 0, stream, 0, True),
        ("add2", "add1 dropout2", 0, stream, 0, False),
    ):
        sources = " ".join(before if each == "-" else at + each for each in inputs.split())
        yield at + name, sources, operations, numbers, weights, saves


def gpt_profile(blocks: int = BLOCKS, shape: Shape = Shape()) -> Profile:
    """Blocks of 20 operators; times from a roofline of one device."""
    width, length, vocabulary = shape.width, shape.length, shape.vocabulary
    stream, logits = length * width, length * vocabulary
    layers: list[Layer] = [("embed", "", 0, stream, vocabulary * width, True)]
    for index in range(blocks):
        layers += block(shape, layers[-1][0], f"h{index}.")
    layers += [
        ("norm", layers[-1][0], 0, stream, 2 * width, True),
        ("head", "norm", 2 * logits * width, logits, vocabulary * width, True),
        ("loss", "head", 0, length, 0, True),
    ]
    return Profile(
        name="gpt",
        source="generated",
        micro_batch_size=1,
        operators=tuple(operator(*layer) for layer in layers),
        edges=tuple((source, name) for name, inputs, *_ in layers for source in inputs.split()),
        optimizer=OptimizerCost(6.0, 8 / BANDWIDTH),
        process_baseline_bytes=2**30,
    )


def operator(
    name: str, _: str, operations: float, numbers: int, weights: int, saves: bool
) -> Operator:
    """A layer on one device."""
    seconds = operations / FLOPS + 3 * HALF * numbers / BANDWIDTH
    return Operator(
        id=name,
        name=name,
        forward_s=seconds,
        backward_s=2 * seconds,
        parameter_bytes=HALF * weights,
        output_bytes=HALF * numbers,
        gradient_bytes=HALF * numbers,
        parameters=((f"{name}.weight", HALF * weights),) if weights else (),
        saved=((name, HALF * numbers),) if saves else (),
    )


def cluster_of(ranks: int, memory_bytes: int = MEMORY_BYTES) -> Cluster:
    """Nodes of eight devices."""
    node = Node("n", 8, 8, Device("gpu", 1.0, memory_bytes))
    return Cluster(
        "cluster", "assumed", (node,) * (ranks // 8), Link(5e-6, 2e11), Link(1e-5, 2.4e10)
    )


def row(ranks: int) -> tuple[object, ...]:
    """Figures of a plan over so many ranks."""
    profile, cluster = gpt_profile(), cluster_of(ranks)
    started = time.perf_counter()
    plan = make_plan(profile, cluster, PlanRequest("gpt3", BATCH, recompute=None))
    planning_s = time.perf_counter() - started
    return (
        *(ranks, f"{planning_s:.1f}", len(plan.stages), plan.micro_batches),
        *(f"{plan.predicted_step_s:.2f}", f"{plan.search.gap:.0%}", f"{peak_of(plan) / 2**30:.0f}"),
    )


def main(counts: list[int]) -> None:
    """Plan once before, so that the kernels are compiled."""
    make_plan(gpt_profile(1), cluster_of(8, 8 * MEMORY_BYTES), PlanRequest("gpt3", 8))
    print_table(COLUMNS, map(row, counts or COUNTS))


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]])
