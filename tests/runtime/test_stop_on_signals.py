"""Signals to a rank ask for a checkpoint and the end of the run, which ranks agree on."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from mpi4py import MPI

from pipectl.runtime.step_end import StepEnd
from pipectl.runtime.stopping import GO_ON, MOVE, STOP, WAIT, StopRequest, stop_on_signals
from pipectl.runtime.vote import Vote


@pytest.mark.parametrize(
    ("name", "content"), [("TERM", "TERM\n"), ("INT", "INT\n"), ("USR1", ""), ("USR2", "")]
)
def test_a_signal_makes_the_file_and_ends_nothing_but_forks(tmp_path, name, content):
    """Forks, such as workers that load data, end as ever; nothing ends without a directory."""
    number = signal.Signals[f"SIG{name}"]
    before = signal.getsignal(number)
    with stop_on_signals(tmp_path / "stop"):
        child = os.fork()
        if not child:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
        assert not (tmp_path / "stop").exists()
        signal.raise_signal(number)
    assert (tmp_path / "stop").read_text() == content
    with stop_on_signals(tmp_path / "gone" / "stop"):
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("step_s", "request_in", "stop_after"),
    [(0.125, 1, 2), (0.125, 26, 34), (100.0, 2, 2), (100.0, 7, 7)],  # a look per second
)
def test_a_request_in_a_long_step_is_obeyed_at_its_end(
    tmp_path, monkeypatch, step_s, request_in, stop_after
):
    """The lead time has to be enough for one step; short steps may be followed by one more."""
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    request, vote = StopRequest(tmp_path / "stop"), Vote(MPI.COMM_SELF, [])
    end: Any = SimpleNamespace(_vote=vote, settle=vote.count)
    for step in range(1, 40):
        now += step_s
        if step == request_in:
            (tmp_path / "stop").touch()
        vote.count()
        vote.cast(step, answer=request.answer())
        if StepEnd.answer(end) == STOP:
            break
    assert step == stop_after


@pytest.mark.parametrize(
    ("votes", "answers"),
    [
        ([MOVE, MOVE, GO_ON, GO_ON], [GO_ON, MOVE, GO_ON, GO_ON]),
        ([MOVE, STOP, STOP], [GO_ON, STOP]),  # no stages are built for a plan that never trains
        ([WAIT, MOVE, GO_ON, GO_ON], [GO_ON, MOVE, GO_ON, GO_ON]),
    ],
)
def test_a_move_is_answered_once_and_a_stop_comes_before_it(votes, answers):
    """Rank 0 votes for a move once more before it knows whether the first one was made."""
    end = StepEnd.__new__(StepEnd)
    end._vote = Vote(MPI.COMM_SELF, [])
    for step, (vote, answer) in enumerate(zip(votes, answers, strict=False)):
        end.settle()  # as at the end of every step
        end._vote.cast(step, answer=vote)
        assert end.answer() == answer
