"""When ranks move to another plan: what rank 0 sees, and what the process that plans answers."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from pipectl.capture import CapturedJob
from pipectl.jobs import replan
from pipectl.plan import Plan, Replication
from pipectl.runs import WARM_UP_STEPS, RankBeat, RunDirectory, read_heartbeat
from pipectl.runs.rebalance import Balance, Imbalance
from pipectl.runtime import rebalancing
from pipectl.runtime.checkpoint import Saver
from pipectl.runtime.device import choose_device
from pipectl.runtime.rebalancing import WINDOW, Move, Rebalancing, can_move
from pipectl.runtime.setup import Setup
from pipectl.runtime.trainer import Trainer
from pipectl.spec import load
from pipectl.watch.board import Board
from tests.planner.gate.checked_plans import cluster_of, planned
from tests.planner.gate.graphs import chain

RANKS, STEPS = 4, 10_000
JOB = """
model: m:build
loss: model
data: m:data
training: {steps: 10000, batch_size: 16}
pipeline: {micro_batches: 16}
resources: {nodes: 1, tasks_per_node: 4}
"""


@pytest.fixture
def cluster():
    return cluster_of(RANKS)


@pytest.fixture
def run(tmp_path, cluster):
    """A run on four ranks, each with an equal part of a chain."""
    directory = RunDirectory(tmp_path)
    directory.trace.mkdir()
    directory.job.write_text(JOB)
    profile = chain(16)
    profile.save(directory.profile)
    cluster.save(directory.cluster)
    plan = planned(profile, cluster, 16, micro_batches=16)
    assert [len(stage.nodes) for stage in plan.stages] == [4] * RANKS
    plan.save(directory.plan)
    directory.predicted.write_text("{}")
    return directory


class Watch:
    """Rank 0 of a run, and the speeds of all ranks."""

    def __init__(self, run, monkeypatch):
        self.run, self.asked, self.step = run, [], 0
        self.plan = planned(chain(16), cluster_of(RANKS), 16, micro_batches=16)
        self.rebalancing = Rebalancing(run, self.plan, STEPS)
        monkeypatch.setattr("pipectl.batch.process.start_detached", self.answer)
        monkeypatch.setattr("os.waitpid", lambda pid, _: (pid, 0))
        monkeypatch.setattr("os.nice", lambda _: 0)  # else the tests after this one would wait
        monkeypatch.setattr(rebalancing, "_LOOK_S", 0.0)
        self.random = np.random.default_rng(0)

    def answer(self, argv, *, env, **_):
        *_, self.searched_last = env["PYTHONPATH"].split(":")
        self.asked.append(Imbalance.load(self.run.imbalance))
        assert replan.main(argv[3:]) == 0
        return 4711

    def train(self, steps, *slowness, noise=0.05):
        expected_s = rebalancing._expected_s(self.rebalancing._plan, self.rebalancing._shares)
        for _ in range(steps):
            self.step += 1
            drawn = 1 + noise * self.random.standard_normal(RANKS)
            busy_s = expected_s * np.array(slowness or [1.0] * RANKS) * np.abs(drawn)
            beats = [RankBeat(r, node=f"n{r}", busy_s=each) for r, each in enumerate(busy_s)]
            self.rebalancing.look(self.step, beats)


@pytest.fixture
def watch(run, monkeypatch):
    return Watch(run, monkeypatch)


def test_even_ranks_stay_however_slow_all_are_and_however_noisy(watch):
    watch.train(100, noise=0.05)
    watch.train(200, 3.0, 3.0, 3.0, 3.0)
    watch.train(30, 1.05, 1.0, 1.0, 1.0)
    for _ in range(20):  # moments are no slow node
        watch.train(3, 1.0, 1.0, 4.0, 1.0)
        watch.train(12)
    assert watch.asked == []


def test_a_rank_that_becomes_slow_gets_less_work_and_more_again_when_it_recovers(watch, run):
    watch.train(WARM_UP_STEPS + WINDOW + 30)
    watch.train(WINDOW + 1, 1.0, 1.0, 2.0, 1.0)
    (imbalance,) = watch.asked
    assert imbalance.shares == pytest.approx((1.0, 1.0, 0.5, 1.0), rel=0.1)
    assert imbalance.factors == (1.0,) * RANKS
    move = watch.rebalancing.found
    assert "rank 2 on n2 computes 2 times as long as before" in move.why
    sizes = {stage.ranks[0]: len(stage.nodes) for stage in move.plan.stages}
    assert sizes[2] < min(sizes[rank] for rank in (0, 1, 3))
    before = json.loads(run.plan.read_text())
    (run.trace / "step-000012.json").write_text("{}")
    plan = watch.rebalancing.adopt(watch.step)
    assert json.loads(run.plan.read_text()) != before
    until = run.trace_until(watch.step)
    assert json.loads((until / "plan.json").read_text()) == before
    assert {path.name for path in until.iterdir()} == {
        "plan.json",
        "predicted.json",
        "step-000012.json",
    }
    assert plan.prediction.step_time_s == move.balance.after_s < 0.8 * move.balance.before_s
    watch.train(WARM_UP_STEPS + 100)  # as the plan now expects
    assert len(watch.asked) == 1
    watch.train(WINDOW + 1, 1.0, 1.0, 0.5, 1.0)
    assert watch.asked[1].shares == pytest.approx((1.0,) * RANKS, rel=0.1)
    assert watch.rebalancing.found.balance.after_s < 1.1 * watch.plan.predicted_step_s


def test_what_is_uneven_from_the_start_is_a_wrong_profile(watch, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "packages")
    watch.train(WARM_UP_STEPS + WINDOW + 1, 1.0, 2.0, 1.0, 1.0)
    (imbalance,) = watch.asked
    assert imbalance.factors == pytest.approx((1.0, 2.0, 1.0, 1.0), rel=0.1)
    assert imbalance.shares == (1.0,) * RANKS
    assert "times as long as predicted" in watch.rebalancing.found.why
    assert watch.searched_last == str(Path("packages").absolute())
    plan = watch.rebalancing.found.plan
    costs = {node: stage.cost.forward_s for stage in plan.stages for node in stage.nodes}
    assert len(costs) == 16
    assert max(stage.load_s for stage in plan.stages) < 1.7 * watch.plan.stages[0].load_s


def test_planning_pauses_longer_and_longer_if_it_finds_nothing(watch, run, monkeypatch):
    monkeypatch.setattr(replan, "_MIN_GAIN", 1.0)
    watch.train(WARM_UP_STEPS + WINDOW)
    watch.train(5 * WINDOW, 1.0, 1.0, 2.0, 1.0)
    assert watch.rebalancing.found is None
    assert len(watch.asked) == 3
    assert not Balance.load(run.balance).pays


def test_a_move_must_pay_for_itself(watch, run):
    watch.train(WARM_UP_STEPS + WINDOW)
    watch.train(WINDOW + 1, 1.0, 1.0, 2.0, 1.0)
    found = Balance.load(run.balance)
    gain_s = found.before_s - found.after_s
    imbalance = Imbalance.load(run.imbalance)
    for cost_s, pays in ((gain_s * imbalance.steps / 2, False), (0.0, True)):
        replace(imbalance, move_s=cost_s).save(run.imbalance)
        assert replan.propose(run).pays is pays


def test_plans_on_whose_copies_or_order_of_steps_results_depend_stay(watch):
    plan = watch.plan
    assert can_move(plan)
    first, *others = plan.stages
    uneven = replace(plan, stages=(replace(first, ranks=(0, 4)), *others))
    assert not can_move(uneven)
    assert not can_move(replace(plan, schedule="pipedream"))
    assert not can_move(replace(plan, prediction=None))
    copies = tuple(replace(s, ranks=(s.ranks[0], 4 + s.ranks[0])) for s in plan.stages)
    assert can_move(replace(plan, stages=copies, replication=Replication.WHOLE))


@pytest.mark.parametrize("saves", [False, True])
def test_a_move_whose_checkpoint_fails_is_dropped_for_good(make_run, monkeypatch, saves):
    """Though rank 0 has voted for it once more before it knows. Later checkpoints succeed."""
    run = make_run(1, training={"steps": 8, "batch_size": 4}, checkpoint={"every": 8})
    plan, outcomes = Plan.load(run.plan), iter([saves])
    monkeypatch.setattr(Saver, "wait_saved", lambda _: next(outcomes, True))
    moving = Rebalancing(run, plan, 8)
    moving.found = Move(plan, "tried", Balance(True, 1.0, 1.0, 1), ())
    job = CapturedJob(load(run.job))
    with closing(Setup(MPI.COMM_SELF, job, plan, choose_device(0, 0), Board())) as setup:
        assert Trainer(setup, run.start, rebalancing=moving).train() is saves
    assert (moving.found is not None) is saves
    assert read_heartbeat(run.start).state == ("moving to another plan" if saves else "done")
