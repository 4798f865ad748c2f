"""Runs that go on from a checkpoint end with the bits of runs that were never stopped."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from pipectl.errors import MismatchError
from pipectl.runs import (
    RunDirectory,
    best_checkpoint,
    checkpoints,
    read_errors,
    read_heartbeat,
    read_metrics,
)
from pipectl.runs.metrics import sum_up
from pipectl.runtime import checkpoint
from pipectl.runtime.manifest import Manifest
from pipectl.runtime.stopping import count_without_improvement
from pipectl.runtime.worker import run as work_here
from pipectl.spec import dump, load
from pipectl.watch.board import Board

HERE = Path(__file__).parent
PARTS = HERE.parent / "job_parts.py"
EQUALITY = HERE.parents[1] / "equality" / "models.py"
IN_TURN = HERE.parent / "ranks_in_turn.py"
STEPS, STOPPED = 9, 3
SLOW = {"factory": f"{PARTS}:Paced"}
TRAINING = {"steps": STEPS, "batch_size": 4}
HALF = {**TRAINING, "precision": "float16"}
GROWING = {"growth_interval": 2}
PLAIN: dict[str, Any] = {
    "model": {"factory": f"{PARTS}:Model", "kwargs": {"depth": 3, "dropout": 0.2}},
    "data": {"shuffle": True},
    "optimizer": {"factory": "torch.optim:AdamW", "kwargs": {"lr": 0.05}},
    "lr_scheduler": {
        "factory": "torch.optim.lr_scheduler:CosineAnnealingLR",
        "kwargs": {"T_max": 11},
    },
    "training": {**TRAINING, "clip_grad_norm": 1.0},
    "checkpoint": {"every": STOPPED},
}
ASYNCHRONOUS = {"stages": 2, "micro_batches": 2, "schedule": "pipedream-2bw"}
APART = {"stages": 1, "micro_batches": 2, "backward": "apart"}
SHARED = {"stages": 1, "micro_batches": 2, "replicas": 2, "shard_optimizer": True}
BUCKETS = {
    "model": {"factory": f"{EQUALITY}:gpt"},
    "loss": {"factory": f"{EQUALITY}:token_loss", "weight": f"{EQUALITY}:valid_tokens"},
    "data": {
        "factory": f"{EQUALITY}:Sentences",
        "shuffle": True,
        "buckets": [5, 12],
        "pad": {"inputs": 0, "targets": -100},
    },
}
"""Twelve batches an epoch: the second run begins in the middle of it."""
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "float16": {"training": {**HALF, "loss_scale": {**GROWING, "initial": 2.0**40}}},
    "float16, trained": {"training": {**HALF, "loss_scale": {**GROWING, "initial": 2.0**10}}},
    "spoilt": {
        "data": {"factory": f"{PARTS}:Spoilt", "shuffle": True},
        "training": {**TRAINING, "on_nonfinite": "skip"},
    },
    "buckets": BUCKETS,
    "turned": {
        "model": {"factory": f"{PARTS}:Turned"},
        "optimizer": {"factory": "torch.optim:AdamW", "kwargs": {"lr": 0.05, "fused": True}},
    },
    "endless": {"data": {"factory": f"{PARTS}:Endless"}},
    "asynchronous": {"training": TRAINING, "pipeline": ASYNCHRONOUS},
    "apart": {"pipeline": APART},
    "shared out": {
        "loss": {"factory": f"{PARTS}:Tempered", "weight": f"{PARTS}:valid"},
        "pipeline": SHARED,
    },
}
OTHERS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "plain, on one": ("plain", 1, {"schedule": "gpipe"}),
    "plain, on three": ("plain", 3, {"schedule": "zb-h1"}),
    "asynchronous, on three": ("asynchronous", 3, {"schedule": "pipedream-2bw"}),
    "apart, on three": ("apart", 3, {"backward": "together"}),
}
"""The optimizer's state follows its parameters to other ranks."""
Pair = tuple[RunDirectory, RunDirectory]
pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def trained(make_run: Any, launch: Any) -> dict[str, Pair]:
    """By name, two ranks that train, and those that go on from the middle."""
    found: dict[str, Pair] = {}
    arguments: dict[int, list[Any]] = {2: [], 1: [], 3: []}
    for name, sections in VARIANTS.items():
        whole, rest = found[name] = make_run(2, **PLAIN | sections), make_run(2, **PLAIN | sections)
        arguments[2] += [whole.path, f"{whole.path}:{STOPPED}:{rest.path}"]
    for name, (variant, ranks, pipeline) in OTHERS.items():
        other = {"pipeline": {"stages": ranks, "micro_batches": 2, **pipeline}}
        whole, rest = found[variant][0], make_run(ranks, **PLAIN | VARIANTS[variant] | other)
        found[name] = whole, rest
        arguments[ranks].append(f"{whole.path}:{STOPPED}:{rest.path}")
    for ranks, runs in arguments.items():
        done = launch(ranks, IN_TURN, *runs)
        assert done.returncode == 0, done.stderr
    return found


