"""The claims of the papers that pipectl builds on, and what it shows for each. Prints a page.

    export PIPECTL_WORKLOADS=DIRECTORY PIPECTL_GROUND_TRUTH=DIRECTORY
    python tests/benchmarks/claims.py > docs/claims.md
    python tests/benchmarks/claims.py networks nodes    # these sections only

Plans are simulated, unless the page says that they were rehearsed or trained over real ranks. The
profiles of the convolutional networks are those of ``planner_cnns.py``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from time import perf_counter

from tests.benchmarks import ground_truth, jobs, memory, planner_cnns
from tests.benchmarks.jobs import peak_of, run_ranks, table
from tests.benchmarks.planner_scale import Shape, cluster_of, gpt_profile

sys.path.insert(0, str(Path(__file__).parents[1] / "planner" / "gate"))
from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError
from pipectl.jobs.measuring import REHEARSAL_WORKER, result_of
from pipectl.link import Link
from pipectl.plan import Plan, Replication, StageCost
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Profile
from pipectl.runs import RunDirectory
from pipectl.schedule.equal_stages import plan_equal_stages
from pipectl.simulate import simulate
from pipectl.simulate.rehearsing import rehearsal_of
from pipectl.units import format_bytes
from tests.planner.gate import published

SHAPE = Shape(width=2048, heads=16, length=1024)
"""Of the GPTs here: 50 million parameters per block."""
MEMORY_BYTES = 16 * 2**30
"""Of each accelerator."""
RANKS, SAMPLES, MICRO_BATCHES, BLOCKS = 8, 64, 32, 48
DEVICES = 16
"""Of the comparison of PipeDream and PipeFB."""
HOST_LINK, PEER_LINK = Link(1e-5, 5e10), Link(5e-6, 2e11)
"""Of these devices."""
BLOCKS_PER_RANK = 11
"""To begin the search with."""
FREE, FORWARD_S = Link(0.0, 1e15), 0.04
"""Of stages that take equal times."""
V_HALF_KEEPS = RANKS / 2 + 3 / 2
"""Micro-batches of the fullest rank."""
PRECISION = 1.05
"""Of the number of blocks that fit."""

SYNCHRONOUS = "synchronous 1F1B iteration latency, event-simulated, full-duplex links"
AT_LEAST = "per-device micro-batch >= profile micro-batch"
"""What is compared of the published plans of DAPPLE's profiles."""

OPENING = """# The claims of the papers, shown

This page compares what the papers that pipectl builds on claim with what pipectl reaches. `python
tests/benchmarks/claims.py` plans, simulates and prints the page; it needs `PIPECTL_WORKLOADS` for
DAPPLE's own profiles, and `PIPECTL_GROUND_TRUTH` for vTrain's measured steps. The blocks of the
GPTs have a width of 2048 and read 1024 tokens. They compute in half precision and train with Adam;
their times follow from the roofline of one accelerator.
"""


def main() -> None:
    """Print the page, or the sections that are named; how long each takes goes to stderr."""
    sections = (
        *(dapple_plans, one_f_one_b_and_gpipe, largest_models, bubbles),
        *(networks, offload_and_pipefb, nodes, published_steps),
    )
    by_name = {section.__name__: section for section in sections}
    if unknown := set(sys.argv[1:]) - set(by_name):
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; sections: {', '.join(by_name)}")
    if missing := {"PIPECTL_WORKLOADS", "PIPECTL_GROUND_TRUTH"} - set(os.environ):
        sys.exit(f"set {' and '.join(sorted(missing))}")
    print(OPENING)
    for section in [by_name[name] for name in sys.argv[1:]] or sections:
        started_s = perf_counter()
        for line in section():
            print(line, flush=True)
        print()
        print(f"{section.__name__}: {perf_counter() - started_s:.0f} s", file=sys.stderr)


def dapple_plans() -> Iterator[str]:
    """DAPPLE's plans against PipeDream's, and ours against both, on DAPPLE's profiles."""
    yield "## DAPPLE: plans with replicas\n"
    yield "Claim: plans are up to 3.23 times faster than PipeDream's. On DAPPLE's profiles, links"
    yield "and 16 devices, simulated by the same simulator:\n"
    ratios: dict[str, list[float]] = {}
    for steps_s in dapple_steps():
        for slow, fast in (
            ("DAPPLE", "pipectl"),
            ("PipeDream", "DAPPLE"),
            ("PipeDream", "pipectl"),
        ):
            if slow in steps_s:
                ratio = steps_s[slow] / steps_s[fast]
                ratios.setdefault(f"{fast} over {slow}", []).append(ratio)
    yield from table(
        ("plans", "problems", "faster on average", "at least", "at most"),
        (
            (name, len(found), *(f"{each(found):.2f}x" for each in (geometric_mean, min, max)))
            for name, found in sorted(ratios.items())
        ),
    )


