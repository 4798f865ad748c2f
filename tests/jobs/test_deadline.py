from pipectl.jobs.deadline import Deadline


def test_without_a_budget_there_is_no_end():
    now = [0.0]
    deadline = Deadline(None, lambda: now[0])
    now[0] = 1e9
    assert not deadline()
    assert not deadline.cut_short


def test_the_budget_is_of_each_plan():
    now = [0.0]
    deadline = Deadline(10, lambda: now[0])
    now[0] = 9.9
    assert not deadline()
    deadline.restart()
    now[0] = 19.5
    assert not deadline()
    now[0] = 20.0
    assert deadline()
    deadline.restart()
    assert not deadline()
    assert deadline.cut_short


def test_an_interrupt_holds_for_all_plans():
    deadline = Deadline(None, lambda: 0.0)
    deadline.interrupt()
    deadline.restart()
    assert deadline()
    assert deadline.interrupted


def test_a_planner_that_never_asked_was_not_cut_short():
    deadline = Deadline(None, lambda: 0.0)
    deadline.interrupt()
    assert not deadline.cut_short
