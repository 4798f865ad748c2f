"""A process forked from a warm Python is to its caller what a fresh one would be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

ASK = ["-m", "mpi4py", "-c"]


def run(python: str, *words: str, **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, *words], capture_output=True, text=True, timeout=300, check=False, **how
    )


def test_words_directory_environment_and_input_are_the_callers_and_draws_its_own(
    warm_python: str, tmp_path: Path
) -> None:
    """Draws would be those of all forks, if a rank forgot to seed them."""
    code = "import os, sys, random, numpy; print(sys.argv, os.getcwd(), os.environb[b'TEST_WORD'], "
    code += "input(), os.umask(0)); print(random.random()); print(numpy.random.random())"
    how = {
        "cwd": tmp_path,
        "env": {**os.environ, "TEST_WORD": "é\udcff\nü="},
        "input": "in\n",
        "umask": 0o27,
    }
    pythons = (warm_python, warm_python, sys.executable)
    done = [run(python, *ASK, code, "a", "", "b -m\nc", **how) for python in pythons]
    assert [(each.returncode, each.stderr) for each in done] == [(0, "")] * 3
    said, *draws = zip(*(each.stdout.splitlines() for each in done), strict=True)
    assert len({*said}) == 1
    assert len({*draws[0], *draws[1]}) == 6


@pytest.mark.parametrize("end", ["sys.exit(7)", "1 / 0", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_it_ends_as_a_fresh_one(warm_python: str, end: str) -> None:
    code = "import os, signal, sys; from mpi4py import MPI; print('last words', end=''); "
    code += f"sys.stdout.flush(); {end}"
    warm, fresh = (run(python, *ASK, code) for python in (warm_python, sys.executable))
    assert (warm.returncode, warm.stdout) == (fresh.returncode, fresh.stdout)


def test_it_ends_with_whoever_stands_in_for_it(warm_python: str) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with subprocess.Popen([warm_python, *ASK, code], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        forked = psutil.Process(int(client.stdout.readline()))
        client.kill()
    assert client.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while forked.is_running() and forked.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