def dapple_steps() -> Iterator[dict[str, float]]:
    """Of every problem of DAPPLE's: the simulated steps by who found the plan."""
    for path in sorted(Path(os.environ["PIPECTL_WORKLOADS"]).glob("dapple-*.json")):
        document, profile = json.loads(path.read_text()), published.half_and_half(path)
        problems: dict[tuple[str, int, int], dict[str, float]] = {}
        for entry in document["best_known"]:
            if entry["objective"] == SYNCHRONOUS and entry["rule"] == AT_LEAST:
                problem = tuple(
                    entry[key] for key in ("layout", "global_batch", "profile_micro_batch")
                )
                cluster = published.cluster_of(document["cluster"]["layouts"][entry["layout"]])
                plans = published.plans_of(profile, entry, cluster)
                step_s = min(simulate(plan, cluster).step_time_s for plan in plans)
                problems.setdefault(problem, {})[entry["found_by"].split()[0]] = step_s
        for (layout, batch, _), steps_s in problems.items():
            cluster = published.cluster_of(document["cluster"]["layouts"][layout])
            request = PlanRequest("dapple", batch, replicas=None, replication=Replication.SPLIT)
            yield steps_s | {"pipectl": make_plan(profile, cluster, request).predicted_step_s}


def one_f_one_b_and_gpipe() -> Iterator[str]:
    """Early backwards against GPipe, and what the planner makes of 12% less memory."""
    yield "## DAPPLE: early backwards\n"
    yield f"Claim: 1.6 times faster than GPipe with 12% less memory. A GPT of {BLOCKS} blocks on"
    yield f"{RANKS} accelerators, {SAMPLES} samples in {MICRO_BATCHES} micro-batches for all:\n"
    profile, cluster = gpt_profile(BLOCKS, SHAPE), free_memory(RANKS)
    request = PlanRequest(
        "gpt", SAMPLES, micro_batches=MICRO_BATCHES, stages=RANKS, schedule="gpipe"
    )
    recomputing = make_plan(profile, cluster, replace(request, recompute=True))
    limit = round(0.88 * peak_of(recomputing))
    plans = {
        "GPipe, recomputing as in its paper": recomputing,
        "GPipe, keeping everything": make_plan(profile, cluster, request),
        "1F1B": make_plan(profile, cluster, replace(request, schedule="1f1b")),
    }
    best = replace(
        request, schedule=None, stages=None, recompute=None, segments=None, every_schedule=True
    )
    plans["`schedule: auto`"] = make_plan(profile, cluster, best)
    limited = attempt(profile, cluster, replace(best, memory_limit_bytes=limit))
    if limited is not None:
        plans["`schedule: auto`, 12% less memory than GPipe"] = limited
    yield from table(
        ("plan", "schedule", "step", "faster than GPipe", "largest peak"),
        (
            (
                name,
                plan.schedule,
                f"{plan.predicted_step_s:.3f} s",
                f"{recomputing.predicted_step_s / plan.predicted_step_s:.2f}x",
                f"{format_bytes(peak_of(plan))} ({peak_of(plan) / peak_of(recomputing) - 1:+.0%})",
            )
            for name, plan in plans.items()
        ),
    )


TECHNIQUES: dict[str, dict[str, object]] = {
    "GPipe": {"schedule": "gpipe"},
    "1F1B": {"schedule": "1f1b"},
    "V-Half": {"schedule": "v-half"},
    "V-Min": {"schedule": "v-min"},
    "1F1B, offloading to the host": {"schedule": "1f1b", "offload": True},
    "1F1B, recomputing": {"schedule": "1f1b", "recompute": True},
    "1F1B, recomputing in blocks": {"schedule": "1f1b", "recompute": True, "segments": True},
}