def names(run: RunDirectory) -> list[str]:
    """Of the checkpoints, from the newest."""
    return [path.name for path in checkpoints(run.checkpoints)]


@pytest.mark.parametrize("name", [*VARIANTS, *OTHERS])
def test_ranks_go_on_to_the_bit(trained, contents, name):
    """Weights, optimizer state, loss scale, losses and learning rates."""
    whole, rest = trained[name]
    last = f"step-{STEPS:06d}"
    assert contents(whole.checkpoints / last) == contents(rest.checkpoints / last)
    every, later = (
        {x.step: (x.loss, x.learning_rate) for x in read_metrics(run) if x.is_step}
        for run in (whole, rest)
    )
    assert [*later] == [*range(STOPPED + 1, STEPS + 1)]
    assert every == every | later


def test_the_variants_have_what_they_are_for(trained):
    """They would also pass without: steps left out on both sides of the checkpoint, a loss scale
    that has grown before and grows after it, and the value and the optimizer state of a trained
    loss on the second rank."""
    before, after = (
        [line.step for line in read_metrics(run) if line.not_finite is not None]
        for run in trained["spoilt"]
    )
    assert [step for step in before if step > STOPPED] == after
    assert min(before) <= STOPPED < max(before)
    run, _ = trained["float16, trained"]
    stopped, ended = (
        checkpoint.load(run.checkpoints / f"step-{step:06d}").manifest for step in (STOPPED, STEPS)
    )
    assert (stopped.loss_scale.steps_since, ended.updates) == (1, STEPS)
    run, _ = trained["shared out"]
    shards = checkpoint.load(run.checkpoints / f"step-{STOPPED:06d}").manifest.training
    assert ["loss.temperature" in shard.names for shard in shards] == [False, True]


def test_other_micro_batches_are_refused(trained, make_run):
    whole, _ = trained["plain"]
    rest = make_run(1, **{**PLAIN, "pipeline": {"micro_batches": 4, "stages": 1}})
    shutil.copytree(whole.checkpoints, rest.checkpoints, dirs_exist_ok=True)
    words = "was written with micro-batches of 2 samples, and the plan has 1"
    with pytest.raises(MismatchError, match=words):
        work_here(rest, MPI.COMM_SELF, Board())


def test_new_options_of_the_optimizer_apply_from_the_next_step_on(trained, make_run, contents):
    """What they need and the checkpoint has not begins with zeros."""
    whole, _ = trained["plain"]
    optimizer = {"factory": "torch.optim:AdamW", "kwargs": {"lr": 0.05, "amsgrad": True}}
    sections = {**PLAIN, "pipeline": {"micro_batches": 2, "stages": 1}, "optimizer": optimizer}
    rest = make_run(1, **sections)
    shutil.copytree(
        whole.checkpoints / f"step-{STOPPED:06d}", rest.checkpoints / f"step-{STOPPED:06d}"
    )
    work_here(rest, MPI.COMM_SELF, Board())
    before, after = (contents(run.checkpoints / f"step-{STEPS:06d}") for run in (whole, rest))
    assert {name.rpartition("/")[2] for name in after.keys() - before.keys()} == {"max_exp_avg_sq"}


