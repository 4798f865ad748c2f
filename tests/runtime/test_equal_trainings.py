"""Jobs over real ranks train what one rank trains, or a plain process."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipectl.cluster import assumed_cluster
from pipectl.jobs.state import get_status
from pipectl.plan import Plan, Replication
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Profile
from pipectl.runs import RunDirectory, read_errors, read_heartbeat, read_metrics
from pipectl.runtime import checkpoint

pytestmark = pytest.mark.mpi
HERE = Path(__file__).parent
PARTS = HERE / "job_parts.py"
STILL = {"factory": "torch.optim:SGD", "kwargs": {"lr": 0.0}}


def figures(run: RunDirectory) -> list[tuple[Any, ...]]:
    """What the run said of every step, its times left out."""
    lines = [line for line in read_metrics(run) if line.is_step]
    return [(line.step, line.loss, line.learning_rate, line.gradient_norm) for line in lines]


def test_micro_batches_and_held_out_data_count_by_their_valid_targets(
    make_run: Any, train: Any, trained_alone: RunDirectory, different: Any
) -> None:
    """Two ranks, which load with a process each, train and evaluate what one does."""
    held_out = {"data": f"{PARTS}:HalfPadded", "batch_size": 2}
    told = {"told": f"{PARTS}:Told"}
    two = make_run(2, data={"workers": 1}, callbacks=told, evaluation=held_out)
    train(two)
    assert figures(two) == figures(trained_alone)
    assert [step for step, *_ in figures(two)] == [1, 2, 3, 4, 5]
    assert (two.path / "told.jsonl").read_text() == two.metrics.read_text()
    # The second micro-batch of step 2 has no valid target: its loss is 0 / 0, and counts nothing.
    assert None not in [loss for _, loss, *_ in figures(two)]
    assert different(trained_alone, two) == []
    # The first of three micro-batches that are held out is padding alone, and its loss NaN.
    (found,) = [line.evaluation for line in read_metrics(two) if line.evaluation is not None]
    parts = SimpleNamespace(**runpy.run_path(str(PARTS)))
    model, padded = parts.Model(), parts.HalfPadded()
    model.load_state_dict(checkpoint.load(two.checkpoints / "step-000005"))
    with torch.no_grad():
        expected = parts.loss(model(padded.vectors), padded.targets)
    assert found["loss"] == pytest.approx(float(expected), rel=1e-6)
    beat = read_heartbeat(two)
    assert (beat.state, beat.step, len(beat.ranks)) == ("done", 5, 2)
    assert read_errors(two) == []


def test_two_ranks_train_what_a_plain_process_trains(make_run: Any, launch: Any) -> None:
    """What a module counts begins with the first step, and a part that runs twice counts once."""
    training = {"steps": 3, "batch_size": 4}
    runs = [
        make_run(2, model={**model, "factory": f"{PARTS}:{name}"}, training=training)
        for name, model in (
            ("Counting", {"opaque": ["counter"]}),
            ("Checkpointed", {}),
            ("Checkpointed", {"opaque": ["part"]}),
            ("Checkpointed", {"opaque": ["part"], "kwargs": {"reentrant": True}}),
            ("Described", {}),
        )
    ]
    # The last micro-batch of its steps is smaller, and its graph has a number of its own.
    counted = {"data": {"factory": f"{PARTS}:Counted"}, "loss": f"{PARTS}:counted_loss"}
    five = {"steps": 3, "batch_size": 5}
    runs.append(make_run(2, **counted, training=five, pipeline={"micro_batches": 3, "stages": 2}))
    done = launch(2, HERE / "ranks_in_turn.py", *(run.path for run in runs))
    assert done.returncode == 0, done.stderr
    size = Plan.load(runs[0].plan).micro_batch_size
    program = "import sys; from pipectl.runtime import plain\n"
    program += f"for run in sys.argv[1:]: assert not plain.main([f'{{run}}/job.yaml', {size}, run])"
    done = launch(0, "-c", program, *(run.path for run in runs))
    assert done.returncode == 0, done.stderr
    for run in runs:
        losses = json.loads((run.path / "losses.json").read_text())["losses"]
        assert [line.loss for line in read_metrics(run)] == losses, run.job.read_text()
        expected = load_file(run.path / "step-000003.safetensors")
        trained = checkpoint.load(run.checkpoints / "step-000003", weights_only=True)
        assert set(trained) == set(expected)
        different = [n for n in expected if not torch.equal(trained[n], expected[n])]
        assert different == [], run.job.read_text()


def test_every_step_draws_masks_of_its_own(make_run: Any, train: Any) -> None:
    """Nothing else tells steps apart: weights stay, and each has the same four samples."""
    model = {"factory": f"{PARTS}:Model", "kwargs": {"dropout": 0.5}}
    run = make_run(1, {"kwargs": {"count": 4}}, model=model, optimizer=STILL)
    train(run)
    losses = [line.loss for line in read_metrics(run)]
    assert len(set(losses)) == len(losses) == 5


def test_the_optimizer_is_given_parameters_in_the_order_of_the_model(
    make_run: Any, train: Any, tmp_path: Path
) -> None:
    """The model uses its layers in another order."""
    file = tmp_path / "given.json"
    optimizer = {"factory": f"{PARTS}:noting", "kwargs": {"lr": 0.1, "file": str(file)}}
    train(make_run(1, model=f"{PARTS}:Backwards", optimizer=optimizer))
    assert json.loads(file.read_text()) == [[12, 8], [12], [8, 7], [8], [7, 6], [7]]


@pytest.mark.parametrize(
    ("progress", "level", "mode", "why"),
    [
        ("poll", "multiple", "poll", "set in the job"),
        ("thread", "multiple", "thread", "set in the job"),
        ("thread", "single", "poll", "this MPI does not allow calls from several threads"),
    ],
)
def test_help_and_checks_are_those_that_the_job_asks_for_and_change_no_bit(
    make_run: Any,
    trained_alone: RunDirectory,
    launch: Any,
    different: Any,
    progress: str,
    level: str,
    mode: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The two ranks fail where messages, operators or checkpoints were not told. Polling takes the
    place of a thread that is not possible."""
    two = make_run(2, launch={"progress": progress})
    monkeypatch.setenv("PIPECTL_CHECK_MESSAGES", "1")
    monkeypatch.setenv("MPI4PY_RC_THREAD_LEVEL", level)
    done = launch(2, HERE / "changed_ranks.py", "wired", two.path)
    assert done.returncode == 0, done.stderr
    assert different(trained_alone, two) == []
    beat = read_heartbeat(two)
    found = {key: beat.messages[key] for key in ("route", "progress", "why")}
    assert found == {"route": "in place", "progress": mode, "why": why}
    assert "training begins: 5 steps of 4 samples on 2 ranks\n" in done.stderr


