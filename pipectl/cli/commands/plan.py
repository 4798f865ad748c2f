"""`pipectl plan`: cut the model into stages and show what to expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import typer

from pipectl.cli import options as opt
from pipectl.cli.console import note, plain, say, say_json, short_path, show, warn
from pipectl.cli.search import ask_prospects, interruptible
from pipectl.cli.views import plan as view
from pipectl.files import make_directory_of, write_text
from pipectl.jobs.node_range import plan_every_count
from pipectl.jobs.output import profile_path, save_plans
from pipectl.jobs.plan_search import PlanSearch, plan_step
from pipectl.jobs.planning import PlanInputs, gather
from pipectl.plan import Plan
from pipectl.planner.explain.scaling import scaling
from pipectl.report.gantt import gantt_svg
from pipectl.units import plural

JOB_FILE = typer.Argument(None, metavar="JOB.yaml", help="The job spec; not needed with --profile.")
PROFILE_FILE = opt.value("FILE", "Profile to use; by default runs/NAME.profile.json.", "--profile")
CLUSTER_FILE = opt.value("FILE", "Cluster description to use (cluster.json).", "--cluster")
DEVICES = opt.count("Number of devices to use.")


def command(
    context: typer.Context,
    job: Path | None = JOB_FILE,
    profile_file: Path | None = PROFILE_FILE,
    cluster: Path | None = CLUSTER_FILE,
    devices: int | None = DEVICES,
    scheduler: str | None = opt.SCHEDULER,
    nodes: Any = opt.NODES,
    compare: list[str] | None = opt.value("N,N,…", "Compare these numbers of nodes."),
    when: bool = opt.flag("Say when it would start and be done, in every partition.", "--when"),
    new_micro_batches: bool = opt.flag(
        "Do not keep the number of micro-batches of the previous plan.", "--new-micro-batches"
    ),
    from_run: str | None = opt.value(
        "RUN", "Correct the profile by what the recorded steps of a run took.", "--from-run"
    ),
    explain: bool = opt.flag("Explain the step and say what would help.", "--explain"),
    output_file: Path | None = opt.value(
        "FILE", "File to write; by default runs/NAME.plan.json.", "-o", "--output"
    ),
    svg: Path | None = opt.value("FILE", "Write a picture of the predicted step to this file."),
    as_json: bool = opt.JSON,
    overrides: list[str] | None = opt.OVERRIDES,
) -> None:
    if job is None:
        opt.refuse(
            context, "--scheduler --nodes --when --new-micro-batches --from-run", "needs a JOB.yaml"
        )
    if from_run is not None:
        opt.refuse(context, "--profile", "cannot be used with --from-run, which takes the run's")
    if when:
        opt.refuse(context, "--devices -o --svg --explain", "cannot be used with --when")
    if compare:
        why = "cannot be used with --compare, which makes several plans"
        opt.refuse(context, "--nodes --devices -o --svg --explain", why)
    counts = opt.read_node_counts(compare)
    inputs = gather(
        job, profile_file, _add_nodes(nodes, overrides), scheduler=scheduler,
        cluster_file=cluster, devices=devices, compare=None if when else counts,
        new_micro_batches=new_micro_batches, from_run=from_run,
    )  # fmt: skip
    if when:
        _show_prospects(inputs, counts, as_json=as_json)
        return
    own = None if output_file or counts else inputs.plan_file
    replaces = bool(overrides) and own is not None and own.exists()
    plan_and_print(
        inputs, PlanSearch(), counts,
        explained=explain, output_file=output_file or inputs.plan_file, svg=svg, as_json=as_json,
    )  # fmt: skip
    if replaces:
        note(
            "this replaces the job's last plan, and later plans keep its number of micro-batches; "
            "-o FILE writes it elsewhere"
        )


def _add_nodes(nodes: int | str | None, overrides: Sequence[str] | None) -> list[str]:
    """The values of ``--set``, which precede that of ``--nodes``."""
    return [*([] if nodes is None else [f"resources.nodes={nodes}"]), *(overrides or ())]


def plan_and_print(
    inputs: PlanInputs, search: PlanSearch, counts: tuple[int, ...] | None = None,
    *, explained: bool = False, output_file: Path | None, svg: Path | None = None, as_json: bool,
) -> None:  # fmt: skip
    """Plan for the shortest step, write the files, and print.

    Args:
        counts: numbers of nodes to compare; None makes one plan.
    """
    for warning in inputs.warnings:
        warn(warning)
    if counts is not None:
        _show_counts(inputs, search, counts, as_json=as_json)
        return
    for file in filter(None, (output_file, svg)):
        make_directory_of(file)
    by_nodes: Mapping[int, Plan] = {}
    with interruptible(search) as tell:
        if inputs.has_range:
            tell("planning for every number of nodes")
            by_nodes, inputs = plan_every_count(inputs, search.plan)
        answer = plan_step(inputs, search, tell, explained=explained)
    if output_file is not None:
        _save(answer.plan, by_nodes, output_file, inputs)
    if svg is not None:
        plan = answer.plan
        titles = f"{plan.name}: {plan.summary}", *plan.describe_prediction(inputs.cluster)
        write_text(svg, gantt_svg(answer.simulation.timeline, *titles))
    if as_json:
        say_json({**answer.to_json(), **view.nodes_json(by_nodes)})
        return
    show(view.step_view(answer))
    cluster = inputs.cluster_file and f"{inputs.cluster_file} ({inputs.cluster.source})"
    nodes = view.nodes_line(by_nodes) if by_nodes else None
    lines = {"nodes": nodes, "cluster": cluster, "plan": output_file, "picture": svg}
    for label, text in lines.items():
        if text is not None:
            say(f"{label}: {text}")


def _save(plan: Plan, by_nodes: Mapping[int, Plan], output_file: Path, inputs: PlanInputs) -> None:
    """Write a plan, and with the job's own also those for the other numbers of nodes, and the
    profile that was corrected for it."""
    if output_file == inputs.plan_file and inputs.spec is not None:
        if inputs.is_corrected:
            file, profile = profile_path(inputs.spec), inputs.profile
            profile.save(file)
            note(f"profile: {short_path(file)}, {profile.source.rpartition('; ')[2]}")
        save_plans(inputs.spec, {**by_nodes, inputs.spec.resources.max_nodes: plan})
        return
    plan.save(output_file)


def _show_prospects(inputs: PlanInputs, counts: tuple[int, ...] | None, *, as_json: bool) -> None:
    """Ask when the job would start, and print when it would be done."""
    from pipectl.cli.views import prospects as when_view  # other plans do without batch systems

    for warning in inputs.warnings:
        warn(warning)
    found = ask_prospects(inputs, counts)
    if as_json:
        say_json(found.to_json())
        return
    training = found.spec.training
    samples, asked = plural(training.batch_size, "sample"), ""
    if found.has_queue:
        asked = f"; {found.system.title} was asked at {datetime.fromtimestamp(found.now):%H:%M}"
    title = f"{found.spec.name}: {plural(training.steps, 'step')} of {samples}{asked}"
    show(
        plain(title, "bold"),
        *([when_view.prospects_table(found)] if found.rows else []),
        *map(plain, when_view.prospects_lines(found)),
        *view.assumption_lines((*inputs.profile.assumptions, *inputs.cluster.assumptions)),
    )


def _show_counts(
    inputs: PlanInputs, search: PlanSearch, counts: tuple[int, ...], *, as_json: bool
) -> None:
    """Compare numbers of nodes, and print."""
    inputs = inputs.fold()
    subject, request = (inputs.profile, inputs.cluster, inputs.request), inputs.request
    with interruptible(search) as tell:
        result = scaling(
            *subject, counts, search.plan, lambda count: tell(f"planning for {count} nodes")
        )
    if as_json:
        say_json({**result.to_json(), "cut_short": search.cut_short})
        return
    samples = plural(request.batch_size, "sample")
    title = f"{request.name}: {samples} per step; node-hours of 1000 steps"
    assumptions = (*inputs.profile.assumptions, *inputs.cluster.assumptions)
    show(
        plain(title, "bold"),
        view.scaling_table(result),
        *map(plain, view.scaling_lines(result)),
        *view.assumption_lines(assumptions),
    )
