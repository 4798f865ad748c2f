"""Plans as text: the table of stages, a verdict, the predicted step, and explanations.

Everything fits 80 columns; wider terminals show more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from pipectl.cli.console import Fitted, labels, plain, table
from pipectl.cluster import Cluster
from pipectl.plan import Plan, Replication, Stage
from pipectl.units import format_bytes, format_ranges, format_time, plural

if TYPE_CHECKING:  # `status` shows plans, too, and loads no planner
    from pipectl.jobs.plan_search import StepAnswer
    from pipectl.planner.explain.bottleneck import End, LinkLoad
    from pipectl.planner.explain.data_parallel import WithoutPipeline
    from pipectl.planner.explain.explain import Explanation
    from pipectl.planner.explain.scaling import Count, Scaling
    from pipectl.timeline import Timeline

_STAGE_COLUMNS = (
    *("stage", "rank", "node", "ops", "parameters", "forward", "backward", "load", ""),
    *("memory", "operators"),
)
_MAX_ROWS, _FIRST_ROWS, _LAST_ROWS = 24, 12, 4
_GAP = "…"
_BAR, _LOAD_BAR = 24, 6
_MAX_RANGES = 40
_NOTHING, _SMALL = 1e-3, 0.05
"""Shares of the step that are too small for a line, and for an advice."""
_NOTEWORTHY_S = 1.0
"""Minimum compile time that is printed, in seconds."""
_FASTER = 1.005
_DATA_PARALLEL = "--set pipeline.replicas=any"
_PARTS = (
    ("compute_s", "forward and backward"),
    ("recompute_s", "recomputation"),
    ("update_s", "optimizer step"),
    ("reduction_s", "waiting for sums of gradients"),
    ("offload_s", "waiting for offloaded values"),
    ("communication_s", "waiting for messages"),
    ("bubble_s", "waiting for other ranks"),
)


def step_view(answer: StepAnswer) -> RenderableType:
    """Everything that `pipectl plan` shows about one plan."""
    plan, explanation = answer.plan, answer.explanation
    names = {operator.id: operator.name for operator in answer.inputs.profile.operators}
    ends = [
        " … ".join(
            names.get(node, node) for node in dict.fromkeys(stage.nodes[:1] + stage.nodes[-1:])
        )
        for stage in plan.stages
    ]
    parts: list[RenderableType] = [plain(f"{plan.name}: {plan.summary}", "bold")]
    parts += [
        *map(plain, plan.describe_prediction(answer.inputs.cluster, answer.range_s)),
        "",
        stage_table(plan, ends if explanation is None else [""] * len(ends)),
        *map(plain, mark_lines(plan)),
    ]
    if explanation is not None:  # in any width
        parts += [plain(f"stage {index}: {ends[index]}") for index in choose_stages(plan)]
    lines = [(f"{label}:", text, "") for label, text in (*verdict(answer), *remarks(answer))]
    indent = max(len(label) for label, _, _ in lines) + 1
    parts += ["", labels(lines, indent, "bold"), "", draw_step(answer.simulation.timeline)]
    if explanation is not None:
        parts += map(plain, explanation_lines(answer, explanation))
    parts += assumption_lines(plan.assumptions)
    return Group(*parts)


def nodes_line(plans: Mapping[int, Plan]) -> str:
    """The plans for a range of nodes: ``planned for 2 (52.0 ms per step), 3 (36.1 ms) and so on."""
    times = [f"{n} ({format_time(plan.predicted_step_s)})" for n, plan in plans.items()]
    times[0] = f"{times[0][:-1]} per step)"
    count = next(iter(plans.values())).micro_batches
    missing = {*range(min(plans), max(plans))} - plans.keys()
    more = f"; for {format_ranges(missing)} in the job" if missing else ""
    return f"planned for {', '.join(times)}, each with {plural(count, 'micro-batch')}{more}"


def nodes_json(plans: Mapping[int, Plan]) -> dict[str, list[dict[str, float]]]:
    """See :class:`pipectl.jobs.plan_search.AnswerJson`; empty without a range of nodes."""
    times = [{"nodes": n, "step_time_s": plan.predicted_step_s} for n, plan in plans.items()]
    return {"nodes": times} if times else {}


def assumption_lines(assumptions: Iterable[str]) -> list[RenderableType]:
    """The assumptions of a prediction, each on lines of its own."""
    words = (text.replace(" is assumed, not measured", " (not measured)") for text in assumptions)
    label = "assumed:"
    return [labels([(label, text, "dim")], len(label) + 1, "dim") for text in words]


def stage_table(plan: Plan, ends: Sequence[str]) -> RenderableType:
    """One row per stage with all its ranks; of very many stages, some are left out.

    Args:
        ends: names of the first and last operator of every stage, shown if there is room.
    """
    loads = [stage.load_s for stage in plan.stages]
    total_s, largest_s = sum(loads) or 1.0, max(loads) or 1.0
    indices, rows = choose_stages(plan), []
    for index, after in zip(indices, [*indices[1:], len(plan.stages)], strict=True):
        stage = plan.stages[index]
        cells = (
            index,
            format_ranges(stage.every_rank, ","),
            format_ranges([plan.node_of_rank[rank] for rank in stage.every_rank], ","),
            len(stage.nodes),
            format_bytes(stage.cost.parameter_bytes),
            format_time(stage.cost.forward_s),
            format_time(stage.cost.backward_s),
            f"{stage.load_s / total_s:.1%}",
            "█" * round(_LOAD_BAR * stage.load_s / largest_s),
            "" if plan.prediction is None else format_bytes(_peak_bytes(plan, stage)),
            ends[index],
        )
        slowest = loads[index] == max(loads) and len(loads) > 1
        rows.append([plain(cell, "bold" if slowest else "") for cell in cells])
        if after > index + 1:
            rows.append([plain(_GAP)] * len(_STAGE_COLUMNS))
    left, optional = ("", "operators"), ("operators",)
    return table(_STAGE_COLUMNS, rows, left=left, optional=optional)


def choose_stages(plan: Plan) -> list[int]:
    """All stages; of very many, the first, the last, the slowest and the one with most memory."""
    count = len(plan.stages)
    if count <= _MAX_ROWS:
        return list(range(count))
    loads = [stage.load_s for stage in plan.stages]
    peaks = [_peak_bytes(plan, stage) for stage in plan.stages]
    extremes = loads.index(max(loads)), peaks.index(max(peaks))
    return sorted({*range(_FIRST_ROWS), *range(count - _LAST_ROWS, count), *extremes})


def _peak_bytes(plan: Plan, stage: Stage) -> int:
    """Largest peak memory of a stage's ranks; 0 without a prediction."""
    if plan.prediction is None:
        return 0
    peaks = plan.prediction.peak_memory_bytes
    return max(peaks[rank] for rank in stage.every_rank)