@pytest.fixture
def start(warm_python, mpiexec, monkeypatch):
    """``start(run, attempt)``: two workers, as a process that goes on by itself."""
    started: list[subprocess.Popen[str]] = []

    def begin(run: RunDirectory, attempt: int) -> subprocess.Popen[str]:
        own = run.start_of(attempt)
        own.errors.mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv("PIPECTL_START", str(own.path))
        worker = [warm_python, "-m", "mpi4py", "-m", "pipectl.runtime.worker", "--run"]
        command = [mpiexec, "-n", "2", *worker, str(run.path)]
        given: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, **given))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def wait_for(process: subprocess.Popen[str], happened: Callable[[], object]) -> None:
    while not happened():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


@pytest.mark.torture
def test_a_run_that_is_killed_and_then_asked_to_stop_goes_on(trained, make_run, start, different):
    """No attempt by far reaches the end before; a damaged checkpoint is passed over. When they are
    asked to stop, all ranks agree on the step, save, and end with 0."""
    whole, _ = trained["plain"]
    run = make_run(2, **{**PLAIN, "data": {**SLOW, "shuffle": True}})
    process = start(run, 1)
    wait_for(process, (run.checkpoints / "step-000006").exists)
    (pid,) = [rank.pid for rank in read_heartbeat(run.start).ranks if rank.rank == 1]
    os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=280)
    assert process.returncode != 0
    while not (errors := read_errors(run.start)):
        time.sleep(0.1)
    assert [error.rank for error in errors] == [1]
    assert errors[0].step > 6
    assert errors[0].message.startswith("its process was killed")
    assert read_metrics(run)[-1].step < STEPS
    assert names(run)[0] == "step-000006"
    file = next((run.checkpoints / "step-000006" / "training").iterdir())
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    process = start(run, 2)
    wait_for(process, lambda: read_metrics(run)[-1].attempt == 2)
    run.start.stop_request.write_text("")
    _, log = process.communicate(timeout=280)
    assert process.returncode == 0, log
    assert "missing or damaged; the checkpoint before it is used" in log
    assert run.start.stopped_marker.exists()
    assert read_heartbeat(run.start).state == "stopped"
    stopped = read_metrics(run)[-1].step
    assert names(run)[0] == f"step-{stopped:06d}"

    process = start(run, 3)
    _, log = process.communicate(timeout=280)
    assert process.returncode == 0, log
    assert not run.start.stopped_marker.exists()
    assert read_heartbeat(run.start).state == "done"
    lines = read_metrics(run)
    attempts = {1: range(1, 4), 2: range(4, stopped + 1), 3: range(stopped + 1, STEPS + 1)}
    assert [(line.step, line.attempt) for line in lines] == [
        (step, attempt) for attempt, steps in attempts.items() for step in steps
    ]
    assert [line.loss for line in lines] == [line.loss for line in read_metrics(whole)]
    assert different(whole, run) == []


def test_steps_that_overlap_stop_where_the_pipeline_is_empty_and_save_while_it_is_not(
    make_run, train
):
    """A stop waits for the next checkpoint, and a checkpoint is valid before the one after it: a
    job that is killed meanwhile would have lost both. And checkpoints stay as the job says."""
    overlapping = {"training": {"steps": 12, "batch_size": 4}, "pipeline": ASYNCHRONOUS}
    watching = {"callbacks": {"watching": f"{PARTS}:watching"}, "checkpoint": {"every": 6}}
    run = make_run(2, **overlapping, **watching)
    stopping = make_run(2, **{**overlapping, "checkpoint": {"every": STOPPED}})
    stopping.start.stop_request.write_text("")
    keeping = make_run(1, **{**PLAIN, "checkpoint": {"every": 1, "keep": 2, "keep_every": 4}})
    train(run, stopping, keeping)
    seen = dict(map(json.loads, (run.path / "seen.jsonl").read_text().splitlines()))
    assert seen[6] == []
    assert seen[11] == ["step-000006"]
    assert stopping.start.stopped_marker.exists()
    assert [line.step for line in read_metrics(stopping)] == [*range(1, STOPPED + 1)]
    assert names(stopping) == [f"step-{STOPPED:06d}"]
    assert names(keeping) == ["step-000009", "step-000008", "step-000004"]