def test_a_slow_rank_is_named(make_run: Any, train: Any) -> None:
    pause = "pause_s: 0.8"  # long beside what a rank waits for a core of a busy machine
    model = {"factory": f"{PARTS}:Slow", "opaque": ["pausing"], "kwargs": {"pause_s": 0.0}}
    run = make_run(3, model=model, training={"steps": 3, "batch_size": 4})
    run.job.write_text(run.job.read_text().replace("pause_s: 0.0", pause))
    assert pause in run.job.read_text()
    train(run)
    stages = Plan.load(run.plan).stages
    (slow,) = [s for s in stages if any("pausing" in node for node in s.nodes)]
    found = get_status(run, 0.0)
    shares = {rank.rank: rank.waiting for rank in found.ranks}
    assert shares.keys() == {0, 1, 2}
    assert found.laggard is not None, shares
    assert found.laggard.rank == slow.ranks[0]
    assert found.laggard.others > 0.5


def test_a_collate_fn_draws_for_a_split_micro_batch_what_it_draws_on_one_rank(
    make_run: Any, train: Any
) -> None:
    one, two = (make_run(ranks, {"factory": f"{PARTS}:Shifted"}) for ranks in (1, 2))
    request = PlanRequest(
        "job", 4, micro_batches=2, stages=1, replicas=2, replication=Replication.SPLIT
    )
    cluster = assumed_cluster("here", [2], 2, None)
    make_plan(Profile.load(two.profile), cluster, request).save(two.plan)
    train(one, two)
    losses = [[line.loss for line in read_metrics(run)] for run in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_parameter_that_a_step_leaves_out_is_left_alone(
    make_run: Any, launch: Any, train: Any, tmp_path: Path
) -> None:
    """An optimizer leaves a parameter without gradient alone; zeros would move it by momentum."""
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    sections = {
        "model": {"factory": f"{PARTS}:Branching"},
        "data": {"factory": f"{PARTS}:BranchingSamples"},
        "optimizer": {"factory": "torch.optim:SGD", "kwargs": options},
    }
    one = make_run(1, **sections)
    apart = with_costly_branches(Profile.load(one.profile))
    copies = {"micro_batches": 2, "stages": 1, "replicas": 2}
    two = make_run(2, **sections, profile=apart)
    for stage in Plan.load(two.plan).stages:
        assert any(node.startswith("model_") for node in stage.nodes)
    replicated = [
        make_run(2, **sections, pipeline={**copies, "shard_optimizer": shard})
        for shard in (False, True)
    ]
    train(one, two, *replicated)
    done = launch(0, "-m", "pipectl.runtime.plain", one.job, 2, tmp_path)
    assert done.returncode == 0, done.stderr
    expected = load_file(tmp_path / "step-000005.safetensors")
    for run in (one, two, *replicated):
        trained = checkpoint.load(run.checkpoints / "step-000005")
        allowed = 1e-6 if run in replicated else 0.0
        for name, weight in trained.items():
            assert float((weight - expected[name]).abs().max()) <= allowed, name


def with_costly_branches(profile: Profile) -> Profile:
    """As if nothing else took time: two stages have a branch each."""
    operators = tuple(
        replace(each, forward_s=took_s, backward_s=took_s, timings={}, cached={})
        for each in profile.operators
        for took_s in [0.1 if each.id.startswith("model_") else 1e-6]
    )
    return replace(profile, operators=operators)


def test_weights_to_start_from_reach_every_rank(
    make_run: Any, trained_alone: RunDirectory, train: Any, different: Any
) -> None:
    """Backwards on other ranks, too. With a rate of 0, weights stay as they were read."""
    stored = trained_alone.checkpoints / "step-000005"
    model = {"factory": f"{PARTS}:Model", "weights": str(stored)}
    apart = {"micro_batches": 2, "stages": 2, "backward": "apart"}
    runs = [
        make_run(2, model={**model, "materialize": "eager"}, optimizer=STILL),
        make_run(2, model={**model, "materialize": "per_rank"}, optimizer=STILL),
        make_run(4, model=model, pipeline=apart, optimizer=STILL),
    ]
    ranks = [(stage.ranks, stage.backward_ranks) for stage in Plan.load(runs[2].plan).stages]
    assert sorted(rank for pair in ranks for held in pair for rank in held) == [0, 1, 2, 3]
    train(*runs)
    for run in runs:
        assert different(trained_alone, run) == []