def mark_lines(plan: Plan) -> Iterator[str]:
    """Lines about replicas, recomputation, offload and separate backwards of stages."""
    if any(stage.replicas > 1 for stage in plan.stages):
        split = plan.replication is Replication.SPLIT
        share = "samples of every micro-batch" if split else "whole micro-batches in turn"
        changed = "; operators such as BatchNorm see only these" if split else ""
        yield f"replicas: the ranks of a stage take {share}{changed}"
    marks = {
        "backward on ranks of their own": [bool(stage.backward_ranks) for stage in plan.stages],
        "recomputed in the backward": [
            stage.recompute and stage.segments is None for stage in plan.stages
        ],
        "recomputed segment by segment in the backward": [
            stage.segments is not None for stage in plan.stages
        ],
        "offloaded until the backward": [stage.offload for stage in plan.stages],
    }
    for words, held in marks.items():
        stages = [index for index, holds in enumerate(held) if holds]
        if stages:
            yield f"{words}: {_stages_in_words(stages, len(held))}"


def _stages_in_words(indices: Sequence[int], count: int) -> str:
    """Some of ``count`` stages, in words."""
    if len(indices) == count:
        return "all stages" if count > 1 else "the stage"
    ranges = format_ranges(indices, ",")
    if len(ranges) > _MAX_RANGES:
        return f"{len(indices):,} of {count:,} stages"
    return f"stage {ranges}" if len(indices) == 1 else f"stages {ranges}"


