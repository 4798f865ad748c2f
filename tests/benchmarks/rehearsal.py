"""What published schedules gain, as predicted, as rehearsed over real ranks, and as trained.

Zero-bubble (Qi et al., 2024): ZB-H1 and ZB-V against 1F1B with 8 ranks, 32 micro-batches and
F = I = W, over links that take no time. DAPPLE (Fan et al., 2021): 1F1B against GPipe within the
memory that 1F1B needs; GPipe does what the planner finds best there (recomputation, smaller or
fewer micro-batches). Simulated and rehearsed for a GPT of 24 blocks with GPT-3's shapes on 8
accelerators; trained for a small GPT on two ranks of this machine, in turns.

    python tests/benchmarks/rehearsal.py [--short] [zero-bubble] [dapple]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from in_turns import cluster_of, gpt, profiled, ratio, spread, train_in_turns
from planner_scale import cluster_of as accelerators
from planner_scale import gpt3_profile

from pipectl.cluster import Cluster, Device, Node
from pipectl.errors import InfeasibleError
from pipectl.graph import TransferKind
from pipectl.jobs.rehearse import WORKER, Rehearsed, result_of
from pipectl.link import Link
from pipectl.plan import Plan, Stage, StageCost, Transfer
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Profile
from pipectl.runs import RunDirectory
from pipectl.schedule import default_ranks, default_warm_up
from pipectl.simulate import simulate
from pipectl.simulate.rehearsing import rehearsal_of
from pipectl.units import format_bytes

RANKS, MICRO_BATCHES, FORWARD_S = 8, 32, 0.02
PUBLISHED_ZERO_BUBBLE, PUBLISHED_DAPPLE = "1.23x", "1.6x, 12% less memory"
AT_LEAST = 0.97
ROUNDS = 5
BLOCKS, BATCH = 24, 128
SAMPLES, TRAINED_RANKS = 32, 2
ROOM = 1.02
"""Of the limit, over what 1F1B needs."""


def chain(schedule: str) -> Plan:
    """Even stages, one a rank or two halves, in which a backward's halves take as a forward."""
    parts = 2 if schedule == "zb-v" else 1
    stages = parts * RANKS
    part_s = FORWARD_S / parts
    cost = StageCost(part_s, 2 * part_s, 0.0, 0, 0, 0, weight_s=part_s)
    neighbours = [(stage, stage + 1) for stage in range(stages - 1)]
    ranks = default_ranks(schedule, stages)
    return Plan(
        name=schedule,
        fingerprint=None,
        schedule=schedule,
        warm_up=default_warm_up(schedule, stages, MICRO_BATCHES, ranks=RANKS),
        batch_size=MICRO_BATCHES,
        micro_batch_size=1,
        micro_batches=MICRO_BATCHES,
        stages=tuple(Stage((f"n{index}",), (rank,), cost) for index, rank in enumerate(ranks)),
        transfers=(
            *(Transfer(TransferKind.ACTIVATION, a, b, 8) for a, b in neighbours),
            *(Transfer(TransferKind.GRADIENT, b, a, 8) for a, b in neighbours),
        ),
        node_of_rank=(0,) * RANKS,
    )


def free_links(ranks: int) -> Cluster:
    """A cluster whose messages take no time."""
    link = Link(0.0, 1e15)
    return Cluster("free", "given", (Node("n", ranks, ranks, Device("cpu")),), link, link)


def rehearsed(plan: Plan, cluster: Cluster, folder: Path) -> Rehearsed:
    """A rehearsal on this machine, as ``pipectl submit --rehearse`` runs it."""
    run = RunDirectory.create(folder, plan.schedule, 0.0)
    plan.save(run.plan)
    rehearsal_of(plan, cluster, plan.ranks / len(os.sched_getaffinity(0))).save(run.rehearsal)
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    command = [str(mpiexec), "-n", str(plan.ranks), sys.executable, "-m", "mpi4py", "-m", WORKER]
    subprocess.run([*command, "--run", str(run.path)], check=True, timeout=900)
    return result_of(run)