@pytest.mark.parametrize(
    ("values", "mode", "min_delta", "count"),
    [
        ([], "min", 0.0, 0),
        ([3.0, 2.0, 2.0], "min", 0.0, 1),
        ([3.0, 2.0, 2.5, 1.9], "min", 0.0, 0),
        ([3.0, 2.0, 2.5, 1.9], "min", 0.2, 2),
        ([0.5, 0.6, 0.6, 0.1], "max", 0.0, 2),
        ([math.nan, 2.0, math.nan, math.inf], "min", 0.0, 2),
        ([math.nan, math.nan], "max", 0.0, 2),
        ([math.inf, 2.0], "min", 0.0, 0),
    ],
)
def test_values_without_an_improvement_are_counted(values, mode, min_delta, count):
    assert count_without_improvement(values, mode, min_delta) == count


def test_runs_end_early_and_go_on_to_the_bit(make_run, launch, different, monkeypatch):
    def make(patience: int, pipeline: dict[str, Any]) -> RunDirectory:
        # Nothing is an improvement, and the first loss is the largest.
        stopping = {"patience": patience, "min_delta": 1e9, "mode": "max"}
        held_out = {"data": f"{PARTS}:Samples", "every": 2, "early_stopping": stopping}
        more = {"training": TRAINING, "checkpoint": {"every": 4}, "pipeline": pipeline}
        return make_run(2, **{**PLAIN, **more, "evaluation": held_out})

    def train(attempt: int, *runs: RunDirectory) -> str:
        for run in runs:
            run.start_of(attempt).errors.mkdir(parents=True, exist_ok=True)
        done = launch(2, IN_TURN, *(run.path for run in runs))
        assert done.returncode == 0, done.stderr
        return str(done.stderr)

    whole, run = (make(patience, {"stages": 2, "micro_batches": 2}) for patience in (100, 2))
    stopped = run, make(2, ASYNCHRONOUS)
    why = "loss has not improved by more than 1e+09 in 2 evaluations"
    assert train(1, whole, *stopped).count(f"the training ends after step 6: {why}") == 2
    train(2, *stopped)  # as they are, they have nothing to do
    for each in stopped:
        measured = sum_up(read_metrics(each))
        assert (measured.step, measured.evaluation_step, measured.early_stop) == (6, 6, why)
        assert read_heartbeat(each.start).state == "done"
        assert names(each) == ["step-000006", "step-000004", "step-000002"]
        each.job.write_text(dump(load(each.job, ["evaluation.early_stopping.patience=100"])))
    train(3, *stopped)
    assert [sum_up(read_metrics(each)).early_stop for each in stopped] == ["", ""]
    best = ["step-000009", "step-000008", "step-000006", "step-000002"]
    assert [names(each) for each in stopped] == [best, best]
    assert best_checkpoint(run.checkpoints).path.name == best[-1]
    assert different(whole, run) == []  # checkpoints drain steps that overlap, which is part of it


def test_the_evaluation_at_the_end_is_made_once_and_also_if_the_end_comes_early(make_run, launch):
    """A complete run gets more steps, and another one no more than it has made."""
    training, held_out = {"steps": 5, "batch_size": 4}, {"data": f"{PARTS}:HeldOut", "every": 4}
    complete, stopped = (make_run(1, training=training, evaluation=held_out) for _ in range(2))
    stopped.start.stop_request.write_text("")
    for attempt in (1, 2):
        for run in (complete, stopped):
            run.start_of(attempt).errors.mkdir(parents=True, exist_ok=True)
        done = launch(1, IN_TURN, complete.path, stopped.path)
        assert done.returncode == 0, done.stderr
        (step,) = (int(name.removeprefix("step-")) for name in names(stopped))
        for run, steps in ((complete, 6), (stopped, step)):
            run.job.write_text(dump(load(run.job, [f"training.steps={steps}"])))
    made = [
        [line.step for line in read_metrics(run) if line.evaluation] for run in (complete, stopped)
    ]
    assert made == [[4, 5, 6], [step]]
    of_last = [line.attempt for line in read_metrics(complete) if line.evaluation]
    assert of_last == [1, 1, 2]


PLATEAU = {
    "factory": "torch.optim.lr_scheduler:ReduceLROnPlateau",
    "kwargs": {"patience": 0, "threshold": 1e9, "threshold_mode": "abs", "factor": 0.5},
}
"""Each evaluation but the first halves the learning rate."""


