"""Plans for people: the table of stages, a verdict, the predicted step, and why.

Everything fits 80 columns; what a wider terminal adds is left out below that.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipectl.cli.console import joined, plain
from pipectl.cli.tables import table
from pipectl.plan import Plan, Replication, Stage
from pipectl.report.gantt import gantt, legend
from pipectl.timeline import Timeline
from pipectl.units import format_bytes, format_time

if TYPE_CHECKING:  # `status` shows plans, too, and loads no planner
    from pipectl.cluster import Cluster
    from pipectl.jobs.lab_plan import Balanced
    from pipectl.jobs.plan import StepAnswer
    from pipectl.planner.answers.busiest_link import End, LinkLoad
    from pipectl.planner.answers.data_parallel import WithoutPipeline
    from pipectl.planner.answers.explain import Alternative, Explanation, Offer
    from pipectl.planner.answers.scaling import Count, Scaling
    from pipectl.planner.answers.step_parts import StepParts
    from pipectl.profile import Profile

_STYLES = {
    "forward": "cyan",
    "backward": "magenta",
    "backward_input": "magenta",
    "backward_weight": "blue",
    "recompute": "blue",
    "reduce_wait": "yellow",
    "update": "green",
    "evaluate": "cyan",
}
_STAGE_COLUMNS = (
    *("stage", "rank", "node", "ops", "parameters", "forward", "backward", "load", ""),
    "memory",
)
_MAX_ROWS, _FIRST_ROWS, _LAST_ROWS = 24, 12, 4
_GAP = "…"
_BAR, _LOAD_BAR = 24, 6
_STAGES_WIDTH = 80
_MAX_RANGES = 40
_NOTHING, _SMALL = 1e-3, 0.05
"""Shares of the step that are not worth a line, and not worth an advice."""
_NOTEWORTHY_S = 1.0
"""Seconds of compiling that a reader would otherwise take for the search's."""
_WIDE = 100
"""Columns from which a table of numbers of nodes has bars."""
_FASTER = 1.005
_PARTS = (
    ("compute_s", "forward and backward"),
    ("recompute_s", "recomputation"),
    ("update_s", "optimizer step"),
    ("reduction_s", "waits for the sum of gradients"),
    ("offload_s", "waits for offloaded values"),
    ("communication_s", "waits for messages"),
    ("bubble_s", "fills, drains, waits for others"),
)


def counted(number: int, noun: str) -> str:
    """A number with its noun in the plural if it needs one."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"


def number_ranges(numbers: Sequence[int]) -> str:
    """Numbers with neighbours put together: ``0-3,8``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def headline(plan: Plan) -> str:
    """One line: what is cut into what."""
    used = {rank for stage in plan.stages for rank in (*stage.ranks, *stage.backward_ranks)}
    ranks = counted(plan.ranks, "rank")
    ranks = ranks if len(used) == plan.ranks else f"{len(used)} of {ranks}"
    return (
        f"{plan.name}: {counted(len(plan.stages), 'stage')} on {ranks}, {plan.schedule}, "
        f"{counted(plan.micro_batches, 'micro-batch')} of {plan.micro_batch_size} "
        f"(batch {plan.batch_size})"
    )


def prediction_lines(plan: Plan) -> Iterator[str]:
    """Step time, throughput and bubble; then memory."""
    if plan.prediction is None:
        return
    step_s, peaks = plan.prediction.step_time_s, plan.prediction.peak_memory_bytes
    rate = f"{plan.batch_size / step_s:.1f} samples/s, " if step_s else ""
    yield f"predicted: {format_time(step_s)} per step, {rate}bubble {plan.prediction.bubble:.1%}"
    limit = plan.memory_limit_bytes
    within = "" if limit is None else f", limit {format_bytes(limit)}"
    fullest = peaks.index(max(peaks))
    yield f"memory: at most {format_bytes(max(peaks))} per rank (rank {fullest}){within}"