def largest_models() -> Iterator[str]:
    """The largest GPT that fits on 2, 4 and 8 accelerators with each technique."""
    yield "## The largest model that fits\n"
    yield f"Parameters of the largest GPT that fits on accelerators of {format_bytes(MEMORY_BYTES)}"
    yield f"each, {SAMPLES} samples in {MICRO_BATCHES} micro-batches (within 5%):\n"
    counts = (2, 4, 8)

    def row(name: str, choices: dict[str, object]) -> Sequence[object]:
        sizes, guess = [], counts[0] * BLOCKS_PER_RANK
        for ranks in counts:
            sizes.append(largest(choices, ranks, guess))
            guess = round(1.75 * sizes[-1])  # for twice as many ranks
        return (name, *map(parameters, sizes))

    yield from table(
        ("technique", *(f"{count} ranks" for count in counts)),
        (row(name, choices) for name, choices in TECHNIQUES.items()),
    )
    yield ""
    yield "V-Half keeps at most p/2 + 3/2 micro-batches on each of p ranks: 5.5 on 8, where the"
    yield "first rank of 1F1B keeps 8 and the last one 1. If memory is short, the planner gives"
    yield "1F1B's later stages more layers, until every rank holds about (p + 1)/2 = 4.5"
    yield "micro-batches' worth, so 1F1B fits the larger models. These stages take unequal times."
    yield "With 72 blocks on 8 ranks, which fit with both:\n"
    profile, cluster = gpt_profile(72, SHAPE), free_memory(8)
    for name in ("1F1B", "V-Half"):
        request = PlanRequest(
            "gpt", SAMPLES, micro_batches=MICRO_BATCHES, memory_limit_bytes=MEMORY_BYTES
        )
        plan = attempt(profile, cluster, replace(request, **TECHNIQUES[name]))
        if plan is not None:
            yield f"- {name}: {plan.predicted_step_s:.3f} s, peak {format_bytes(peak_of(plan))}"


