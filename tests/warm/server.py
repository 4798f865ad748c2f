"""A Python that has imported what takes long, and forks for every program it is asked to be.

Importing torch and what captures models takes a rank longer than most tests train. The tests
therefore start this once, as ``server.py SOCKET [FILE]``, and their ranks through client.py: MPI
starts clients, and the process of each rank is forked from here, with all that the file, a module,
has made. It ends when its standard input does.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import multiprocessing
import os
import random
import runpy
import selectors
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import captured
import message
import mpi4py
import numpy as np

LOADED = ("pipectl.rehearsal", "pipectl.runtime.worker")
"""Besides what captures models; nothing that starts a thread, which a fork would lack."""
LEVELS = ("single", "funneled", "serialized", "multiple")


@dataclass
class Child:
    """A forked process, and who asked for it."""

    pid: int
    handle: int
    asker: socket.socket


class Server:
    """Forks, tells how the processes end, and ends those whose client is gone."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.children: list[Child] = []
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)
        self.selector.register(0, selectors.EVENT_READ)

    def serve(self) -> message.Request | None:
        """What to be, in a forked process; None in the first one, at its end."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    asked = self._answer(self.listener.accept()[0])
                    if asked is not None:
                        return asked
                elif key.data is None:
                    for child in self.children:
                        os.kill(child.pid, signal.SIGKILL)
                    return None
                elif key.data in self.children:  # it may have ended in this same round
                    self._end(key.data, gone=key.fileobj is key.data.asker)

    def _answer(self, asker: socket.socket) -> message.Request | None:
        asked = message.receive(asker)
        if asked is None:
            asker.close()
            return None
        pid = os.fork()
        if pid == 0:
            asker.close()
            self._forget_all()
            return asked
        asked.close()
        with suppress(OSError):
            asker.sendall(b"%d\n" % pid)
        child = Child(pid, os.pidfd_open(pid), asker)
        self.children.append(child)
        for source in (child.handle, asker):
            self.selector.register(source, selectors.EVENT_READ, child)
        return None

    def _forget_all(self) -> None:
        for child in self.children:
            child.asker.close()
            os.close(child.handle)
        self.selector.close()
        self.listener.close()

    def _end(self, child: Child, *, gone: bool) -> None:
        if gone:
            os.kill(child.pid, signal.SIGKILL)
        _, status = os.waitpid(child.pid, 0)
        for source in (child.handle, child.asker):
            self.selector.unregister(source)
        with suppress(OSError):
            child.asker.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
        child.asker.close()
        os.close(child.handle)
        self.children.remove(child)


def become(asked: message.Request, python: str) -> None:
    """As ``python -m MODULE WORDS`` where the client is; what it starts in turn is warm, too."""
    sys.executable = python
    fork_instead_of_spawning()
    for number, given in enumerate(asked.files[:3]):
        os.dup2(given, number)
        os.close(given)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        mode = "w" if number else "r"  # the streams there are know what their files were
        setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(asked.environment)
    os.chdir(asked.directory)
    sys.path[0] = asked.directory
    random.seed()
    np.random.seed()
    sys.argv = asked.words[1:]
    if asked.words[1] == "mpi4py":
        run_with_mpi()
    else:
        runpy.run_module(asked.words[1], run_name="__main__", alter_sys=True)


def run_with_mpi() -> None:
    """MPI is started, and ended or aborted, as by importing it under ``-m mpi4py``."""
    from mpi4py import MPI

    level = os.environ.get("MPI4PY_RC_THREAD_LEVEL", LEVELS[-1])
    MPI.Init_thread(LEVELS.index(level))  # MPI.THREAD_SINGLE and so on
    try:
        runpy.run_module("mpi4py", run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        if not stop.code:
            atexit.register(MPI.Finalize)
        raise  # mpi4py aborts
    atexit.register(MPI.Finalize)


def fork_instead_of_spawning() -> None:
    """Neighbours of a profile then begin at once; TERM ends them, whatever their parent does on it.

    That is safe while nothing computes with several threads, and before MPI is started.
    """
    context_of, forks = multiprocessing.get_context, multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: (  # type: ignore[assignment, misc]
        forks if method == "spawn" else context_of(method)
    )
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def main(address: str, *files: str) -> None:
    mpi4py.rc.initialize = False  # not before the fork
    for name in LOADED:
        importlib.import_module(name)
    captured.capture()
    # Profiles have the same times of rows: two ranks would measure them for seconds.
    rows = importlib.import_module("pipectl.jobs.profiles")
    times = rows.RowTimes(compute=5e-5, begin=1e-3, end=1e-3)
    rows.user_cache = lambda _: None  # type: ignore[attr-defined]
    rows.measure_rows = lambda *_: (times, "")  # type: ignore[attr-defined]
    # Ranks that do measure them train a small model for a moment.
    probe: Any = importlib.import_module("pipectl.runtime.row_probe")
    probe.MAX_STEPS, probe._BLOCKS = 3, 1
    for file in map(Path, files):
        sys.path.insert(1, str(file.parent))
        importlib.import_module(file.stem)
    gc.freeze()  # what is loaded is shared with the forks for as long as nobody writes to it
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{address}.new")
        listener.listen(100)
        Path(f"{address}.new").rename(address)  # from now on there is an answer
        asked: Any = Server(listener).serve()
    if asked is not None:
        become(asked, str(Path(address).with_name("python")))


if __name__ == "__main__":
    main(*sys.argv[1:])
