"""What benchmarks share: jobs, which the commands profile and train, and tables."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipectl.batch.script import TIGHT_HEAP
from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link
from pipectl.plan import Plan
from pipectl.profile import Profile
from pipectl.runs import RunDirectory

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CORPUS = Path(__file__).resolve().parents[1] / "corpus"
FAST = Link(latency_s=5e-6, bandwidth_bytes_per_s=4e9)
"""Shared memory."""
NOTHING: Mapping[str, Any] = {}


def gpt(vocabulary: int = 98, *, layers: int = 8, width: int = 256) -> dict[str, Any]:
    """The parts of a job that trains an even GPT, unless its vocabulary is large."""
    sizes = {"layers": layers, "width": width, "heads": 8, "vocabulary": vocabulary}
    text = {"length": 128, "megabytes": 0.5}
    return {
        "model": {"factory": f"{CONFIGS}/models/gpt.py:build", "kwargs": {**sizes, "dropout": 0.0}},
        "loss": {"factory": f"{CONFIGS}/models/gpt.py:loss"},
        "data": {"factory": f"{CONFIGS}/models/text.py:training", "kwargs": text},
    }


def vision(name: str, *, pixels: int = 64, **kwargs: Any) -> dict[str, Any]:
    """The parts of a job that trains a model of torchvision."""
    images = {"pixels": pixels, "classes": 10}
    return {
        "model": {"factory": f"{CORPUS}/vision.py:build", "kwargs": {"name": name, **kwargs}},
        "loss": {"factory": "torch.nn:CrossEntropyLoss"},
        "data": {"factory": f"{CORPUS}/own.py:Images", "kwargs": images},
    }


def write_job(folder: Path, parts: Mapping[str, Any], batch: int, ranks: int) -> None:
    """``job.yaml``, for so many ranks on one node."""
    document = {
        "version": 1,
        "name": "benchmark",
        "site_defaults": False,
        "optimizer": {"factory": "torch.optim:AdamW", "kwargs": {"lr": 1e-4}},
        "training": {"steps": 1, "batch_size": batch},
        "resources": {"nodes": 1, "tasks_per_node": ranks, "cpus_per_task": 1},
        **parts,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(document))


def pipectl(folder: Path, *command: str, settings: Mapping[str, Any] = NOTHING) -> dict[str, Any]:
    """What a command says that runs in a folder."""
    sets = (f"--set={key}={json.dumps(value)}" for key, value in settings.items())
    words = [sys.executable, "-m", "pipectl", *command, *sets, "--json"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def profiled(folder: Path, micro_batches: int | str, *more: str) -> Profile:
    """The profile of ``job.yaml``; ``auto`` measures micro-batches of several sizes."""
    command = ("profile", "job.yaml", "-o", "profile.json", "--scheduler", "local", *more)
    pipectl(folder, *command, settings={"pipeline.micro_batches": micro_batches})
    return Profile.load(folder / "profile.json")


def trained(folder: Path, job: Path | str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What ``status`` says of a job that was profiled, planned and trained."""
    pipectl(folder, "submit", str(job), "--scheduler", "local", "--wait", settings=settings)
    return pipectl(folder, "status", "last")


def run_ranks(module: str, run: RunDirectory, ranks: int) -> None:
    """Run a program of MPI ranks on a run directory to its end, as a job does."""
    mpiexec = Path(sys.executable).with_name("mpiexec")
    program = (sys.executable, "-W", "ignore", "-m", "mpi4py", "-m", module, "--run", str(run.path))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": TIGHT_HEAP}
    command = [str(mpiexec), "-n", str(ranks), *program]
    subprocess.run(command, env=environment, stdout=sys.stderr, check=True)


def cluster_of(ranks: int, between: Link | None = None) -> Cluster:
    """One node with a core for every rank; or, with a link, as many nodes."""
    each, nodes = (ranks, 1) if between is None else (1, ranks)
    node = Node("n", each, each, Device("cpu"))
    return Cluster("benchmark", "given", (node,) * nodes, FAST, between or FAST)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """The lines of a table in Markdown."""
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print every line as soon as it is known."""
    for line in table(columns, rows):
        print(line, flush=True)


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Median, lowest and highest."""
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:{form}} ({least:{form}} to {most:{form}})"


def peak_of(plan: Plan) -> int:
    """Predicted, of the rank that holds the most."""
    assert plan.prediction is not None
    return max(plan.prediction.peak_memory_bytes)