def test_an_evaluation_made_only_because_the_training_ended_changes_no_further_steps(
    make_run, train, different
):
    """Neither learning rate nor early stopping nor buffers: at its end the whole run has had one
    evaluation too few to end early. It may be the best."""
    stopping = {"patience": 4, "min_delta": 1e9}
    held_out = {"data": f"{PARTS}:HeldOut", "every": 2, "early_stopping": stopping}
    often = {"model": {"factory": f"{PARTS}:Called"}, "evaluation": held_out}
    whole, run = (make_run(1, **often, lr_scheduler=PLATEAU, training=TRAINING) for _ in range(2))
    run.job.write_text(dump(load(run.job, ["training.steps=5"])))
    train(whole, run)
    manifests = [Manifest.load(run.checkpoints / "step-000005")]
    values = {line.step: line.evaluation["loss"] for line in read_metrics(run) if line.evaluation}
    assert [*values] == [2, 4, 5]
    assert manifests[0].best.step == min(values, key=values.get)
    run.start_of(2).errors.mkdir(parents=True)
    run.job.write_text(dump(load(run.job, [f"training.steps={STEPS}"])))
    train(run)
    manifests += [Manifest.load(each.checkpoints / f"step-{STEPS:06d}") for each in (run, whole)]
    assert [len(each.losses) for each in manifests] == [2, 4, 4]
    assert [len(each.metric_values) for each in manifests] == [2, 4, 4]
    assert different(whole, run) == []


@pytest.mark.parametrize(
    "places",
    [["compute", "update"], pytest.param(["data"], marks=pytest.mark.product)],
    ids=["computing or receiving", "data"],
)
def test_an_evaluation_that_fails_on_one_rank_costs_no_step_and_is_made_again(
    make_run, work, train, monkeypatch, different, places
):
    """The others wait for messages of that rank. It is tried before the first step, on all held-out
    data if a metric has no result for few; the evaluation after the last step begins when its
    checkpoint is complete, unless the learning rate follows it."""
    held_out = {"data": f"{PARTS}:HeldOut", "metrics": {"score": f"{PARTS}:Fragile"}}
    often = {"evaluation": {**held_out, "every": 2}, "lr_scheduler": PLATEAU}
    two = {"micro_batches": 2, "stages": 2}
    whole, plain = make_run(1, **often), make_run(1, evaluation=held_out)
    train(whole, plain)
    for place, rank, pipeline, sections, equal, action in (
        ("compute", 0, APART, {"evaluation": held_out}, plain, "computing metrics"),
        ("update", 1, two, often, whole, "EVALUATE micro-batch 6"),
        ("data", 0, two, often, whole, "EVALUATE micro-batch 2"),
    ):
        if place not in places:
            continue
        run, ends = make_run(2, pipeline=pipeline, **sections), 5 if equal is plain else 2
        monkeypatch.setenv("TEST_EVALUATION_FAILS", place)
        done = work(2, run)
        assert done.returncode == 1
        assert "only one class is present" not in done.stderr.partition("training begins")[0]
        assert "no result for so few samples (at " in done.stderr
        assert "); it is tried on all held-out data" in done.stderr
        saved = f"the training is saved up to step {ends}, where `pipectl resume RUN` goes on"
        assert f"the evaluation has failed; {saved}" in done.stderr
        (error,) = read_errors(run.start)
        assert (error.rank, error.action) == (rank, action)
        assert "only one class is present" in error.message
        assert saved in (error.hint or saved)
        assert names(run) == [f"step-{ends:06d}"]
        before = read_metrics(run)
        assert [line.step for line in before if line.is_step] == [*range(1, ends + 1)]
        assert not any(line.evaluation for line in before)
        monkeypatch.delenv("TEST_EVALUATION_FAILS")
        run.start_of(2).errors.mkdir(parents=True)
        done = work(2, run)
        assert done.returncode == 0, done.stderr
        pair = [
            [(line.step, line.loss, line.evaluation) for line in read_metrics(each)]
            for each in (run, equal)
        ]
        assert pair[0] == pair[1]
        assert different(run, equal) == []
