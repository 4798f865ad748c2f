"""The search for the best plan.

1. Stages: for every number of them, good partitions from the dynamic programme.
2. With every micro-batch size, schedule, warm-up and placement, these are the candidates.
3. The judge simulates them, most promising first, and drops what does not fit into memory.
4. Where balanced partitions do not fit, partitions made for the memory limit join.
5. If its micro-batch size is not the one stages were cut for, they are cut once more.
6. The borders of the winner's stages move while that makes the simulated step shorter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from time import perf_counter

from pipectl.cluster import Cluster
from pipectl.plan import Plan, Search
from pipectl.planner.condense import Condensed, condense
from pipectl.planner.fitting import Fitter
from pipectl.planner.infeasible import infeasible
from pipectl.planner.interleaving import interleaved_plan
from pipectl.planner.judge import Candidate, Judge, Verdict
from pipectl.planner.neighbours import neighbours
from pipectl.planner.partition import Bound, Costs, Partitioner, Space
from pipectl.planner.placement import placements
from pipectl.planner.problem import Choice, Problem, baseline_bytes
from pipectl.planner.request import PlanRequest, micro_batch_sizes, stage_counts, warm_ups
from pipectl.planner.spans import Partition
from pipectl.profile import Profile
from pipectl.schedule.interleaved import NAME as INTERLEAVED

PLANNER = "pipectl"
MICRO_BATCHES_PER_STAGE = 8
"""More add little: the bubble is then about a tenth."""
MICRO_BATCHES_IF_PROPORTIONAL = 4
"""The same where what a small micro-batch costs was not measured but scaled from a larger one."""
MOST_ROUNDS = 50
"""Of moving borders."""
MOST_FITTINGS = 24
"""Memory-limited searches, the most promising first."""


def make_plan(profile: Profile, cluster: Cluster, request: PlanRequest) -> Plan:
    """The fastest plan found by simulation that fits into memory, with its prediction.

    Raises:
        InfeasibleError: nothing fits; says how much is missing and what would help.
    """
    if request.schedule == INTERLEAVED:
        return interleaved_plan(make_plan, profile, cluster, request, baseline_bytes(profile))
    started_s = perf_counter()
    graph = condense(profile)
    counts = stage_counts(request, cluster.ranks, len(graph))
    space = _space(graph, profile, counts[-1])
    search = _Search(Problem(profile, cluster, request, space.graph), space, counts)
    verdict = search.run()
    plan = verdict.candidate.plan
    bound = search.bound(len(plan.stages), plan.micro_batch_size)
    return replace(
        plan,
        prediction=verdict.simulation.prediction,
        search=Search(
            planner=PLANNER,
            max_stage_load_s=_largest_load_s(plan, cluster),
            lower_bound_s=bound.load_s,
            exact=bound.exact,
            planning_s=perf_counter() - started_s,
        ),
    )


def _space(graph: Condensed, profile: Profile, stages: int) -> Space:
    """What to search; small blocks stay apart if there would be too few for the stages."""
    space = Space.of(graph, profile)
    return space if len(space.graph) >= stages else Space.sample(graph)


class _Search:
    def __init__(self, problem: Problem, space: Space, counts: Sequence[int]) -> None:
        self._problem = problem
        self._space = space
        self._counts = counts
        self._judge = Judge(problem)
        self._fitter = Fitter(problem)
        self._sizes = self._sizes_for(counts[-1])

    def run(self) -> Verdict:
        """The winner."""
        reference = self._reference_size()
        partitioner = self._partitioner(self._counts, reference)
        too_large = self._judge.consider(self._balanced(partitioner))
        self._fit(too_large)
        if self._judge.best() is None:
            self._fit_with_smaller_micro_batches()
        self._refine(reference)
        self._improve()
        verdict = self._judge.best()
        if verdict is None:
            raise infeasible(self._problem, self._fitter, self._counts)
        return verdict

    def bound(self, stages: int, size: int) -> Bound:
        """What is proven about partitions into so many stages."""
        return self._partitioner([stages], size).bound(stages)

    def _sizes_for(self, stages: int) -> list[int]:
        """Micro-batch sizes worth trying with so many stages."""
        several = any(operator.timings for operator in self._problem.profile.operators)
        per_stage = MICRO_BATCHES_PER_STAGE if several else MICRO_BATCHES_IF_PROPORTIONAL
        return micro_batch_sizes(self._problem.request, per_stage * stages)

    def _reference_size(self) -> int:
        """The size stages are first cut for: the one that was measured, if it is open."""
        measured = self._problem.profile.micro_batch_size
        return min(self._sizes, key=lambda size: (abs(size - measured), size))

    def _partitioner(self, counts: Sequence[int], size: int) -> Partitioner:
        cluster, most = self._problem.cluster, counts[-1]
        several_nodes = cluster.node_of_rank[most - 1] > 0
        costs = Costs(
            compute_s=self._problem.block_times(size),
            cached_s=self._problem.block_times(size, cached=True),
            least_s=self._problem.block_times(size, free=self._space.moved, cached=True),
            scale=self._problem.scale(size),
            link=cluster.between_nodes if several_nodes else cluster.within_node,
            speeds=[cluster.device(rank).speed for rank in range(most)],
        )
        fewest = next((count for count in counts if count > 1), 1)
        return Partitioner(self._space, costs, fewest=fewest, most=most)

    def _balanced(self, partitioner: Partitioner) -> Iterator[Choice]:
        """Every candidate whose stages come from the unlimited search."""
        for stages in self._counts:
            found = partitioner.partitions(stages)
            for size in self._sizes_for(stages):
                yield from self._choices(found, stages, size)

    def _choices(self, partitions: Iterable[Partition], stages: int, size: int) -> Iterator[Choice]:
        micro_batches = self._problem.micro_batches(size)
        for partition in partitions:
            for placement in placements(self._problem.cluster, stages):
                for schedule, warm_up in warm_ups(self._problem.request, stages, micro_batches):
                    yield Choice(partition, placement, size, schedule, warm_up)

    def _fit(self, too_large: Iterable[Candidate]) -> None:
        """Cut anew, within the memory limit, where balanced stages were too large."""
        tried: set[tuple[tuple[float, ...], int, tuple[int, ...]]] = set()
        for candidate in sorted(too_large, key=lambda item: (item.bound_s, *item.simplicity)):
            choice = candidate.choice
            limits = tuple(self._problem.limit_bytes(rank) for rank in choice.placement)
            key = (limits, choice.size, choice.warm_up)
            if key in tried or self._judge.is_beaten(candidate.bound_s):
                continue
            if len(tried) == MOST_FITTINGS:
                return
            tried.add(key)
            found = self._fitter.balanced(*key)
            self._judge.consider(replace(choice, partition=partition) for partition in found)

    def _fit_with_smaller_micro_batches(self) -> None:
        """More micro-batches than speed asks for, down to single samples; most stages help most."""
        request = self._problem.request
        for size in micro_batch_sizes(request, request.batch_size):
            for stages in reversed(self._counts) if size < self._sizes[-1] else ():
                depths = warm_ups(request, stages, self._problem.micro_batches(size))
                for placement in placements(self._problem.cluster, stages):
                    limits = [self._problem.limit_bytes(rank) for rank in placement]
                    found = self._fitter.balanced(limits, size, depths[0][1])
                    self._judge.consider(Choice(p, placement, size, *depths[0]) for p in found)
            if self._judge.best() is not None:
                return

    def _refine(self, reference: int) -> None:
        """Stages that are balanced at one size need not be at another."""
        best = self._judge.best()
        size = reference if best is None else best.candidate.choice.size
        if best is not None and size != reference:
            stages = len(best.candidate.plan.stages)
            found = self._partitioner([stages], size).partitions(stages)
            self._judge.consider(self._choices(found, stages, size))

    def _improve(self) -> None:
        """Move the borders of the best partition while that makes the step shorter."""
        best = self._judge.best()
        for _ in range(MOST_ROUNDS):
            if best is None:
                return
            choice, before = best.candidate.choice, best
            near = neighbours(choice.partition, self._problem.block_times(choice.size))
            self._judge.consider(self._choices(near, len(choice.partition), choice.size))
            best = self._judge.best()
            if best is before:
                return


def _largest_load_s(plan: Plan, cluster: Cluster) -> float:
    """Forward and backward of the most loaded stage on its device."""
    return max(
        (stage.cost.forward_s + stage.cost.backward_s) / cluster.device(stage.ranks[0]).speed
        for stage in plan.stages
    )