def step_view(answer: StepAnswer, width: int) -> RenderableType:
    """Everything that `pipectl plan` shows of one plan.

    Args:
        width: columns there are.
    """
    plan, cluster = answer.plan, answer.inputs.cluster
    names = {operator.id: operator.name for operator in answer.inputs.profile.operators}
    ends = [
        (names.get(stage.nodes[0], stage.nodes[0]), names.get(stage.nodes[-1], stage.nodes[-1]))
        for stage in plan.stages
    ]
    room = width - _STAGES_WIDTH - 2
    shown = shown_stages(plan)
    beside = all(len(end) * 2 <= room for index in shown for end in ends[index])
    parts: list[RenderableType] = [plain(headline(plan), "bold")]
    parts += map(plain, prediction_lines(plan))
    parts += ["", stage_table(plan, ends if beside else None)]
    parts += map(plain, mark_lines(plan))
    if answer.explanation is not None and not beside:
        parts += [plain(f"stage {index}: {' … '.join(ends[index])}") for index in shown]
    parts += ["", *labelled([*verdict(answer), *remarks(answer)], width), ""]
    parts += [*gantt_lines(answer.simulation.timeline, width)]
    parts.append(plain(legend(answer.simulation.timeline), "dim"))
    if answer.explanation is not None:
        parts += map(plain, explanation_lines(answer.explanation, cluster))
    parts += [plain(f"assumed: {assumption}", "dim") for assumption in plan.assumptions]
    return Group(*parts)


def labelled(lines: Iterable[tuple[str, str]], width: int) -> Iterator[Text]:
    """Lines of a label and a text each, which is folded beside its label.

    Args:
        width: columns there are.
    """
    pairs = list(lines)
    indent = max((len(label) + 2 for label, _ in pairs), default=0)
    for label, text in pairs:
        first, *more = textwrap.wrap(text, max(20, width - indent))
        yield joined(plain(f"{label + ':':<{indent}}", "bold"), plain(first))
        yield from (plain(f"{'':<{indent}}{line}") for line in more)


def stage_table(plan: Plan, ends: Sequence[tuple[str, str]] | None) -> Table:
    """One row per stage, with all ranks that hold it; the middle of very many is left out.

    Args:
        ends: first and last operator of every stage; None if there is no room for them.
    """
    words = ("from", "to") if ends else ()
    rows = table(*_STAGE_COLUMNS, *words, left=("", *words))
    loads = [stage.load_s for stage in plan.stages]
    total_s, largest_s = sum(loads) or 1.0, max(loads) or 1.0
    shown = shown_stages(plan)
    for index, after in zip(shown, [*shown[1:], len(plan.stages)], strict=True):
        stage = plan.stages[index]
        cells = (
            index,
            number_ranges((*stage.ranks, *stage.backward_ranks)),
            number_ranges([plan.node_of_rank[rank] for rank in stage.ranks]),
            len(stage.nodes),
            format_bytes(stage.cost.parameter_bytes),
            format_time(stage.cost.forward_s),
            format_time(stage.cost.backward_s),
            f"{stage.load_s / total_s:.1%}",
            "█" * round(_LOAD_BAR * stage.load_s / largest_s),
            "" if plan.prediction is None else format_bytes(_peak_bytes(plan, stage)),
            *(ends[index] if ends else ()),
        )
        slowest = loads[index] == max(loads) and len(loads) > 1
        rows.add_row(*(plain(cell, "bold" if slowest else "") for cell in cells))
        if after > index + 1:
            rows.add_row(*[_GAP] * len(_STAGE_COLUMNS))
    return rows


def shown_stages(plan: Plan) -> list[int]:
    """All stages, or of very many the first, the last, the slowest and the fullest."""
    count = len(plan.stages)
    if count <= _MAX_ROWS:
        return list(range(count))
    loads = [stage.load_s for stage in plan.stages]
    peaks = [_peak_bytes(plan, stage) for stage in plan.stages]
    extremes = loads.index(max(loads)), peaks.index(max(peaks))
    return sorted({*range(_FIRST_ROWS), *range(count - _LAST_ROWS, count), *extremes})


def _peak_bytes(plan: Plan, stage: Stage) -> int:
    """Of the fullest of a stage's ranks; 0 without a prediction."""
    if plan.prediction is None:
        return 0
    peaks = plan.prediction.peak_memory_bytes
    return max(peaks[rank] for rank in (*stage.ranks, *stage.backward_ranks))


def mark_lines(plan: Plan) -> Iterator[str]:
    """What sets stages apart besides their figures; nothing if nothing does."""
    if any(stage.replicas > 1 for stage in plan.stages):
        split = plan.replication is Replication.SPLIT
        share = "samples of every micro-batch" if split else "whole micro-batches in turn"
        changed = "; operators such as BatchNorm see only these" if split else ""
        yield f"replicas: the ranks of a stage take {share}{changed}"
    marks = {
        "backward on ranks of their own": [bool(stage.backward_ranks) for stage in plan.stages],
        "recomputed in the backward": [
            stage.recompute and stage.blocks is None for stage in plan.stages
        ],
        "recomputed block by block in the backward": [
            stage.blocks is not None for stage in plan.stages
        ],
        "offloaded until the backward": [stage.offload for stage in plan.stages],
    }
    for words, held in marks.items():
        stages = [index for index, holds in enumerate(held) if holds]
        if stages:
            yield f"{words}: {_stages_in_words(stages, len(held))}"


