"""Messages arrive, and what is not what its receiver expects is named."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipectl.cluster import assumed_cluster
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Profile
from pipectl.runs import read_errors, read_metrics
from pipectl.schedule.listed import Listed

pytestmark = pytest.mark.mpi
HERE = Path(__file__).parent
PARTS = HERE.parent / "job_parts.py"
HOWS = ("none", "poll", "thread", "none check", "thread check")
WAY = "from stage 3 (rank 0) to stage 5 (rank 1)"
SIZED = f"the activation of 'a' {WAY} has another size than planned"
Errors = dict[str, dict[str, str | None]]


@pytest.fixture(scope="module")
def errors(launch: Any, tmp_path_factory: pytest.TempPathFactory) -> Errors:
    """By the way messages go, and by case; that of the receiver, or else of the sender."""
    file = tmp_path_factory.mktemp("wrong") / "errors"
    done = launch(2, HERE / "wrong_messages.py", file, *HOWS)
    errors: Errors = {how: {} for how in HOWS}
    for line in file.read_text().splitlines():
        how, name, (of_sender, of_receiver) = json.loads(line)
        errors[how][name] = of_sender if name == "written meanwhile" else of_receiver
    assert "written meanwhile" in errors[HOWS[-1]], done.stderr  # the last of all
    return errors


def test_whole_messages(errors: Errors) -> None:
    assert errors["none"] == {
        "short": f"{SIZED}: expected 24 B, received 12 B",
        "long": f"{SIZED}: expected 12 B, received more than 12 B",
        "nothing": f"{SIZED}: expected 24 B, received 0 B",
        "short, large": f"{SIZED}: expected 2.73 MiB, received 1.95 MiB",
        "long, large": f"{SIZED}: expected 1.95 MiB, received more than 1.95 MiB",
        "another type": None,  # as many bytes: see the checks
    }


@pytest.mark.parametrize("mode", ["poll", "thread"])
def test_messages_in_pieces(errors: Errors, mode: str) -> None:
    in_pieces = dict(errors[mode])
    assert in_pieces.pop("another type") is None
    assert all(error and error.startswith(SIZED) for error in in_pieces.values()), in_pieces
    in_a_piece = f"{SIZED} in a piece of it: expected 976 KiB, received more than 976 KiB"
    assert in_pieces["long, large"] == in_a_piece


@pytest.mark.parametrize("how", ["none check", "thread check"])
def test_checks_find_what_sizes_do_not_tell(errors: Errors, how: str) -> None:
    """Either the size is seen first, or what the sender says of the message."""
    activation = "activation of micro-batch {} from stage 3 to 5"
    said = f"a message {WAY} is not what was sent: {activation.format(1)}: sent was 'a', "
    checked = dict(errors[how])
    other, meanwhile = checked.pop("another micro-batch"), checked.pop("written meanwhile")
    assert f"the sender sent the {activation.format(7)}, the receiver expects the " in str(other)
    assert f"'a' changed while it was sent ({activation.format(1)}" in str(meanwhile)
    assert all(error and error.startswith((said, SIZED)) for error in checked.values()), checked
    assert str(checked["another byte"]).startswith(f"{said}float32 [6]")
    assert checked["another type"] == (
        f"{said}int32 [6] with strides [1], arrived is 'a', float32 [6] with strides [1]"
    )
    if how != "none check":
        assert checked["fewer pieces"] == (
            f"{said}float32 [262144] with strides [1], "
            "arrived is 'a', float32 [524288] with strides [1]"
        )


def test_messages_arrive_in_every_mode_and_order_whole_and_in_pieces(launch: Any) -> None:
    """With and without help, in place and through copies, and several on their way at once."""
    done = launch(3, HERE / "exchanges.py")
    assert done.returncode == 0, done.stderr


def test_a_job_ends_on_all_ranks_and_names_the_message(launch: Any, make_run: Any) -> None:
    """The second rank believes that its first value has one sample less."""
    run = make_run(2)
    done = launch(2, HERE.parent / "changed_ranks.py", "forgetful", run.path)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    (error,) = read_errors(run)
    assert (error.rank, error.stage, error.type) == (1, 1, "WorkerError")
    assert "from stage 0 (rank 0) to stage 1 (rank 1) has another size" in error.message
    assert re.search(r"expected (\d+) B, received more than \1 B", error.message)
    assert "PIPECTL_CHECK_MESSAGES" in error.cure
    assert read_metrics(run) == []


def test_gradients_do_not_change_while_they_are_sent_and_are_read_in_any_order(
    make_run: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one sample a micro-batch, the gradients of places are views of the one that is sent."""
    cluster = assumed_cluster("here", [2], 2, None)
    placed = make_run(
        2,
        model={"factory": f"{PARTS}:Placed", "kwargs": {"count": 24}},
        training={"steps": 2, "batch_size": 4},
        pipeline={"stages": 2, "schedule": "1f1b", "micro_batches": 4},
    )
    profile = Profile.load(placed.profile)
    alike = [replace(o, forward_s=1e-3, backward_s=1e-3, timings={}) for o in profile.operators]
    request = PlanRequest("job", batch_size=4, micro_batches=4, stages=2, schedule="1f1b")
    plan = make_plan(replace(profile, operators=tuple(alike)), cluster, request)
    assert plan.stages[1].nodes[0].startswith(("unsqueeze", "add"))
    plan.save(placed.plan)
    crossed = make_run(2)
    listed = Listed.read("0F0,0F1,0B1,0B0\n1F0,1F1,1B0,1B1\n", "crossed.csv")
    request = PlanRequest("job", batch_size=4, listed=listed)
    make_plan(Profile.load(crossed.profile), cluster, request).save(crossed.plan)
    monkeypatch.setenv("PIPECTL_CHECK_MESSAGES", "1")
    train(placed, crossed)
