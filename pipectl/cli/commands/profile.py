"""`pipectl profile`: measure the model's operators, or the links between its ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypedDict

import typer
from rich.console import Group, RenderableType

from pipectl.batch import HERE, LOCAL, system_of_this_node
from pipectl.cli import options as opt
from pipectl.cli.console import note, plain, say, say_json, short_path, show, table, warn
from pipectl.cli.progress import profiling_progress
from pipectl.cli.restart import restart_for_job
from pipectl.cli.submission import describe_job, follow_or_exit, note_origin, print_submission
from pipectl.cluster import Cluster
from pipectl.jobs.job import choose_scheduler, fit_to_allocation
from pipectl.jobs.measuring import make_measuring_job
from pipectl.jobs.output import cluster_path, profile_path
from pipectl.jobs.owners import warning_of_code
from pipectl.jobs.profiles import measure
from pipectl.jobs.submit import submit as submit_job
from pipectl.jobs.warnings import warnings_of
from pipectl.link import Link
from pipectl.profile import Profile
from pipectl.report.charts import bandwidth, format_size, list_measured_links
from pipectl.spec import JobSpec, load
from pipectl.units import format_bytes, format_time, plural
from pipectl.versions import untested


def command(
    context: typer.Context,
    job: Path = opt.JOB_FILE,
    output_file: Path | None = opt.value(
        "FILE",
        "File to write; by default runs/NAME.profile.json (.cluster.json).",
        "-o",
        "--output",
    ),
    effort: Literal["fast", "normal", "thorough"] = opt.flag(
        "How long to measure.", default="normal"
    ),
    again: bool = opt.flag("Measure again, without the cache.", "--again"),
    wait: bool = opt.WAIT,
    links: bool = opt.flag("Measure the links between the ranks instead.", "--links"),
    scheduler: str | None = opt.SCHEDULER,
    as_json: bool = opt.JSON,
    overrides: list[str] | None = opt.OVERRIDES,
) -> None:
    if links:
        hint = "leave --again out: links are always measured again"
        opt.refuse(context, "--again", "is not used with --links", hint=hint)
    began, spec = time.time(), load(job, overrides or (), check_names=not links)
    if not links:
        restart_for_job(spec, job)
    warn(warning_of_code(spec, job))
    warn(untested("torch"))
    batch_system = choose_scheduler(spec, scheduler)
    spec = fit_to_allocation(spec, batch_system)
    path = output_file or (cluster_path(spec) if links else profile_path(spec))
    has_container = spec.environment.container is not None
    if not (links or has_container) and batch_system in {LOCAL, system_of_this_node()}:
        with profiling_progress() as progress:
            profile = measure(spec, path, progress, effort, again=again)
        show_profile(profile, path, began, as_json=as_json)
        _warn_of(spec, profile)
        return
    job_that_measures = make_measuring_job(
        spec, batch_system, path, effort, links=links, again=again
    )
    (submission,) = submit_job([job_that_measures], began)
    run, record = submission.run, submission.record
    result = f"the {'cluster' if links else 'profile'} will be in {short_path(path.absolute())}"
    if not wait and batch_system not in {HERE, LOCAL}:
        lines = f"submitted: {run.name} ({describe_job(record)})", result
        print_submission(submission, *lines, as_json=as_json, file=str(path.absolute()))
        return
    note(f"measuring: {run.name} ({describe_job(record)})")
    follow_or_exit(run, as_json=as_json)
    if links:
        _show_links(spec, path, as_json=as_json)
    else:
        profile = Profile.load(run.profile)
        show_profile(profile, path, began, as_json=as_json)
        _warn_of(spec, profile)


def _warn_of(spec: JobSpec, profile: Profile) -> None:
    """Print what makes results other than the user may expect."""
    for text in warnings_of(spec, profile):
        warn(text)


def _show_links(spec: JobSpec, path: Path, *, as_json: bool) -> None:
    """Print the measured links, and whether plans will use ``path``."""
    cluster, usual = Cluster.load(path), cluster_path(spec)
    if as_json:
        say_json(cluster.to_json())
    else:
        show(links_view(cluster))
        say(f"cluster: {path}")
        say(f"picture: {path.with_suffix('.svg')}")
    if spec.cluster is not None and path.absolute() != Path(spec.cluster):
        note(f"the job sets cluster:, so plans use {spec.cluster}")
    elif spec.cluster is None and path.absolute() != usual.absolute():
        note(f"plans look for it in {usual}; set cluster: to have them use {path}")


class ProfileJson(TypedDict):
    """The figures of a profile.

    Args:
        file: path of the profile.
        name: its name.
        operators: number of operators.
        micro_batch_size: samples that ``forward_s`` and ``backward_s`` are for.
        micro_batch_sizes: all measured sizes.
        parameter_bytes: size of the model's parameters.
        forward_s, backward_s: sums over all operators.
        device: what it was measured on, as in the profile.
        cached: whether it was measured before this command.
        resumed: number of measurements taken over from an interrupted attempt.
        host, measured_at, seconds: where and when it was measured, and how long that took.
    """

    file: str
    name: str
    operators: int
    micro_batch_size: int
    micro_batch_sizes: list[int]
    parameter_bytes: int
    forward_s: float
    backward_s: float
    device: dict[str, Any]
    cached: bool
    resumed: int
    host: str | None
    measured_at: float | None
    seconds: float | None


def show_profile(profile: Profile, path: Path, began: float, *, as_json: bool) -> None:
    """Print a profile's figures, its file, and whether it was measured since ``began``."""
    forward_s = sum(operator.forward_s for operator in profile.operators)
    backward_s = sum(operator.backward_s for operator in profile.operators)
    parameters = dict(pair for operator in profile.operators for pair in operator.parameters)
    if as_json:
        sizes = {size for operator in profile.operators for size in operator.timings}
        on = profile.to_json().get("device", {})
        cached = on.get("measured_at", began) < began
        answer: ProfileJson = {
            "file": str(path.absolute()),
            "name": profile.name,
            "operators": len(profile.operators),
            "micro_batch_size": profile.micro_batch_size,
            "micro_batch_sizes": sorted({profile.micro_batch_size, *sizes}),
            "parameter_bytes": sum(parameters.values()),
            "forward_s": forward_s,
            "backward_s": backward_s,
            "device": on,
            "cached": cached,
            "resumed": 0 if cached else on.get("resumed", 0),
            "host": on.get("host"),
            "measured_at": on.get("measured_at"),
            "seconds": on.get("seconds"),
        }
        say_json(answer)
        return
    samples = plural(profile.micro_batch_size, "sample")
    loading = f" ({format_time(profile.loading_s)} loading)" if profile.loading_s else ""
    say(
        f"{profile.name}: {len(profile.operators)} operators, "
        f"{format_bytes(sum(parameters.values()))} of parameters; forward {format_time(forward_s)}"
        f"{loading}, backward {format_time(backward_s)} for {samples}"
    )
    say(f"profile: {path}")
    note_origin(profile, began, "use --again to measure again")