def _stages_in_words(indices: Sequence[int], count: int) -> str:
    """Some of all stages."""
    if len(indices) == count:
        return "all stages" if count > 1 else "the stage"
    ranges = number_ranges(indices)
    if len(ranges) > _MAX_RANGES:
        return f"{len(indices):,} of {count:,} stages"
    return f"stage {ranges}" if len(indices) == 1 else f"stages {ranges}"


def verdict(answer: StepAnswer) -> Iterator[tuple[str, str]]:
    """What the bottleneck is, what it costs, and what would help: labels and texts."""
    parts, step_s = answer.parts, answer.parts.step_s or 1.0
    link = answer.link
    stages = _stages_in_words(parts.stages, len(answer.plan.stages) + 1)
    if link is not None and link.busy_s > parts.busy_s:
        ends = _link_ends(link, answer.inputs.cluster)
        yield "bottleneck", f"the link {ends}, in use for {link.busy_s / step_s:.1%} of the step"
    else:
        yield (
            "bottleneck",
            f"rank {parts.rank} ({stages}), which computes for {parts.busy_s / step_s:.1%} "
            "of the step",
        )
    losses = [
        (parts.bubble_s, "for other stages, to fill and to drain"),
        (parts.communication_s, "for messages"),
        (parts.reduction_s, "for the sum of gradients"),
        (parts.offload_s, "for offloaded values"),
    ]
    lost = [
        f"{lost_s / step_s:.1%} {words}"
        for lost_s, words in sorted(losses, key=lambda loss: -loss[0])
        if lost_s / step_s >= _NOTHING
    ]
    if lost:
        yield "it waits", ", ".join(lost)
    yield "would help", _advice(answer)


def _advice(answer: StepAnswer) -> str:
    """The best offer that was tried, else what the largest loss suggests."""
    plan, parts, request = answer.plan, answer.parts, answer.inputs.request
    worth = _without_advice(plan, answer.without, considered=request.replicas is None)
    if worth:
        return worth
    step_s = plan.predicted_step_s
    if answer.explanation is not None:
        offers = answer.explanation.offers
        best = max(offers, key=lambda offer: offer.gain(step_s), default=None)
        if best is None or not best.gain(step_s):
            return "nothing that was tried"
        return f"{best.change}: {-best.gain(step_s):+.1%} per step"
    open_micro_batches = request.micro_batches is None or answer.inputs.kept is not None
    more_work = "a larger batch (training.batch_size), or fewer ranks"
    if not open_micro_batches and 2 * plan.micro_batches <= plan.batch_size:
        more_work = "more micro-batches (pipeline.micro_batches)"
    losses = {
        more_work: parts.bubble_s,
        "faster links, or fewer stages": parts.communication_s,
        "faster links, or fewer replicas": parts.reduction_s,
        "more memory per rank (pipeline.memory_limit)": parts.recompute_s + parts.offload_s,
    }
    advice, lost_s = max(losses.items(), key=lambda loss: loss[1])
    if lost_s < _SMALL * parts.step_s:
        return "more nodes; --nodes 1,2,4 says how far that pays"
    return f"{advice}; --explain tries that and more"


def _without_advice(plan: Plan, without: WithoutPipeline | None, *, considered: bool) -> str:
    """That this is better done without a pipeline; empty if it is not, or nobody knows.

    Args:
        considered: whether the planner was free to choose replicas.
    """
    better = None if without is None else without.better_than(plan)
    if better is not None and better.ranks == 1:
        return f"no pipeline: one rank alone takes {format_time(better.step_s)} per step"
    if better is not None:
        advice = (
            f"no pipeline: data parallelism on {better.ranks} ranks takes about "
            f"{format_time(better.step_s)} per step, {format_time(better.reduction_s)} of it to "
            "sum gradients"
        )
        return advice if considered else f"{advice} (pipeline.replicas: any considers it)"
    if without is not None and len(plan.stages) == 1 and plan.stages[0].replicas < plan.ranks:
        return "fewer ranks: no cut makes a step shorter than one rank alone does"
    return ""


