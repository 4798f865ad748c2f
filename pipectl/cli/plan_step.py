"""`pipectl plan` for the shortest step: the plan, what else would do, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipectl.cli.console import say
from pipectl.cli.plan_ask import Ask
from pipectl.cli.plan_subject import find_subject
from pipectl.cli.plan_wait import stoppable
from pipectl.files import make_directory_of

if TYPE_CHECKING:
    from pipectl.jobs.subject import Subject
    from pipectl.plan import Plan
    from pipectl.planner.answers.data_parallel import WithoutPipeline
    from pipectl.planner.answers.explain import Explanation


@dataclass(frozen=True)
class Found:
    """All that was found out.

    Args:
        stopped: what ended the search early; empty if nothing did.
        without: what a step takes without a pipeline; None where planning was interrupted.
        explanation: None unless asked for.
        compiling_s: of the search, what compiling the planner took.
    """

    subject: Subject
    plan: Plan
    stopped: str
    without: WithoutPipeline | None
    explanation: Explanation | None
    compiling_s: float


def answer(ask: Ask) -> None:
    """Plan, write what is to be written, and print."""
    from pipectl.cli.plan_print import draw, print_json, print_text

    subject, path = find_subject(ask)
    for file in filter(None, (path, ask.svg)):
        make_directory_of(file)
    found = _find(ask, subject)
    if path is not None:
        found.plan.save(path)
    if ask.svg is not None:
        draw(ask.svg, found)
    if ask.as_json:
        print_json(found)
        return
    print_text(found)
    if path is not None:
        say(f"plan: {path}")


def _find(ask: Ask, subject: Subject) -> Found:
    from pipectl.compiled import compiling_s
    from pipectl.jobs.deadline import Deadline
    from pipectl.jobs.engines import PIPECTL, planner_named, searcher_named
    from pipectl.jobs.plan import advising_other_micro_batches
    from pipectl.planner.answers.data_parallel import without_pipeline
    from pipectl.planner.answers.explain import explain

    made_of = subject.profile, subject.cluster, subject.request
    deadline = Deadline(ask.budget_s)
    search, planner = searcher_named(ask.planner, deadline), planner_named(ask.planner, deadline)
    without = explanation = None
    with advising_other_micro_batches(subject.kept), stoppable(deadline) as watch:
        before_s = compiling_s()
        first = search(*made_of)
        spent_s = compiling_s() - before_s
        stopped = ""
        if deadline.cut_short:
            stopped = "by Ctrl-C" if deadline.interrupted else f"after {ask.budget_s} s"
        if not deadline.interrupted:
            watch.tell("comparing with other ways to train")
            without = without_pipeline(*made_of, planner_named(PIPECTL, deadline))
        if ask.explain:
            watch.tell("explaining")
            explanation = explain(
                first.plan, *made_of, planner, first.alternatives, lambda: deadline.interrupted
            )
    return Found(subject, first.plan, stopped, without, explanation, spent_s)
