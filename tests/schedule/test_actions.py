import numpy as np
import pytest

from pipectl.schedule import Action, Actions, Kind, Program

ACTIONS = [
    Action(Kind.FORWARD, 1, 2),
    Action(Kind.SEND_START, 1, 2, channel=3),
    Action(Kind.BACKWARD, 1, 2, start=4, stop=8, weight_version=1),
    Action(Kind.UPDATE, 1),
]


def test_columns_hold_what_the_actions_hold():
    columns = Actions.of(ACTIONS)
    assert list(columns) == ACTIONS
    assert len(columns) == 4
    assert columns.column("channel").tolist() == [-1, 3, -1, -1]


def test_columns_by_name_take_the_defaults_of_an_action():
    columns = Actions.of_columns(kind=np.array([0, 1]), stage=np.array([5, 6]))
    assert list(columns) == [Action(Kind.FORWARD, 5), Action(Kind.BACKWARD, 6)]


def test_columns_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        Actions.of(ACTIONS).rows[0, 0] = 1


def test_equal_columns_are_equal_and_hash_equally():
    first, second = Actions.of(ACTIONS), Actions.of(ACTIONS)
    assert first == second
    assert hash(first) == hash(second)
    assert first != Actions.of(ACTIONS[1:])
    assert len(Program(first).prologue) == 0


def test_only_computations_are_compute():
    names = {kind.name for kind in Kind if not kind.is_compute}
    moves = ("SEND", "RECEIVE", "REDUCE", "OFFLOAD", "FETCH")
    assert names == {f"{move}_{part}" for move in moves for part in ("START", "WAIT")}
