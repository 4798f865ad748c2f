"""How soon a lost rank is named, and how soon all processes of the job are gone, by fault.

Four ranks on two nodes that are both this machine pass a message round; a rank may be missed for
4 s (``hang_after: 3s``, and four intervals of two watchers). A lost node is its two ranks and their
watcher, stopped all at once (nothing is heard of it, as after a power cut) or killed.

    python tests/benchmarks/detection.py [--times 3] [FAULT ...]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from pipectl.runs import RunDirectory, read_errors

RING = Path(__file__).parents[1] / "runtime" / "watch" / "ranks_that_wait.py"
RANKS, LIMIT_S = 4, 60.0
GROUPS = Path("/sys/fs/cgroup/memory")
OF_A_RANK = ("killed", "frozen", "crashes", "memory", "killed for memory")
OF_A_NODE = {"node stopped": "suspend", "node killed": "kill"}


def start(run: RunDirectory, fault: str) -> subprocess.Popen[str]:
    """The launcher of a job; a rank of the second node meets with the fault, or only waits."""
    run.errors.mkdir(parents=True)
    command = [sys.executable, "-m", "mpi4py", str(RING), "--run", str(run.path)]
    nodes = [["-n", "2", "-env", "SLURMD_NODENAME", name, *command] for name in ("n1", "n2")]
    happens = "lingers" if fault in OF_A_NODE else fault
    variables = {"TEST_HAPPENS": happens, "TEST_RANK": "3", "PIPECTL_RUN_DIRECTORY": str(run.path)}
    mpiexec = Path(sys.prefix) / "bin" / "mpiexec"
    return subprocess.Popen(
        [str(mpiexec) if mpiexec.exists() else "mpiexec", *nodes[0], ":", *nodes[1]],
        env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def family(run: RunDirectory, ranks: Iterable[int]) -> list[psutil.Process]:
    """Ranks and their watchers that are alive."""
    processes = []
    for rank in ranks:
        for pid, created in json.loads((run.path / f"pids-{rank}").read_text())["family"]:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.create_time() == created:
                    processes.append(process)
    return processes


def wait_until(condition: Callable[[], object]) -> float:
    """When it is true, in seconds since the epoch."""
    deadline = time.time() + LIMIT_S
    while not condition():
        if time.time() > deadline:
            raise TimeoutError
        time.sleep(0.01)
    return time.time()


@contextmanager
def small_group(run: RunDirectory) -> Iterator[None]:
    """A control group of 64 MiB for the rank that takes too much."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = [line.split(":", 2)[2] for line in lines if line.split(":")[1] == "memory"]
    group = GROUPS / (own[0].lstrip("/") if own else ".") / f"detection-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(2**26))
        (run.path / "group").write_text(str(group))
        yield
    finally:
        group.rmdir()


def measure(fault: str) -> tuple[float, float, str]:
    """Seconds from the fault to its report and to the end of all processes, and what was said."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(Path(folder) / "run")
        launcher = start(run, fault)
        try:
            if fault == "killed for memory":
                with small_group(run):
                    return observe(run, fault)
            return observe(run, fault)
        finally:
            for process in family(run, range(RANKS)):
                process.kill()
            launcher.kill()
            launcher.communicate()


def observe(run: RunDirectory, fault: str) -> tuple[float, float, str]:
    wait_until((run.path / "happened").exists)
    everybody = family(run, range(RANKS))
    if fault in OF_A_NODE:
        time.sleep(1.5)
        lost = family(run, range(2, RANKS))
        assert len(lost) == 3, lost
        happened = time.time()
        for process in lost:
            getattr(process, OF_A_NODE[fault])()
    else:
        happened = float((run.path / "happened").read_text())
    reported = wait_until(lambda: read_errors(run))
    (error,) = read_errors(run)
    rest = [process for process in everybody if process not in (lost if fault in OF_A_NODE else ())]
    psutil.wait_procs(rest, timeout=LIMIT_S)
    words = f"rank {error['rank']}: {error['message'].partition(';')[0]}"
    return reported - happened, time.time() - happened, words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("faults", nargs="*", default=[*OF_A_RANK, *OF_A_NODE])
    options = parser.parse_args()
    print(f"{'fault':18} {'named after':>12} {'gone after':>12}")
    for fault in options.faults:
        try:
            results = [measure(fault) for _ in range(options.times)]
        except OSError as error:
            print(f"{fault:18} cannot be tried here: {error}", flush=True)
            continue
        named, gone, words = zip(*results, strict=True)
        times = (f"{statistics.median(each):.1f} ({max(each):.1f}) s" for each in (named, gone))
        print(
            f"{fault:18} {' '.join(f'{each:>12}' for each in times)}  {sorted(set(words))}",
            flush=True,
        )


if __name__ == "__main__":
    main()
