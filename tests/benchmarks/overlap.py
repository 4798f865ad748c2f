"""Overlap of messages with computation, over a link of 1 Gbit/s.

Two ranks in two network namespaces start a message, compute for twice its time, and wait for the
rest. All figures are multiples of the time of the message alone: the wait, the slowdown of the
computation, and the processor time of the thread. It needs root, ``ip`` and ``tc``; without them it
measures in shared memory and says so.

    python tests/benchmarks/overlap.py [MEGABITS_PER_SECOND] [MEBIBYTES]
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RANK = Path(__file__).resolve().with_name("ranks") / "overlap.py"
HOSTS = {"overlapA": "10.77.0.1", "overlapB": "10.77.0.2"}
DEVICE = "overlap0"
ENTER = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
host=$1; shift
case $host in {a}) space=overlapA;; *) space=overlapB;; esac
exec ip netns exec $space bash -c "$*"
"""


@contextmanager
def shaped_link(megabits: int) -> Iterator[list[str]]:
    """The beginning of a command whose two ranks have only this link."""
    with tempfile.TemporaryDirectory() as folder:
        enter = Path(folder) / "enter"
        enter.write_text(ENTER.format(a=HOSTS["overlapA"]))
        enter.chmod(enter.stat().st_mode | stat.S_IXUSR)
        try:
            make_link(megabits)
            yield [
                *("ip", "netns", "exec", "overlapA"),
                *("mpiexec", "-launcher", "rsh", "-launcher-exec", str(enter)),
                *("-hosts", ",".join(HOSTS.values()), "-ppn", "1", "-n", "2"),
                *("-env", "MPIR_CVAR_NOLOCAL", "1", "-env", "UCX_TLS", "tcp,self"),
                *("-env", "UCX_NET_DEVICES", DEVICE, "-env", "FI_PROVIDER", "tcp"),
            ]
        finally:
            for space in HOSTS:
                subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def make_link(megabits: int) -> None:
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


def call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def main(megabits: int, mebibytes: int) -> None:
    rank = [sys.executable, "-m", "mpi4py", str(RANK), str(mebibytes * 2**20)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    print(f"## Overlap of a message of {mebibytes} MiB with work")
    if os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc"):
        print(f"\nTwo network namespaces, {megabits} Mbit/s.", flush=True)
        with shaped_link(megabits) as launch:
            subprocess.run([*launch, *rank], env=environment, check=True)
    else:
        print("\nShared memory: a shaped link needs root, ip and tc.", flush=True)
        subprocess.run(["mpiexec", "-n", "2", *rank], env=environment, check=True)


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[1:]]
    main(*(*given, *(1000, 16)[len(given) :]))