def verdict(answer: StepAnswer) -> Iterator[tuple[str, str]]:
    """The bottleneck, what it costs, and what would help: labels and texts."""
    parts, step_s = answer.parts, answer.parts.step_s or 1.0
    link = answer.link
    every = len(answer.plan.stages) + 1  # more than there are: "all stages" says too little here
    stages = _stages_in_words(parts.stages, every)
    if link is not None and answer.is_link_bound:
        ends, waiting = _link_ends(link, answer.inputs.cluster), f"rank {parts.rank} waits"
        yield "bottleneck", f"the link {ends}, in use for {link.busy_s / step_s:.1%} of the step"
    else:
        share, waiting = f"{parts.busy_s / step_s:.1%}", "it waits"
        yield "bottleneck", f"rank {parts.rank} ({stages}), which computes for {share} of the step"
    losses = [
        (parts.bubble_s, "for other ranks (the pipeline fills and drains)"),
        (parts.communication_s, "for messages"),
        (parts.reduction_s, "for sums of gradients"),
        (parts.offload_s, "for offloaded values"),
    ]
    lost = [
        f"{lost_s / step_s:.1%} {words}"
        for lost_s, words in sorted(losses, key=lambda loss: -loss[0])
        if lost_s / step_s >= _NOTHING
    ]
    if lost:
        yield waiting, ", ".join(lost)
    yield _advice(answer)


def _advice(answer: StepAnswer) -> tuple[str, str]:
    """What is faster or would help as planned, else what may help against the largest loss."""
    plan, parts, request = answer.plan, answer.parts, answer.inputs.request
    worth = _without_advice(plan, answer.without, considered=request.replicas is None)
    if worth:
        return worth
    step_s = plan.predicted_step_s
    if answer.explanation is not None:
        offers = answer.explanation.offers
        best = max(offers, key=lambda offer: offer.gain(step_s), default=None)
        if best is None or not best.gain(step_s):
            return "would help", "none of the changes that were tried"
        step, gain = format_time(best.step_s or 0.0), best.gain(step_s)
        return "would help", f"{best.change}: {step} per step ({-gain:+.1%})"
    more_work = "a larger batch (training.batch_size), or fewer ranks"
    if answer.inputs.sets_micro_batches and 2 * plan.micro_batches <= plan.batch_size:
        more_work = "more micro-batches (pipeline.micro_batches)"
    losses = {
        more_work: parts.bubble_s,
        "faster links, or fewer stages": parts.communication_s,
        "faster links, or fewer replicas": parts.reduction_s,
        request.more_memory(answer.inputs.cluster): parts.recompute_s + parts.offload_s,
    }
    advice, lost_s = max(losses.items(), key=lambda loss: loss[1])
    if lost_s < _SMALL * parts.step_s:
        if not answer.inputs.can_add_nodes:
            return (
                "would help",
                f"only faster operators: waits are less than {_SMALL:.0%} of the step",
            )
        return "may help", "more nodes; --compare 1,2,4 says up to how many nodes it is faster"
    return "may help", f"{advice}; not tried: --explain tries such changes"


