"""Jobs over real ranks train what one rank trains, or a plain process."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
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
from pipectl.schedule import default_warm_up

pytestmark = pytest.mark.mpi
HERE = Path(__file__).parent
PARTS = HERE / "job_parts.py"
STILL = {"factory": "torch.optim:SGD", "kwargs": {"lr": 0.0}}


def figures(run: RunDirectory) -> list[tuple[Any, ...]]:
    """What the run said of every step and evaluation, its times left out."""
    return sorted(
        (line.step, "evaluation", line.evaluation["loss"])
        if line.evaluation is not None
        else (line.step, "step", line.loss, line.learning_rate, line.gradient_norm)
        for line in read_metrics(run)
    )


@pytest.fixture(scope="module")
def parts() -> Any:
    """The module of the jobs, in this process."""
    spec = importlib.util.spec_from_file_location("job_parts_plain", PARTS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_weights_of_micro_batches_are_the_same_on_one_and_two_ranks(
    make_run: Any, train: Any, trained_alone: RunDirectory, different: Any, parts: Any
) -> None:
    """A micro-batch counts by its valid targets; two ranks load with a process each."""
    told = {"told": f"{PARTS}:told"}
    two = make_run(2, data={"workers": 1}, callbacks=told)
    train(two)
    assert figures(two) == figures(trained_alone)
    assert [step for step, *_ in figures(two)] == [1, 2, 3, 4, 5]
    assert (two.path / "told.jsonl").read_text() == two.metrics.read_text()
    # The second micro-batch of step 2 has no valid target: its loss is 0 / 0, and counts nothing.
    losses = [line.loss for line in read_metrics(two)]
    assert None not in losses
    torch.manual_seed(0)
    model, data = parts.Model(), parts.Samples()
    whole_batch = parts.loss(model(data.vectors[:4]), data.targets[:4])
    assert losses[0] == pytest.approx(float(whole_batch.detach()), rel=1e-6)
    assert different(trained_alone, two) == []
    beat = read_heartbeat(two)
    assert (beat.state, beat.step, len(beat.ranks)) == ("done", 5, 2)
    assert read_errors(two) == []


def test_two_ranks_train_what_a_plain_process_trains(make_run: Any, launch: Any) -> None:
    """What a module counts begins with the first step, and a part that runs twice counts once."""
    runs = []
    for name, model in {
        "Counting": {"opaque": ["counter"]},
        "Checkpointed": {},
        "Checkpointed as it is": {"opaque": ["part"]},
        "Checkpointed reentrant": {"opaque": ["part"], "kwargs": {"reentrant": True}},
        "Described": {},
    }.items():
        factory = {"factory": f"{PARTS}:{name.split()[0]}"}
        training = {"steps": 3, "batch_size": 4}
        runs.append(make_run(2, model={**model, **factory}, training=training))
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_optimizer_is_given_a_ranks_parameters_in_the_order_of_the_model(
    ranks: int, make_run: Any, train: Any, tmp_path: Path
) -> None:
    """The model uses its layers in another order."""
    kwargs = {"lr": 0.1, "folder": str(tmp_path)}
    optimizer = {"factory": f"{PARTS}:noting", "kwargs": kwargs}
    run = make_run(ranks, model=f"{PARTS}:Backwards", optimizer=optimizer)
    for file in tmp_path.iterdir():  # of the profiler, which tries the optimizer
        file.unlink()
    train(run)
    whole = [[12, 8], [12], [8, 7], [8], [7, 6], [7]]
    given = [json.loads(file.read_text()) for file in tmp_path.iterdir()]
    # A rank whose stages have no parameters tries the optimizer on small ones only.
    given = [sizes for sizes in given if all(size in whole for size in sizes)]
    assert sorted(item for sizes in given for item in sizes) == sorted(whole)
    for sizes in given:
        assert sizes == [item for item in whole if item in sizes]


@pytest.mark.parametrize(
    ("progress", "level", "why"),
    [
        ("poll", "multiple", "set in the job"),
        ("thread", "multiple", "set in the job"),
        ("thread", "single", "this MPI does not allow calls from several threads"),
    ],
)
def test_help_and_checks_are_those_that_the_job_asks_for_and_change_no_bit(
    make_run: Any,
    trained_alone: RunDirectory,
    launch: Any,
    different: Any,
    progress: str,
    level: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The two ranks fail where messages, operators or checkpoints were not told. Polling takes the
    place of a thread that is not possible."""
    two = make_run(2, launch={"progress": progress})
    monkeypatch.setenv("PIPECTL_CHECK_MESSAGES", "1")
    monkeypatch.setenv("MPI4PY_RC_THREAD_LEVEL", level)
    mode = progress if level == "multiple" else "poll"
    done = launch(2, HERE / "changed_ranks.py", "wired", two.path)
    assert done.returncode == 0, done.stderr
    assert different(trained_alone, two) == []
    beat = read_heartbeat(two)
    found = {key: beat.messages[key] for key in ("route", "progress", "why")}
    assert found == {"route": "in place", "progress": mode, "why": why}
    assert "training begins: 5 steps of 4 samples on 2 ranks\n" in done.stderr


