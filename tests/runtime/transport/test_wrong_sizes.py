"""Messages that have another size than their receiver expects."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipectl.runs import read_errors, read_metrics

pytestmark = pytest.mark.mpi
HERE = Path(__file__).parent
CASES = {"short", "long", "nothing", "short, large", "long, large", "another type"}
HOWS = ("none", "poll", "thread", "none check", "thread check")
WAY = "from stage 3 (rank 0) to stage 5 (rank 1)"


@pytest.fixture(scope="module")
def errors(
    launch: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, str | None]]:
    """By the way messages go, and by case."""
    file = tmp_path_factory.mktemp("wrong") / "errors"
    done = launch(2, HERE / "wrong_size.py", file, *HOWS)
    errors: dict[str, dict[str, str | None]] = {how: {} for how in HOWS}
    for line in file.read_text().splitlines():
        how, name, error = json.loads(line)
        errors[how][name] = error
    assert all(errors[how].keys() >= CASES for how in HOWS), done.stderr
    return errors


def test_whole_messages(errors: Any) -> None:
    start = f"the activation of 'a' {WAY} has another size than planned: expected "
    assert errors["none"] == {
        "short": f"{start}24 B, received 12 B",
        "long": f"{start}12 B, received more than 12 B",
        "nothing": f"{start}24 B, received 0 B",
        "short, large": f"{start}2.73 MiB, received 1.95 MiB",
        "long, large": f"{start}1.95 MiB, received more than 1.95 MiB",
        "another type": None,  # as many bytes: see the checks
    }


@pytest.mark.parametrize("mode", ["poll", "thread"])
def test_messages_in_pieces(errors: Any, mode: str) -> None:
    in_pieces = dict(errors[mode])
    assert in_pieces.pop("another type") is None
    start = f"the activation of 'a' {WAY} has another size than planned"
    assert all(error and error.startswith(start) for error in in_pieces.values()), in_pieces
    in_a_piece = f"{start} in a piece of it: expected 976 KiB, received more than 976 KiB"
    assert in_pieces["long, large"] == in_a_piece


@pytest.mark.parametrize("how", ["none check", "thread check"])
def test_checks_find_what_sizes_do_not_tell(errors: Any, how: str) -> None:
    """Either the size is seen first, or what the sender says of the message."""
    said = (
        f"a message {WAY} is not what was sent: activation of micro-batch 1 from stage 3 to 5: "
        "sent was 'a', "
    )
    sized = f"the activation of 'a' {WAY} has another size than planned"
    checked = errors[how]
    assert all(error and error.startswith((said, sized)) for error in checked.values()), checked
    assert checked["another type"] == (
        f"{said}int32 [6] with strides [1], arrived is 'a', float32 [6] with strides [1]"
    )
    if how != "none check":
        assert checked["fewer pieces"] == (
            f"{said}float32 [262144] with strides [1], "
            "arrived is 'a', float32 [524288] with strides [1]"
        )


def test_a_job_ends_on_all_ranks_and_names_the_message(
    launch: Any, make_spec: Any, make_run: Any
) -> None:
    """The second rank believes that its first value has one sample less."""
    run = make_run(make_spec(2))
    done = launch(2, HERE / "forgetful_worker.py", "--run", run.path)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    (error,) = read_errors(run)
    assert (error.rank, error.stage, error.type) == (1, 1, "WorkerError")
    assert "from stage 0 (rank 0) to stage 1 (rank 1) has another size" in error.message
    assert re.search(r"expected (\d+) B, received more than \1 B", error.message)
    assert "PIPECTL_CHECK_MESSAGES" in error.cure
    assert read_metrics(run) == []
