"""Runs that go on from a checkpoint end with the bits of runs that were never stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pipectl.plan import Plan
from pipectl.runs import RunDirectory, checkpoints, read_errors, read_heartbeat, read_metrics
from pipectl.runtime import checkpoint

pytestmark = pytest.mark.mpi
HERE = Path(__file__).parent
PARTS = HERE.parent / "job_parts.py"
ADAM = {"optimizer": {"factory": "torch.optim:AdamW", "kwargs": {"lr": 0.05}}}
COSINE = {
    "lr_scheduler": {
        "factory": "torch.optim.lr_scheduler:CosineAnnealingLR",
        "kwargs": {"T_max": 11},
    }
}
STEPS, STOPPED = 9, 3


def options(**more: Any) -> dict[str, Any]:
    training = {"steps": STEPS, "batch_size": 4, "clip_grad_norm": 1.0}
    return {**ADAM, **COSINE, "checkpoint": {"every": STOPPED}, "training": training, **more}


def check_same(one: RunDirectory, other: RunDirectory) -> None:
    """Weights, optimizer state, losses and learning rates."""
    name = f"step-{STEPS:06d}"
    first, second = (checkpoint.load(run.checkpoints / name) for run in (one, other))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[weight], second[weight]) for weight in first)
    assert first.manifest.updates == second.manifest.updates
    assert first.manifest.loss_scale == second.manifest.loss_scale
    figures = [
        {x.step: (x.loss, x.learning_rate) for x in read_metrics(run) if x.is_step}
        for run in (one, other)
    ]
    assert [*figures[1]] == [*range(STOPPED + 1, STEPS + 1)]
    assert all(figures[0][step] == found for step, found in figures[1].items())


def in_float16(scale: float) -> dict[str, Any]:
    """Sections of a job whose first loss scale is so large."""
    training = {"steps": STEPS, "batch_size": 4, "precision": "float16"}
    return options(training={**training, "loss_scale": {"initial": scale, "growth_interval": 2}})


EQUALITY = HERE.parents[1] / "equality" / "models.py"
BUCKETS = {
    "model": {"factory": f"{EQUALITY}:gpt"},
    "loss": {"factory": f"{EQUALITY}:token_loss", "weight": f"{EQUALITY}:valid_tokens"},
    "data": {
        "factory": f"{EQUALITY}:Sentences",
        "buckets": [5, 12],
        "pad": {"inputs": 0, "targets": -100},
    },
}
"""Twelve batches an epoch: the second run begins in the middle of it."""
VARIANTS = {
    "plain": (options(), {}),
    "float16": (in_float16(2.0**40), {}),
    "float16, trained": (in_float16(2.0**10), {}),
    "spoilt": (
        options(
            data={"factory": f"{PARTS}:Spoilt"},
            training={"steps": STEPS, "batch_size": 4, "on_nonfinite": "skip"},
        ),
        {},
    ),
    "buckets": (options(**BUCKETS), {}),
    "endless": (options(data={"factory": f"{PARTS}:Endless"}), {}),
    "asynchronous": (
        options(training={"steps": STEPS, "batch_size": 4}),
        {"schedule": "pipedream-2bw"},
    ),
    "shared out": (
        options(loss={"factory": f"{PARTS}:Tempered", "weight": f"{PARTS}:valid"}),
        {"replicas": 2, "shard_optimizer": True},
    ),
}


@pytest.fixture(scope="module")
def trained(module_runs: Any, launch: Any) -> dict[str, tuple[RunDirectory, RunDirectory]]:
    """By variant, two ranks that train, and two that go on from the middle."""
    found, arguments = {}, []
    for name, (sections, request) in VARIANTS.items():
        ranks = 2
        whole, rest = (module_runs(ranks, sections, **request) for _ in range(2))
        arguments += [whole.path, f"{whole.path}:{STOPPED}:{rest.path}"]
        found[name] = whole, rest
    done = launch(2, HERE / "ranks_that_resume.py", *arguments)
    assert done.returncode == 0, done.stderr
    return found


def test_steps_are_left_out_before_and_after_the_checkpoint(
    trained: dict[str, tuple[RunDirectory, RunDirectory]],
) -> None:
    """The variant would also pass if nothing were spoilt."""
    whole, rest = trained["spoilt"]
    found = [
        [x.step for x in read_metrics(run) if x.not_finite is not None] for run in (whole, rest)
    ]
    assert [step for step in found[0] if step > STOPPED] == found[1]
    assert min(found[0]) <= STOPPED < max(found[0])


def test_half_precision_is_left_between_two_growths_of_its_scale(
    trained: dict[str, tuple[RunDirectory, RunDirectory]],
) -> None:
    """The variants would also pass if every step were skipped."""
    whole, _ = trained["float16, trained"]
    stopped, ended = (
        checkpoint.load(whole.checkpoints / f"step-{step:06d}").manifest
        for step in (STOPPED, STEPS)
    )
    assert stopped.loss_scale is not None
    assert stopped.loss_scale.steps_since == 1
    assert ended.updates == STEPS


@pytest.mark.parametrize("name", VARIANTS)
def test_two_ranks_go_on_to_the_bit(
    trained: dict[str, tuple[RunDirectory, RunDirectory]], name: str
) -> None:
    check_same(*trained[name])


def test_a_trained_loss_has_its_value_and_its_optimizer_state_in_two_files(
    trained: dict[str, tuple[RunDirectory, RunDirectory]],
) -> None:
    """The variant would also pass if one replica wrote both."""
    whole, _ = trained["shared out"]
    shards = checkpoint.load(whole.checkpoints / f"step-{STOPPED:06d}").manifest.training
    assert ["loss.temperature" in shard.names for shard in shards] == [True, True]


def test_other_numbers_of_ranks_go_on_to_the_bit(
    trained: dict[str, tuple[RunDirectory, RunDirectory]], module_runs: Any, launch: Any
) -> None:
    """The optimizer's state follows its parameters."""
    whole, _ = trained["plain"]
    sections, _ = VARIANTS["plain"]
    for ranks in (1, 3):
        rest = module_runs(ranks, sections)
        again = f"{whole.path}:{STOPPED}:{rest.path}"
        done = launch(ranks, HERE / "ranks_that_resume.py", again)
        assert done.returncode == 0, done.stderr
        check_same(whole, rest)


