"""The spec names the schedules there are, in the groups that the planner makes of them."""

from pipectl.planner import request
from pipectl.schedule import NAMES
from pipectl.spec import types as schedules


def test_the_spec_takes_every_schedule_there_is():
    assert set(schedules.BUILT_IN) == set(NAMES) == set(request.SCHEDULES)
    assert len(schedules.BUILT_IN) == len(NAMES)


def test_the_groups_are_those_of_the_planner():
    assert schedules.ROUND == request.ROUND
    assert schedules.V_SHAPED == request.V_SHAPED
    assert schedules.UNFLUSHED == request.UNFLUSHED


def test_every_schedule_without_a_group_has_one_stage_a_rank():
    others = {*schedules.ROUND, *schedules.V_SHAPED, *schedules.UNFLUSHED}
    assert set(schedules.ONE_STAGE) == set(schedules.BUILT_IN) - others
