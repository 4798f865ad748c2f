"""Starting the process that watches a rank, and telling it how the rank ends.

See :mod:`pipectl.watch`: it sees what becomes of ranks that can no longer say so themselves.
"""

from __future__ import annotations

import faulthandler
import json
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from mpi4py import MPI

import pipectl
from pipectl.batch import process
from pipectl.graph import TransferKind
from pipectl.plan import Plan
from pipectl.runs import RUN_VARIABLE, SCRIPT, RunDirectory
from pipectl.runtime.failure import Doing, warn
from pipectl.runtime.labelling import unlabelled
from pipectl.runtime.nodes import node_name
from pipectl.runtime.waiting import tell_of_waits
from pipectl.schedule import Kind
from pipectl.spec import JobSpec
from pipectl.watch.board import shared_memory
from pipectl.watch.charge import BYE, FAILING
from pipectl.watch.siblings import show_sign
from pipectl.watch.wire import Address, listen

_pipes: list[int] = []
"""Through which this process talks to its watcher, while it is watched."""
_signs: list[socket.socket] = []
"""That this process shows while it is watched."""
_held = threading.local()
"""Of each thread that forks: the signals that it had blocked before, as ``mask``."""


@contextmanager
def watched(
    communicator: MPI.Comm, directory: RunDirectory, spec: JobSpec, plan: Plan, doing: Doing
) -> Iterator[None]:
    """Have this rank watched while it works. Collective.

    Where no further process can be started, it works without.
    """
    own = listen() if communicator.rank == 0 else None
    address = communicator.bcast(None if own is None else _address(own))
    memory, board = shared_memory()
    doing.board.move_to(memory)
    tell_of_waits(doing.board.waits)
    handle = -1 if own is None else own.fileno()
    given = {
        **_identity(communicator, directory),
        **address._asdict(),
        "socket": handle,
        "board": board,
        "least_s": spec.launch.hang_after,
        "predicted_s": 0.0 if plan.prediction is None else plan.prediction.step_time_s,
        "kinds": [kind.name for kind in Kind],
        "lanes": [kind.value for kind in TransferKind],
    }
    sign = show_sign(given["secret"])
    pipe = _start(given, [number for number in (handle, board) if number >= 0])
    os.close(board)
    if own is not None:
        own.close()
    if pipe is None:
        if sign is not None:
            sign.close()
        warn("no process can be started that would watch this rank; it works without")
        yield
        return
    with _last_words(pipe, sign):
        yield


def _address(own: socket.socket) -> Address:
    hosts = list(dict.fromkeys((socket.gethostname(), node_name())))
    return Address(hosts, own.getsockname()[1], secrets.token_hex(16))


def _identity(communicator: MPI.Comm, directory: RunDirectory) -> dict[str, Any]:
    script = os.environ.get(SCRIPT, "")
    return {
        "rank": communicator.rank,
        "size": communicator.size,
        "pid": os.getpid(),
        "node": node_name(),
        "errors": str(directory.errors),
        "launched": RUN_VARIABLE in os.environ,
        "script": int(script) if script.isdecimal() else 0,
    }


def _start(given: Mapping[str, Any], keep: list[int]) -> int | None:
    """Start the process; the end of the pipe through which to talk to it."""
    theirs, ours = os.pipe()
    root = Path(pipectl.__file__).parents[1]
    argv = [sys.executable, "-S", "-m", "pipectl.watch.watcher"]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    pid = process.start_companion(
        argv, stdin=theirs, keep=keep, env=environment, stderr=unlabelled()
    )
    os.close(theirs)
    if pid is None:
        os.close(ours)
        return None
    os.write(ours, json.dumps(given).encode() + b"\n")
    os.set_blocking(ours, False)
    return ours


@contextmanager
def _last_words(pipe: int, sign: socket.socket | None) -> Iterator[None]:
    """Tell the watcher of signals, of python's own crash reports, and how the work ends."""
    _keep_from_children()
    _pipes.append(pipe)
    _signs.extend([] if sign is None else [sign])
    main = threading.current_thread() is threading.main_thread()
    if main:
        before = signal.signal(signal.SIGTERM, _end)
        woken = signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
    faulthandler.enable(pipe)
    said = FAILING
    try:
        yield
        said = BYE
    finally:
        faulthandler.disable()
        if main:
            signal.set_wakeup_fd(woken)
            signal.signal(signal.SIGTERM, before)
        if pipe in _pipes:  # no more in a child that ends like this
            _pipes.remove(pipe)
            with suppress(OSError):  # the watcher may be gone
                os.write(pipe, said)
        os.close(pipe)
        _take_down_signs()


def _take_down_signs() -> None:
    while _signs:
        _signs.pop().close()


def _end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    """End as without a handler; that there is one lets the watcher know of the signal."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@cache
def _keep_from_children() -> None:
    """Have forks of this process (workers of the user's data, say) say nothing to its watcher.

    It would take a signal to one of them, or its crash, for one of the rank.
    """
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_fall_silent)


def _hold() -> None:
    """Keep a signal to a child from arriving before the child has fallen silent."""
    if _pipes:
        _held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _release() -> None:
    mask = _held.__dict__.pop("mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _fall_silent() -> None:
    """In a child: end by signals as without a watcher."""
    if _pipes:
        _pipes.clear()
        _take_down_signs()
        faulthandler.disable()
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) is _end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _release()
