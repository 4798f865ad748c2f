"""Ranks that train one job in several ways in turns, in shared memory or over a slow link."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

RANK = Path(__file__).with_name("rank.py")
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


def train_in_turns(
    folder: Path, case: dict[str, Any], ranks: int, megabits: int = 0
) -> list[dict[str, Any]]:
    """What every rank found; see ``rank.py``.

    Args:
        megabits: a second, of the only link between two ranks; 0 for shared memory.
    """
    host = next(iter(HOSTS.values())) if megabits else "127.0.0.1"
    (folder / "case.json").write_text(json.dumps({**case, "host": host}))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # of the mpiexec beside it
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}
    if megabits:
        environment["GLOO_SOCKET_IFNAME"] = DEVICE
    alone = nullcontext(["mpiexec", "-n", str(ranks)])
    with shaped_link(megabits) if megabits else alone as begin:
        command = [*begin, sys.executable, "-W", "ignore", "-m", "mpi4py", str(RANK), str(folder)]
        # Warnings of the network's library are no figures.
        subprocess.run(command, env=environment, stdout=sys.stderr, check=True, timeout=1800)
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
