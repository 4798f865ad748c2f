"""The requests by which changes of the planner are judged: seeded, of every kind, small enough to
be planned in about a minute.

Each case is a profile, a cluster and a request; its name is ``KIND-GRAPH-NUMBER``, from
which graph and costs follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from pipectl.cluster import Cluster, OffloadTarget
from pipectl.link import Link
from pipectl.plan import Replication
from pipectl.planner import PlanRequest
from pipectl.profile import Profile
from pipectl.profile_parts import Operator, OptimizerCost, SplitBackward, StageOverhead
from tests.planner.gate.checked_plans import cluster_of

Edges = list[tuple[int, int]]
KIB, MIB = 2**10, 2**20
BASELINE = 64 * MIB
SIZE = 8
"""Samples of the profiles' micro-batches."""
SIZES_OF_MOST = (1, 2, 4, 16, 32)
"""Further sizes of profiles that were measured at several."""


@dataclass(frozen=True)
class Case:
    """One thing to plan."""

    name: str
    profile: Profile
    cluster: Cluster
    request: PlanRequest


def chain(random: Random, count: int) -> Edges:
    return [(i, i + 1) for i in range(count - 1)]


def skips(random: Random, count: int) -> Edges:
    """A chain whose values are read again two to five operators later, as residuals are."""
    more = [(i, i + random.randint(2, 5)) for i in range(0, count - 5, 3)]
    return sorted({*chain(random, count), *more})


def branches(random: Random, count: int) -> Edges:
    """Blocks of two to four branches that meet again."""
    edges, last, at = [], 0, 1
    while at < count:
        ends = []
        for _ in range(random.randint(2, 4)):
            end = last
            for _ in range(random.randint(1, 2)):
                if at < count - 1:
                    edges.append((end, at))
                    end, at = at, at + 1
            ends.append(end)
        if at < count:
            edges += [(end, at) for end in set(ends)]
            last, at = at, at + 1
    return sorted(set(edges))