def test_the_loss_of_held_out_data_counts_every_valid_target_once(
    make_run: Any, train: Any, parts: Any
) -> None:
    """The first of three micro-batches is padding alone, and its loss NaN."""
    held_out = {"data": f"{PARTS}:HalfPadded", "batch_size": 2}
    once = {"steps": 1, "batch_size": 4}
    run = make_run(1, optimizer=STILL, training=once, evaluation=held_out)
    train(run)
    (found,) = [line.evaluation for line in read_metrics(run) if line.evaluation is not None]
    torch.manual_seed(0)
    model, data = parts.Model(), parts.HalfPadded()
    with torch.no_grad():
        expected = parts.loss(model(data.vectors), data.targets)
    assert found["loss"] == pytest.approx(float(expected), rel=1e-6)


def test_with_a_slow_rank_training_goes_on_with_the_same_bits_and_names_it(
    make_run: Any, train: Any, different: Any
) -> None:
    pause = "pause_s: 0.8"  # long beside what a rank waits for a core of a busy machine
    slow = {"factory": f"{PARTS}:SlowLayers", "opaque": ["pausing"], "kwargs": {"pause_s": 0.0}}
    sections = {
        "model": slow,
        "loss": {"factory": "torch.nn:MSELoss"},
        "data": {"factory": f"{PARTS}:Vectors"},
        "training": {"steps": 3, "batch_size": 4},
    }
    one, three = (make_run(ranks, **sections) for ranks in (1, 3))
    text = three.job.read_text()
    three.job.write_text(text.replace("pause_s: 0.0", pause))
    assert pause in three.job.read_text()
    train(one, three)
    assert different(one, three) == []
    assert figures(one) == figures(three)
    (laggard,) = [
        stage.ranks[0]
        for stage in Plan.load(three.plan).stages
        if any("pausing" in node for node in stage.nodes)
    ]
    found = get_status(three, 0.0)
    shares = {rank.rank: rank.waiting for rank in found.ranks}
    assert shares.keys() == {0, 1, 2}
    assert found.laggard is not None, shares
    assert found.laggard.rank == laggard
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


def test_a_job_goes_on_apart_as_on_one_rank(
    make_run: Any, trained_alone: RunDirectory, train: Any, different: Any
) -> None:
    """Evaluations on the way, weights of the loss by targets, and a start from saved weights."""
    held_out = {"data": {"factory": f"{PARTS}:Samples", "kwargs": {"count": 7}}, "every": 2}
    start = trained_alone.checkpoints / "step-000005"
    model = {"factory": f"{PARTS}:Model", "weights": str(start)}
    one = make_run(1, model=model, evaluation=held_out)
    apart = {"micro_batches": 2, "stages": 2, "backward": "apart"}
    four = make_run(4, model=model, pipeline=apart, evaluation=held_out)
    ranks = [(stage.ranks, stage.backward_ranks) for stage in Plan.load(four.plan).stages]
    assert sorted(rank for pair in ranks for held in pair for rank in held) == [0, 1, 2, 3]
    train(one, four)
    assert different(one, four) == []
    assert len(different(trained_alone, four)) == len(checkpoint.load(start))
    assert figures(four) == figures(one)
    assert sum(kind == "evaluation" for _, kind, *_ in figures(four)) == 3


