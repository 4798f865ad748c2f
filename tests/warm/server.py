"""A Python that has imported what takes long, and forks for every program it is asked to be.

Importing torch and what captures models takes a rank longer than most tests train. The tests
therefore start this once, as ``server.py FOLDER [MODULE]``, and their ranks through client.py,
which is ``FOLDER/python``: MPI starts clients, and the process of each rank is forked from here,
with all that the module has made. It ends with the tests.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import multiprocessing
import os
import random
import re
import runpy
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from pipectl.jobs import profiles
from pipectl.link import RowTimes
from pipectl.profiler import effort
from pipectl.runs import sources
from pipectl.runtime import waiting
from pipectl.spec import code

LOADED = [
    *("pipectl.cli", "pipectl.jobs.in_job", "pipectl.jobs.planning", "pipectl.jobs.prepare"),
    *("pipectl.jobs.submit", "pipectl.profiler.job", "pipectl.rehearsal"),
]
MEASURING = {"pipectl.runtime.rehearsal", "pipectl.runtime.links.probe"}
"""Programs of ranks whose times count."""
PAUSE_S = 1e-3


def load(*modules: str) -> None:
    """Nothing of it starts MPI or a thread, which a fork would lack."""
    for name in LOADED:
        importlib.import_module(name)
    # Profiles have the same times of rows: two ranks would measure them for seconds.
    vars(profiles)["start_row_probe"] = lambda *_: (
        RowTimes(compute=5e-5, begin=1e-3, end=1e-3),
        "",
    )
    vars(profiles)["user_cache"] = lambda _: None
    limits = vars(effort)["_LIMITS"]  # of what no test looks at, the times of profiles
    limits[effort.Effort.NORMAL] = limits[effort.Effort.FAST]
    sys.path.insert(1, str(Path(__file__).parents[2]))
    cell_jobs = importlib.import_module("tests.equality.cell_jobs")
    cell_jobs.captured("gpt", plain=False)  # the first takes long
    for name in modules:
        importlib.import_module(name)
    del sys.path[1]
    # No user's code has run here yet.
    vars(sources)["_began_s"] = None
    vars(code)["_loaded"].clear()
    vars(code)["_opened"].clear()
    gc.freeze()  # what is loaded is shared with the forks for as long as nobody writes to it


def cuda_has_begun() -> bool:
    """Whether a library has asked CUDA for anything here: no fork can use it then."""
    not_initialized = 3
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != not_initialized


def accepted(listener: socket.socket, tests: int) -> socket.socket | None:
    """A client, in a process that is forked for it; None where and when the tests end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how these processes end
    while tests not in select.select([listener, tests], [], [])[0]:
        client, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return client
        client.close()
    return None


def watch(client: socket.socket, pid: int, tests: int) -> None:
    """Tell a client how its process ends, and end that with the client or the tests."""
    process = os.pidfd_open(pid)
    with suppress(OSError):
        client.sendall(b"%d\n" % pid)
    if process not in select.select([process, client, tests], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with suppress(OSError):
        client.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def become(client: Path, files: dict[int, int], python: str) -> None:
    """As ``python -m MODULE WORDS`` where the client is, or as what multiprocessing spawns.

    What it starts in turn is warm, too.

    Args:
        files: those that the client has, by their numbers there.
    """
    command, environment = (
        client.joinpath(name).read_bytes().split(b"\0")[:-1] for name in ("cmdline", "environ")
    )
    words = [*map(os.fsdecode, command)]
    os.chdir(client / "cwd")
    (mask,) = re.findall(r"^Umask:\s*(\d+)$", (client / "status").read_text(), re.MULTILINE)
    os.umask(int(mask, 8))
    sys.executable = python
    fork_instead_of_spawning()
    apart = {number: fcntl.fcntl(file, fcntl.F_DUPFD, 1000) for number, file in files.items()}
    for file in files.values():
        os.close(file)
    for number, file in apart.items():
        os.dup2(file, number)
        os.close(file)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        mode = "w" if number else "r"  # the streams there are know what their files were
        setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    os.environb.clear()
    os.environb.update(entry.split(b"=", 1) for entry in environment)
    sys.path[0] = os.getcwd()  # noqa: PTH109
    find_accelerators()
    if not MEASURING & {*words}:  # ranks of several tests wait, and each look costs time of a core
        vars(waiting)["_LONG_PAUSE_S"] = PAUSE_S
    random.seed()
    np.random.seed()
    if words[-1] == "--multiprocessing-fork":
        sys.argv = ["-c", words[-1]]
        exec(words[-2])
    else:
        sys.argv = words[words.index("-m") + 1 :]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def find_accelerators() -> None:
    """Load the pretended one if it is on the path, as torch does when it is imported."""
    if "PRETENDED_LATE" in os.environ and not hasattr(torch, "pretended"):
        sys.path[1:1] = os.environ["PYTHONPATH"].split(os.pathsep)
        importlib.import_module("pretended").load()


def fork_instead_of_spawning() -> None:
    """Neighbours of a profile then begin at once; TERM ends them, whatever their parent does on it.

    That is safe while nothing computes with several threads, and before MPI is started.
    """
    context_of, forks = multiprocessing.get_context, multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: (  # type: ignore[assignment, misc]
        forks if method == "spawn" else context_of(method)
    )
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def main(folder: Path, *modules: str) -> None:
    load(*modules)
    if cuda_has_begun():
        print("CUDA has begun", flush=True)
        return
    tests = os.pidfd_open(int(os.environ["PIPECTL_TESTS_PID"]))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen(100)
        print("ready", flush=True)
        client = accepted(listener, tests)
    if client is None:
        return
    said, inherited, _, _ = socket.recv_fds(client, 1000, 100)
    caller, numbers = said.decode().split()
    pid = os.fork()
    if pid:
        for number in inherited:
            os.close(number)
        watch(client, pid, tests)
        os._exit(0)
    client.close()
    os.close(tests)
    files = dict(zip(map(int, numbers.split(",")), inherited, strict=True))
    become(Path("/proc", caller), files, str(folder / "python"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
