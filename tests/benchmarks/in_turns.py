"""What benchmarks of real ranks share: jobs, their profiles, and ranks that train them in turns."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from overlap import HOSTS, shaped_link

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link
from pipectl.plan import Plan
from pipectl.profile import Profile
from pipectl.runs import RunDirectory

HERE = Path(__file__).resolve().parent
RANKS = HERE / "ranks"
WORKER = "pipectl.runtime.worker"
MODELS = HERE / "models"
CONFIGS = HERE.parents[1] / "configs" / "models"
CORPUS = HERE.parent / "corpus"
FAST = Link(latency_s=5e-6, bandwidth_bytes_per_s=4e9)
"""Shared memory."""
NO_VARIABLES: Mapping[str, str] = {}


@dataclass(frozen=True)
class Job:
    """What is trained, with batches of so many samples."""

    model: dict[str, Any]
    loss: str
    data: dict[str, Any]
    batch: int = 32

    def write(self, folder: Path, ranks: int) -> None:
        """``job.yaml``."""
        document = {
            "version": 1,
            "name": "benchmark",
            "site_defaults": False,
            "model": self.model,
            "loss": {"factory": self.loss},
            "data": self.data,
            "optimizer": {"factory": "torch.optim:AdamW", "kwargs": {"lr": 1e-4}},
            "training": {"steps": 1, "batch_size": self.batch},
            "resources": {"nodes": 1, "tasks_per_node": ranks, "cpus_per_task": 1},
        }
        (folder / "job.yaml").write_text(yaml.safe_dump(document))


def gpt(vocabulary: int = 98, *, layers: int = 8, width: int = 256, batch: int = 32) -> Job:
    """An even GPT, unless its vocabulary is large."""
    sizes = {"layers": layers, "width": width, "heads": 8, "vocabulary": vocabulary}
    return Job(
        {"factory": f"{CONFIGS}/gpt.py:build", "kwargs": {**sizes, "dropout": 0.0}},
        f"{CONFIGS}/gpt.py:loss",
        {"factory": f"{CONFIGS}/text.py:training", "kwargs": {"length": 128, "megabytes": 0.5}},
        batch,
    )


def vision(name: str) -> Job:
    """A model of torchvision."""
    return Job(
        {"factory": f"{CORPUS}/vision.py:build", "kwargs": {"name": name}},
        "torch.nn:CrossEntropyLoss",
        {"factory": f"{CORPUS}/own.py:Images", "kwargs": {"pixels": 64, "classes": 10}},
    )


def even_cnn() -> Job:
    """Equal blocks of convolutions."""
    return Job(
        {"factory": f"{MODELS}/even.py:cnn"},
        "torch.nn:CrossEntropyLoss",
        {"factory": f"{CORPUS}/own.py:Images", "kwargs": {"pixels": 32, "classes": 10}},
    )


def profiled(folder: Path, micro_batches: int | None, *, again: bool = False) -> Profile:
    """The profile of the job in a folder, measured with as many neighbours as it has ranks.

    Args:
        micro_batches: of a batch; with None, micro-batches of several sizes are measured.
        again: whether it is measured although it is known.
    """
    command = [sys.executable, "-m", "pipectl", "profile", "job.yaml", "-o", "profile.json"]
    parts = f"pipeline.micro_batches={micro_batches or 'auto'}"
    settings = ["--scheduler", "local", "--set", parts]
    more = ["--again"] if again else []
    done = subprocess.run([*command, *settings, *more], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return Profile.load(folder / "profile.json")


def cluster_of(ranks: int, between: Link | None = None) -> Cluster:
    """One node with a core for every rank; or, with a link, as many nodes."""
    if between is None:
        nodes: tuple[Node, ...] = (Node("n", ranks, ranks, Device("cpu")),)
    else:
        nodes = tuple(Node(f"n{index}", 1, 1, Device("cpu")) for index in range(ranks))
    return Cluster("benchmark", "given", nodes, FAST, between or FAST)


def start(
    program: str,
    folder: Path,
    ranks: int,
    megabits: int = 0,
    variables: Mapping[str, str] = NO_VARIABLES,
) -> None:
    """Run a program of ``ranks/`` to its end.

    Args:
        megabits: a second, of the only link between two ranks; 0 for shared memory.
        variables: of the ranks' environment.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    if megabits:
        environment["GLOO_SOCKET_IFNAME"] = "overlap0"
    alone = nullcontext(["mpiexec", "-n", str(ranks)])
    with shaped_link(megabits) if megabits else alone as launch:
        worker = [sys.executable, "-W", "ignore", "-m", "mpi4py", str(RANKS / program)]
        command = [*launch, *worker, str(folder)]
        # Warnings of the network's library are no figures.
        subprocess.run(command, env=environment, stdout=sys.stderr, check=True, timeout=1800)


def run_ranks(
    module: str, run: RunDirectory, ranks: int, variables: Mapping[str, str] = NO_VARIABLES
) -> None:
    """Run a worker on a run directory to its end, in as many processes as there are ranks."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # of the mpiexec beside it
    worker = [sys.executable, "-W", "ignore", "-m", "mpi4py", "-m", module, "--run", str(run.path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables, "PATH": path}
    command = ["mpiexec", "-n", str(ranks), *worker]
    subprocess.run(command, env=environment, stdout=sys.stderr, check=True, timeout=1800)


def train_in_turns(
    folder: Path,
    case: dict[str, Any],
    ranks: int,
    megabits: int = 0,
    variables: Mapping[str, str] = NO_VARIABLES,
) -> list[dict[str, Any]]:
    """What every rank found; see ``ranks/turns.py``."""
    (folder / "case.json").write_text(json.dumps(case))
    start("turns.py", folder, ranks, megabits, variables)
    found: list[dict[str, Any]] = json.loads((folder / "result.json").read_text())
    return found


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Median, lowest and highest."""
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:{form}} ({least:{form}} to {most:{form}})"


def ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """Of the medians."""
    return statistics.median(ones) / statistics.median(others)


def peak_of(plan: Plan) -> int:
    """Predicted, of the rank that holds the most."""
    assert plan.prediction is not None
    return max(plan.prediction.peak_memory_bytes)


def rates(plan: Plan, steps_s: Sequence[float]) -> list[float]:
    """Samples per second of some steps."""
    return [plan.batch_size / step_s for step_s in steps_s]


def may_shape() -> bool:
    """Whether links can be shaped here."""
    return os.geteuid() == 0 and bool(shutil.which("ip") and shutil.which("tc"))


HOST = next(iter(HOSTS.values()))
"""Of the first rank, where links are shaped."""