def test_a_run_whose_rank_is_killed_goes_on(
    trained: dict[str, tuple[RunDirectory, RunDirectory]],
    module_runs: Any,
    start: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first attempt by far does not reach the end; its damaged checkpoint is passed over."""
    whole, _ = trained["plain"]
    sections, _ = VARIANTS["plain"]
    slow = {"data": {"factory": f"{PARTS}:Slow"}}
    run = module_runs(2, {**sections, **slow})
    monkeypatch.setenv("PIPECTL_ATTEMPT", "1")
    process = start(2, run)
    kill_a_rank_behind_step(run, process, 6)
    newest = checkpoints(run.checkpoints)[0]
    assert newest.name == "step-000006"
    damage(newest)
    monkeypatch.setenv("PIPECTL_ATTEMPT", "2")
    process = start(2, run)
    _, log = process.communicate(timeout=280)
    assert process.returncode == 0, log
    assert "missing or damaged; the checkpoint before it is used" in log
    lines = read_metrics(run)
    assert [(line.step, line.attempt) for line in lines] == [
        *((step, 1) for step in range(1, 4)),
        *((step, 2) for step in range(4, STEPS + 1)),
    ]
    losses = [[line.loss for line in read_metrics(found)] for found in (whole, run)]
    assert losses[0] == losses[1]
    ends = [checkpoint.load(found.checkpoints / f"step-{STEPS:06d}") for found in (whole, run)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_run_that_is_asked_to_stop_saves_and_goes_on(
    trained: dict[str, tuple[RunDirectory, RunDirectory]],
    module_runs: Any,
    start: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between two checkpoints: all ranks agree on the step, and end with 0."""
    whole, _ = trained["plain"]
    slow = {"data": {"factory": f"{PARTS}:Slow"}, "checkpoint": {"every": 100}}
    run = module_runs(2, {**VARIANTS["plain"][0], **slow})
    for attempt in (1, 2):
        monkeypatch.setenv("PIPECTL_ATTEMPT", str(attempt))
        process = start(2, run)
        while attempt == 1 and not read_metrics(run):
            time.sleep(0.05)
        if attempt == 1:
            run.stop_request.write_text("")
        _, log = process.communicate(timeout=280)
        assert process.returncode == 0, log
        assert run.stopped_marker.exists() == (attempt == 1)
        beat = read_heartbeat(run)
        assert beat.state == ("stopped" if attempt == 1 else "done")
        run.stop_request.unlink(missing_ok=True)
        run.stopped_marker.unlink(missing_ok=True)
    lines = read_metrics(run)
    assert {line.attempt for line in lines} == {1, 2}
    ends = [checkpoint.load(found.checkpoints / f"step-{STEPS:06d}") for found in (whole, run)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_steps_that_overlap_stop_where_the_pipeline_is_empty(module_runs: Any, train: Any) -> None:
    """Which is behind the next checkpoint."""
    sections, request = VARIANTS["asynchronous"]
    run = module_runs(2, sections, **request)
    run.stop_request.write_text("")
    train(run)
    assert run.stopped_marker.exists()
    assert [line.step for line in read_metrics(run)] == [*range(1, STOPPED + 1)]
    assert names(run) == [f"step-{STOPPED:06d}"]


def test_checkpoints_stay_as_the_job_says(module_runs: Any, train: Any) -> None:
    run = module_runs(1, options(checkpoint={"every": 1, "keep": 2, "keep_every": 4}))
    train(run)
    assert names(run) == ["step-000009", "step-000008", "step-000004"]


def names(run: RunDirectory) -> list[str]:
    """Of the checkpoints, from the newest."""
    return [path.name for path in checkpoints(run.checkpoints)]


def kill_a_rank_behind_step(run: RunDirectory, process: subprocess.Popen[str], step: int) -> None:
    """Once its checkpoint is there, which is behind the next step."""
    deadline = time.monotonic() + 280
    while not (run.checkpoints / f"step-{step:06d}").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pids = {rank.rank: rank.pid for rank in read_heartbeat(run).ranks}
    pid = pids[1]
    os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=280)
    assert process.returncode != 0
    deadline = time.monotonic() + 280
    while not (errors := read_errors(run)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert [pids[error.rank] for error in errors] == [pid]
    assert errors[0].step > step
    assert errors[0].message.startswith("its process was killed")
    assert read_metrics(run)[-1].step < STEPS


def damage(directory: Path) -> None:
    file = next((directory / "training").iterdir())
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_other_micro_batches_are_refused(
    trained: dict[str, tuple[RunDirectory, RunDirectory]], module_runs: Any, launch: Any
) -> None:
    whole, _ = trained["plain"]
    sections, _ = VARIANTS["plain"]
    rest = module_runs(1, sections, micro_batches=4)
    assert Plan.load(rest.plan).micro_batch_size == 1
    shutil.copytree(whole.checkpoints, rest.checkpoints, dirs_exist_ok=True)
    done = launch(1, "-m", "pipectl.runtime.worker", "--run", rest.path)
    assert done.returncode == 3
    assert "was written with micro-batches of 2 samples, and the plan has 1" in done.stderr


def test_a_checkpoint_becomes_valid_while_the_next_steps_overlap(
    make_spec: Any, make_run: Any, train: Any
) -> None:
    """Not at the next one, before which a job that is killed would have lost both."""
    spec = make_spec(
        2,
        training={"steps": 12, "batch_size": 4},
        pipeline={"stages": 2, "schedule": "pipedream-2bw", "micro_batches": 2},
        checkpoint={"every": 6},
        callbacks={"watching": f"{PARTS}:watching"},
    )
    run = make_run(spec)
    train(run)
    seen = dict(map(json.loads, (run.path / "seen.jsonl").read_text().splitlines()))
    assert seen[6] == []
    assert seen[11] == ["step-000006"]
