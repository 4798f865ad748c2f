"""Jobs over real ranks train what one rank trains, or a plain process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pipectl.capture.factories import find
from pipectl.cluster import assumed_cluster
from pipectl.jobs.state import get_status
from pipectl.plan import Plan, Replication
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Profile
from pipectl.runs import RunDirectory, read_errors, read_heartbeat, read_metrics
from pipectl.runtime import checkpoint
from pipectl.runtime.compare import Trained, distance

pytestmark = pytest.mark.mpi
HERE = Path(__file__).parent
PARTS = HERE / "job_parts.py"
STILL = {"factory": "torch.optim:SGD", "kwargs": {"lr": 0.0}}
NOISY = {"factory": f"{PARTS}:Coupled", "kwargs": {"kind": "noise"}}
MOMENTUM = {"factory": "torch.optim:SGD", "kwargs": {"lr": 0.1, "momentum": 0.9}}
COPIES = {"micro_batches": 2, "stages": 1, "replicas": 2}
SHARDED = {**COPIES, "shard_optimizer": True}


def of(model: str, samples: str = "Samples", **more: Any) -> dict[str, Any]:
    return {
        "model": {"factory": f"{PARTS}:{model}", **more},
        "data": {"factory": f"{PARTS}:{samples}"},
    }


BRANCHING = {**of("Branching", "BranchingSamples"), "optimizer": MOMENTUM}
"""An optimizer leaves a parameter without gradient alone; zeros would move it by momentum."""
SKIPPING = {
    **of("Late", "Spoilt", kwargs={"after": 1}),
    "training": {"steps": 6, "batch_size": 4, "on_nonfinite": "skip"},
}
"""A buffer that the first forward left as it was is restored, too."""
SPREADING = {
    **of("Spreading"),
    "data": {"factory": f"{PARTS}:Samples", "kwargs": {"count": 5}},
    "training": {"steps": 4, "batch_size": 4, "on_nonfinite": "skip"},
}
"""A buffer alone is not finite in every second step, of one sample."""
AVERAGING = {
    **of("Averaging"),
    "pipeline": {"micro_batches": 2, "stages": 2, "recompute": "all"},
}
"""Each micro-batch reads what the one before has written; the second forward of one does, too."""
IGNORING = {
    **of("Overflowing", "Marked"),
    "training": {"steps": 2, "batch_size": 4, "on_nonfinite": "ignore"},
}
"""The gradient of one parameter is infinite in the last step."""
KEPT_APART = {
    **of("Checkpointed", opaque=["part"]),
    "pipeline": {"micro_batches": 2, "stages": 1, "backward": "apart"},
}
"""The plan has to recompute: no other rank can follow code that runs as it is."""
HIDING_APART = {
    **of("Hiding"),
    "pipeline": {"micro_batches": 2, "stages": 1, "backward": "apart"},
}
"""It has to recompute, too: what a function keeps in attributes does not travel. Its layers
are used twice, and ranks sum the gradients of each use apart."""
UNEQUAL = {
    **of("Model", "Counted"),
    "loss": f"{PARTS}:counted_loss",
    "training": {"steps": 3, "batch_size": 5},
    "pipeline": {"micro_batches": 3, "stages": 2},
}
"""The last micro-batch of its steps is smaller, and its graph has a number of its own."""
PADDED = {
    **of("Model"),
    "loss": {"factory": f"{PARTS}:mean_of_valid", "weight": f"{PARTS}:valid"},
}
"""Gradients of the second micro-batch of step 2 are NaN, and count nothing, as its loss does."""
UNDEFINED = {**PADDED, **of("OverPresent", "Emptied")}
"""All from the middle of the model on is NaN there."""
SPLIT = {"micro_batches": 2, "stages": 2, "schedule": "zb-h1"}
SPLIT_ALONE = {"micro_batches": 2, "stages": 1, "schedule": "zb-h1"}
IN_BLOCKS = {"micro_batches": 2, "stages": 1, "recompute": "blocks"}
APART = {"micro_batches": 2, "stages": 1, "backward": "apart"}
TRAININGS: dict[str, tuple[int, dict[str, Any], float]] = {
    "calls count from the first step": (2, of("Counting", opaque=["counter"]), 0.0),
    "checkpointed": (2, of("Checkpointed"), 0.0),
    "a loss with weights of its own": (2, {**of("Model"), "loss": f"{PARTS}:Tempered"}, 0.0),
    "checkpointed as one operator": (2, of("Checkpointed", opaque=["part"]), 0.0),
    "checkpointed as one operator, backwards apart": (2, KEPT_APART, 0.0),
    "tensors in attributes, backwards apart": (2, HIDING_APART, 1e-6),
    "reentrant": (2, of("Checkpointed", opaque=["part"], kwargs={"reentrant": True}), 0.0),
    "backwards that run a part again": (2, {**of("Reversed"), "pipeline": COPIES}, 1e-6),
    "more than tensors in a state dict": (2, of("Described"), 0.0),
    "a micro-batch without weight, backwards in halves": (2, {**PADDED, "pipeline": SPLIT}, 0.0),
    "a micro-batch without weight, backwards apart": (2, {**PADDED, "pipeline": APART}, 0.0),
    "undefined outputs without weight, in blocks": (1, {**UNDEFINED, "pipeline": IN_BLOCKS}, 0.0),
    "the same, backwards in halves": (1, {**UNDEFINED, "pipeline": SPLIT_ALONE}, 0.0),
    "a smaller last micro-batch": (2, UNEQUAL, 0.0),
    "noise in the model's order": (1, {**of("Backwards"), "optimizer": NOISY}, 0.0),
    "steps without some parameters": (1, BRANCHING, 0.0),
    "the same over ranks": (2, BRANCHING, 0.0),
    "the same on replicas": (2, {**BRANCHING, "pipeline": COPIES}, 1e-6),
    "the same on shards": (2, {**BRANCHING, "pipeline": SHARDED}, 1e-6),
    "steps left out": (1, SKIPPING, 0.0),
    "steps left out on all ranks": (2, SKIPPING, 0.0),
    "steps left out on all replicas": (2, {**SKIPPING, "pipeline": SHARDED}, 0.03),
    "steps left out for a buffer alone": (2, SPREADING, 0.0),
    "a mean that is read": (2, AVERAGING, 0.0),
    "a step that is taken whatever it is": (2, IGNORING, 0.0),
    "draws of a collate_fn for a split micro-batch": (2, of("Model", "Shifted"), 1e-5),
}
"""Ranks, job, and by how much results may differ: replicas add in another order, and average means
of buffers, each of its own micro-batches."""
FURTHER = (
    *("checkpointed", "checkpointed as one operator", "steps without some parameters"),
    *("the same on replicas", "steps left out", "steps left out on all ranks"),
    *("a loss with weights of its own", "more than tensors in a state dict", "reentrant"),
)
"""Those that the others cover, but for their number of ranks or what is kept whole."""


def figures(run: RunDirectory) -> list[tuple[Any, ...]]:
    """What the run said of every step, its times left out."""
    lines = [line for line in read_metrics(run) if line.is_step]
    return [(line.step, line.loss, line.learning_rate, line.gradient_norm) for line in lines]


def test_losses_count_by_valid_targets_and_metrics_by_samples(
    make_run: Any, train: Any, trained_alone: RunDirectory, different: Any
) -> None:
    """Two ranks, which load with a process each, train and evaluate what one does."""
    metrics = {"mean": f"{PARTS}:mean", "seen": f"{PARTS}:Seen"}
    held_out = {"data": f"{PARTS}:HalfPadded", "batch_size": 2, "every": 4, "metrics": metrics}
    told = {"told": f"{PARTS}:Told"}
    two = make_run(2, data={"workers": 1}, callbacks=told, evaluation=held_out)
    train(two)
    assert figures(two) == figures(trained_alone)
    assert [step for step, *_ in figures(two)] == [1, 2, 3, 4, 5]
    assert (two.path / "told.jsonl").read_text() == two.metrics.read_text()
    # The second micro-batch of step 2 has no valid target: its loss is 0 / 0, and counts nothing.
    assert None not in [loss for _, loss, *_ in figures(two)]
    assert different(trained_alone, two) == []
    # The first of three micro-batches that are held out is padding alone, and its loss NaN; the
    # last has one sample.
    found = [line.evaluation for line in read_metrics(two) if line.evaluation is not None]
    model, padded = find(f"{PARTS}:Model")(), find(f"{PARTS}:HalfPadded")()
    model.load_state_dict(checkpoint.load(two.checkpoints / "step-000005"))
    with torch.no_grad():
        outputs = model(padded.vectors)
        expected = find(f"{PARTS}:loss")(outputs, padded.targets)
    assert found[-1]["loss"] == pytest.approx(float(expected), rel=1e-6)
    assert found[-1]["mean"] == pytest.approx(float(outputs.mean()), rel=1e-5)
    assert [each["seen"] for each in found] == [3, 3]
    beat = read_heartbeat(two.start)
    assert (beat.state, beat.step, len(beat.ranks)) == ("done", 5, 2)
    assert read_errors(two.start) == []


def test_an_evaluation_has_constants_of_its_own(make_run: Any, train: Any) -> None:
    """In a graph of its own, in which they have the names of those of training."""
    held_out = {"data": f"{PARTS}:Samples", "every": 5}
    run = make_run(1, **of("Scaling"), evaluation=held_out)
    train(run)
    (found,) = [line.evaluation for line in read_metrics(run) if line.evaluation is not None]
    model, data = find(f"{PARTS}:Scaling")().eval(), find(f"{PARTS}:Samples")()
    model.load_state_dict(checkpoint.load(run.checkpoints / "step-000005"))
    expected = find(f"{PARTS}:loss")(model(data.vectors), data.targets)
    assert found["loss"] == pytest.approx(float(expected), rel=1e-6)


def test_ranks_train_what_a_plain_process_trains(make_run: Any, compare: Any) -> None:
    usual = {name: job for name, job in TRAININGS.items() if name not in FURTHER}
    runs = {name: make_run(ranks, **job) for name, (ranks, job, _) in usual.items()}
    costly = with_costly_branches(Profile.load(runs["the same over ranks"].profile))
    plan_again(runs["the same over ranks"], costly, stages=2)
    for stage in Plan.load(runs["the same over ranks"].plan).stages:
        assert any(node.startswith("model_") for node in stage.nodes)
    split = runs["draws of a collate_fn for a split micro-batch"]
    plan_again(split, stages=1, replicas=2, replication=Replication.SPLIT)
    compare(runs)
    spreading = get_status(runs["steps left out for a buffer alone"], 0.0).measured
    assert (spreading.not_finite, spreading.fault) == ((2, 4), "the buffer 'spread'")


@pytest.mark.product
def test_further_ranks_train_what_a_plain_process_trains(make_run: Any, compare: Any) -> None:
    compare({name: make_run(TRAININGS[name][0], **TRAININGS[name][1]) for name in FURTHER})


@pytest.fixture
def compare(train: Any, launch: Any) -> Any:
    """``compare(runs)``: trains them, by their names, and compares with plain processes."""
    return partial(train_and_compare, train, launch)


def train_and_compare(train: Any, launch: Any, runs: dict[str, RunDirectory]) -> None:
    train(*runs.values())
    program = "import sys; from pipectl.runtime import plain\n"
    program += "for run in sys.argv[1:]: assert not plain.main([f'{run}/job.yaml', '2', run])"
    done = launch(0, "-c", program, *(run.path for run in runs.values()))
    assert done.returncode == 0, done.stderr
    for name, run in runs.items():
        allowed = TRAININGS[name][2]
        found, plain = Trained.of_run(run), Trained.of_process(run.path)
        losses, expected = ([each.loss(s) for s in plain.losses] for each in (found, plain))
        assert losses == pytest.approx(expected, rel=0, abs=allowed, nan_ok=True), name
        last = max(plain.losses)
        weights, others = found.weights(last), plain.weights(last)
        assert set(weights) == set(others)
        far = {n: d for n in others if (d := distance(weights[n], others[n])) > allowed}
        assert not far, name


def plan_again(run: RunDirectory, profile: Profile | None = None, **how: Any) -> None:
    """In some other way, for two ranks."""
    cluster, request = assumed_cluster("here", [2], 2, None), PlanRequest("job", 4, 2, **how)
    make_plan(profile or Profile.load(run.profile), cluster, request).save(run.plan)


def with_costly_branches(profile: Profile) -> Profile:
    """As if nothing else took time: two stages have a branch each."""
    operators = tuple(
        replace(each, forward_s=took_s, backward_s=took_s, timings={}, cached={})
        for each in profile.operators
        for took_s in [0.1 if each.id.startswith("model_") else 1e-6]
    )
    return replace(profile, operators=operators)


def test_every_step_draws_masks_of_its_own(make_run: Any, train: Any) -> None:
    """Nothing else tells steps apart: weights stay, and each has the same four samples."""
    model = {"factory": f"{PARTS}:Model", "kwargs": {"dropout": 0.5}}
    run = make_run(1, {"kwargs": {"count": 4}}, model=model, optimizer=STILL)
    train(run)
    losses = [line.loss for line in read_metrics(run)]
    assert len(set(losses)) == len(losses) == 5


@pytest.mark.parametrize(
    ("progress", "level", "mode", "why"),
    [
        ("none", "multiple", "none", "set in the job"),
        ("thread", "multiple", "thread", "set in the job"),
        ("thread", "single", "none", "this MPI does not allow calls from several threads"),
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
    """The two ranks fail where messages or checkpoints were not told. Nothing takes the place of a
    thread that is not possible."""
    two = make_run(2, launch={"progress": progress})
    monkeypatch.setenv("PIPECTL_CHECK_MESSAGES", "1")
    monkeypatch.setenv("MPI4PY_RC_THREAD_LEVEL", level)
    done = launch(2, HERE / "changed_ranks.py", "wired", two.path)
    assert done.returncode == 0, done.stderr
    assert different(trained_alone, two) == []
    beat = read_heartbeat(two.start)
    found = {key: beat.messages[key] for key in ("route", "progress", "why")}
    assert found == {"route": "in place", "progress": mode, "why": why}
    assert "training begins: 5 steps of 4 samples on 2 ranks\n" in done.stderr


def test_a_slow_rank_is_named(make_run: Any, train: Any) -> None:
    pause = "pause_s: 0.8"  # long beside what a rank waits for a core of a busy machine
    model = of("Counting", opaque=["counter"], kwargs={"pause_s": 0.0})
    run = make_run(3, **model, training={"steps": 3, "batch_size": 4})
    run.job.write_text(run.job.read_text().replace("pause_s: 0.0", pause))
    assert pause in run.job.read_text()
    train(run)
    stages = Plan.load(run.plan).stages
    (slow,) = [s for s in stages if any("counter" in node for node in s.nodes)]
    found = get_status(run, 0.0)
    shares = {rank.rank: rank.waiting for rank in found.ranks}
    assert shares.keys() == {0, 1, 2}
    assert found.laggard is not None, shares
    assert found.laggard.rank == slow.ranks[0]
    assert found.laggard.others > 0.5


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
