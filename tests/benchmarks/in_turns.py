"""What benchmarks of real ranks share: jobs, their profiles, and ranks that train them in turns."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link
from pipectl.plan import Plan
from pipectl.profile import Profile
from pipectl.runs import RunDirectory

HERE = Path(__file__).resolve().parent
WORKER = "pipectl.runtime.worker"
CONFIGS = HERE.parents[1] / "configs" / "models"
CORPUS = HERE.parent / "corpus"
FAST = Link(latency_s=5e-6, bandwidth_bytes_per_s=4e9)
"""Shared memory."""
NO_VARIABLES: Mapping[str, str] = {}
HOSTS = {"benchA": "10.77.0.1", "benchB": "10.77.0.2"}
"""Addresses of two ranks by their network namespace."""
DEVICE = "bench0"
"""Of the link between these."""
ENTER = f"""#!/bin/bash
while [[ $1 == -* ]]; do shift; done
host=$1; shift
case $host in {HOSTS["benchA"]}) space=benchA;; *) space=benchB;; esac
exec ip netns exec $space bash -c "$*"
"""
"""Runs a command in the namespace of a host, as ``rsh`` would on the host."""


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


def launch(
    program: Sequence[str],
    ranks: int,
    megabits: int = 0,
    variables: Mapping[str, str] = NO_VARIABLES,
) -> None:
    """Run a program of MPI ranks to its end.

    Args:
        program: what follows ``python``.
        megabits: a second, of the only link between two ranks; 0 for shared memory.
        variables: of the ranks' environment.
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # of the mpiexec beside it
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables, "PATH": path}
    if megabits:
        environment["GLOO_SOCKET_IFNAME"] = DEVICE
    alone = nullcontext(["mpiexec", "-n", str(ranks)])
    with shaped_link(megabits) if megabits else alone as begin:
        command = [*begin, sys.executable, "-W", "ignore", "-m", "mpi4py", *program]
        # Warnings of the network's library are no figures.
        subprocess.run(command, env=environment, stdout=sys.stderr, check=True, timeout=1800)


def run_worker(
    module: str, run: RunDirectory, ranks: int, variables: Mapping[str, str] = NO_VARIABLES
) -> None:
    """Run a worker on a run directory to its end."""
    launch(("-m", module, "--run", str(run.path)), ranks, variables=variables)


def train_in_turns(
    folder: Path, case: dict[str, Any], ranks: int, megabits: int = 0
) -> list[dict[str, Any]]:
    """What every rank found; see ``rank.py``."""
    host = next(iter(HOSTS.values())) if megabits else "127.0.0.1"
    (folder / "case.json").write_text(json.dumps({**case, "host": host}))
    launch((str(HERE / "rank.py"), str(folder)), ranks, megabits)
    found: list[dict[str, Any]] = json.loads((folder / "result.json").read_text())
    return found


@contextmanager
def shaped_link(megabits: int) -> Iterator[list[str]]:
    """The beginning of a command whose two ranks have only this link; needs root, ip and tc."""
    with tempfile.TemporaryDirectory() as folder:
        enter = Path(folder) / "enter"
        enter.write_text(ENTER)
        enter.chmod(0o755)
        remove_link()  # of a run that was killed
        try:
            make_link(megabits)
            yield [
                *("ip", "netns", "exec", "benchA"),
                *("mpiexec", "-launcher", "rsh", "-launcher-exec", str(enter)),
                *("-hosts", ",".join(HOSTS.values()), "-ppn", "1", "-n", "2"),
                *("-env", "MPIR_CVAR_NOLOCAL", "1", "-env", "UCX_TLS", "tcp,self"),
                *("-env", "UCX_NET_DEVICES", DEVICE, "-env", "FI_PROVIDER", "tcp"),
            ]
        finally:
            remove_link()


def remove_link() -> None:
    """Nothing if there is none."""
    for space in HOSTS:
        subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def make_link(megabits: int) -> None:
    """Two network namespaces and the link between them."""

    def call(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True)

    first, second = HOSTS
    for space in HOSTS:
        call("ip", "netns", "add", space)
    call(
        *("ip", "link", "add", DEVICE, "netns", first),
        *("type", "veth", "peer", "name", DEVICE, "netns", second),
    )
    for space, host in HOSTS.items():
        inside = ("ip", "netns", "exec", space)
        call(*inside, "ip", "addr", "add", f"{host}/24", "dev", DEVICE)
        call(*inside, "ip", "link", "set", DEVICE, "up")
        call(*inside, "ip", "link", "set", "lo", "up")
        shape = ("rate", f"{megabits}mbit", "burst", "256k", "latency", "50ms")
        call(*inside, "tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", *shape)
    time.sleep(3.0)  # until the link is up for both sides


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