def links_view(cluster: Cluster) -> RenderableType:
    """Measured links: times by message size, effects of other messages, and times of sums."""
    parts: list[RenderableType] = [plain(f"{cluster.name}: {cluster.source}", "bold"), ""]
    links, rows = list_measured_links(cluster), []
    for size in sorted({size for link in links.values() for size, _ in link.timings}):
        cells = [format_size(size)]
        for link in links.values():
            measured = size <= link.timings[-1][0]
            cells.append(format_time(link.transfer_s(size)) if measured else "")
            cells.append(f"{format_bytes(bandwidth(link, size))}/s" if measured else "")
        rows.append(cells)
    heads = (head for name in links for head in (name, "bandwidth"))
    parts += [table(("message", *heads), rows), ""]
    parts += map(plain, _link_lines("within a node", cluster.within_node))
    parts += map(plain, _link_lines("between nodes", cluster.between_nodes))
    if cluster.allreduce:
        times = {(ranks, size): format_time(time_s) for ranks, size, time_s in cluster.allreduce}
        counts = sorted({ranks for ranks, _ in times})
        sums = [
            (format_size(size), *(times.get((count, size), "") for count in counts))
            for size in sorted({size for _, size in times})
        ]
        parts += ["", table(("sum", *(f"{count} ranks" for count in counts)), sums)]
    return Group(*parts)


def _link_lines(name: str, link: Link) -> Iterator[str]:
    figures = (
        f"latency {format_time(link.latency_s)}, "
        f"bandwidth {format_bytes(link.bandwidth_bytes_per_s)}/s"
    )
    if link.assumed:
        yield f"{name}: not measured, there are no two such ranks; {figures} is assumed"
        return
    yield f"{name}: {figures}"
    facts = link.observed
    if facts is None:
        return
    if facts.both_ways is not None:
        kind = "both directions at once" if link.duplex else "one direction at a time"
        yield f"  both ways: {facts.both_ways:.2f} times as long as one way; taken as {kind}"
    if facts.at_once is not None:
        kind = "one link for all" if link.shared else "a link for each"
        yield f"  {facts.pairs} pairs: {facts.at_once:.2f} times as long as one; taken as {kind}"
    for size, hidden, polled in facts.overlap:
        shares = f"{hidden:.0%}, and {polled:.0%} with MPI calls in between"
        yield f"  hidden by compute, {format_size(size)}: {shares}"
