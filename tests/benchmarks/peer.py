"""pipectl against torch.distributed.pipelining (gloo): same model, same ranks, same processes.

Both engines train the same model on the same two ranks in turns, a few steps each, for some rounds.
torch splits the model in half by number of layers. pipectl runs the same split, its own plan for
the same micro-batches, and its own plan for the number N of micro-batches that it chooses; torch is
measured with N as well. The peaks of resident memory come from separate processes.

    python tests/benchmarks/peer.py [--rounds COUNT] [CASE ...]

A case is a model (gpt, gpt-8192, resnet50, densenet121) in shared memory, or a model and a link,
such as gpt@200 (Mbit/s) or gpt@20% (messages in one direction take 20 % of a rank's computation). A
link joins two network namespaces and needs root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from in_turns import HOST, Job, cluster_of, gpt, profiled, start, vision
from tables import print_table

from pipectl.cluster import Cluster
from pipectl.link import Link
from pipectl.plan import Plan
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.judge import plan_of_stages
from pipectl.profile import Profile
from pipectl.schedule import default_warm_up
from pipectl.schedule.one_f_one_b import policy_b
from pipectl.units import format_bytes

BATCH, MICRO_BATCHES, RANKS = 32, 8, 2
ROUNDS, STEPS = 5, 3


@dataclass(frozen=True)
class Model:
    """A model and where the peer halves its layers, and quarters them for two chunks per rank."""

    job: Job
    half: str
    quarters: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ("1F1B", "GPipe")
    chunked: tuple[str, ...] = ()


def language(vocabulary: int) -> Model:
    return Model(
        gpt(vocabulary),
        "blocks.4",
        ("blocks.2", "blocks.4", "blocks.6"),
        chunked=("Interleaved1F1B", "InterleavedZeroBubble"),
    )


MODELS = {
    "gpt": language(98),
    "gpt-8192": language(8192),
    "resnet50": Model(vision("resnet50"), "layer3.1"),
    "densenet121": Model(vision("densenet121"), "features.denseblock3.denselayer12"),
}
UNEVEN = ("gpt-8192", "resnet50", "densenet121")
"""Models whose layers differ: pipectl's plan is compared with as many layers on every rank, too."""
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


def write_case(folder: Path, model: Model, megabits: int, rounds: int) -> dict[str, Any]:
    """The job's profile and pipectl's plans; returns who takes part."""
    plans = plans_of(folder, model, cluster_between(megabits))
    for name, plan in plans.items():
        plan.save(folder / f"{name}.json")
    # The peer wants a micro-batch for each stage at least; our plan may be of one rank.
    counts = {plan.micro_batches for plan in plans.values() if plan.micro_batches >= RANKS}
    return {
        "plans": list(plans),
        "theirs": {
            name: given for count in sorted(counts) for name, given in theirs(model, count).items()
        },
        "rounds": rounds,
        "steps": STEPS,
        "host": HOST if megabits else "127.0.0.1",
        "port": 29511,
    }


def theirs(model: Model, micro_batches: int) -> dict[str, dict[str, Any]]:
    """The peer's schedules by name: where it splits, and its micro-batches."""
    splits = {name: [model.half] for name in model.schedules}
    splits |= {name: list(model.quarters) for name in model.chunked}
    more = "" if micro_batches == MICRO_BATCHES else f" of {micro_batches}"
    return {
        f"torch/{name}{more}": {"schedule": name, "split": split, "micro_batches": micro_batches}
        for name, split in splits.items()
    }


def plans_of(folder: Path, model: Model, cluster: Cluster) -> dict[str, Plan]:
    """The peer's split under three schedules, and the plans that pipectl makes."""
    profile = profiled(folder, MICRO_BATCHES)
    any_size = replace(request(), micro_batches=None)
    free = make_plan(profiled(folder, None, again=True), cluster, any_size)
    same = plan_of_stages(profile, cluster, request(), halves(profile, model.half))
    everything = default_warm_up("gpipe", RANKS, MICRO_BATCHES)
    deeper = policy_b(RANKS, MICRO_BATCHES)
    return {
        "pipectl, 1F1B": same,
        "pipectl, GPipe": replace(same, schedule="gpipe", warm_up=everything),
        "pipectl, 1F1B with policy B": replace(same, warm_up=deeper),
        "pipectl, its plan": make_plan(profile, cluster, request()),
        f"pipectl, its plan of {free.micro_batches}": free,
    }


def halves(profile: Profile, module: str) -> list[list[str]]:
    """The operators before those of a module, and the rest."""
    names = [operator.name for operator in profile.operators]
    first = next(index for index, name in enumerate(names) if name.startswith(f"{module}."))
    ids = [operator.id for operator in profile.operators]
    return [ids[:first], ids[first:]]


