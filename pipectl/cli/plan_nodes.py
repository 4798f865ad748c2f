"""`pipectl plan --nodes 1,2,4`: the same step on different numbers of nodes."""

from __future__ import annotations

from pipectl.cli.console import output, plain, say_json
from pipectl.cli.plan_ask import Ask
from pipectl.cli.plan_nodes_view import scaling_lines, scaling_table
from pipectl.cli.plan_subject import find_subject
from pipectl.cli.plan_wait import stoppable
from pipectl.planner.answers.scaling import scaling

_LEAST_WIDTH = 100


def answer(ask: Ask) -> None:
    """Plan for every number, and print the table."""
    from pipectl.jobs.answer import scaling_json
    from pipectl.jobs.deadline import Deadline
    from pipectl.jobs.engines import planner_named

    assert ask.nodes is not None, "checked"
    subject, _ = find_subject(ask)
    deadline = Deadline(ask.budget_s)
    planner = planner_named(ask.planner, deadline)
    with stoppable(deadline) as watch:
        found = scaling(
            subject.profile,
            subject.cluster,
            subject.request,
            ask.nodes,
            planner,
            lambda nodes: watch.tell(f"planning for {nodes} nodes"),
        )
    if ask.as_json:
        say_json({**scaling_json(found), "cut_short": deadline.cut_short})
        return
    console = output()
    request = subject.request
    title = f"{request.name}: {request.batch_size} samples a step; node-hours are of 1000 steps"
    console.print(plain(title, "bold"))
    console.print(scaling_table(found, wide=console.width >= _LEAST_WIDTH))
    for line in scaling_lines(found):
        console.print(plain(line))
    for assumption in (*subject.profile.assumptions, *subject.cluster.assumptions):
        console.print(plain(f"assumed: {assumption}", "dim"))
