"""Profiles and measured links for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from pipectl.cli.console import note, plain, say, say_json, table
from pipectl.cluster import Cluster
from pipectl.jobs.profiles import Measurement
from pipectl.link import Link
from pipectl.report.charts import bandwidth, measured_links, whole_bytes
from pipectl.units import format_bytes, format_time

_SPANS = ((86400, "day"), (3600, "h"), (60, "min"))


def show_measurement(measurement: Measurement, path: Path, now: float, *, as_json: bool) -> None:
    """Print what was measured, where it is, and whether it was measured now.

    Args:
        path: of the profile.
    """
    profile = measurement.profile
    forward_s = sum(operator.forward_s for operator in profile.operators)
    backward_s = sum(operator.backward_s for operator in profile.operators)
    parameters = dict(pair for operator in profile.operators for pair in operator.parameters)
    if as_json:
        sizes = {size for operator in profile.operators for size in operator.timings}
        answer: dict[str, Any] = {
            "file": str(path.absolute()),
            "name": profile.name,
            "operators": len(profile.operators),
            "micro_batch_size": profile.micro_batch_size,
            "micro_batch_sizes": sorted({profile.micro_batch_size, *sizes}),
            "parameter_bytes": sum(parameters.values()),
            "forward_s": forward_s,
            "backward_s": backward_s,
            "device": profile.to_json().get("device"),
        }
        say_json({**answer, **measurement.to_json()})
        return
    loading = f" ({format_time(profile.loading_s)} loading)" if profile.loading_s else ""
    say(
        f"{profile.name}: {len(profile.operators)} operators, "
        f"{format_bytes(sum(parameters.values()))} of parameters; forward {format_time(forward_s)}"
        f"{loading}, backward {format_time(backward_s)} for {profile.micro_batch_size} samples"
    )
    say(f"profile: {path}")
    note_origin(measurement, now, "use --again to measure again")


def note_origin(measurement: Measurement, now: float, again: str) -> None:
    """Note that a profile, or a part of it, is not from now.

    Args:
        again: how to measure all of it.
    """
    if measurement.cached:
        device = measurement.profile.device
        model = device.model if device else "another device"
        when = ago(now - measurement.measured_at)
        note(f"cached: measured {when} on {measurement.host} ({model}); {again}")
    elif measurement.resumed:
        note(f"{measurement.resumed} measurements are from an interrupted attempt")


def ago(age_s: float) -> str:
    """``3 h ago``; in the largest unit that fits."""
    for span_s, unit in _SPANS:
        count = int(age_s // span_s)
        if count > 0:
            return f"{count} {unit}{'s' if unit == 'day' and count > 1 else ''} ago"
    return "just now"


def links_view(cluster: Cluster) -> RenderableType:
    """Measured links: messages by size, what disturbs them, sums over ranks."""
    parts: list[RenderableType] = [plain(f"{cluster.name}: {cluster.source}", "bold"), ""]
    parts += [_messages(measured_links(cluster)), ""]
    for name, link in (
        ("within a node", cluster.within_node),
        ("between nodes", cluster.between_nodes),
    ):
        parts += [plain(line) for line in _link_lines(name, link)]
    if cluster.allreduce:
        parts += ["", _sums(cluster)]
    return Group(*parts)


def _messages(links: dict[str, Link]) -> Table:
    """A row per message size."""
    rows = []
    for size in sorted({size for link in links.values() for size, _ in link.timings}):
        cells = [whole_bytes(size)]
        for link in links.values():
            measured = size <= link.timings[-1][0]
            cells.append(format_time(link.transfer_s(size)) if measured else "")
            cells.append(f"{format_bytes(bandwidth(link, size))}/s" if measured else "")
        rows.append(cells)
    return table(("message", *(head for name in links for head in (name, "bandwidth"))), rows)


def _sums(cluster: Cluster) -> Table:
    """A row per size of the summed vector, a column per number of ranks."""
    times = {(ranks, size): format_time(time_s) for ranks, size, time_s in cluster.allreduce}
    counts = sorted({ranks for ranks, _ in times})
    rows = [
        (whole_bytes(size), *(times.get((count, size), "") for count in counts))
        for size in sorted({size for _, size in times})
    ]
    return table(("sum", *(f"{count} ranks" for count in counts)), rows)


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
        shares = f"{hidden:.0%}, and {polled:.0%} with polling"
        yield f"  hidden by compute, {whole_bytes(size)}: {shares}"
