"""Notes that travel with messages, and what they find."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipectl.cluster import assumed_cluster
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Profile
from pipectl.schedule.listed import Listed

PARTS = Path(__file__).parents[1] / "job_parts.py"


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("byte", "a message from stage 0 (rank 0) to stage 1 (rank 1) is not what was sent: "
         "activation of micro-batch 1 from stage 0 to 1: sent was 'a', float32 [2, 3]"),
        ("micro-batch", "the sender sent the activation of micro-batch 7 from stage 0 to 1, "
         "the receiver expects the activation of micro-batch 1"),
        ("write", "'a' changed while it was sent (activation of micro-batch 1"),
    ],
)  # fmt: skip
def test_a_damaged_message_ends_both_ranks(launch: Any, damage: str, words: str) -> None:
    done = launch(2, Path(__file__).with_name("damage.py"), damage)
    assert done.returncode not in (0, 17)
    assert words in done.stderr


@pytest.mark.mpi
def test_messages_arrive_in_every_mode_and_order_whole_and_in_pieces(launch: Any) -> None:
    """With and without help, in place and through copies, and several on their way at once."""
    done = launch(3, Path(__file__).with_name("exchanges.py"))
    assert done.returncode == 0, done.stderr


@pytest.mark.mpi
def test_a_send_does_not_wait_until_its_note_is_read(launch: Any) -> None:
    done = launch(2, Path(__file__).with_name("damage.py"), "none")
    assert done.returncode == 0, done.stderr


@pytest.mark.mpi
def test_gradients_do_not_change_while_they_are_sent(
    make_spec: Any, make_run: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one sample a micro-batch, the gradients of places are views of the one that is sent."""
    spec = make_spec(
        2,
        model={"factory": f"{PARTS}:Placed", "kwargs": {"count": 24}},
        training={"steps": 2, "batch_size": 4},
        pipeline={"stages": 2, "schedule": "1f1b", "micro_batches": 4},
    )
    run = make_run(spec)
    profile = Profile.load(run.profile)
    alike = [replace(o, forward_s=1e-3, backward_s=1e-3, timings={}) for o in profile.operators]
    request = PlanRequest("job", batch_size=4, micro_batches=4, stages=2, schedule="1f1b")
    cluster = assumed_cluster("here", [2], 2, None)
    plan = make_plan(replace(profile, operators=tuple(alike)), cluster, request)
    assert plan.stages[1].nodes[0].startswith(("unsqueeze", "add"))
    plan.save(run.plan)
    monkeypatch.setenv("PIPECTL_CHECK_MESSAGES", "1")
    train(run)


@pytest.mark.mpi
def test_gradients_may_be_read_in_another_order_than_they_are_sent(
    make_spec: Any, make_run: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = Listed.read("0F0,0F1,0B1,0B0\n1F0,1F1,1B0,1B1\n", "crossed.csv")
    run = make_run(make_spec(2))
    request = PlanRequest("job", batch_size=4, listed=listed)
    cluster = assumed_cluster("here", [2], 2, None)
    make_plan(Profile.load(run.profile), cluster, request).save(run.plan)
    monkeypatch.setenv("PIPECTL_CHECK_MESSAGES", "1")
    train(run)
