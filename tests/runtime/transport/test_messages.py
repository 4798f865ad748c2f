"""Messages arrive, and what is not what its receiver expects is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.mpi
HERE = Path(__file__).parent
HOWS = ("none", "poll", "thread", "none check", "thread check")
WAY = "from stage 3 (rank 0) to stage 5 (rank 1)"
SIZED = f"the activation of 'a' {WAY} has another size than planned"
Errors = dict[str, dict[str, str | None]]


@pytest.fixture(scope="module")
def errors(launch: Any, tmp_path_factory: pytest.TempPathFactory) -> Errors:
    """By the way messages go, and by case; that of the receiver, or else of the sender.

    Before, the ranks have exchanged sound messages in every mode and order, whole and in pieces.
    """
    file = tmp_path_factory.mktemp("wrong") / "errors"
    done = launch(2, HERE / "messages.py", file, *HOWS)
    assert file.exists(), done.stderr
    errors: Errors = {how: {} for how in HOWS}
    for line in file.read_text().splitlines():
        how, name, (of_sender, of_receiver) = json.loads(line)
        errors[how][name] = of_sender if name == "written meanwhile" else of_receiver
    assert "written meanwhile" in errors[HOWS[-1]], done.stderr  # the last of all
    return errors


def test_a_whole_message_of_another_size_is_named_with_both_sizes(errors: Errors) -> None:
    assert errors["none"] == {
        "short": f"{SIZED}: expected 24 B, received 12 B",
        "long": f"{SIZED}: expected 12 B, received more than 12 B",
        "nothing": f"{SIZED}: expected 24 B, received 0 B",
        "short, large": f"{SIZED}: expected 2.73 MiB, received 1.95 MiB",
        "long, large": f"{SIZED}: expected 1.95 MiB, received more than 1.95 MiB",
        "another type": None,  # as many bytes: see the checks
    }


@pytest.mark.parametrize("mode", ["poll", "thread"])
def test_messages_in_pieces_of_another_size_are_named(errors: Errors, mode: str) -> None:
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
