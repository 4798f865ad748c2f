"""One simulated step for people: of a plan, or of a schedule on equal stages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipectl.cluster import Cluster, Device, Node, assumed_cluster
from pipectl.errors import UsageError
from pipectl.graph import TransferKind
from pipectl.link import Link
from pipectl.plan import Plan, Stage, StageCost, Transfer
from pipectl.schedule import NAMES, default_ranks, default_warm_up, lower, stage_peaks_in_flight
from pipectl.schedule.listed import Listed
from pipectl.schedule.own import make_listed, read_listed
from pipectl.simulate.simulation import Simulation, simulate
from pipectl.spec import SCHEDULE_SUFFIX

_FAST = 1e15


@dataclass(frozen=True)
class Simulated:
    """A step, and what its programs need.

    Args:
        peak_in_flight: of every stage, micro-batches between forward and backward.
        assumptions: of the machines.
    """

    plan: Plan
    simulation: Simulation
    peak_in_flight: tuple[int, ...]
    assumptions: tuple[str, ...]

    @property
    def planned_s(self) -> float | None:
        """The step as the plan itself predicts it; None if that is of another order."""
        return None if self.plan.prediction is None else self.plan.prediction.step_time_s

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        step = self.simulation
        return {
            "schedule": self.plan.schedule,
            "stages": len(self.plan.stages),
            "ranks": self.plan.ranks,
            "micro_batches": self.plan.micro_batches,
            "step_time_s": step.step_time_s,
            "planned_step_time_s": self.planned_s,
            "bubble": step.bubble,
            "utilisation": list(step.utilisation),
            "peak_in_flight": list(self.peak_in_flight),
            "peak_memory_bytes": list(step.peak_memory_bytes),
            "assumptions": list(self.assumptions),
        }


def simulate_plan(
    plan: Plan, cluster: Cluster | None = None, schedule: str | None = None
) -> Simulated:
    """A plan's own step, or that of its stages in the order of a user's schedule.

    Args:
        cluster: by default assumed: shared memory within nodes, 10 Gbit/s Ethernet between.

    Raises:
        UsageError: the schedule is not a user's own, or not of as many stages and micro-batches.
        ScheduleError: the schedule cannot run.
    """
    if schedule is not None:
        plan = _reorder(plan, schedule)
    if cluster is None:
        counts = [plan.node_of_rank.count(node) for node in range(1 + max(plan.node_of_rank))]
        cluster = assumed_cluster(plan.name, counts, max(counts), None)
    programs = [lower(plan, rank) for rank in range(plan.ranks)]
    simulation = simulate(plan, cluster, programs)
    in_flight = stage_peaks_in_flight(plan, programs)
    return Simulated(plan, simulation, in_flight, cluster.assumptions)


def plan_equal_stages(
    schedule: str,
    stages: int | None = None,
    micro_batches: int | None = None,
    ranks: int | None = None,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    latency_s: float = 0.0,
) -> tuple[Plan, Cluster]:
    """A schedule on equal stages, whose messages take nothing but a latency, and its machines.

    Args:
        schedule: built in, a file, or what a package offers.
        stages, micro_batches, ranks: None if the schedule says how many.
        forward_s, backward_s: of a micro-batch, in any unit.
        latency_s: of a message between ranks, in the same.

    Raises:
        UsageError: numbers that the schedule needs are missing, or contradict it.
        ScheduleError: it is none.
    """
    options = {"stages": stages, "micro-batches": micro_batches, "ranks": ranks}
    listed: Listed | None = None
    actions: tuple[str, ...] = ()
    if schedule.endswith(SCHEDULE_SUFFIX):
        listed = read_listed(Path(schedule), schedule)
    elif stages is None or micro_batches is None:
        raise UsageError(
            f"schedule {schedule}: of how many stages and micro-batches?",
            cure="add for example --stages 4 --micro-batches 8",
        )
    elif schedule not in NAMES:
        listed = make_listed(schedule, ranks or stages, stages, micro_batches)
    if listed is not None:
        stages, micro_batches, ranks = listed.stages, listed.micro_batches, len(listed.ranks)
        rank_of_stage, warm_up, actions = listed.rank_of_stage, listed.warm_up, listed.text
    else:
        assert stages is not None
        assert micro_batches is not None
        rank_of_stage = default_ranks(schedule, stages, ranks)
        ranks = len(set(rank_of_stage))
        warm_up = default_warm_up(schedule, stages, micro_batches, ranks=ranks)
    numbers = zip(options.items(), (stages, micro_batches, ranks), strict=True)
    for (name, option), number in numbers:
        if option not in (None, number):
            subject = schedule if listed else f"{schedule} of {stages} stages"
            raise UsageError(
                f"{subject} has {number} {name}, not {option}", cure=f"leave --{name} out"
            )
    cost = StageCost(forward_s, backward_s, 0.0, 0, 0, 0)
    pairs = list(pairwise(range(stages)))
    plan = Plan(
        name=schedule,
        fingerprint=None,
        schedule=schedule,
        actions=actions,
        warm_up=tuple(warm_up),
        batch_size=micro_batches,
        micro_batch_size=1,
        micro_batches=micro_batches,
        stages=tuple(Stage((f"stage{s}",), (rank,), cost) for s, rank in enumerate(rank_of_stage)),
        transfers=(
            *(Transfer(TransferKind.ACTIVATION, a, b, 0) for a, b in pairs),
            *(Transfer(TransferKind.GRADIENT, b, a, 0) for a, b in pairs),
        ),
        node_of_rank=(0,) * (1 + max(rank_of_stage)),
    )
    nodes = (Node("one", plan.ranks, plan.ranks, Device("any")),)
    link = Link(latency_s, _FAST)
    return plan, Cluster("equal devices", "imagined", nodes, link, link)


def _reorder(plan: Plan, schedule: str) -> Plan:
    """The plan's stages in the order, and on the ranks, of a user's schedule."""
    if not schedule.endswith(SCHEDULE_SUFFIX):
        raise UsageError(
            f"--schedule {schedule}: a plan's stages are cut for its own schedule",
            cure="name a .csv file, or plan again with pipeline.schedule",
        )
    if any(stage.replicas > 1 or stage.backward_ranks for stage in plan.stages):
        raise UsageError(
            f"--schedule {schedule}: stages of the plan have several ranks, lists give them one",
            cure="plan again with pipeline.schedule",
        )
    listed = read_listed(Path(schedule), schedule)
    have = len(plan.stages), plan.micro_batches, plan.ranks
    needs = listed.stages, listed.micro_batches, len(listed.ranks)
    if have[:2] != needs[:2] or needs[2] > have[2]:
        raise UsageError(
            "{} has {} stages, {} micro-batches and {} ranks; the plan {}, {} and {}".format(
                schedule, *needs, *have
            ),
            cure="use a schedule made for the plan, or plan again with pipeline.schedule",
        )
    ranks = zip(plan.stages, listed.rank_of_stage, strict=True)
    return replace(
        plan,
        schedule=listed.name,
        actions=listed.text,
        warm_up=listed.warm_up,
        stages=tuple(replace(stage, ranks=(rank,)) for stage, rank in ranks),
        prediction=None,
    )
