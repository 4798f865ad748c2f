"""pipectl against torch.distributed.pipelining (gloo): same model, same ranks, same processes.

Both engines train the same model on the same two ranks in turns, a few steps each, for some rounds.
torch splits the model in half by number of layers. pipectl runs the same split, its own plan for
the same micro-batches, and its own plan for the number N of micro-batches that it chooses; torch is
measured with N as well. *Compiled* stages (``training.compile``) begin later, by the time of the
compiler. The peaks of resident memory come from separate processes.

    python tests/benchmarks/peer.py [--rounds COUNT] [CASE ...]

A case is a model (gpt, gpt-8192, resnet50, densenet121) in shared memory, or a model and a link,
such as gpt@200 (Mbit/s) or gpt@20% (messages in one direction take 20 % of a rank's computation). A
link joins two network namespaces and needs root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipectl.cluster import Cluster
from pipectl.link import Link
from pipectl.plan import Plan
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.evaluator import plan_of_stages
from pipectl.profile import Profile
from pipectl.schedule import default_warm_up
from pipectl.schedule.one_f_one_b import policy_b
from pipectl.units import format_bytes
from tests.benchmarks.in_turns import train_in_turns
from tests.benchmarks.jobs import cluster_of, gpt, print_table, profiled, spread, vision, write_job

BATCH, MICRO_BATCHES, RANKS = 32, 8, 2
ROUNDS, STEPS = 5, 3
OWN = "pipectl, its plan"
COMPILED = f"{OWN}, compiled"
CHUNKED = ("Interleaved1F1B", "InterleavedZeroBubble")
Contender = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A model and where the peer halves its layers, and quarters them for two chunks per rank."""

    parts: dict[str, Any]
    half: str
    quarters: tuple[str, ...] = ()


QUARTERS = ("blocks.2", "blocks.4", "blocks.6")
MODELS = {
    "gpt": Model(gpt(), "blocks.4", QUARTERS),
    "gpt-8192": Model(gpt(8192), "blocks.4", QUARTERS),
    "resnet50": Model(vision("resnet50"), "layer3.1"),
    "densenet121": Model(vision("densenet121"), "features.denseblock3.denselayer12"),
}
CASES = ("gpt", "gpt-8192", "resnet50", "densenet121", "gpt@20%", "gpt@40%")


def cluster_between(megabits: int) -> Cluster:
    """Two nodes and the link between them, or one node."""
    if not megabits:
        return cluster_of(RANKS)
    return cluster_of(RANKS, Link(latency_s=1e-4, bandwidth_bytes_per_s=megabits * 1e6 / 8))


def link_speed(folder: Path, model: Model, text: str) -> int:
    """Mbit/s of a link that a case names; 0 for shared memory."""
    if not text.endswith("%"):
        return int(text or 0)
    profile = profiled(folder, MICRO_BATCHES)
    stages = halves(profile, model.half)
    plan = plan_of_stages(profile, cluster_of(RANKS), request(), stages)
    computing_s = statistics.mean(stage.load_s for stage in plan.stages)
    forwards = sum(each.size_bytes for each in plan.transfers if each.target == RANKS - 1)
    return round(8 * forwards / 1e6 / (computing_s * int(text[:-1]) / 100))


def request() -> PlanRequest:
    """For the peer's micro-batches."""
    return PlanRequest("peer", batch_size=BATCH, micro_batches=MICRO_BATCHES)


def ours(folder: Path, model: Model, cluster: Cluster) -> dict[str, Plan]:
    """The peer's split under three schedules, and the plans that pipectl makes."""
    profile = profiled(folder, MICRO_BATCHES)
    any_size = replace(request(), micro_batches=None)
    free = make_plan(profiled(folder, "auto", "--again"), cluster, any_size)
    same = plan_of_stages(profile, cluster, request(), halves(profile, model.half))
    everything = default_warm_up("gpipe", RANKS, MICRO_BATCHES)
    deeper = policy_b(RANKS, MICRO_BATCHES)
    return {
        "pipectl, 1F1B": same,
        "pipectl, GPipe": replace(same, schedule="gpipe", warm_up=everything),
        "pipectl, 1F1B with policy B": replace(same, warm_up=deeper),
        OWN: make_plan(profile, cluster, request()),
        f"{OWN}, N": free,
    }


