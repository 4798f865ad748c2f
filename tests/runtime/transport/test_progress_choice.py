"""What follows from a trial, and a trial over a real MPI."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from pipectl.runtime.transport.choice import HELPED, STAGED, Choice, choose_progress, decide
from pipectl.runtime.transport.transfer import WHOLE


@pytest.mark.parametrize(
    ("poll", "thread", "mode"),
    [
        (0.0, 0.0, "none"),
        (0.4, 0.4, "none"),
        (0.9, 0.8, "thread"),
        (1.9, 0.8, "thread"),
        (0.9, 0.1, "poll"),
        (1.9, 0.5, "poll"),
        (0.1, 0.9, "thread"),
    ],
)
def test_help_is_chosen_where_it_hides_much_of_a_message(poll, thread, mode) -> None:
    choice = decide({"poll": poll, "thread": thread})
    assert choice.mode == mode
    assert f"poll hides {poll:.0%} more of a message" in choice.why
    assert choice.to_json()["gained"] == {"poll": poll, "thread": thread}


def test_without_thread_support_there_is_polling() -> None:
    assert decide({"poll": 0.9}).mode == "poll"
    assert decide({"poll": 0.0}).mode == "none"


def test_a_single_rank_tries_nothing() -> None:
    assert choose_progress(MPI.COMM_SELF).why == "a single rank"


@pytest.mark.parametrize("mode", ["none", "poll", "thread"])
def test_the_job_may_force_a_choice(mode: str) -> None:
    choice = choose_progress(MPI.COMM_SELF, mode)
    assert (choice.mode, choice.why) == (mode, "set in the job")


def test_an_mpi_for_one_thread_gets_no_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    assert choose_progress(MPI.COMM_SELF, "thread").mode == "poll"


@pytest.mark.parametrize(
    ("mode", "staged", "pieces"),
    [
        ("none", False, WHOLE),
        ("none", True, STAGED),
        ("poll", False, HELPED),
        ("thread", True, HELPED),
    ],
)
def test_pieces_follow_from_the_choice(mode, staged, pieces) -> None:
    with Choice(mode, "").progress(staged=staged) as progress:
        assert (progress.mode, progress.pieces) == (mode, pieces)


TRIAL = """
from mpi4py import MPI
from pipectl.runtime.transport import choose_progress
for message_bytes in 0, 2**22:
    found = choose_progress(MPI.COMM_WORLD.Dup(), "auto", message_bytes)
    everyone = MPI.COMM_WORLD.allgather(found)
    assert all(choice == found for choice in everyone), everyone
    assert dict(found.gained).keys() == {"poll", "thread"}
"""


@pytest.mark.mpi
def test_a_trial_ends_alike_on_three_ranks(launch, tmp_path) -> None:
    script = tmp_path / "trial.py"
    script.write_text(TRIAL)
    done = launch(3, script)
    assert done.returncode == 0, done.stderr