def remarks(answer: StepAnswer) -> Iterator[tuple[str, str]]:
    """What to know of the search and of the plan: labels and texts."""
    from pipectl.runtime.supported import unsupported

    plan, inputs = answer.plan, answer.inputs
    search = plan.search
    if search is not None:
        compiling = ""
        if answer.compiling_s >= _NOTEWORTHY_S:
            compiling = f", {format_time(answer.compiling_s)} of it to compile the planner"
        stopped = f", stopped {answer.stopped}" if answer.stopped else ""
        bound = ""
        if search.step_lower_bound_s is not None and search.gap is not None:
            bound = (
                "; with these sizes of micro-batches, none takes less than "
                f"{format_time(search.step_lower_bound_s)} per step (within {search.gap:.1%})"
            )
        took = format_time(search.planning_s)
        yield "search", f"by {search.planner} in {took}{compiling}{stopped}{bound}"
    if inputs.kept is not None:
        yield (
            "micro-batches",
            f"{inputs.kept}, as in the plan before, because results depend on them; "
            "--new-micro-batches chooses anew",
        )
    features = unsupported(plan)
    if features and inputs.request.from_job:
        yield "not to be submitted", f"the ranks cannot run {' and '.join(features)} yet"
    if answer.without is not None and answer.without.reason:
        yield "data parallelism", f"not compared: {answer.without.reason}"


def gantt_lines(timeline: Timeline, width: int) -> list[Text]:
    """The Gantt's rows with colours."""
    lines = []
    for row in gantt(timeline, width):
        line = Text(row.label)
        for segment in row.segments:
            line.append(segment.text, style=_STYLES.get(segment.kind, ""))
        lines.append(line)
    return lines


def explanation_lines(explanation: Explanation, cluster: Cluster) -> Iterator[str]:
    """Where the step of the busiest rank goes, other plans, and what more would buy."""
    step_s = explanation.parts.step_s
    yield ""
    yield from _part_lines(explanation.parts)
    if explanation.link is not None:
        link, share = explanation.link, explanation.link.busy_s / step_s if step_s else 0.0
        yield f"busiest link: {_link_ends(link, cluster)}, in use for {share:.1%} of the step"
        yield f"  ({format_bytes(link.bytes_per_step)} per step take {format_time(link.busy_s)})"
    copies = _largest_copy(explanation.plan, cluster)
    if copies is not None:
        rank, size_bytes = copies
        yield f"checkpoints: while writing one, rank {rank} holds {format_bytes(size_bytes)} more"
    yield ""
    yield "other plans:" if explanation.alternatives else "other plans: none was found"
    yield from _columns(_alternative_row(other, step_s) for other in explanation.alternatives)
    yield ""
    yield "what more would buy:"
    predicted_s = explanation.plan.predicted_step_s
    yield from _columns(_offer_row(offer, predicted_s) for offer in explanation.offers)
    if explanation.measured_size is not None:
        yield (
            f"(only micro-batches of {explanation.measured_size} were measured; the times of other "
            "sizes are scaled: small ones may take longer)"
        )


def _part_lines(parts: StepParts) -> Iterator[str]:
    """The step of the busiest rank, part by part."""
    yield f"the {format_time(parts.step_s)} of rank {parts.rank}:"
    for name, words in _PARTS:
        time_s: float = getattr(parts, name)
        share = time_s / parts.step_s if parts.step_s else 0.0
        if share >= _NOTHING:
            bar = "█" * round(share * _BAR)
            yield f"  {words:<32}{format_time(time_s):>9}{share:>7.1%}  {bar}".rstrip()


def _link_ends(link: LinkLoad, cluster: Cluster) -> str:
    """What the link lies between, or whose it is."""

    def name(end: End) -> str:
        if link.between == "node" and isinstance(end, int):
            return cluster.nodes[end].name
        return f"{link.between} {end}"

    if link.source is None:
        return f"into {name(link.target)}"
    if link.target is None:
        return f"out of {name(link.source)}"
    if link.source == link.target:
        return f"in and out of {name(link.source)}"
    return f"{name(link.source)} to {name(link.target)}"


def _largest_copy(plan: Plan, cluster: Cluster) -> tuple[int, int] | None:
    """The rank that copies most for a checkpoint, besides the peak, and how much; None if none."""
    from pipectl.schedule.saving import copy_bytes

    copies = [
        copy_bytes(plan, rank, cluster.memory_of(rank, plan.memory_limit_bytes))
        for rank in range(plan.ranks)
    ]
    largest = max(copies)
    return (copies.index(largest), largest) if largest else None


def _alternative_row(other: Alternative, step_s: float) -> tuple[str, str, str]:
    """What is different, step time, and by how much that is longer, if it can be said."""
    other_s = other.plan.predicted_step_s
    longer = f"{other_s / step_s - 1:+.1%}" if step_s else ""
    return other.difference, format_time(other_s), longer