def rehearsed_in_turns(
    plans: Sequence[Plan], cluster: Cluster, rounds: int
) -> dict[str, list[Rehearsed]]:
    """Rehearsals of every plan by its schedule, round after round."""
    found: dict[str, list[Rehearsed]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for plan in plans:
                found.setdefault(plan.schedule, []).append(rehearsed(plan, cluster, Path(folder)))
    return found


def zero_bubble(rounds: int) -> None:
    plans = [chain(schedule) for schedule in ("1f1b", "zb-h1", "zb-v")]
    cluster = free_links(RANKS)
    ideal_s = [simulate(plan, cluster).step_time_s for plan in plans]
    found = rehearsed_in_turns(plans, cluster, rounds)
    steps_s = [[item.step_s for item in found[plan.schedule]] for plan in plans]
    print(f"\n### Zero-bubble: {RANKS} ranks, {MICRO_BATCHES} micro-batches, F = I = W, {rounds} "
          f"rounds\n")  # fmt: skip
    print("| schedule | predicted step s | rehearsed step s | predicted gain | rehearsed gain "
          "| of the predicted gain | latest rank s | published |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for plan, ideal, times in zip(plans, ideal_s, steps_s, strict=True):
        gain, real = ideal_s[0] / ideal - 1, ratio(steps_s[0], times) - 1
        late_s = max(item.late_s for item in found[plan.schedule])
        gains = f"{gain:.1%} | {real:.1%} | {_share(real, gain)}" if gain else "| |"
        published = PUBLISHED_ZERO_BUBBLE if gain else ""
        print(f"| {plan.schedule} | {ideal:.3f} | {spread(times)} | {gains} | {late_s:.3f} "
              f"| {published} |", flush=True)  # fmt: skip


def _share(found: float, ideal: float) -> str:
    return f"{found / ideal:.3f}{'' if found >= AT_LEAST * ideal else f' (below {AT_LEAST})'}"


def within(profile: Profile, cluster: Cluster, request: PlanRequest) -> list[Plan]:
    """1F1B, GPipe within its memory, and GPipe as if there were enough."""
    one = make_plan(profile, cluster, replace(request, schedule="1f1b"))
    assert one.prediction is not None
    limit = round(ROOM * max(one.prediction.peak_memory_bytes))
    plans = [replace(one, name="1F1B")]
    gpipe = replace(request, schedule="gpipe", stages=len(one.stages))
    try:
        limited = replace(gpipe, memory_limit_bytes=limit, recompute=None)
        plans.append(replace(make_plan(profile, cluster, limited), name="GPipe within its memory"))
    except InfeasibleError as error:
        print(f"\nGPipe does not fit into {format_bytes(limit)}: {error}")
    same = replace(gpipe, micro_batches=one.micro_batches)
    return [*plans, replace(make_plan(profile, cluster, same), name="GPipe with all it needs")]


def described(plan: Plan) -> str:
    """What tells the plans apart."""
    again = sum(stage.recompute for stage in plan.stages)
    more = f", {again} of {len(plan.stages)} stages recompute" if again else ""
    return f"{plan.name} ({plan.micro_batches} micro-batches{more})"


def peak_of(plan: Plan) -> int:
    """Predicted, of the rank that holds the most."""
    assert plan.prediction is not None
    return max(plan.prediction.peak_memory_bytes)


def dapple_predicted(rounds: int) -> None:
    profile, cluster = gpt3_profile(BLOCKS), accelerators(RANKS, 2**50)
    request = PlanRequest("dapple", BATCH, stages=RANKS, from_job=False)
    plans = within(profile, cluster, request)
    rehearsals = [
        [item.step_s for item in rehearsed_in_turns([plan], cluster, rounds)[plan.schedule]]
        for plan in plans
    ]
    print(f"\n### DAPPLE's comparison, predicted and rehearsed: {RANKS} ranks, {BATCH} samples\n")
    print("| plan | predicted step s | rehearsed step s | 1F1B is faster, predicted | rehearsed "
          "| largest peak | 1F1B holds | published |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for plan, times in zip(plans, rehearsals, strict=True):
        faster = f"{plan.predicted_step_s / plans[0].predicted_step_s:.2f}x"
        real = f"{ratio(times, rehearsals[0]):.2f}x"
        held = f"{format_bytes(peak_of(plan))} | {peak_of(plans[0]) / peak_of(plan):.2f}x"
        print(f"| {described(plan)} | {plan.predicted_step_s:.3f} | {spread(times)} | {faster} "
              f"| {real} | {held} | {PUBLISHED_DAPPLE} |", flush=True)  # fmt: skip


def dapple_trained(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gpt(batch=SAMPLES).write(folder, TRAINED_RANKS)
        request = PlanRequest("dapple", SAMPLES, stages=TRAINED_RANKS)
        plans = within(profiled(folder, 16), cluster_of(TRAINED_RANKS), request)
        for plan in plans:
            plan.save(folder / f"{plan.name}.json")
        contenders = {plan.name: {"plan": f"{plan.name}.json"} for plan in plans}
        case = {"contenders": contenders, "rounds": rounds, "steps": 2}
        seconds = train_in_turns(folder, case, TRAINED_RANKS)[0]["seconds"]
        peaks = {name: _peak(folder, name, entry) for name, entry in contenders.items()}
    print(f"\n### DAPPLE's comparison, trained: a GPT on {TRAINED_RANKS} ranks, {SAMPLES} samples, "
          f"{rounds} rounds\n")  # fmt: skip
    print("| plan | step s | predicted | 1F1B is faster | predicted | largest peak | predicted "
          "| 1F1B holds | published |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    first = plans[0]
    for plan in plans:
        faster = f"{ratio(seconds[plan.name], seconds[first.name]):.2f}x"
        expected = f"{plan.predicted_step_s / first.predicted_step_s:.2f}x"
        held = f"{format_bytes(peaks[plan.name])} | {format_bytes(peak_of(plan))}"
        print(f"| {described(plan)} | {spread(seconds[plan.name])} | {plan.predicted_step_s:.3f} "
              f"| {faster} | {expected} | {held} | {peaks[first.name] / peaks[plan.name]:.2f}x "
              f"| {PUBLISHED_DAPPLE} |", flush=True)  # fmt: skip


def _peak(folder: Path, name: str, entry: dict[str, str]) -> int:
    """Resident, in processes of its own."""
    alone = {"contenders": {name: entry}, "rounds": 1, "steps": 2}
    return max(rank["peak_bytes"] for rank in train_in_turns(folder, alone, TRAINED_RANKS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="one round")
    parser.add_argument("parts", nargs="*", help="zero-bubble, dapple; both by default")
    given = parser.parse_args()
    rounds, parts = 1 if given.short else ROUNDS, given.parts or ["zero-bubble", "dapple"]
    print("## Published schedules: predicted, rehearsed, trained")
    if "zero-bubble" in parts:
        zero_bubble(rounds)
    if "dapple" in parts:
        dapple_predicted(1 if given.short else 2)
        dapple_trained(rounds)


if __name__ == "__main__":
    main()
