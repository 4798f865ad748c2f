"""``pytest -n COUNT``: tests run in processes that are forked after all tests are collected.

Tests are collected once, so torch and the modules of the tests are loaded once. A process that is
free runs the next group of tests, and its reports go to the first process.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

import captured
import kernels
import mpi4py
import pytest


class Worker:
    """A process, seen from the first one.

    Attributes:
        left: indices of tests that it was given and has not begun.
        test: the index of the one that it runs.
    """

    def __init__(self, session: pytest.Session, others: list[Worker]) -> None:
        self.connection, theirs = Pipe()
        self.left: deque[int] = deque()
        self.test: int | None = None
        self.is_silent = False
        self.pid = os.fork()
        if self.pid == 0:
            for other in (self, *others):
                other.connection.close()
            run_as_worker(session, theirs)
        theirs.close()
        self.handle = os.pidfd_open(self.pid)

    @property
    def sources(self) -> list[Any]:
        """What can be waited for: its messages, and its end."""
        return [self.handle] if self.is_silent else [self.connection, self.handle]

    def run(self, group: list[int]) -> None:
        self.left.extend(group)
        self.connection.send(group)

    def stop(self) -> None:
        """After its current test; what it says until then is lost."""
        with suppress(OSError, EOFError):
            self.connection.send([])
            while self.connection.recv():
                pass
        self.close()

    def close(self) -> int:
        """The exit status."""
        self.connection.close()
        os.close(self.handle)
        return os.waitpid(self.pid, 0)[1]


class Reporter:
    """In a worker, takes the place of what prints; ``_tw`` is for the stacks of a timeout."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection
        self._tw = config.get_terminal_writer()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        data = hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        w = warning_message
        shown = str(w.message), w.category.__name__, w.filename, w.lineno
        self._connection.send(("warning", (*shown, when, nodeid, location)))


def run_as_worker(session: pytest.Session, connection: Connection) -> None:
    """Run groups of tests, asking for the next when one is done, until there is none; then end."""
    code = 1
    try:
        sys.modules["__main__"] = ModuleType("__main__")  # processes that tests spawn would load it
        start_mpi()
        config, plugins = session.config, session.config.pluginmanager
        capture = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files are those of all processes
        capture.start_global_capturing()
        capture.suspend_global_capture()
        reporter = Reporter(config, connection)
        plugins.unregister(name="terminalreporter")
        plugins.register(reporter, "terminalreporter")
        while group := connection.recv():
            for index, following in zip(group, [*group[1:], None], strict=True):
                # After the last test of a group, only what the whole session shares is kept.
                after = session if following is None else session.items[following]
                connection.send(("test", index))
                config.hook.pytest_runtest_protocol(item=session.items[index], nextitem=after)
                if connection.poll():  # the first process gives up
                    break
            connection.send(("free", None))
        code = 0
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    try:
        session._setupstate.teardown_exact(None)
    except BaseException:
        traceback.print_exc()
        code = 1
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(60)  # for an end that hangs
    connection.close()
    finish_mpi()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def run_tests(
    session: pytest.Session, processes: int, group_of: Callable[[str], str]
) -> bool | None:
    """Run the collected tests in so many processes; None leaves that to pytest.

    Args:
        group_of: tests of one group, by their node ids, run in one process, one after the other.
    """
    items, config = session.items, session.config
    groups = groupby(range(len(items)), key=lambda index: group_of(items[index].nodeid))
    waiting = deque(list(indices) for _, indices in groups)
    processes = min(processes, len(waiting))
    if processes < 2 or session.testsfailed or config.option.collectonly:
        start_mpi()
        return None
    if "pipectl.capture" in sys.modules:
        captured.capture()
    if "pipectl.compiled" in sys.modules:
        kernels.load()
    config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    sys.stdout.flush()
    gc.collect()
    gc.freeze()
    hand_out(session, waiting, processes)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


def hand_out(session: pytest.Session, waiting: deque[list[int]], processes: int) -> None:
    """Let workers run all groups that wait, or until the session stops."""
    workers: list[Worker] = []
    try:
        while (waiting or workers) and not (session.shouldstop or session.shouldfail):
            while waiting and len(workers) < processes:
                workers.append(Worker(session, workers))
                workers[-1].run(waiting.popleft())
            for worker in ready(workers):
                handle(session, worker, waiting)
                if worker.connection.closed:
                    workers.remove(worker)
    finally:
        for worker in workers:
            worker.stop()


def ready(workers: list[Worker]) -> Iterator[Worker]:
    """Those that have sent something, or ended."""
    events = wait([source for worker in workers for source in worker.sources])
    return (worker for worker in list(workers) if any(s in events for s in worker.sources))


def handle(session: pytest.Session, worker: Worker, waiting: deque[list[int]]) -> None:
    """Take in a message of a worker; close its connection at its end."""
    hook = session.config.hook
    try:
        if worker.is_silent or not worker.connection.poll():
            what, data = "end", None
        else:
            what, data = worker.connection.recv()
    except EOFError:
        worker.is_silent = True  # it is about to end
        return
    if what == "end":
        status = worker.close()
        if worker.test is not None:
            ending = os.waitstatus_to_exitcode(status)
            hook.pytest_runtest_logreport(report=crash(session.items[worker.test], ending))
            if worker.left:
                waiting.appendleft(list(worker.left))
        elif status:
            session.shouldfail = f"the end of a process with tests failed: {status}"
        return
    if what == "test":
        worker.test = worker.left.popleft()
        item = session.items[worker.test]
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    elif what == "report":
        report = hook.pytest_report_from_serializable(config=session.config, data=data)
        hook.pytest_runtest_logreport(report=report)
    elif what == "warning":
        text, category, file, line, when, nodeid, location = data
        kind = type(category, (Warning,), {})
        told = warnings.WarningMessage(kind(text), kind, file, line)
        hook.pytest_warning_recorded.call_historic(
            kwargs={
                "warning_message": told, "when": when, "nodeid": nodeid, "location": location,
            }
        )  # fmt: skip
    else:
        worker.test = None
        following = waiting.popleft() if waiting else []
        worker.run(following)


def crash(item: pytest.Item, code: int) -> pytest.TestReport:
    """The report of a test whose process ended."""
    return pytest.TestReport(
        item.nodeid,
        item.location,
        keywords={},
        outcome="failed",
        longrepr=f"{item.nodeid}: its process ended with {code}",
        when="call",
    )


def start_mpi() -> None:
    """Start MPI in this process if a module of a test has imported it, or will."""
    mpi4py.rc.initialize = True
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
            atexit.register(finish_mpi)


def finish_mpi() -> None:
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.Finalize()
