"""Starts the watcher of each node, and tells it how the ranks end.

See :mod:`pipectl.watch`: the watcher reports what happens to ranks that can no longer report it
themselves. A rank communicates through unnamed memory and an unnamed pipe: the watcher opens those
of its own user's processes.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType

from mpi4py import MPI

import pipectl
from pipectl.batch import process
from pipectl.plan import Plan
from pipectl.runs import RUN_VARIABLE, SCRIPT, RunDirectory, StartDirectory, start_of_job
from pipectl.runtime.nodes import grouped, node_name
from pipectl.runtime.rank_process import job_log, warn
from pipectl.runtime.waiting import broadcast, gather_all
from pipectl.spec import JobSpec
from pipectl.watch.board import Board
from pipectl.watch.rank import BYE, FAILING, LocalRank
from pipectl.watch.watcher import Settings

_LOOK_S = 1.0
_DEATH_S = 2.0
"""Time for the launcher to end this rank after another one has died."""
_MAX_STARTS = 4
_pipes: list[int] = []
"""Pipes from this process to its watcher, while it is watched."""
_masks = threading.local()
"""Per forking thread, the signals that it had blocked before, as ``mask``."""


@contextmanager
def watched(
    communicator: MPI.Comm, directory: RunDirectory, spec: JobSpec, plan: Plan, board: Board
) -> Iterator[None]:
    """Watch this rank while it works. Collective.

    If no further process can be started, it works without a watcher.
    """
    start = start_of_job(directory)
    folder = broadcast(communicator, _make_folder(start) if communicator.rank == 0 else "")
    nodes = list(grouped(gather_all(communicator, _place())).values())
    number = next(index for index, ranks in enumerate(nodes) if communicator.rank in ranks)
    # Both ends are open here, so the pipe never breaks, whatever happens to the watcher.
    reader, pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    process_id = os.getpid()
    started, ours = process.start_time(process_id) or 0, f"/proc/{process_id}/fd"
    memory, words = f"{ours}/{board.handle}", f"{ours}/{reader}"
    me = LocalRank(communicator.rank, process_id, started, memory, words)
    ranks = gather_all(communicator, me)
    if communicator.rank == nodes[number][0]:
        script = os.environ.get(SCRIPT, "")
        settings = Settings(
            name=node_name(),
            node=number,
            nodes=len(nodes),
            size=communicator.size,
            ranks=tuple(ranks[rank] for rank in nodes[number]),
            launched=RUN_VARIABLE in os.environ,
            script=int(script) if script.isdecimal() else 0,
            folder=folder,
            errors=str(start.errors),
            min_s=spec.launch.hang_after,
            predicted_s=0.0 if plan.prediction is None else plan.prediction.step_time_s,
        )
        board.on_step = _Watcher(settings).keep
    try:
        with _last_words(pipe):
            yield
    finally:
        board.on_step = None
        os.close(reader)


def _place() -> tuple[object, ...]:
    """What ranks must have in common for one watcher: containers may share none of it."""
    known: list[object] = [node_name()]
    with suppress(OSError):
        status = Path("/proc/self/ns/pid").stat()
        known += [status.st_dev, status.st_ino]
    return tuple(known)


def _make_folder(start: StartDirectory) -> str:
    """Make the folder for the watchers of a start."""
    with suppress(OSError):
        start.watch.mkdir(mode=0o700, exist_ok=True)
    return str(start.watch)


class _Watcher:
    """The process that watches this node, run by the rank that starts it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = json.dumps(settings._asdict()).encode()
        self._starts, self._looked_at = 0, time.monotonic()
        self._pid: int | None = None
        self._start()

    def keep(self) -> None:
        """Restart it if it has ended; checked once per second."""
        now = time.monotonic()
        if self._pid is None or now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        if process.has_ended(self._pid):
            warn("the process that watches this node's ranks has ended; it is started again")
            self._start()

    def _start(self) -> None:
        self._starts += 1
        self._pid = None
        if self._starts <= _MAX_STARTS:
            argv = [sys.executable, "-S", "-m", "pipectl.watch.watcher"]
            environment = {**os.environ, "PYTHONPATH": str(Path(pipectl.__file__).parents[1])}
            with suppress(OSError), os.fdopen(os.memfd_create("pipectl-watcher"), "wb+") as words:
                words.write(self._settings)
                words.seek(0)
                self._pid = process.start_detached(
                    argv,
                    directory=Path("/"),
                    stdin=words.fileno(),
                    stderr=job_log(),
                    env=environment,
                )
        if self._pid is None:
            warn("the process that watches the ranks cannot be started; they run without it")


@contextmanager
def _last_words(pipe: int) -> Iterator[None]:
    """Report signals, Python's own crash reports and the end of the work to the watcher."""
    _keep_from_children()
    _pipes.append(pipe)
    before = signal.signal(signal.SIGTERM, _end)
    woken = signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
    faulthandler.enable(pipe)
    last = FAILING
    try:
        yield
        last = BYE
    except MPI.Exception:
        # Another rank may have died, so that MPI could not reach it. Its watcher reports that, and
        # the launcher ends this rank.
        time.sleep(_DEATH_S)
        raise
    finally:
        faulthandler.disable()
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGTERM, before)
        if pipe in _pipes:  # not in a child that ends like this
            _pipes.remove(pipe)
            with suppress(OSError):  # it is full
                os.write(pipe, last)
            os.close(pipe)


def _end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    """End as without a handler; the handler only reports the signal to the watcher."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@cache
def _keep_from_children() -> None:
    """Keep forks of this process (workers of the user's data, say) from reporting to its watcher.

    The watcher would take a signal to a fork, or its crash, for one of the rank.
    """
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_fall_silent)


def _hold() -> None:
    """Keep a signal to a child from arriving before the child has disconnected from the watcher."""
    if _pipes:
        _masks.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _release() -> None:
    mask = _masks.__dict__.pop("mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _fall_silent() -> None:
    """In a child: end by signals as without a watcher, and close the parent's pipes."""
    if _pipes:
        faulthandler.disable()
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) is _end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while _pipes:
            os.close(_pipes.pop())
    _release()