def _without_advice(
    plan: Plan, without: WithoutPipeline | None, *, considered: bool
) -> tuple[str, str] | None:
    """What is faster without a pipeline; None if nothing is, or nothing is known.

    Args:
        considered: whether the planner was free to choose replicas.
    """
    better = None if without is None else without.better_than(plan)
    if better is not None and better.ranks == 1:
        return "faster", f"one rank without a pipeline: {format_time(better.step_s)} per step"
    if better is not None:
        advice = (
            f"data parallelism on {better.ranks} ranks without a pipeline: about "
            f"{format_time(better.step_s)} per step, {format_time(better.reduction_s)} of it to "
            "sum gradients"
        )
        return "faster", advice if considered else f"{advice} ({_DATA_PARALLEL} plans it)"
    if without is not None and len(plan.stages) == 1 and plan.stages[0].replicas < plan.ranks:
        return "would help", "fewer ranks: no cut makes a step shorter than one rank alone does"
    return None


def remarks(answer: StepAnswer) -> Iterator[tuple[str, str]]:
    """Remarks on the search and the plan: labels and texts."""
    from pipectl.runtime.nodes import unsupported

    plan, inputs, search = answer.plan, answer.inputs, answer.plan.search
    if search is not None:
        text = f"took {format_time(search.planning_s)}"
        if answer.compiling_s >= _NOTEWORTHY_S:
            text += f", {format_time(answer.compiling_s)} of it to compile the planner"
        if answer.stopped:
            text += f", stopped {answer.stopped}"
        if search.step_lower_bound_s is not None and search.gap is not None:
            if search.gap < _NOTHING:
                text += "; no plan with these micro-batch sizes is faster"
            else:
                bound = format_time(search.step_lower_bound_s)
                text += (
                    f"; no plan with these micro-batch sizes takes less than {bound} per step (a "
                    "lower bound, which may not be reachable)"
                )
        yield "search", text
    if inputs.request.keeps_micro_batches:
        yield (
            "micro-batches",
            f"{inputs.request.micro_batches}, as in the previous plan, because results depend on "
            "them; use --new-micro-batches to change them",
        )
    features = unsupported(plan)
    if features and inputs.request.from_job:
        yield "cannot be submitted", f"the ranks cannot run {' and '.join(features)} yet"
    if answer.without is not None and answer.without.reason:
        yield "data parallelism", f"not compared: {answer.without.reason}"


def draw_step(timeline: Timeline) -> RenderableType:
    """The Gantt chart in colours, and its legend."""
    from pipectl.report.gantt import gantt, legend

    def draw(width: int) -> RenderableType:
        rows = (Text.assemble(*row) for row in gantt(timeline, width))
        return Group(*rows, plain(legend(timeline), "dim"))

    return Fitted(draw)


def explanation_lines(answer: StepAnswer, explanation: Explanation) -> Iterator[str]:
    """Time of the busiest rank, other plans, and the effect of changes."""
    from pipectl.simulate.memory import copy_bytes  # numpy, which `status` does without

    parts, plan, cluster = answer.parts, answer.plan, answer.inputs.cluster
    yield ""
    yield f"the {format_time(parts.step_s)} of rank {parts.rank}:"
    for name, words in _PARTS:
        time_s: float = getattr(parts, name)
        share = time_s / parts.step_s if parts.step_s else 0.0
        if share >= _NOTHING:
            bar = "█" * round(share * _BAR)
            yield f"  {words:<32}{format_time(time_s):>9}{share:>7.1%}  {bar}".rstrip()
    if (link := answer.link) is not None:
        share = link.busy_s / parts.step_s if parts.step_s else 0.0
        yield f"busiest link: {_link_ends(link, cluster)}, in use for {share:.1%} of the step"
        yield f"  ({format_bytes(link.bytes_per_step)} per step take {format_time(link.busy_s)})"
    copies = [
        (copy_bytes(plan, rank, cluster.memory_of(rank, plan.memory_limit_bytes)), -rank)
        for rank in range(plan.ranks)
    ]
    size_bytes, rank = max(copies)
    if size_bytes:
        size = format_bytes(size_bytes)
        yield f"checkpoints: while writing one, rank {-rank} holds {size} more"
    yield ""
    yield "other plans:" if explanation.alternatives else "other plans: none"
    rows = []
    for other in explanation.alternatives:
        other_s = other.plan.predicted_step_s
        longer = f"{other_s / parts.step_s - 1:+.1%}" if parts.step_s else ""
        rows.append((other.difference, format_time(other_s), longer))
    yield from _columns(rows)
    yield ""
    yield "with other resources or settings:"
    rows = []
    for offer in explanation.offers:
        gain = 0.0 if offer.step_s is None else offer.gain(plan.predicted_step_s)
        value = offer.reason if offer.step_s is None else "nothing"
        if gain and offer.step_s is not None:
            value = format_time(offer.step_s)
        rows.append((offer.change, value, f"{-gain:+.1%}" if gain else ""))
    yield from _columns(rows)
    if not answer.inputs.profile.has_several_sizes:
        yield (
            f"(only micro-batches of {answer.inputs.profile.micro_batch_size} were measured; the "
            "times of other sizes are scaled: small ones may take longer)"
        )


