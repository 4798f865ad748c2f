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
SAY = "import os, sys; print(sys.argv, os.getcwd(), os.environ['TEST_WORD'], input())"


def run(python: str, *words: str, **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, *words], capture_output=True, text=True, timeout=120, check=False, **how
    )


def test_words_directory_environment_and_input_are_the_callers(
    warm_python: str, tmp_path: Path
) -> None:
    how = {"cwd": tmp_path, "env": {**os.environ, "TEST_WORD": "é\udcff ü"}, "input": "in\n"}
    asked = [*ASK, SAY.replace("os.environ", "os.environb").replace("'TEST", "b'TEST"), "a", "b c"]
    warm, fresh = (run(python, *asked, **how) for python in (warm_python, sys.executable))
    assert (warm.returncode, warm.stderr) == (0, "")
    assert warm.stdout == fresh.stdout
    assert warm.stdout.startswith("['-c', 'a', 'b c'] ")


def test_it_has_loaded_torch_and_mpi_and_not_the_planners_compiler(warm_python: str) -> None:
    code = (
        "import sys; print(*(name in sys.modules for name in ('torch', 'mpi4py.MPI', 'llvmlite')))"
    )
    assert run(warm_python, *ASK, code).stdout == "True True False\n"
    assert run(warm_python, "-c", code).stdout == "False False False\n"  # Python itself


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
    assert (warm.stderr == "") == (fresh.stderr == "")


def test_it_ends_with_whoever_stands_in_for_it(warm_python: str) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    client = subprocess.Popen([warm_python, *ASK, code], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    forked = psutil.Process(int(client.stdout.readline()))
    assert forked.pid != client.pid
    client.kill()
    assert client.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while forked.is_running() and forked.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    client.stdout.close()


AWAIT = """
import signal, time

calls = []
signal.signal(10, lambda *given: calls.append(print(*given)))
print(flush=True)
while not calls:
    time.sleep(0.01)
"""


def test_signals_reach_it(warm_python: str) -> None:
    client = subprocess.Popen([warm_python, *ASK, AWAIT], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    client.stdout.readline()
    client.send_signal(signal.SIGUSR1)
    assert client.communicate(timeout=60)[0].startswith("10 <frame")
    assert client.returncode == 0


SPAWN = """
import multiprocessing, signal, time

def work():
    begun.set()
    time.sleep(600)

signal.signal(signal.SIGTERM, lambda *_: None)
context = multiprocessing.get_context("spawn")
begun = context.Event()
child = context.Process(target=work)
child.start()
begun.wait()
child.terminate()
child.join()
print(type(child).__name__, child.exitcode)
"""


def test_what_it_would_spawn_is_forked_and_ends_when_it_is_told_to(warm_python: str) -> None:
    assert run(warm_python, *ASK, SPAWN).stdout == "ForkProcess -15\n"


@pytest.mark.mpi
def test_ranks_find_each_other_and_one_that_dies_ends_all(launch_warm: Any) -> None:
    code = "from mpi4py import MPI; print(MPI.COMM_WORLD.allgather(MPI.COMM_WORLD.rank))"
    assert launch_warm(3, code).stdout.splitlines() == ["[0, 1, 2]"] * 3
    dies = "import os; from mpi4py import MPI; c = MPI.COMM_WORLD\n"
    dies += "if c.rank == 1: os.kill(os.getpid(), 9)\nc.Barrier()"
    assert launch_warm(3, dies).returncode != 0


@pytest.fixture
def launch_warm(warm_python: str) -> Any:
    mpiexec = Path(warm_python).with_name("mpiexec")
    if not mpiexec.exists():
        pytest.skip("no mpiexec beside Python")
    return lambda ranks, code: run(str(mpiexec), "-n", str(ranks), warm_python, *ASK, code)