def run(folder: Path, case: dict[str, Any], megabits: int) -> dict[str, Any]:
    """What the ranks measured."""
    (folder / "case.json").write_text(json.dumps(case))
    start("peer.py", folder, RANKS, megabits)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def peaks(folder: Path, case: dict[str, Any]) -> dict[str, list[int]]:
    """Peak resident bytes of both ranks, each in processes of its own."""
    ours, theirs = "pipectl, 1F1B", "torch/1F1B"
    own: dict[str, Any] = {"rounds": 1, "plans": [], "theirs": {}}
    return {
        ours: run(folder, {**case, **own, "plans": [ours]}, 0)["peak_bytes"],
        theirs: run(folder, {**case, **own, "theirs": {theirs: case["theirs"][theirs]}}, 0)[
            "peak_bytes"
        ],
    }


def show_times(cells: Mapping[str, Mapping[str, str]]) -> None:
    """Print a row for every engine and schedule, and a column for every case."""
    print("\n### Seconds per step: median (lowest to highest)\n")
    keys = dict.fromkeys(key for column in cells.values() for key in column)
    rows = ((key, *(column.get(key, "") for column in cells.values())) for key in keys)
    print_table(("", *cells), rows)


def times_of(seconds: Mapping[str, list[float]]) -> dict[str, str]:
    """Cells of a case; N is the number of micro-batches that pipectl chose."""
    chosen = {key.rpartition(" of ")[2] for key in seconds if " of " in key}
    cells = {"N": ", ".join(sorted(chosen))}
    for key, times in seconds.items():
        name = re.sub(r" of \d+$", ", N", key).replace("torch/", "torch, ")
        cells[name] = f"{statistics.median(times):.3f} ({min(times):.3f} to {max(times):.3f})"
    return cells


def fastest_of_the_peer(medians: Mapping[str, float], same_micro_batches: bool = False) -> float:
    """Seconds per step of its best schedule, for any number of micro-batches or the common one."""
    names = [name for name in medians if name.startswith("torch/")]
    return min(medians[name] for name in names if not (same_micro_batches and " of " in name))


def ratios_to_torch(medians: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[str, str]]:
    """How many times faster than torch each case is."""
    shared = {case: seconds_of for case, seconds_of in medians.items() if "@" not in case}
    for schedule in ("1F1B", "GPipe"):
        ratios = (
            f"{case} {seconds_of[f'torch/{schedule}'] / seconds_of[f'pipectl, {schedule}']:.2f}x"
            for case, seconds_of in shared.items()
        )
        yield f"same cut, {schedule}", ", ".join(ratios)
    for case, seconds_of in medians.items():
        best, ours = fastest_of_the_peer(seconds_of), "pipectl, its plan"
        if case in UNEVEN:
            faster = seconds_of["torch/1F1B"] / seconds_of[ours]
            yield f"{case}: plan over equal layers", f"{faster:.2f}x"
        for name in [name for name in seconds_of if name.startswith(ours)]:
            of_8 = fastest_of_the_peer(seconds_of, same_micro_batches=True) / seconds_of[name]
            plan = re.sub(r" of \d+$", ", N,", name.removeprefix("pipectl, "))
            ratios = f"{of_8:.2f}x ({best / seconds_of[name]:.2f}x)"
            yield f"{case}: {plan} over torch's best with 8 (8 or N)", ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    usual = " ".join(CASES).replace("%", "%%")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"by default {usual}")
    arguments = parser.parse_args()
    if unknown := {text.partition("@")[0] for text in arguments.cases} - MODELS.keys():
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    print(f"## pipectl and torch.distributed.pipelining {torch.__version__}\n")
    print(f"{RANKS} ranks, one thread each; batch {BATCH} in {MICRO_BATCHES} micro-batches; AdamW.")
    medians: dict[str, dict[str, float]] = {}
    cells: dict[str, dict[str, str]] = {}
    for text in arguments.cases or CASES:
        name, _, speed = text.partition("@")
        with tempfile.TemporaryDirectory() as place:
            folder, model = Path(place), MODELS[name]
            model.job.write(folder, RANKS)
            megabits = link_speed(folder, model, speed)
            case = write_case(folder, model, megabits, arguments.rounds)
            title = f"{text}, {megabits} Mbit/s" if speed.endswith("%") else text
            seconds = run(folder, case, megabits)["seconds"]
            medians[text] = {key: statistics.median(times) for key, times in seconds.items()}
            cells[title] = times_of(seconds)
            for key, sizes in ({} if megabits else peaks(folder, case)).items():
                name = f"peak of ranks 0 and 1, {key.replace('torch/', 'torch, ')}"
                cells[title][name] = ", ".join(map(format_bytes, sizes))
    show_times(cells)
    print("\n### Ratios of medians\n")
    print_table(("", "faster than torch"), ratios_to_torch(medians))


if __name__ == "__main__":
    main()
