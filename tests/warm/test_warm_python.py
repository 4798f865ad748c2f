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
        [python, *words], capture_output=True, text=True, timeout=120, check=False, **how
    )


def test_words_directory_environment_and_input_are_the_callers(
    warm_python: str, tmp_path: Path
) -> None:
    code = "import os, sys; print(sys.argv, os.getcwd(), os.environb[b'TEST_WORD'], input())"
    how = {"cwd": tmp_path, "env": {**os.environ, "TEST_WORD": "é\udcff ü"}, "input": "in\n"}
    warm, fresh = (
        run(python, *ASK, code, "a", "b c", **how) for python in (warm_python, sys.executable)
    )
    assert (warm.returncode, warm.stderr) == (0, "")
    assert warm.stdout == fresh.stdout != ""


def test_draws_differ_from_process_to_process(warm_python: str) -> None:
    """As those of two processes would, if a rank forgot to seed them."""
    code = "import random, numpy; print(random.random(), numpy.random.random())"
    found = [run(warm_python, *ASK, code).stdout.split() for _ in range(2)]
    assert len({*found[0], *found[1]}) == 4


@pytest.mark.parametrize("end", ["sys.exit(7)", "1 / 0", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_it_ends_as_a_fresh_one(warm_python: str, end: str) -> None:
    code = "import os, signal, sys; from mpi4py import MPI; print('last words', end=''); "
    code += f"sys.stdout.flush(); {end}"
    warm, fresh = (run(python, *ASK, code) for python in (warm_python, sys.executable))
    assert (warm.returncode, warm.stdout) == (fresh.returncode, fresh.stdout)


def test_it_ends_with_whoever_stands_in_for_it(warm_python: str) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    client = subprocess.Popen([warm_python, *ASK, code], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    forked = psutil.Process(int(client.stdout.readline()))
    client.kill()
    assert client.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while forked.is_running() and forked.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    client.stdout.close()
