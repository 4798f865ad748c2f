"""pipectl against torch.distributed.pipelining (gloo): same model, same ranks, same processes.

Two ranks train a model in turns by both engines, a few steps each, round after round; what counts
are ratios of medians over the rounds. The peer splits in front of the module that halves the
number of layers. pipectl runs that very split, and the plan it makes from its own profile. Over
links, the two ranks live in two network namespaces joined by a shaped link (needs root, ``ip`` and
``tc``). Peak memory is measured in processes of their own.

    python tests/benchmarks/peer.py [CASE ...]      a case: gpt, gpt-8192, resnet50, densenet121,
                                                    gpt@200 and gpt@100 (Mbit/s)
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from overlap import DEVICE, HOSTS, shaped_link

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link
from pipectl.plan import Plan
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.given_stages import plan_of_stages
from pipectl.profile import Profile
from pipectl.schedule import default_warm_up
from pipectl.schedule.one_f_one_b import policy_b
from pipectl.units import format_bytes

HERE = Path(__file__).resolve().parent
RANK = HERE / "ranks" / "peer.py"
CONFIGS = HERE.parents[1] / "configs" / "models"
CORPUS = HERE.parent / "corpus"
BATCH, MICRO_BATCHES, RANKS = 32, 8, 2
ROUNDS, STEPS = 7, 3


@dataclass(frozen=True)
class Model:
    """A model and where the peer halves its layers, and quarters them for two chunks a rank."""

    model: dict[str, Any]
    loss: str
    data: dict[str, Any]
    half: str
    quarters: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ("1F1B", "GPipe")
    chunked: tuple[str, ...] = field(default=())


def gpt(vocabulary: int) -> Model:
    kwargs = {"layers": 8, "width": 256, "heads": 8, "dropout": 0.0, "vocabulary": vocabulary}
    return Model(
        {"factory": f"{CONFIGS}/gpt.py:build", "kwargs": kwargs},
        f"{CONFIGS}/gpt.py:loss",
        {"factory": f"{CONFIGS}/text.py:training", "kwargs": {"length": 128, "megabytes": 0.5}},
        "blocks.4",
        ("blocks.2", "blocks.4", "blocks.6"),
        chunked=("Interleaved1F1B", "InterleavedZeroBubble"),
    )


def vision(name: str, half: str) -> Model:
    return Model(
        {"factory": f"{CORPUS}/vision.py:build", "kwargs": {"name": name}},
        "torch.nn:CrossEntropyLoss",
        {"factory": f"{CORPUS}/vision.py:Images", "kwargs": {"pixels": 64}},
        half,
    )


MODELS = {
    "gpt": gpt(98),
    "gpt-8192": gpt(8192),
    "resnet50": vision("resnet50", "layer3.1"),
    "densenet121": vision("densenet121", "features.denseblock3.denselayer12"),
}
CASES = ("gpt", "gpt-8192", "resnet50", "densenet121", "gpt@200", "gpt@100")


def job_of(model: Model) -> dict[str, Any]:
    return {
        "version": 1,
        "name": "peer",
        "site_defaults": False,
        "model": model.model,
        "loss": {"factory": model.loss},
        "data": model.data,
        "optimizer": {"factory": "torch.optim:AdamW", "kwargs": {"lr": 1e-4}},
        "training": {"steps": 1, "batch_size": BATCH},
        "resources": {"nodes": 1, "tasks_per_node": RANKS, "cpus_per_task": 1},
    }


def cluster_of(megabits: int) -> Cluster:
    """Two nodes and the link between them, or one node."""
    fast = Link(latency_s=5e-6, bandwidth_bytes_per_s=4e9)
    if not megabits:
        nodes = (Node("a", ranks=2, cores=2, device=Device("cpu")),)
        return Cluster("one node", "benchmark", nodes, fast, fast)
    between = Link(latency_s=1e-4, bandwidth_bytes_per_s=megabits * 1e6 / 8)
    nodes = tuple(Node(name, ranks=1, cores=1, device=Device("cpu")) for name in "ab")
    return Cluster("two nodes", "benchmark", nodes, fast, between)


def write_case(folder: Path, model: Model, megabits: int) -> dict[str, Any]:
    """The job, its profile and pipectl's plans; returns who takes part."""
    (folder / "job.yaml").write_text(yaml.safe_dump(job_of(model)))
    command = [sys.executable, "-m", "pipectl", "profile", "job.yaml", "-o", "profile.json"]
    settings = ["--scheduler", "local", "--set", f"pipeline.micro_batches={MICRO_BATCHES}"]
    subprocess.run([*command, *settings], cwd=folder, check=True, capture_output=True)
    plans = plans_of(Profile.load(folder / "profile.json"), model, cluster_of(megabits))
    for name, plan in plans.items():
        plan.save(folder / f"{name}.json")
    theirs = {f"torch/{name}": [model.half] for name in model.schedules}
    theirs |= {f"torch/{name}": list(model.quarters) for name in model.chunked}
    return {
        "plans": list(plans),
        "theirs": theirs,
        "micro_batches": MICRO_BATCHES,
        "rounds": ROUNDS,
        "steps": STEPS,
        "host": next(iter(HOSTS.values())) if megabits else "127.0.0.1",
        "port": 29511,
    }


