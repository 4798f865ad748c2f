"""Why a plan is as it is, in lines for people."""

from __future__ import annotations

from collections.abc import Iterator

from pipectl.cluster import Cluster
from pipectl.plan import Plan
from pipectl.planner.answers.busiest_link import End, LinkLoad
from pipectl.planner.answers.data_parallel import WithoutPipeline
from pipectl.planner.answers.explain import NOTHING, Alternative, Explanation, Offer
from pipectl.schedule.saving import copy_bytes
from pipectl.units import format_bytes, format_time

_BAR = 24
_PARTS = (
    ("compute_s", "forward and backward"),
    ("recompute_s", "recomputation"),
    ("update_s", "optimizer step"),
    ("reduction_s", "waits for the sum of gradients"),
    ("offload_s", "waits for offloaded values"),
    ("communication_s", "waits for messages"),
    ("bubble_s", "fills, drains, waits for others"),
)


def worth_lines(plan: Plan, without: WithoutPipeline, *, considered: bool) -> Iterator[str]:
    """Whether a pipeline is worth it at all; nothing if it is.

    Args:
        considered: whether the planner was free to choose replicas.
    """
    better, step_s = without.better_than(plan), plan.predicted_step_s
    if better is not None and better.ranks == 1:
        yield (
            f"a pipeline is not worth it here: one rank takes {format_time(better.step_s)} a step, "
            f"this plan {format_time(step_s)}"
        )
    elif better is not None:
        yield (
            f"a pipeline is not worth it here: data parallelism on {better.ranks} ranks would take "
            f"about {format_time(better.step_s)} a step ({format_time(better.reduction_s)} of it "
            f"to sum gradients), this plan {format_time(step_s)}"
            + ("" if considered else "; pipeline.replicas: any considers it")
        )
    elif len(plan.stages) == 1 and plan.stages[0].replicas < plan.ranks:
        yield "a pipeline is not worth it here: no cut makes a step shorter than one rank alone"
    if without.reason:
        yield f"data parallelism is not compared with: {without.reason}"


def explanation_lines(found: Explanation, cluster: Cluster) -> Iterator[str]:
    """What binds, what came next, what more would buy."""
    yield ""
    yield from _binding(found)
    if found.link is not None:
        yield _link_line(found.link, found.parts.step_s, cluster)
    yield from _checkpoint_line(found.plan, cluster)
    yield ""
    yield "other plans:" if found.alternatives else "other plans: none was found"
    yield from _table(_alternative(other, found.parts.step_s) for other in found.alternatives)
    yield ""
    yield "what more would buy:"
    yield from _table(_offer(offer, found.plan.predicted_step_s) for offer in found.offers)
    if found.measured_size is not None:
        yield (
            f"(only micro-batches of {found.measured_size} were measured, other sizes are scaled: "
            "small ones may take longer than said here)"
        )


def _binding(found: Explanation) -> Iterator[str]:
    """The step of the busiest rank, part by part."""
    parts = found.parts
    stages = " and ".join(map(str, parts.stages))
    plural = "s" if len(parts.stages) > 1 else ""
    if found.link_binds:
        yield f"the busiest link binds; the busiest rank, {parts.rank} (stage{plural} {stages}):"
    else:
        yield f"rank {parts.rank} (stage{plural} {stages}) binds; its {format_time(parts.step_s)}:"
    for name, words in _PARTS:
        time_s: float = getattr(parts, name)
        share = time_s / parts.step_s if parts.step_s else 0.0
        if share >= NOTHING:
            bar = "█" * round(share * _BAR)
            yield f"  {words:<32}{format_time(time_s):>9}{share:>7.1%}  {bar}".rstrip()


def _link_line(link: LinkLoad, step_s: float, cluster: Cluster) -> str:
    share = link.busy_s / step_s if step_s else 0.0
    return (
        f"busiest link: {_ends(link, cluster)}, {format_bytes(link.bytes_per_step)} a step, "
        f"in use for {format_time(link.busy_s)} ({share:.1%} of the step)"
    )


def _ends(link: LinkLoad, cluster: Cluster) -> str:
    """What the link lies between, or whose it is."""

    def named(end: End) -> str:
        if link.between == "node" and isinstance(end, int):
            return cluster.nodes[end].name
        return f"{link.between} {end}"

    if link.source is None:
        return f"into {named(link.target)}"
    if link.target is None:
        return f"out of {named(link.source)}"
    if link.source == link.target:
        return f"in and out of {named(link.source)}"
    return f"{named(link.source)} to {named(link.target)}"


def _checkpoint_line(plan: Plan, cluster: Cluster) -> Iterator[str]:
    """What copies take beside the peak, of the rank with the most; nothing where nothing is known
    of the state."""
    limit_bytes = plan.memory_limit_bytes
    copies = {
        rank: copy_bytes(plan, rank, cluster.memory_of(rank, limit_bytes))
        for rank in range(plan.ranks)
    }
    rank = max(copies, key=copies.__getitem__)
    if copies[rank]:
        yield (
            f"checkpoints: while one is written, rank {rank} holds up to "
            f"{format_bytes(copies[rank])} besides"
        )


def _alternative(other: Alternative, step_s: float) -> tuple[str, str, str]:
    """What is different, step time, and by how much that is longer, where it can be said."""
    other_s = other.plan.predicted_step_s
    longer = f"{other_s / step_s - 1:+.1%}" if step_s else ""
    return other.difference, format_time(other_s), longer


def _offer(offer: Offer, step_s: float) -> tuple[str, str, str]:
    """Change, step time, and what it is better; or why nothing can be said."""
    if offer.step_s is None:
        return offer.change, offer.reason, ""
    gain = offer.gain(step_s)
    if not gain:
        return offer.change, "nothing", ""
    return offer.change, format_time(offer.step_s), f"{-gain:+.1%}"


def _table(rows: Iterator[tuple[str, str, str]]) -> Iterator[str]:
    found = list(rows)
    width = max((len(row[0]) for row in found), default=0)
    for words, value, change in found:
        yield f"  {words:<{width}}  {value:>9}  {change:>7}".rstrip()
