"""`pipectl plan`: cut the model into stages and show what to expect."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Group

from pipectl.cli.console import note, output, plain, say, say_json, short_path, warn
from pipectl.cli.options import Json, Overrides, SchedulerOption, count, flag, option, refuse
from pipectl.cli.progress import progress_bar
from pipectl.cli.views import plan as view
from pipectl.errors import UsageError
from pipectl.files import make_directory_of, write_text
from pipectl.jobs.plan_answers import Deadline, PlanInputs, gather, plan_nodes, plan_step
from pipectl.report.gantt import gantt_svg

_MAX_NODES = 100_000

JobFile = Annotated[
    Path | None,
    typer.Argument(metavar="[JOB.yaml]", help="The job spec; not needed with --profile."),
]
ProfileFile = Annotated[
    Path | None, option("FILE", "Profile to use; by default runs/NAME.profile.json.", "--profile")
]
ClusterFile = Annotated[
    Path | None, option("FILE", "Cluster description to use (cluster.json).", "--cluster")
]
Devices = Annotated[int | None, count("Number of devices to use.")]
NodeCounts = Annotated[
    list[str] | None, option("N,N,…", "Compare these numbers of nodes.", "--nodes")
]
Explain = Annotated[bool, flag("Explain the step and say what would help.", "--explain")]
SvgFile = Annotated[
    Path | None, option("FILE", "Write a picture of the predicted step to this file.")
]


def command(
    job: JobFile = None,
    profile_file: ProfileFile = None,
    cluster: ClusterFile = None,
    devices: Devices = None,
    scheduler: SchedulerOption = None,
    nodes: NodeCounts = None,
    new_micro_batches: Annotated[
        bool,
        flag(
            "Do not keep the number of micro-batches of the previous plan.", "--new-micro-batches"
        ),
    ] = False,
    from_run: Annotated[
        str | None,
        option(
            "RUN", "Correct the profile by what the recorded steps of a run took.", "--from-run"
        ),
    ] = None,
    explain: Explain = False,
    output_file: Annotated[
        Path | None,
        option("FILE", "File to write; by default runs/NAME.plan.json.", "-o", "--output"),
    ] = None,
    svg: SvgFile = None,
    as_json: Json = False,
    overrides: Overrides = None,
) -> None:
    about_jobs = {
        "--scheduler": scheduler,
        "--new-micro-batches": new_micro_batches,
        "--from-run": from_run,
    }
    if job is None:
        refuse(about_jobs, "needs a JOB.yaml")
    of_one_plan = {"--devices": devices, "-o": output_file, "--svg": svg, "--explain": explain}
    counts = node_counts(nodes, of_one_plan)
    inputs = gather(
        job, profile_file, overrides or (), scheduler=scheduler, cluster=cluster, devices=devices,
        nodes=counts, new_micro_batches=new_micro_batches, from_run=from_run,
    )  # fmt: skip
    if from_run is not None and inputs.plan_file is not None and output_file is None:
        corrected = inputs.plan_file.with_name(f"{inputs.request.name}.profile.json")
        inputs.profile.save(corrected)
        note(f"profile: {short_path(corrected)}, {inputs.profile.source.rpartition('; ')[2]}")
    inputs = inputs.fold()
    for warning in inputs.warnings:
        warn(warning)
    if counts is not None:
        compare_nodes(inputs, counts, Deadline(), as_json=as_json)
        return
    show_step(
        inputs, Deadline(),
        explain=explain, output_file=output_file or inputs.plan_file, svg=svg, as_json=as_json,
    )  # fmt: skip


def node_counts(
    texts: list[str] | None, of_one_plan: Mapping[str, object]
) -> tuple[int, ...] | None:
    """Whole numbers above 0 with commas between them: ``1,2,4``; None if none is given.

    Args:
        of_one_plan: options that have no meaning when several are compared, by name.

    Raises:
        UsageError: a text is something else, or such an option is given, too.
    """
    if not texts:
        return None
    refuse(of_one_plan, "cannot be used with --nodes, which makes several plans")
    text = ",".join(texts)
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--nodes: {text!r} is not a list of numbers", cure="write for example 1,2,4"
        ) from None
    if not all(0 < number <= _MAX_NODES for number in counts):
        raise UsageError(f"--nodes: {text!r}: each must be from 1 to {_MAX_NODES:,}")
    return counts


def show_step(
    inputs: PlanInputs, deadline: Deadline,
    *, explain: bool, output_file: Path | None, svg: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Plan for the shortest step, write what is to be written, and print."""
    for file in filter(None, (output_file, svg)):
        make_directory_of(file)
    with stop_at_interrupt(deadline) as tell:
        answer = plan_step(inputs, deadline, tell, explained=explain)
    if output_file is not None:
        answer.plan.save(output_file)
    if svg is not None:
        titles = f"{answer.plan.name}: {answer.plan.summary}", *view.prediction_lines(answer.plan)
        write_text(svg, gantt_svg(answer.simulation.timeline, *titles))
    if as_json:
        say_json(answer.to_json())
        return
    console = output()
    console.print(view.step_view(answer, console.width))
    if inputs.cluster_file is not None:
        say(f"cluster: {inputs.cluster_file} ({inputs.cluster.source})")
    if output_file is not None:
        say(f"plan: {output_file}")


def compare_nodes(
    inputs: PlanInputs, nodes: tuple[int, ...], deadline: Deadline, *, as_json: bool
) -> None:
    """Plan the same step for every number of nodes, and print the table."""
    with stop_at_interrupt(deadline) as tell:
        result = plan_nodes(inputs, nodes, deadline, tell)
    if as_json:
        say_json({**result.to_json(), "cut_short": deadline.cut_short})
        return
    console, request = output(), inputs.request
    title = f"{request.name}: {request.batch_size} samples per step; node-hours of 1000 steps"
    console.print(plain(title, "bold"))
    console.print(view.scaling_table(result, console.width))
    for line in view.scaling_lines(result):
        console.print(plain(line))
    assumptions = (*inputs.profile.assumptions, *inputs.cluster.assumptions)
    console.print(Group(*view.assumption_lines(assumptions)))


@contextmanager
def stop_at_interrupt(deadline: Deadline) -> Iterator[Callable[[str], None]]:
    """Within, Ctrl-C ends planning with what it has; the second one aborts.

    Gives a function ``tell(what)`` that says what goes on from then.
    """

    def stop(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        deadline.interrupt()
        note("stopping with the best plan so far; Ctrl-C again aborts", style="")

    before = signal.signal(signal.SIGINT, stop)
    try:
        with progress_bar("planning") as report:
            report(0, 0, "planning (Ctrl-C: the best so far)")
            yield lambda what: report(0, 0, what)
    finally:
        signal.signal(signal.SIGINT, before)