def largest(choices: dict[str, object], ranks: int, guess: int) -> int:
    """About the most blocks that fit.

    Args:
        guess: where to begin; steps away from it double until they have passed the answer.
    """
    request = PlanRequest(
        "gpt", SAMPLES, micro_batches=MICRO_BATCHES, memory_limit_bytes=MEMORY_BYTES
    )
    request = replace(request, **choices)
    if request.schedule in ("gpipe", "1f1b"):  # one stage per rank needs least memory
        request = replace(request, stages=ranks)

    def fits(blocks: int) -> bool:
        profile, cluster = gpt_profile(blocks, SHAPE), free_memory(ranks)
        return not blocks or attempt(profile, cluster, request) is not None

    low = high = max(guess, 1)
    step = max(1, guess // 16)
    if fits(guess):
        while fits(high := low + step):
            low, step = high, 2 * step
    else:
        while not fits(low := max(high - step, 0)):
            high, step = low, 2 * step
    while high > PRECISION * low and high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def parameters(blocks: int) -> str:
    """Of a GPT with so many blocks, in billions."""
    if not blocks:
        return ""
    numbers = sum(each.parameter_bytes for each in gpt_profile(blocks, SHAPE).operators) // 2
    return f"{numbers / 1e9:.2f} billion"


def bubbles() -> Iterator[str]:
    """Step and activations of the schedules with half backwards against 1F1B."""
    published = {
        "zb-h1": "less waiting, the memory of 1F1B",
        "zb-v": "1.23x at most, the memory of 1F1B",
        "v-half": "1/2 of the activations",
        "v-min": "1/3 of the activations",
        "interleaved": "less waiting, more memory",
    }
    yield "## Zero bubble, V-Half and V-Min\n"
    yield "Claims of Qi et al. (2024), and of Narayanan et al. (2021) for `interleaved`: a GPT of"
    yield f"{BLOCKS} blocks on {RANKS} accelerators, {MICRO_BATCHES} micro-batches. *Activations*"
    yield "are what the fullest rank holds above its weights, gradients and optimizer state."
    profile, cluster = gpt_profile(BLOCKS, SHAPE), free_memory(RANKS)
    request = PlanRequest("gpt", SAMPLES, micro_batches=MICRO_BATCHES, schedule="1f1b")
    plans = {
        name: make_plan(profile, cluster, replace(request, schedule=name))
        for name in ("1f1b", *published)
    }
    first = plans["1f1b"]
    yield f"The fastest 1F1B keeps up to {max(first.warm_up)} micro-batches per rank. With the"
    yield f"fewest that it needs, it keeps {RANKS}, and V-Half {V_HALF_KEEPS:.1f} at most.\n"
    yield from table(
        ("schedule", "step", "faster than 1F1B", "activations", "published"),
        (
            (
                f"`{name}`",
                f"{plan.predicted_step_s:.3f} s",
                f"{first.predicted_step_s / plan.predicted_step_s:.2f}x",
                f"{activations(plan) / activations(first):.2f} of 1F1B's",
                published.get(name, ""),
            )
            for name, plan in plans.items()
        ),
    )
    yield "\nWith F = I = W and free messages, over as many real ranks (*rehearsed*, as below):\n"
    free = replace(cluster, within_node=FREE)
    chains = [chain(name) for name in ("1f1b", "zb-h1", "zb-v")]
    ideal_s = [simulate(plan, free).step_time_s for plan in chains]
    real_s = [rehearsed_s(plan, free) for plan in chains]
    yield from table(
        ("schedule", "step", "faster than 1F1B", "rehearsed step", "faster than 1F1B"),
        (
            (
                *(f"`{plan.schedule}`", f"{ideal:.3f} s", f"{ideal_s[0] / ideal:.3f}x"),
                *(f"{real:.3f} s", f"{real_s[0] / real:.3f}x"),
            )
            for plan, ideal, real in zip(chains, ideal_s, real_s, strict=True)
        ),
    )


def chain(schedule: str) -> Plan:
    """Even stages, one a rank or two halves, in which a backward's halves take as a forward."""
    parts = 2 if schedule == "zb-v" else 1
    forward_s = FORWARD_S / parts
    cost = StageCost(forward_s, 2 * forward_s, 0.0, 0, 0, 0, weight_s=forward_s)
    numbers = {"stages": parts * RANKS, "micro-batches": MICRO_BATCHES, "ranks": None}
    plan = plan_equal_stages(schedule, None, numbers, cost)
    sent = (replace(transfer, size_bytes=8) for transfer in plan.transfers)
    return replace(plan, transfers=tuple(sent))


def activations(plan: Plan) -> float:
    """Bytes above what stays resident, of the rank that has most."""
    resident = [0.0] * plan.ranks
    for stage in plan.stages:
        for rank in stage.ranks:
            cost = stage.cost
            gradients = cost.gradient_bytes if cost.gradient_bytes is not None else 0
            resident[rank] += cost.parameter_bytes + cost.optimizer_bytes + gradients
    assert plan.prediction is not None
    peaks = plan.prediction.peak_memory_bytes
    baseline = gpt_profile(1, SHAPE).process_baseline_bytes or 0
    return max(peak - held - baseline for peak, held in zip(peaks, resident, strict=True))


NETWORKS = ("vgg16", "resnet18")
IMAGES = 1024
"""Per step."""
PAPER = {4: 3.4, 8: 3.76}
PLANNING = "ten-convolutional-networks-on-4-and-8-devices"


def networks() -> Iterator[str]:
    """Speed-up of convolutional networks on 4 and 8 devices, predicted and rehearsed."""
    yield "## Antichain DAG: convolutional networks on 4 and 8 devices\n"
    yield "Claim: 3.4 times faster on 4 devices and 3.76 times on 8, trained on CIFAR-10, with the"
    yield "accuracy of one device. Networks of its Table 1 with images of that size, measured on"
    yield f"one core; {IMAGES} images per step, one rank per device, links of 100 Gbit/s."
    yield "*Rehearsed*: over so many MPI ranks on this machine, with real messages and the programs"
    yield "of the workers, and sleeps in place of computation. One device takes its best size of"
    yield "micro-batches. Weights are those of one rank to the bit, or with replicas within"
    yield "rounding ([tests/equality](architecture.md#equality-the-same-bits-in-every-plan))."
    yield f"Planning times are [here](benchmarks.md#{PLANNING}).\n"
    yield from table(
        ("network", "devices", "predicted", "rehearsed", "predicted, replicas allowed", "claim"),
        (network(name, devices) for name in NETWORKS for devices in PAPER),
    )


def network(name: str, devices: int) -> Sequence[object]:
    """A row of the table of networks."""
    profile = planner_cnns.profile_of(name)
    one, cluster = (jobs.cluster_of(count, planner_cnns.LINK) for count in (1, devices))
    request = PlanRequest(name, IMAGES, replicas=1, every_schedule=True)
    alone_s = make_plan(profile, one, request).predicted_step_s
    plan = make_plan(profile, cluster, request)
    copies = make_plan(profile, cluster, replace(request, replicas=None, replication=None))
    times_s = (plan.predicted_step_s, rehearsed_s(plan, cluster), copies.predicted_step_s)
    return name, devices, *(f"{alone_s / each:.2f}x" for each in times_s), f"{PAPER[devices]}x"


def rehearsed_s(plan: Plan, cluster: Cluster) -> float:
    """Step of a rehearsal on this machine, as ``pipectl lab rehearse`` runs it."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory.create(Path(folder), "rehearsal", 0.0)
        plan.save(run.plan)
        rehearsal_of(plan, cluster, plan.ranks / len(os.sched_getaffinity(0))).save(run.rehearsal)
        run_ranks(REHEARSAL_WORKER, run, plan.ranks)
        return result_of(run)["rehearsed_step_time_s"]


def offload_and_pipefb() -> Iterator[str]:
    """Peaks and steps of PipeDream and PipeFB, with and without offload."""
    yield "## Offload and PipeFB\n"
    yield "Claims: offload lowers the peak of PipeDream; PipeFB, which computes backwards on ranks"
    yield "of their own, keeps the loss of speed small. PipeFB has half as many stages, and the"
    yield "schedule of PipeDream: one micro-batch per step, and older weights. A GPT of"
    yield f"{BLOCKS} blocks on {DEVICES} accelerators with 50 GB/s to their host and"
    yield f"200 GB/s to each other, {4 * SAMPLES} samples in {2 * MICRO_BATCHES} micro-batches:\n"
    profile = gpt_profile(BLOCKS, SHAPE)
    cluster = free_memory(DEVICES)
    (node, *_) = cluster.nodes
    node = replace(node, device=replace(node.device, host_link=HOST_LINK))
    nodes = (node,) * len(cluster.nodes)
    cluster = replace(cluster, nodes=nodes, within_node=PEER_LINK, between_nodes=PEER_LINK)
    request = PlanRequest("gpt", 4 * SAMPLES, micro_batches=2 * MICRO_BATCHES, stages=DEVICES)
    ways = memory.thesis(request)
    plans = {way: make_plan(profile, cluster, each) for way, each in ways.items()}
    yield from table(*memory.comparison(plans))
    yield "\nA small GPT, trained by jobs on 4 ranks of this machine, which share two cores: only"
    yield "the peaks count. They include the memory of the process itself.\n"
    yield from table(*memory.thesis_jobs())


def nodes() -> Iterator[str]:
    """Memory and work of the fullest node with 1, 2, 4 and 8 of them, for one model."""
    yield "## The Nankai framework: less memory and work per node\n"
    yield "Claim: automatic splitting reduces the memory and the computation of a node."
    yield "A GPT of 24 blocks, one accelerator per node, nothing changed but the number of nodes:\n"
    profile = gpt_profile(24, SHAPE)

    def row(count: int) -> Sequence[object]:
        request = PlanRequest("gpt", SAMPLES, every_schedule=True)
        plan = make_plan(profile, free_memory(count, per_node=1), request)
        assert plan.prediction is not None
        work = max(plan.prediction.utilisation) * plan.predicted_step_s
        return count, format_bytes(peak_of(plan)), f"{work:.2f} s", f"{plan.predicted_step_s:.2f} s"

    yield from table(
        ("nodes", "largest memory of a node", "longest work of a node per step", "step"),
        (row(count) for count in (1, 2, 4, 8)),
    )


def published_steps() -> Iterator[str]:
    """Predictions of steps that others have measured."""
    yield "## vTrain: predicted and measured steps\n"
    yield "Claim: predictions are 8.4% off on one node, from the times of operators alone. pipectl"
    yield "predicts the steps that vTrain's authors measured, GPTs on up to 8 A100. Steps without a"
    yield "pipeline give the times of a layer, of both ends of the model and of an update; no other"
    yield "measured step is used. vTrain uses none at all, so the two figures differ in kind:\n"
    yield from table(*ground_truth.comparison(Path(os.environ["PIPECTL_GROUND_TRUTH"])))


def free_memory(ranks: int, per_node: int = 8) -> Cluster:
    """Accelerators whose memory is not limited but by requests."""
    whole = cluster_of(8)
    (node,) = whole.nodes
    count = min(ranks, per_node)
    device = replace(node.device, memory_bytes=None, host_link=Link(1e-5, 25e9))
    each = replace(node, ranks=count, cores=count, device=device)
    return replace(whole, nodes=(each,) * (ranks // count))


def attempt(profile: Profile, cluster: Cluster, request: PlanRequest) -> Plan | None:
    """The plan; None if none fits."""
    try:
        return make_plan(profile, cluster, request)
    except InfeasibleError:
        return None


if __name__ == "__main__":
    main()