def plans_of(profile: Profile, model: Model, cluster: Cluster) -> dict[str, Plan]:
    """The peer's split under three schedules, and the plan that pipectl makes."""
    request = PlanRequest("peer", batch_size=BATCH, micro_batches=MICRO_BATCHES)
    same = plan_of_stages(profile, cluster, request, halves(profile, model.half), (None, None))
    everything = default_warm_up("gpipe", RANKS, MICRO_BATCHES)
    deeper = policy_b(RANKS, MICRO_BATCHES)
    return {
        "pipectl, 1F1B": same,
        "pipectl, GPipe": replace(same, schedule="gpipe", warm_up=everything),
        "pipectl, 1F1B with policy B": replace(same, warm_up=deeper),
        "pipectl, its plan": make_plan(profile, cluster, request),
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
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if megabits:
        environment["GLOO_SOCKET_IFNAME"] = DEVICE
    alone = nullcontext(["mpiexec", "-n", str(RANKS)])
    with shaped_link(megabits) if megabits else alone as start:
        command = [*start, sys.executable, "-W", "ignore", "-m", "mpi4py", str(RANK), str(folder)]
        subprocess.run(command, env=environment, check=True, timeout=1800)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def peaks(folder: Path, case: dict[str, Any]) -> dict[str, list[int]]:
    """Peak resident bytes of both ranks, each in processes of its own."""
    ours, theirs = "pipectl, 1F1B", "torch/1F1B"
    own = {"rounds": 1, "plans": [], "theirs": {}}
    return {
        ours: run(folder, {**case, **own, "plans": [ours]}, 0)["peak_bytes"],
        theirs: run(folder, {**case, **own, "theirs": {theirs: case["theirs"][theirs]}}, 0)[
            "peak_bytes"
        ],
    }


def show(name: str, seconds: dict[str, list[float]]) -> None:
    middles = {key: statistics.median(times) for key, times in seconds.items()}
    best = min(value for key, value in middles.items() if key.startswith("torch/"))
    print(f"\n### {name}\n")
    print("| | median s a step | lowest to highest | against torch's 1F1B | its best |")
    print("|---|---|---|---|---|")
    for key, times in seconds.items():
        middle, spread = middles[key], f"{min(times):.3f} to {max(times):.3f}"
        ratios = f"{middles['torch/1F1B'] / middle:.2f}x | {best / middle:.2f}x"
        print(f"| {key} | {middle:.3f} | {spread} | {ratios} |", flush=True)


def main(cases: list[str]) -> None:
    print(f"## pipectl and torch.distributed.pipelining {torch.__version__}\n")
    print(f"{RANKS} ranks, one thread each; batch {BATCH} in {MICRO_BATCHES} micro-batches; AdamW.")
    for given in cases or CASES:
        name, _, text = given.partition("@")
        megabits = int(text or 0)
        with tempfile.TemporaryDirectory() as folder:
            case = write_case(Path(folder), MODELS[name], megabits)
            show(given, run(Path(folder), case, megabits)["seconds"])
            for key, sizes in ({} if megabits else peaks(Path(folder), case)).items():
                print(f"\nPeak resident, {key}: {', '.join(map(format_bytes, sizes))}")


if __name__ == "__main__":
    main(sys.argv[1:])