def _columns(rows: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    width = max((len(row[0]) for row in rows), default=0)
    for words, value, change in rows:
        yield f"  {words:<{width}}  {value:>9}  {change:>7}".rstrip()


def _link_ends(link: LinkLoad, cluster: Cluster) -> str:
    """What the link connects."""

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


def scaling_table(result: Scaling) -> RenderableType:
    """One row per number of nodes, with bars if there is room."""
    heads = ("nodes", "ranks", "stages", "step", "samples/s", "efficiency", "bubble", "node-h/1000")
    bars, rows = "samples/s, · ideal", []
    for count in result.counts:
        plan, efficiency = count.plan, result.efficiency(count)
        cells = ["-"] * (len(heads) - 2)
        if plan is not None and plan.prediction is not None and efficiency is not None:
            cells = [
                str(len(plan.stages)),
                format_time(plan.prediction.step_time_s),
                f"{count.samples_per_s:.1f}",
                f"{efficiency:.0%}",
                f"{plan.prediction.bubble:.1%}",
                f"{count.node_hours:.3g}",
            ]
        rows.append((count.nodes, count.ranks, *cells, _scaling_bar(result, count)))
    return table((*heads, bars), rows, left=(bars,), optional=(bars,))


def _scaling_bar(result: Scaling, count: Count) -> str:
    """Throughput relative to the ideal throughput of the largest number of nodes."""
    efficiency = result.efficiency(count)
    if result.base is None or efficiency is None:
        return ""
    ideal = _BAR * count.nodes / result.counts[-1].nodes
    whole = max(1, round(min(1.0, efficiency) * ideal))
    return "█" * whole + "·" * (round(ideal) - whole)


def scaling_lines(result: Scaling) -> Iterator[str]:
    """Conclusions from the table."""
    for count in result.counts:
        if count.plan is None:
            reason = count.reason.removeprefix("no feasible plan: ")
            yield f"{plural(count.nodes, 'node')}: {reason}"
    base, pays = result.base, result.pays_until
    if base is None or pays is None:
        yield "the model fits on none of these numbers of nodes"
        return
    if base is not result.counts[0]:
        fewest = plural(base.nodes, "node")
        yield f"efficiency is against {fewest}, the fewest on which the model fits"
    until = f"scaling pays up to {plural(pays.nodes, 'node')}"
    if pays is result.counts[-1]:
        yield f"{until}, the largest number tried"
        return
    after = result.counts[result.counts.index(pays) + 1]
    if after.step_s is not None and pays.step_s is not None:
        gain = pays.step_s / after.step_s
        words = f"{gain:.2f} times as fast (ideal: {after.nodes / pays.nodes:.2f})"
        yield f"{until}: {after.nodes} would be {words if gain >= _FASTER else 'no faster'}"