def test_a_parameter_that_a_step_leaves_out_is_left_alone(
    make_run: Any, launch: Any, train: Any, tmp_path: Path
) -> None:
    """An optimizer leaves a parameter without gradient alone; zeros would move it by momentum."""
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    sections = {
        "model": {"factory": f"{PARTS}:Branching"},
        "loss": {"factory": "torch.nn:MSELoss"},
        "data": {"factory": f"{PARTS}:BranchingSamples"},
        "optimizer": {"factory": "torch.optim:SGD", "kwargs": options},
    }
    first = make_run(1, **sections)
    profile = with_costly_branches(Profile.load(first.profile))
    runs: dict[tuple[int, int, bool], RunDirectory] = {}
    for way in ((1, 1, False), (2, 1, False), (1, 2, False), (1, 2, True)):
        stages, replicas, shard = way
        runs[way] = make_run(stages, **sections, profile=profile)
        plan = Plan.load(runs[way].plan)
        replicated(plan, replicas, shard).save(runs[way].plan)
    train(*runs.values())
    done = launch(0, "-m", "pipectl.runtime.plain", first.job, 2, tmp_path)
    assert done.returncode == 0, done.stderr
    expected = load_file(tmp_path / "step-000005.safetensors")
    for way, run in runs.items():
        trained = checkpoint.load(run.checkpoints / "step-000005")
        allowed = 1e-6 if way[1] > 1 else 0.0
        for name, weight in trained.items():
            assert float((weight - expected[name]).abs().max()) <= allowed, (way, name)


def with_costly_branches(profile: Profile) -> Profile:
    """As if nothing else took time: two stages have a branch each."""
    operators = tuple(
        replace(each, forward_s=took_s, backward_s=took_s, timings={}, cached={})
        for each in profile.operators
        for took_s in [0.1 if each.id.startswith("model_") else 1e-6]
    )
    return replace(profile, operators=operators)


def replicated(plan: Plan, replicas: int, shard: bool) -> Plan:
    """With a branch in every stage, and every stage on several ranks."""
    for stage in plan.stages:
        assert any(node.startswith("model_") for node in stage.nodes)
    count = len(plan.stages)
    held = tuple(
        replace(stage, ranks=tuple(range(replicas * index, replicas * (index + 1))))
        for index, stage in enumerate(plan.stages)
    )
    return replace(
        plan,
        stages=held,
        schedule="1f1b",
        warm_up=default_warm_up("1f1b", count, 2, ranks=count, replicas=[replicas] * count),
        node_of_rank=(0,) * (count * replicas),
        replication=Replication.WHOLE,
        shard_optimizer=shard,
    )


MIXED = """
import os, mpi4py
mpi4py.rc.thread_level = "single" if os.environ["PMI_RANK"] == "1" else "multiple"
from mpi4py import MPI
from pipectl.runtime.transport import Circumstances, choose_progress
assert (MPI.Query_thread() == MPI.THREAD_MULTIPLE) == (MPI.COMM_WORLD.rank != 1)
found = choose_progress(MPI.COMM_WORLD, "auto", Circumstances([2, 1], 2**20))
everyone = MPI.COMM_WORLD.allgather(found)
assert all(choice == found for choice in everyone), everyone
assert found.mode == "poll", found
assert "several threads" in found.why, found
"""


def test_one_rank_without_threads_decides_for_all(launch: Any) -> None:
    done = launch(3, "-c", MIXED, fresh=True)
    assert done.returncode == 0, done.stderr


def test_weights_to_start_from_reach_every_rank(
    make_run: Any, trained_alone: RunDirectory, train: Any, different: Any
) -> None:
    """A run goes on from the checkpoint of another; with a rate of 0, its weights stay as read."""
    stored = trained_alone.checkpoints / "step-000005"
    model = {"factory": f"{PARTS}:Model", "weights": str(stored)}
    runs = [
        make_run(2, model={**model, "materialize": materialize}, optimizer=STILL)
        for materialize in ("eager", "per_rank")
    ]
    train(*runs)
    for run in runs:
        assert different(trained_alone, run) == []
