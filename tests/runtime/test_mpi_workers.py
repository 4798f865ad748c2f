"""Workers over a real MPI: how they end when one fails, and what they refuse."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
from mpi4py import MPI

from pipectl.errors import DataFileError, PipectlError
from pipectl.runs import RunDirectory, read_errors, read_heartbeat, read_metrics
from pipectl.runtime import checkpoint
from pipectl.runtime.engine import Engine
from pipectl.runtime.process import Doing
from pipectl.runtime.step import StepRun
from pipectl.runtime.worker import run as work_here

pytestmark = pytest.mark.mpi
HERE = Path(__file__).parent


def test_a_rank_that_fails_in_step_3_ends_all_and_is_named(
    make_spec: Any, make_run: Any, work: Any
) -> None:
    """From sample 8 on, targets are no classes: the loss, on the last rank, raises."""
    run = make_run(make_spec(2, data={"kwargs": {"wrong_from": 8}}))
    done = work(2, run)
    assert done.returncode not in (0, 3)
    (error,) = read_errors(run)
    assert all_end_before(error.time + 20, run)
    assert (error.rank, error.stage, error.step) == (1, 1, 3)
    assert error.action == "FORWARD micro-batch 0"
    assert error.type == "IndexError"
    assert "Target 99 is out of bounds" in error.message
    assert "Traceback" in error.traceback
    assert error.exit_code == 1
    assert f"pipectl: {error.where}: IndexError" in done.stderr


def all_end_before(deadline: float, run: RunDirectory) -> bool:
    beat = read_heartbeat(run)
    assert beat is not None
    pids = [rank.pid for rank in beat.ranks]
    assert len(pids) == 2
    while any(map(psutil.pid_exists, pids)) and time.time() < deadline:
        time.sleep(0.1)
    return time.time() < deadline


def test_data_that_fail_in_the_middle_of_training(make_spec: Any, make_run: Any, work: Any) -> None:
    callbacks = {"closed": f"{HERE / 'job_parts.py'}:Closed"}
    run = make_run(make_spec(1, data={"kwargs": {"fails_from": 9}}, callbacks=callbacks))
    done = work(0, run)
    assert done.returncode != 0
    (error,) = read_errors(run)
    assert (error.rank, error.step) == (0, 3)
    assert error.message == "sample 9 cannot be read"
    assert "job_parts.py" in error.traceback
    assert [line.step for line in read_metrics(run)] == [1, 2]
    assert (run.path / "closed").read_text() == "OSError"


@pytest.mark.parametrize("key", ["data", "evaluation.data"])
def test_data_of_which_ranks_see_different_lengths(
    make_spec: Any, make_run: Any, work: Any, key: str
) -> None:
    data = {"factory": f"{HERE / 'job_parts.py'}:RankDependent"}
    sections = {"data": data} if key == "data" else {"evaluation": {"data": data}}
    run = make_run(make_spec(2, **sections))
    done = work(2, run)
    assert done.returncode == 3
    assert f"{key}: the ranks find different numbers of samples: [23, 24]" in done.stderr
    assert "Traceback" not in done.stderr
    assert read_errors(run)[0].type == "MismatchError"


def test_more_processes_than_ranks(make_spec: Any, make_run: Any, work: Any) -> None:
    run = make_run(make_spec(1))
    done = work(2, run)
    assert done.returncode == 3
    assert "MPI started 2 process(es), but the plan has 1 ranks" in done.stderr
    assert "plan again for the ranks you start" in done.stderr
    assert "Traceback" not in done.stderr


def test_processes_that_are_alone(make_spec: Any, make_run: Any, work: Any) -> None:
    """As srun without the right --mpi starts them."""
    run = make_run(make_spec(2))
    done = work(0, run)
    assert done.returncode == 3
    assert "MPI started 1 process(es), but the plan has 2 ranks" in done.stderr
    assert "every process is alone" in done.stderr
    (error,) = read_errors(run)
    assert error.exit_code == 3
    assert "launch.mpi" in error.cure


def test_a_plan_of_another_model(make_spec: Any, make_run: Any, work: Any) -> None:
    run = make_run(make_spec(1))
    deeper = {"factory": f"{HERE / 'job_parts.py'}:Model", "kwargs": {"depth": 3}}
    other = make_run(make_spec(1, model=deeper))
    for mine, others in ((run.plan, other.plan), (run.profile, other.profile)):
        mine.write_bytes(others.read_bytes())
    done = work(0, run)
    assert done.returncode == 3
    assert (
        "MismatchError: plan.json was made for a different model: "
        "operator 4, 'linear_2', has other arguments here than there" in done.stderr
    )
    assert "Traceback" not in done.stderr


def test_a_run_directory_that_does_not_exist(launch: Any, tmp_path: Path) -> None:
    done = launch(0, "-m", "pipectl.runtime.worker", "--run", tmp_path / "absent")
    assert done.returncode == 3
    assert f"{tmp_path / 'absent' / 'job.yaml'}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "absent").exists()


def test_a_rank_without_a_stage_takes_part(make_spec: Any, make_run: Any, train: Any) -> None:
    """The planner may find one stage on two ranks the fastest."""
    held_out = {"data": {"factory": f"{HERE / 'job_parts.py'}:Samples", "kwargs": {"count": 5}}}
    run = make_run(make_spec(2, pipeline={"micro_batches": 2, "stages": 1}, evaluation=held_out))
    train(run)
    lines = read_metrics(run)
    assert [line.step for line in lines] == [1, 2, 3, 4, 5, 5]
    assert all(line.gradient_norm for line in lines[:5])
    assert lines[5].evaluation["loss"] > 0
    assert "head.weight" in checkpoint.load(run.checkpoints / "step-000005")


def refusal(run: RunDirectory) -> PipectlError:
    """What the worker refuses a run with; in this process, which starts faster."""
    with pytest.raises(PipectlError) as raised:
        work_here(run, MPI.COMM_SELF, Doing())
    assert raised.value.exit_code == 3
    assert raised.value.cure
    return raised.value


class Noting(Doing):
    """Notes every phase of a rank."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        super().__init__()

    @property
    def action(self) -> str:
        return super().action

    @action.setter
    def action(self, phase: str) -> None:
        self.phases.append(phase)
        self.board.phase(phase)


