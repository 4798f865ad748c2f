"""`pipectl lab verify`: does the pipeline train what one process trains?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated

import typer

from pipectl.cli.console import say, say_json
from pipectl.cli.follow import follow
from pipectl.cli.options import JobFile, Json, Overrides, TrustOwner, count, flag
from pipectl.cli.progress import progress_bar
from pipectl.jobs.verify import Verification, verify


def command(
    job: JobFile,
    ranks: Annotated[int, count("Ranks of the pipeline.")] = 2,
    steps: Annotated[int, count("Optimizer steps to train.")] = 3,
    between_plans: Annotated[
        bool, flag("Compare with another plan, not one process.", "--between-plans")
    ] = False,
    trust_owner: TrustOwner = False,
    as_json: Json = False,
    overrides: Overrides = None,
) -> None:
    with progress_bar("profiling") as progress:
        verification = verify(
            job,
            overrides or (),
            ranks,
            steps,
            partial(follow, continues=False),
            progress,
            two_plans=between_plans,
            trust_owner=trust_owner,
        )
    if as_json:
        say_json(verification.to_json())
    else:
        for line in _lines(verification):
            say(line)
    if not verification.comparison.equal:
        raise typer.Exit(1)


def _lines(verification: Verification) -> Iterator[str]:
    plan, comparison = verification.plan, verification.comparison
    tolerance, first = verification.tolerance, comparison.first
    yield (
        f"pipeline: {plan.ranks} ranks, {len(plan.stages)} stages, {plan.schedule}, "
        f"{plan.micro_batches} micro-batches of {plan.micro_batch_size}"
    )
    yield f"reference: {verification.reference}"
    yield from (f"note: {note}" for note in verification.notes)
    for step, (ours, theirs) in enumerate(comparison.losses, 1):
        yield f"step {step}: loss {ours:.9g}, reference {theirs:.9g}"
    if tolerance:
        yield f"tolerance: {tolerance:g} of the farthest that any weight has moved"
    if first is not None:
        yield f"different: by {comparison.largest:.3g} at most"
        yield f"first at step {first.step}, in {first.tensor}: by {first.largest:.3g}"
    elif comparison.largest == 0:
        yield "equal: every loss and every weight, to the bit"
    else:
        yield f"equal within the tolerance: they differ by {comparison.largest:.3g} at most"
