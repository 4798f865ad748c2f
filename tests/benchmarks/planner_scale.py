"""Planning at scale

    python tests/benchmarks/planner_scale.py [RANKS ...]

A profile shaped like GPT-3 (96 blocks, 20 operators each, times from a roofline) on nodes of 8
devices with 80 GiB, 1536 samples per step; one stage per rank, no replicas. Seconds include
everything but imports and compiling.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tables import print_table

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Operator, OptimizerCost, Profile

BLOCKS = 96
FLOPS = 1.5e14
"""Of a device in a large matrix product."""
BANDWIDTH = 1.5e12
"""Of its memory, bytes a second."""
HALF = 2
"""Bytes of a number."""
MEMORY_BYTES = 80 * 2**30
BATCH = 1536
COLUMNS = ["ranks", "planning s", "stages", "micro-batches", "step s", "gap", "largest peak GiB"]


@dataclass(frozen=True)
class Shape:
    """Of a GPT; by default GPT-3's."""

    width: int = 12288
    heads: int = 96
    length: int = 2048
    vocabulary: int = 50257


@dataclass
class Builder:
    """Operators of one sample, in graph order."""

    shape: Shape
    operators: list[Operator] = field(default_factory=list)
    edges: list[tuple[str, str]] = field(default_factory=list)

    def add(self, name: str, *inputs: str, flops=0.0, numbers=0, weights=0, saves=True) -> str:
        """An operator that makes so many numbers from its inputs."""
        seconds = flops / FLOPS + 3 * HALF * numbers / BANDWIDTH
        self.operators.append(
            Operator(
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
        )
        self.edges += [(source, name) for source in inputs]
        return name

    def linear(self, name: str, source: str, inward: int, outward: int) -> str:
        """A matrix product over all positions."""
        length = self.shape.length
        flops = 2 * length * inward * outward
        return self.add(
            name, source, flops=flops, numbers=length * outward, weights=inward * outward
        )


def gpt_profile(blocks: int = BLOCKS, shape: Shape = Shape()) -> Profile:
    """Blocks of 20 operators; times from a roofline of one device."""
    graph, width = Builder(shape), shape.width
    stream = shape.length * width
    value = graph.add("embed", numbers=stream, weights=shape.vocabulary * width)
    for index in range(blocks):
        value = _block(graph, f"h{index}.", value, stream)
    value = graph.add("norm", value, numbers=stream, weights=2 * width)
    logits = graph.linear("head", value, width, shape.vocabulary)
    graph.add("loss", logits, numbers=shape.length)
    return Profile(
        name="gpt",
        source="generated",
        micro_batch_size=1,
        operators=tuple(graph.operators),
        edges=tuple(graph.edges),
        optimizer=OptimizerCost(6.0, 8 / BANDWIDTH),
        process_baseline_bytes=2**30,
    )


def _block(graph: Builder, at: str, value: str, stream: int) -> str:
    width, length = graph.shape.width, graph.shape.length
    scores = graph.shape.heads * length * length
    attention_flops = 2 * length * length * width
    norm = graph.add(at + "norm1", value, numbers=stream, weights=2 * width)
    parts = []
    for part in "qkv":
        made = graph.linear(at + part, norm, width, width)
        parts.append(graph.add(f"{at}{part}_heads", made, numbers=stream, saves=False))
    query, key, values = parts
    product = graph.add(
        at + "scores", query, key, flops=attention_flops, numbers=scores, saves=False
    )
    masked = graph.add(at + "mask", product, numbers=scores, saves=False)
    weights = graph.add(at + "softmax", masked, numbers=scores, saves=False)
    mixed = graph.add(at + "mix", weights, values, flops=attention_flops, numbers=stream)
    joined = graph.add(at + "join", mixed, numbers=stream, saves=False)
    out = graph.linear(at + "out", joined, width, width)
    dropped = graph.add(at + "dropout1", out, numbers=stream)
    value = graph.add(at + "add1", value, dropped, numbers=stream, saves=False)
    norm = graph.add(at + "norm2", value, numbers=stream, weights=2 * width)
    wide = graph.linear(at + "up", norm, width, 4 * width)
    active = graph.add(at + "gelu", wide, numbers=4 * stream)
    narrow = graph.linear(at + "down", active, 4 * width, width)
    dropped = graph.add(at + "dropout2", narrow, numbers=stream)
    return graph.add(at + "add2", value, dropped, numbers=stream, saves=False)


def cluster_of(ranks: int, memory_bytes: int = MEMORY_BYTES) -> Cluster:
    """Nodes of eight devices."""
    node = Node("n", 8, 8, Device("gpu", 1.0, memory_bytes))
    return Cluster(
        "cluster", "assumed", (node,) * (ranks // 8), Link(5e-6, 2e11), Link(1e-5, 2.4e10)
    )


def measure(ranks: int) -> dict[str, float]:
    """Plan twice, the first time to have the kernels compiled; seconds of the second."""
    make_plan(gpt_profile(1), cluster_of(8, 8 * MEMORY_BYTES), PlanRequest("gpt3", 8))
    profile, cluster = gpt_profile(), cluster_of(ranks)
    started = time.perf_counter()
    plan = make_plan(profile, cluster, PlanRequest("gpt3", BATCH, recompute=None))
    return {
        "seconds": time.perf_counter() - started,
        "stages": len(plan.stages),
        "micro_batches": plan.micro_batches,
        "step_s": plan.prediction.step_time_s,
        "gap": plan.search.gap,
        "peak_gib": max(plan.prediction.peak_memory_bytes) / 2**30,
    }


def rows(counts: list[int]) -> Iterator[tuple[object, ...]]:
    """One process for each number of ranks."""
    for ranks in counts:
        command = [sys.executable, __file__, "--one", str(ranks)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        yield (
            *(ranks, f"{found['seconds']:.1f}", found["stages"], found["micro_batches"]),
            *(f"{found['step_s']:.2f}", f"{found['gap']:.0%}", f"{found['peak_gib']:.0f}"),
        )


def main() -> None:
    """The section, or the figures of one number of ranks."""
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(int(sys.argv[2]))))
        return
    counts = [int(text) for text in sys.argv[1:]] or [64, 256, 1024]
    print_table(COLUMNS, rows(counts))


if __name__ == "__main__":
    main()
