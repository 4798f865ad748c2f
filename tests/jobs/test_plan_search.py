"""Time limits and interrupts of a search."""

from types import SimpleNamespace

from pipectl.jobs.plan_search import PlanSearch


def test_the_budget_is_of_each_plan_and_an_interrupt_of_all(monkeypatch):
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("pipectl.jobs.plan_search.time", clock)
    search, endless = PlanSearch(budget_s=10), PlanSearch()
    expired = []
    for now[0], restarts in ((9.9, False), (9.9, True), (19.5, False), (20.0, False), (20.0, True)):
        if restarts:
            search.restart()
        expired.append(search.expired())
    assert expired == [False, False, False, True, False]
    assert search.cut_short
    assert (endless.expired(), endless.cut_short) == (False, False)
    endless.interrupted = True
    assert not endless.cut_short, "no planner was told"
    endless.restart()
    assert (endless.expired(), endless.cut_short) == (True, True)
