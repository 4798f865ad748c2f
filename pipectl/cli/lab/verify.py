"""`pipectl lab verify`: compare a pipeline with training in one process."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import typer

from pipectl.cli import options as opt
from pipectl.cli.console import say, say_json
from pipectl.cli.progress import progress_bar
from pipectl.cli.restart import restart_for_job
from pipectl.errors import PipectlError
from pipectl.jobs.verify import verify
from pipectl.spec import load


def command(
    job: Path = opt.JOB_FILE,
    ranks: int = opt.count("Ranks of the pipeline.", default=2),
    steps: int = opt.count("Optimizer steps to train.", default=3),
    between_plans: bool = opt.flag(
        "Compare with another plan, not one process.", "--between-plans"
    ),
    trust_owner: bool = opt.TRUST_OWNER,
    as_json: bool = opt.JSON,
    overrides: list[str] | None = opt.OVERRIDES,
) -> None:
    with suppress(PipectlError):  # its errors are those of `verify`
        restart_for_job(load(job, overrides or ()), job)
    with progress_bar("verifying") as progress:
        result = verify(
            job, overrides or (), ranks, steps, progress,
            two_plans=between_plans, trust_owner=trust_owner,
        )  # fmt: skip
    if as_json:
        say_json(result)
    else:
        say(
            "pipeline: {ranks} ranks, {stages} stages, {schedule}, {micro_batches} micro-batches "
            "of {micro_batch_size}\nreference: {reference}".format(**result)
        )
        for note in result["notes"]:
            say(f"note: {note}")
        for step, (ours, theirs) in enumerate(result["losses"], 1):
            say(f"step {step}: loss {ours:.9g}, reference {theirs:.9g}")
        is_script = result["compared"] == "a plan and the script"
        if result["tolerance"]:
            of = "the loss" if is_script else "the largest change of any weight"
            say(f"tolerance: {result['tolerance']:g} of {of}")
        largest, first = result["max_abs_difference"], result["first_difference"]
        if first is not None:
            say(f"different: by {largest:.3g} at most")
            say("first at step {step}, in {tensor}: by {largest:.3g}".format(**first))
        elif largest == 0:
            say(f"equal: every loss{'' if is_script else ' and every weight'}, to the bit")
        else:
            say(f"equal within the tolerance: they differ by {largest:.3g} at most")
    if not result["equal"]:
        raise typer.Exit(1)