def theirs(model: Model, chosen: int) -> dict[str, Contender]:
    """The peer's schedules by name: where it splits, and its micro-batches."""
    splits = {name: [model.half] for name in ("1F1B", "GPipe")}
    splits |= {name: list(model.quarters) for name in CHUNKED if model.quarters}
    counts = {"": MICRO_BATCHES}
    if chosen >= RANKS and chosen != MICRO_BATCHES:  # it wants a micro-batch for each stage
        counts[", N"] = chosen
    return {
        f"torch, {name}{more}": {"schedule": name, "split": split, "micro_batches": count}
        for more, count in counts.items()
        for name, split in splits.items()
    }


def halves(profile: Profile, module: str) -> list[list[str]]:
    """The operators before those of a module, and the rest."""
    names = [operator.name for operator in profile.operators]
    first = next(index for index, name in enumerate(names) if name.startswith(f"{module}."))
    ids = [operator.id for operator in profile.operators]
    return [ids[:first], ids[first:]]


def column(text: str, rounds: int) -> tuple[str, dict[str, str], dict[str, float]]:
    """Title and cells of a case, and the medians of seconds per step."""
    name, _, speed = text.partition("@")
    with tempfile.TemporaryDirectory() as place:
        folder, model = Path(place), MODELS[name]
        write_job(folder, model.parts, BATCH, RANKS)
        megabits = link_speed(folder, model, speed)
        plans = ours(folder, model, cluster_between(megabits))
        chosen = plans[f"{OWN}, N"].micro_batches
        for key, plan in plans.items():
            plan.save(folder / f"{key}.json")
        contenders = {key: {"plan": f"{key}.json"} for key in plans} | theirs(model, chosen)
        if not megabits:
            contenders[COMPILED] = {**contenders[OWN], "compile": True}
        case = {"contenders": contenders, "rounds": rounds, "steps": STEPS}
        found = train_in_turns(folder, case, RANKS, megabits)[0]
        seconds, first_s = found["seconds"], found["first_s"]
        cells = {"N": str(chosen), **{key: spread(times) for key, times in seconds.items()}}
        if COMPILED in contenders:
            cells["compiled, it begins later by"] = f"{first_s[COMPILED] - first_s[OWN]:.0f} s"
        for key in () if megabits else ("pipectl, 1F1B", "torch, 1F1B"):
            alone = {**case, "contenders": {key: contenders[key]}, "rounds": 1}
            sizes = [rank["peak_bytes"] for rank in train_in_turns(folder, alone, RANKS)]
            cells[f"peak of ranks 0 and 1, {key}"] = ", ".join(map(format_bytes, sizes))
    title = f"{text}, {megabits} Mbit/s" if speed.endswith("%") else text
    return title, cells, {key: statistics.median(times) for key, times in seconds.items()}


def ratios_to_torch(medians: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[str, str]]:
    """How many times faster than torch each case is."""
    for schedule in ("1F1B", "GPipe"):
        ratios = (
            f"{case} {seconds_of[f'torch, {schedule}'] / seconds_of[f'pipectl, {schedule}']:.2f}x"
            for case, seconds_of in medians.items()
            if "@" not in case
        )
        yield f"same cut, {schedule}", ", ".join(ratios)
    for case, seconds_of in medians.items():
        peer = {key: seconds for key, seconds in seconds_of.items() if key.startswith("torch")}
        best_s = min(peer.values())
        best_of_8_s = min(seconds for key, seconds in peer.items() if not key.endswith(", N"))
        for key in (OWN, f"{OWN}, N"):
            plan, step_s = key.removeprefix("pipectl, "), seconds_of[key]
            comma = "," if key != OWN else ""
            ratios = f"{best_of_8_s / step_s:.2f}x ({best_s / step_s:.2f}x)"
            yield f"{case}: {plan}{comma} over torch's best with 8 (8 or N)", ratios
        if COMPILED in seconds_of:
            faster = seconds_of[OWN] / seconds_of[COMPILED]
            yield f"{case}: its plan, compiled, over its plan", f"{faster:.2f}x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    arguments = parser.parse_args()
    print(f"{RANKS} ranks, one thread each; batch {BATCH} in {MICRO_BATCHES} micro-batches; AdamW.")
    medians: dict[str, dict[str, float]] = {}
    columns: dict[str, dict[str, str]] = {}
    for text in arguments.cases or CASES:
        title, columns[title], medians[text] = column(text, arguments.rounds)
    print("\n### Seconds per step: median (lowest to highest)\n")
    keys = dict.fromkeys(key for cells in columns.values() for key in cells)
    rows = ((key, *(cells.get(key, "") for cells in columns.values())) for key in keys)
    print_table(("", *columns), rows)
    print("\n### Ratios of medians\n")
    print_table(("", "faster than torch"), ratios_to_torch(medians))


if __name__ == "__main__":
    main()