def test_a_rank_says_what_it_does_from_its_start(make_spec: Any, make_run: Any) -> None:
    run = make_run(make_spec(1, training={"steps": 1, "batch_size": 4}))
    doing = Noting()
    work_here(run, MPI.COMM_SELF, doing)
    assert doing.phases == [
        "starting",
        "reading the plan",
        "meeting the other ranks",
        "looking for a checkpoint",
        "choosing the device",
        "building the model and the data",
        "capturing the model",
        "choosing how messages travel",
        "building the stages",
        "connecting to the other ranks",
        "warming up",
        "training",
        "saving",
        "training",
        "finishing",
    ]
    assert doing.step == 1


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_step_is_freed_at_its_end_without_the_garbage_collector(
    make_spec: Any, make_run: Any, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    steps: list[weakref.ref[StepRun]] = []
    still_there: list[int] = []
    execute = Engine.run

    def run(engine: Engine, step: StepRun, parts: Any = None) -> None:
        still_there.append(sum(ref() is not None for ref in steps))
        steps.append(weakref.ref(step))
        execute(engine, step, parts)

    monkeypatch.setattr(Engine, "run", run)
    training = {"steps": 4, "batch_size": 4, "clip_grad_norm": None}
    pipeline = {"schedule": schedule, "micro_batches": None if schedule == "pipedream" else 2}
    job = make_run(make_spec(1, pipeline=pipeline, training=training, checkpoint={"every": 1}))
    gc.disable()
    try:
        work_here(job, MPI.COMM_SELF, Doing())
        still_there.append(sum(ref() is not None for ref in steps))
    finally:
        gc.enable()
    assert len(steps) > 3
    assert not any(still_there)


def test_data_too_few_for_one_batch(make_spec: Any, make_run: Any) -> None:
    data = {"kwargs": {"count": 3}, "drop_last": True}
    run = make_run(make_spec(1, data=data))
    assert refusal(run).message == "data: 3 samples fill no batch of 4"


def test_held_out_data_without_an_end(make_spec: Any, make_run: Any) -> None:
    held_out = {"data": f"{HERE / 'job_parts.py'}:Endless"}
    run = make_run(make_spec(1, evaluation=held_out))
    assert refusal(run).message == "evaluation.data: is iterable, so that its end is not known"


@pytest.mark.parametrize("damage", ["missing", "truncated", "another file"])
def test_a_plan_that_cannot_be_read(make_spec: Any, make_run: Any, damage: str) -> None:
    run = make_run(make_spec(1))
    if damage == "missing":
        run.plan.unlink()
    elif damage == "truncated":
        run.plan.write_text(run.plan.read_text()[:200])
    else:
        run.plan.write_text('{"version": 1}')
    error = refusal(run)
    assert isinstance(error, DataFileError)
    assert error.message.startswith(str(run.plan))
    assert error.cure == "write a new one with: pipectl plan JOB.yaml"


def test_an_overflow_on_one_rank_skips_the_step_on_all(
    make_spec: Any, make_run: Any, train: Any
) -> None:
    """One parameter's gradient does, in step 2; the learning rate waits with the step."""
    parts = HERE / "job_parts.py"
    half = {"precision": "float16", "steps": 3, "batch_size": 4}
    schedule = {"factory": "torch.optim.lr_scheduler:StepLR", "kwargs": {"step_size": 1}}
    model, data = {"factory": f"{parts}:Overflowing"}, {"factory": f"{parts}:Marked"}
    run = make_run(make_spec(2, data, model=model, training=half, lr_scheduler=schedule))
    train(run)
    lines = read_metrics(run)
    assert [line.skipped for line in lines] == [False, True, False]
    assert [line.loss_scale for line in lines] == [65536.0, 65536.0, 32768.0]
    assert [line.learning_rate for line in lines] == pytest.approx([0.1, 0.01, 0.01])


def test_a_short_last_batch_is_refused_before_the_first_step(
    make_spec: Any, make_run: Any, work: Any
) -> None:
    """22 samples: the sixth step has 2 of them, long behind the first checkpoint."""
    spec = make_spec(
        2,
        data={"kwargs": {"count": 22}},
        training={"steps": 8, "batch_size": 4},
        pipeline={"stages": 2, "schedule": "pipedream-2bw", "micro_batches": 2},
        checkpoint={"every": 2},
    )
    run = make_run(spec)
    assert work(2, run).returncode == 3
    assert read_errors(run)[0].message == (
        "data: the last batch of an epoch fills 1 of 2 micro-batches; schedule pipedream-2bw "
        "takes as many in every step"
    )
    assert read_metrics(run) == []
    assert not list(run.checkpoints.glob("step-*"))