def unet(random: Random, count: int) -> Edges:
    """A chain whose first half is read by its second, the first by the last."""
    more = [(i, count - 1 - i) for i in range(1, count // 2 - 1, 2)]
    return sorted({*chain(random, count), *more})


def anything(random: Random, count: int) -> Edges:
    """Every operator reads one or two of the ten before it."""
    found = set()
    for target in range(1, count):
        for _ in range(random.randint(1, 2)):
            found.add((random.randint(max(0, target - 10), target - 1), target))
    return sorted(found)


GRAPHS: dict[str, Callable[[Random, int], Edges]] = {
    graph.__name__: graph for graph in (chain, skips, branches, unet, anything)
}


def profile_of(
    name: str,
    count: int,
    *,
    sizes: tuple[int, ...] = SIZES_OF_MOST,
    frozen: float = 0.0,
    cached: bool = False,
    tied: bool = False,
    split: bool = False,
) -> Profile:
    """A profile of ``count`` operators, whose graph and seed its name tells.

    Args:
        sizes: further micro-batch sizes that were measured.
        frozen: share of the operators, from the first on, that have no backward.
        cached: whether operators are faster in stages whose data stays in the cache.
        tied: whether the first and the last operator share their parameter.
        split: whether halves of backwards were measured; the best cut then differs a lot from one
            micro-batch size to another.
    """
    random = Random(name)
    edges = GRAPHS[name.split("-")[1]](random, count)
    operators: list[Operator] = []
    for index in range(count):
        forward_s = random.lognormvariate(0, 0.8) * 1e-3
        trains = index >= frozen * count
        backward_s = forward_s * random.uniform(1.4, 2.4) * trains
        output = int(random.lognormvariate(0, 1) * 128 * KIB)
        size = int(random.lognormvariate(0, 1.2) * 512 * KIB) * (random.random() < 0.7)
        fixed = random.uniform(0.0, 1.0) if split else random.uniform(0.05, 0.4)
        grows = {n: fixed + (1 - fixed) * n / SIZE for n in sizes}
        own = "shared" if tied and index in (0, count - 1) else f"p{index}"
        read = [source for source, target in edges if target == index]
        saved = {f"n{u}": operators[u].output_bytes for u in read if random.random() < 0.6}
        operators.append(
            Operator(
                id=f"n{index}",
                name=f"layer{index}",
                forward_s=forward_s,
                backward_s=backward_s,
                parameter_bytes=size,
                output_bytes=output,
                gradient_bytes=output if trains else 0,
                parameters=((own, MIB if own == "shared" else size),) if size else (),
                saved=tuple(sorted({**saved, f"n{index}": output}.items())),
                timings={n: (forward_s * f, backward_s * f) for n, f in grows.items()},
                cached={SIZE: (forward_s * 0.8, backward_s * 0.9)} if cached else {},
            )
        )
    return Profile(
        name=name,
        source="gate",
        micro_batch_size=SIZE,
        operators=tuple(operators),
        edges=tuple((f"n{source}", f"n{target}") for source, target in edges),
        optimizer=OptimizerCost(2.0, 5e-11),
        stage=StageOverhead(cache_bytes=4 * MIB if cached else None),
        split=SplitBackward() if split else None,
        process_baseline_bytes=BASELINE,
    )


def nodes(*ranks: int, between: float = 1.1e9, link: Any = None, **more: Any) -> Cluster:
    """Nodes of so many ranks each.

    Args:
        between: bytes per second between nodes.
        link: further properties of the link between nodes.
        more: as :func:`cluster_of` has it.
    """
    slow = Link(50e-6, between, **(link or {}))
    return cluster_of(*ranks, within=Link(20e-6, 2e9), between=slow, **more)


def at_switches(cluster: Cluster) -> Cluster:
    """The nodes at two switches in turn, between which links are half as fast."""
    far = Link(100e-6, cluster.between_nodes.bandwidth_bytes_per_s / 2)
    spread = (replace(node, switch=f"s{i % 2}") for i, node in enumerate(cluster.nodes))
    return replace(cluster, nodes=tuple(spread), between_switches=far)


SHARED, INTERFACE = {"shared": True}, {"interface": True}
ONE, TWO = nodes(4), nodes(2, 2, between=1.2e8, link=SHARED)
MIXED = nodes(2, 2, speeds=(2.0, 1.0))
OF_PROFILES = {"sizes", "frozen", "cached", "tied", "split"}


def _case(
    kind: str,
    graph: str,
    number: int,
    count: int,
    cluster: Cluster,
    batch: int = 64,
    *,
    memory: float | None = None,
    **asked: Any,
) -> Case:
    """A case; ``memory`` is of every rank, relative to an equal share of all parameters with their
    gradients and state and of what two micro-batches keep."""
    name = f"{kind}-{graph}-{number}"
    profile = profile_of(name, count, **{key: asked.pop(key) for key in OF_PROFILES & {*asked}})
    if memory is not None:
        state = 4 * sum(each.parameter_bytes for each in profile.operators)
        kept = 2 * sum(size for each in profile.operators for _, size in each.saved)
        asked["memory_limit_bytes"] = BASELINE + int(memory * (state + kept) / cluster.ranks)
    return Case(name, profile, cluster, PlanRequest(name, batch, **asked))


def _plain() -> Iterator[Case]:
    machines = (ONE, TWO, nodes(3), nodes(2, 2), nodes(1, 1, between=1.2e8))
    for place, graph in enumerate(GRAPHS):
        for number, count in enumerate((9, 16, 28, 40)):
            cluster, batch = machines[(place + number) % len(machines)], (32, 64, 100)[number % 3]
            sizes = SIZES_OF_MOST if (place + number) % 3 else ()
            yield _case("plain", graph, number, count, cluster, batch, sizes=sizes)
    for number, graph in enumerate(("chain", "skips", "branches")):
        yield _case("small", graph, number, 7, nodes(3), 24, sizes=())
        yield _case("small", graph, number + 3, 8, nodes(1, 1, 1, between=3e8), 24)
        yield _case("fixed", graph, number, 24, ONE, stages=3, micro_batches=8)
        yield _case("cached", graph, number, 18, ONE, cached=True)
    yield _case("fixed", "chain", 3, 20, ONE, warm_up=(5, 4, 3, 1))
    yield _case("fixed", "anything", 4, 20, TWO, schedule="gpipe")
    yield _case("fixed", "branches", 5, 20, TWO, micro_batches=16)


def _machines() -> Iterator[Case]:
    three = nodes(1, 1, 1, speeds=(3.0, 1.0, 1.5), between=4e8)
    four = nodes(2, 2, 2, 2, between=1.2e8, link=INTERFACE)
    for number, graph in enumerate(GRAPHS):
        yield _case("mixed", graph, number, 14 + 4 * number, MIXED if number % 2 else three)
        yield _case("crowded", graph, number, 12 + 4 * number, nodes(4, cores=2))
        yield _case("nodes", graph, number, 24, four)
    yield _case("crowded", "skips", 5, 20, nodes(2, 2, cores=1))
    yield _case("switches", "branches", 0, 24, at_switches(nodes(2, 2, 2, 2)))
    yield _case("switches", "chain", 1, 24, at_switches(nodes(1, 1, 1, 1, between=2e8)))
    yield _case("frozen", "chain", 0, 20, ONE, frozen=0.4)
    yield _case("frozen", "skips", 1, 24, TWO, frozen=0.3)
    yield _case("frozen", "unet", 2, 16, TWO, frozen=0.5, replicas=None)
    yield _case("tied", "chain", 0, 18, ONE, tied=True)
    yield _case("large", "skips", 0, 200, nodes(8))
    yield _case("large", "chain", 1, 120, nodes(4, 4, between=3e8, link=SHARED), 128)
    yield _case("large", "branches", 2, 90, nodes(8), 128)


def _memory() -> Iterator[Case]:
    free = {"recompute": None, "segments": None}
    some, few = (1.6, 2.4, 1.6, 1.6, 2.8), (1.1, 1.6, 1.6, 1.1, 1.8)
    for number, graph in enumerate(GRAPHS):
        yield _case("memory", graph, number, 12 + 3 * number, ONE, memory=some[number])
        yield _case("memory", graph, number + 5, 14 + 3 * number, TWO, memory=1.3, **free)
        count, memory = 12 + 2 * number, few[number]
        yield _case("memory", graph, number + 10, count, ONE, memory=memory, recompute=None)
    yield _case("memory", "chain", 15, 16, MIXED, memory=1.6)
    yield _case("memory", "skips", 16, 16, ONE, memory=1.3, recompute=True, segments=True)
    for number, (graph, memory) in enumerate({"chain": 3.0, "skips": 1.2, "branches": 1.2}.items()):
        yield _case("offload", graph, number, 14, ONE, memory=memory, offload=None, **free)
    # Stages are cut again for the memory of named schedules, for the least peak, or to offload.
    few_stages = {"stages": 3, "micro_batches": 4, "recompute": None}
    yield _case("tight", "skips", 72, 14, ONE, memory=2.2, schedule="zb-h1")
    yield _case("tight", "anything", 175, 12, ONE, memory=1.2, schedule="interleaved")
    yield _case("tight", "unet", 141, 13, ONE, memory=1.4, schedule="zb-v")
    yield _case("tight", "branches", 118, 15, ONE, memory=2.2, **few_stages)
    yield _case("tight", "branches", 102, 14, ONE, memory=1.4, offload=None, **free)
    yield _case("tight", "unet", 152, 14, ONE, memory=1.8, offload=None, stages=2, recompute=None)
    disk = {"offload": True, "offload_to": OffloadTarget.DISK}
    yield _case("offload", "chain", 3, 12, ONE, memory=1.6, **disk)


def _replicas() -> Iterator[Case]:
    free = {"replicas": None}
    ways = (Replication.WHOLE, Replication.SPLIT, None)
    for number, graph in enumerate(GRAPHS):
        way, count = ways[number % 3], 10 + 3 * number
        yield _case("replicas", graph, number, count, ONE, replication=way, **free)
        yield _case("replicas", graph, number + 5, 16, TWO, replication=None, **free)
    eight = nodes(4, 4, between=6e8, link=SHARED)
    yield _case("replicas", "chain", 10, 24, eight, 128, **free)
    yield _case("replicas", "branches", 11, 12, ONE, memory=2.2, recompute=None, **free)
    yield _case("replicas", "skips", 12, 14, ONE, memory=2.4, shard_optimizer=True, **free)
    yield _case("copies", "chain", 0, 16, eight, 128, replicas=2)
    yield _case("copies", "skips", 1, 14, ONE, replicas=2, replication=None)
    yield _case("copies", "chain", 2, 14, ONE, replicas=2, shard_optimizer=True, memory=3.4)


def _uneven() -> Iterator[Case]:
    """Replicas on unequal devices, and on more than eight ranks."""
    free = {"replicas": None}
    ways = (Replication.WHOLE, Replication.SPLIT, None)
    slow_first = nodes(1, 1, 1, 1, speeds=(0.25, 1.0, 1.0, 1.0))
    three = nodes(1, 1, 1, 1, 1, speeds=(1.0, 0.45, 0.3), between=3e8)
    for number, graph in enumerate(GRAPHS):
        cluster, way = (slow_first, MIXED, three)[number % 3], ways[number % 3]
        yield _case("uneven", graph, number, 6 + 3 * number, cluster, replication=way, **free)
    yield _case("uneven", "chain", 5, 12, MIXED, memory=2.2, recompute=None, **free)
    # Best with whole micro-batches in turn, or with larger parts for the faster replicas.
    two = nodes(2, 2, 2, 2, speeds=(0.3, 1.0, 1.0), between=1.2e8)
    four = nodes(2, 2, 2, 2, speeds=(0.82, 0.57, 0.99, 0.86))
    five = nodes(*[1] * 5, speeds=(1.0, 0.5))
    six = nodes(*[1] * 6, speeds=(0.25, 1.0, 0.6))
    yield _case("uneven", "chain", 6, 24, two, **free)
    yield _case("uneven", "skips", 103, 16, five, 32, stages=4, **free)
    yield _case("uneven", "branches", 109, 23, six, 32, stages=5, **free)
    yield _case("uneven", "branches", 41, 19, four, replication=None, **free)
    few = {"sizes": (), "stages": None, "micro_batches": 4, "replication": Replication.SPLIT}
    yield _case("uneven", "skips", 6, 6, ONE, 16, memory=1.7, **few, **free)
    yield _case("many", "chain", 0, 18, nodes(*[1] * 12, speeds=(0.1, 1.0, 1.0, 1.0)))
    yield _case("many", "skips", 1, 24, nodes(4, 4, 4, 4), 256, **free)
    yield _case("many", "chain", 2, 30, nodes(*[8] * 8), 512, memory=16.0, recompute=None, **free)
    yield _case("many", "chain", 3, 8, nodes(8), 1024, schedule="1f1b", sizes=())
    yield _case("many", "skips", 4, 24, nodes(4, 4), 64, every_schedule=True, **free)


def _schedules() -> Iterator[Case]:
    named = ("interleaved", "looped-bfs", "zb-h1", "zb-v", "dualpipev", "pipedream-2bw")
    for number, schedule in enumerate(named):
        graph = list(GRAPHS)[number % len(GRAPHS)]
        yield _case("named", graph, number, 20, ONE, schedule=schedule)
        yield _case("named", graph, number + 6, 24, TWO, schedule=schedule, micro_batches=8)
    yield _case("named", "chain", 12, 16, ONE, schedule="pipedream")
    yield _case("named", "skips", 13, 18, ONE, schedule="zb-h1", memory=2.0, recompute=None)
    yield _case("named", "chain", 14, 20, ONE, schedule="interleaved", replicas=2, batch=64)
    for number, graph in enumerate(("chain", "skips", "branches")):
        yield _case("apart", graph, number, 12, ONE, backward_apart=None)
        yield _case("interleave", graph, number, 24, ONE, every_schedule=True)
    many = {"sizes": (*SIZES_OF_MOST, 64, 128), "every_schedule": True, "split": True}
    for graph, number in (("branches", 1), ("skips", 3), ("skips", 4)):
        yield _case("auto", graph, number, 40, nodes(8), 1024, **many)
    yield _case("apart", "chain", 3, 12, ONE, backward_apart=True)
    yield _case("apart", "skips", 4, 12, ONE, memory=1.8, backward_apart=None, recompute=None)
    everything = {"backward_apart": None, "offload": None, "recompute": None, "segments": None}
    yield _case("open", "chain", 0, 16, ONE, **everything)
    yield _case("open", "skips", 1, 16, TWO, memory=1.4, every_schedule=True, **everything)


def cases() -> list[Case]:
    """All of them."""
    return [*_plain(), *_machines(), *_memory(), *_replicas(), *_uneven(), *_schedules()]
