"""Ctrl-C while `plan` searches, and the line that says what goes on."""

from __future__ import annotations

import signal
import time
from io import StringIO

import pytest
from rich.console import Console

from pipectl.cli.interruption import interruptible
from pipectl.cli.plan_wait import Watch, stoppable
from pipectl.jobs.deadline import Deadline


def test_the_first_interrupt_ends_the_search_and_the_second_aborts(
    capfd: pytest.CaptureFixture[str],
) -> None:
    deadline = Deadline()
    with stoppable(deadline):
        assert not deadline()
        signal.raise_signal(signal.SIGINT)
        assert deadline()
        assert "ending with the best so far; Ctrl-C again aborts" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_whoever_ends_the_search_otherwise_gets_the_best_so_far_too(how: signal.Signals) -> None:
    deadline = Deadline()
    with interruptible(), stoppable(deadline):
        signal.raise_signal(how)
        assert deadline()


def test_afterwards_an_interrupt_is_what_it_was() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stoppable(Deadline()):
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_a_terminal_shows_what_goes_on_after_a_second() -> None:
    stream = StringIO()
    watch = Watch(Console(file=stream, force_terminal=True, width=80))
    watch.start()
    watch.tell("planning for 4 nodes")
    time.sleep(0.5)
    assert stream.getvalue() == ""
    time.sleep(1.2)
    watch.stop()
    assert "planning for 4 nodes: 1" in stream.getvalue()


def test_without_a_terminal_nothing_is_shown() -> None:
    stream = StringIO()
    watch = Watch(Console(file=stream, force_terminal=False))
    watch.start()
    time.sleep(1.3)
    watch.stop()
    assert stream.getvalue() == ""