def _offer_row(offer: Offer, step_s: float) -> tuple[str, str, str]:
    """Change, step time, and what it is better; or why nothing can be said."""
    if offer.step_s is None:
        return offer.change, offer.reason, ""
    gain = offer.gain(step_s)
    if not gain:
        return offer.change, "nothing", ""
    return offer.change, format_time(offer.step_s), f"{-gain:+.1%}"


def _columns(rows: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    rows = list(rows)
    width = max((len(row[0]) for row in rows), default=0)
    for words, value, change in rows:
        yield f"  {words:<{width}}  {value:>9}  {change:>7}".rstrip()


def scaling_table(result: Scaling, width: int) -> Table:
    """One row per number of nodes; with bars if there is room.

    Args:
        width: columns there are.
    """
    heads = ("nodes", "ranks", "stages", "step", "samples/s", "efficiency", "bubble", "node-h/1000")
    bars = ("samples/s, · ideal",) if width >= _WIDE else ()
    rows = table(*heads, *bars, left=bars)
    for count in result.counts:
        plan, efficiency = count.plan, result.efficiency(count)
        cells = [str(count.nodes), str(count.ranks)]
        if plan is None or plan.prediction is None or efficiency is None:
            cells += ["-"] * (len(heads) - 2)
        else:
            cells += [
                str(len(plan.stages)),
                format_time(plan.prediction.step_time_s),
                f"{count.samples_per_s:.1f}",
                f"{efficiency:.0%}",
                f"{plan.prediction.bubble:.1%}",
                f"{count.node_hours:.3g}",
            ]
        if bars:
            cells.append(_scaling_bar(result, count))
        rows.add_row(*map(plain, cells))
    return rows


def _scaling_bar(result: Scaling, count: Count) -> str:
    """Throughput against what the largest count could have."""
    efficiency = result.efficiency(count)
    if result.base is None or efficiency is None:
        return ""
    ideal = _BAR * count.nodes / result.counts[-1].nodes
    whole = max(1, round(min(1.0, efficiency) * ideal))
    return "█" * whole + "·" * (round(ideal) - whole)


def scaling_lines(result: Scaling) -> Iterator[str]:
    """What people should conclude."""
    for count in result.counts:
        if count.plan is None:
            reason = count.reason.removeprefix("no feasible plan: ")
            yield f"{counted(count.nodes, 'node')}: {reason}"
    base, pays = result.base, result.pays_until
    if base is None or pays is None:
        yield "the model fits on none of these"
        return
    if base is not result.counts[0]:
        fewest = counted(base.nodes, "node")
        yield f"efficiency is against {fewest}, the fewest on which the model fits"
    until = f"scaling pays up to {counted(pays.nodes, 'node')}"
    if pays is result.counts[-1]:
        yield f"{until}, the most that was tried"
        return
    after = result.counts[result.counts.index(pays) + 1]
    if after.step_s is not None and pays.step_s is not None:
        gain = pays.step_s / after.step_s
        words = f"{gain:.2f} times as fast, of {after.nodes / pays.nodes:.2f} possible"
        yield f"{until}: {after.nodes} would be {words if gain >= _FASTER else 'no faster'}"


def balance_view(balanced: Balanced, profile: Profile) -> RenderableType:
    """The stages with the smallest largest load, and how good they are."""
    result, request, plan = balanced.balance, balanced.request, balanced.plan
    value, took = format_time(result.value_s), format_time(balanced.planning_s)
    proven = "the smallest possible"
    if not result.exact:
        least = format_time(result.lower_bound_s)
        proven = f"within {result.gap:.1%} of the smallest possible (none is below {least})"
    devices = counted(request.devices, "device")
    lines = [
        f"{profile.name}: {counted(len(result.stages), 'stage')} on {devices}",
        f"largest stage load {value}: {proven}, in {took}",
    ]
    rows = table("stage", "ops", "load", "", "from", left=("", "from"))
    for index, stage in enumerate(result.stages):
        bar = "█" * round(_BAR * stage.load_s / (result.value_s or 1.0))
        name = profile.by_id[stage.nodes[0]].name
        cells = (index, len(stage.nodes), format_time(stage.load_s), bar, name)
        rows.add_row(*map(plain, cells))
    parts: list[RenderableType] = [*map(plain, lines), rows]
    if plan.prediction is not None:
        parts.append(
            plain(
                f"as a 1f1b pipeline of {counted(plan.micro_batches, 'micro-batch')}: "
                f"{format_time(plan.prediction.step_time_s)} per step, "
                f"bubble {plan.prediction.bubble:.1%}"
            )
        )
    return Group(*parts, *(plain(f"assumed: {each}") for each in plan.assumptions))
