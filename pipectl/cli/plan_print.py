"""Prints what `pipectl plan` has found: for people, for programs, as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipectl.cli.console import output, plain, say, say_json
from pipectl.cli.plan_explanation import explanation_lines, worth_lines
from pipectl.cli.plan_step import Found
from pipectl.cli.plan_view import headline, plan_view, prediction_lines
from pipectl.files import write_text
from pipectl.jobs.answer import explanation_json, plan_json
from pipectl.jobs.plan import predicted
from pipectl.report.gantt_svg import gantt_svg
from pipectl.units import format_time

_NOTEWORTHY_S = 1.0
"""Seconds of compiling that a reader would otherwise take for the search's."""


def draw(path: Path, found: Found) -> None:
    """Write the predicted step as an SVG picture."""
    timeline = predicted(found.plan, found.subject.cluster)
    notes = prediction_lines(found.plan)
    write_text(path, gantt_svg(timeline, headline(found.plan), *notes))


def print_json(found: Found) -> None:
    """One object."""
    more = {"cut_short": bool(found.stopped), "compiling_s": found.compiling_s}
    document = {**plan_json(found.plan, found.without), **more}
    if found.explanation is not None:
        document["explanation"] = explanation_json(found.explanation)
    say_json(document)


def print_text(found: Found) -> None:
    """Tables and lines."""
    plan, subject = found.plan, found.subject
    names = {operator.id: operator.name for operator in subject.profile.operators}
    console = output()
    timeline = predicted(plan, subject.cluster)
    console.print(plan_view(plan, timeline, console.width, names, [*_remarks(found)]))
    if found.explanation is not None:
        for line in explanation_lines(found.explanation, subject.cluster):
            console.print(plain(line))
    if subject.file is not None:
        say(f"cluster: {subject.file} ({subject.cluster.source})")


def _remarks(found: Found) -> Iterator[str]:
    """What to know of the search, and of doing without a pipeline."""
    from pipectl.runtime.supported import unsupported

    if found.compiling_s >= _NOTEWORTHY_S:
        yield f"compiled: the planner, for {format_time(found.compiling_s)} of the search"
    if found.stopped:
        gap = None if found.plan.search is None else found.plan.search.gap
        proven = "the best so far" if gap is None else f"within {gap:.1%} of the best possible"
        yield f"stopped {found.stopped}: {proven}"
    if found.subject.kept is not None:
        yield (
            f"micro-batches: {found.subject.kept}, as in the plan before, because results depend "
            "on them; --new-micro-batches chooses anew"
        )
    features = unsupported(found.plan)
    if features and found.subject.request.from_job:
        yield f"not to be submitted: the ranks cannot run a plan with {' and '.join(features)} yet"
    if found.without is not None:
        yield from worth_lines(
            found.plan, found.without, considered=found.subject.request.replicas is None
        )
