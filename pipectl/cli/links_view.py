"""Measured links for people: messages by size, what disturbs them, sums over ranks, a plot."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table

from pipectl.cli.console import plain
from pipectl.cli.tables import table
from pipectl.cluster import Cluster
from pipectl.link import Link
from pipectl.report.links_plot import bandwidth, bandwidth_plot, measured_links, whole_bytes
from pipectl.units import format_bytes, format_time


def links_view(cluster: Cluster, width: int) -> RenderableType:
    """Everything about the links of a cluster.

    Args:
        width: columns there are.
    """
    links = measured_links(cluster)
    parts: list[RenderableType] = [plain(f"{cluster.name}: {cluster.source}", "bold"), ""]
    parts += [_messages(links), ""]
    parts += [plain(line) for line in _remarks(cluster)]
    if cluster.allreduce:
        parts += ["", _sums(cluster)]
    parts += ["", *(plain(line) for line in bandwidth_plot(links, width))]
    return Group(*parts)


def _messages(links: dict[str, Link]) -> Table:
    """A row per message size."""
    made = table("message", *(head for name in links for head in (name, "bandwidth")))
    for size in sorted({size for link in links.values() for size, _ in link.timings}):
        cells = [whole_bytes(size)]
        for link in links.values():
            measured = size <= link.timings[-1][0]
            cells.append(format_time(link.transfer_s(size)) if measured else "")
            cells.append(f"{format_bytes(bandwidth(link, size))}/s" if measured else "")
        made.add_row(*map(plain, cells))
    return made


def _sums(cluster: Cluster) -> Table:
    """A row per size of the summed vector, a column per number of ranks."""
    times = {(ranks, size): time_s for ranks, size, time_s in cluster.allreduce}
    counts = sorted({ranks for ranks, _ in times})
    made = table("sum", *(f"{count} ranks" for count in counts))
    for size in sorted({size for _, size in times}):
        found = (times.get((count, size)) for count in counts)
        cells = ["" if time_s is None else format_time(time_s) for time_s in found]
        made.add_row(*map(plain, (whole_bytes(size), *cells)))
    return made


def _remarks(cluster: Cluster) -> Iterator[str]:
    named = {"within a node": cluster.within_node, "between nodes": cluster.between_nodes}
    for name, link in named.items():
        if link.assumed:
            yield f"{name}: not measured, there are no two such ranks; {_figures(link)} is assumed"
        else:
            yield f"{name}: {_figures(link)}"
            yield from (f"  {line}" for line in _observed(link))


def _figures(link: Link) -> str:
    speed = f"{format_bytes(link.bandwidth_bytes_per_s)}/s"
    return f"latency {format_time(link.latency_s)}, bandwidth {speed}"


def _observed(link: Link) -> Iterator[str]:
    found = link.observed
    if found is None:
        return
    if found.both_ways is not None:
        kind = "both directions at once" if link.duplex else "one direction at a time"
        yield f"both ways: {found.both_ways:.2f} times as long as one way; taken as {kind}"
    if found.at_once is not None:
        kind = "one link for all" if link.shared else "a link for each"
        yield f"{found.pairs} pairs: {found.at_once:.2f} times as long as one; taken as {kind}"
    for size, hidden, polled in found.overlap:
        shares = f"{hidden:.0%}, and {polled:.0%} with polling"
        yield f"hidden behind compute, {whole_bytes(size)}: {shares}"
