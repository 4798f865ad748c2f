"""Workers over a real MPI: what they compute together, and how they end when one fails."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from mpi4py import MPI
from safetensors.torch import load_file

from pipectl.errors import DataFileError, PipectlError
from pipectl.plan import Plan
from pipectl.runs import RunDirectory, read_errors, read_heartbeat, read_metrics
from pipectl.runtime import checkpoint
from pipectl.runtime.failure import Doing
from pipectl.runtime.worker import run as work_here

pytestmark = pytest.mark.mpi
HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "how",
    [
        "none 1073741824 0",
        "poll 7 3",
        "thread 64 2 check",
        "thread 1000 2 staged",
        "none 4000 0 staged",
    ],
)
def test_strided_tensors_go_round_a_ring(launch: Any, how: str) -> None:
    """Whole and in pieces, with and without help, in place and through copies."""
    done = launch(3, HERE / "ring.py", *how.split())
    assert done.returncode == 0, done.stderr


def test_weights_of_micro_batches_are_the_same_on_one_and_two_ranks(
    make_spec: Any, make_run: Any, work: Any
) -> None:
    """A micro-batch counts by its valid targets; two ranks load with a process each."""
    loss = {"factory": f"{HERE / 'job_parts.py'}:loss", "weight": f"{HERE / 'job_parts.py'}:valid"}
    one = make_run(make_spec(1, loss=loss))
    told = {"told": f"{HERE / 'job_parts.py'}:told"}
    two = make_run(make_spec(2, loss=loss, data={"workers": 1}, callbacks=told))
    for ranks, run in ((0, one), (2, two)):
        done = work(ranks, run)
        assert done.returncode == 0, done.stderr
    figures = [
        [(line["step"], line["loss"], line["gradient_norm"]) for line in read_metrics(run)]
        for run in (one, two)
    ]
    assert figures[0] == figures[1]
    assert len(figures[0]) == 5
    assert (two.path / "told.jsonl").read_text() == two.metrics.read_text()
    # The second micro-batch of step 2 has no valid target: its loss is 0 / 0, and counts nothing.
    assert all(loss is not None for _, loss, _ in figures[0])
    assert figures[0][0][1] == pytest.approx(whole_batch_loss(), rel=1e-6)
    weights = [checkpoint.load(run.checkpoints / "step-000005") for run in (one, two)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    beat = read_heartbeat(two)
    assert (beat["state"], beat["step"], len(beat["ranks"])) == ("done", 5, 2)
    assert read_errors(two) == []


def whole_batch_loss() -> float:
    """The first loss, computed over the whole batch at once in plain PyTorch."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("job_parts_plain", HERE / "job_parts.py")
    assert spec is not None
    assert spec.loader is not None
    parts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(parts)
    torch.manual_seed(0)
    model, data = parts.Model(), parts.Samples()
    return float(parts.loss(model(data.vectors[:4]), data.targets[:4]).detach())


@pytest.mark.parametrize(
    "model",
    [
        {"factory": "Counting", "opaque": ["counter"]},
        {"factory": "Checkpointed"},
        {"factory": "Checkpointed", "opaque": ["part"]},
        {"factory": "Checkpointed", "opaque": ["part"], "kwargs": {"reentrant": True}},
        {"factory": "Described"},
    ],
    ids=["counting", "checkpointed", "checkpointed as it is", "reentrant", "with extra state"],
)
def test_two_ranks_train_what_a_plain_process_trains(
    make_spec: Any, make_run: Any, work: Any, launch: Any, tmp_path: Path, model: dict[str, Any]
) -> None:
    """What a module counts begins with the first step, and a part that runs twice counts once."""
    model = {**model, "factory": f"{HERE / 'job_parts.py'}:{model['factory']}"}
    run = make_run(make_spec(2, model=model, training={"steps": 3, "batch_size": 4}))
    plain = tmp_path / "plain"
    plain.mkdir()
    size = Plan.load(run.plan).micro_batch_size
    for done in (
        work(2, run),
        launch(0, "-m", "pipectl.runtime.plain", run.job, size, plain),
    ):
        assert done.returncode == 0, done.stderr
    losses = json.loads((plain / "losses.json").read_text())["losses"]
    assert [line["loss"] for line in read_metrics(run)] == losses
    expected = load_file(plain / "step-000003.safetensors")
    found = checkpoint.load(run.checkpoints / "step-000003", weights_only=True)
    assert set(found) == set(expected)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_every_step_draws_masks_of_its_own(make_spec: Any, make_run: Any, work: Any) -> None:
    """Nothing else tells steps apart: weights stay, and each has the same four samples."""
    model = {"factory": f"{HERE / 'job_parts.py'}:Model", "kwargs": {"dropout": 0.5}}
    still = {"factory": "torch.optim:SGD", "kwargs": {"lr": 0.0}}
    run = make_run(make_spec(1, data={"kwargs": {"count": 4}}, model=model, optimizer=still))
    done = work(0, run)
    assert done.returncode == 0, done.stderr
    losses = [line["loss"] for line in read_metrics(run)]
    assert len(set(losses)) == len(losses) == 5


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_optimizer_is_given_a_ranks_parameters_in_the_order_of_the_model(
    ranks: int, make_spec: Any, make_run: Any, work: Any, tmp_path: Path
) -> None:
    """The model uses its layers in another order."""
    parts = HERE / "job_parts.py"
    noted = tmp_path / "noted"
    noted.mkdir()
    kwargs = {"lr": 0.1, "folder": str(noted)}
    optimizer = {"factory": f"{parts}:noting", "kwargs": kwargs}
    run = make_run(make_spec(ranks, model=f"{parts}:Backwards", optimizer=optimizer))
    for file in noted.iterdir():  # of the profiler, which tries the optimizer
        file.unlink()
    done = work(ranks, run)
    assert done.returncode == 0, done.stderr
    whole = [[12, 8], [12], [8, 7], [8], [7, 6], [7]]
    given = [json.loads(file.read_text()) for file in noted.iterdir()]
    # A rank whose stages have no parameters tries the optimizer on small ones only.
    given = [sizes for sizes in given if all(size in whole for size in sizes)]
    assert sorted(item for sizes in given for item in sizes) == sorted(whole)
    for sizes in given:
        assert sizes == [item for item in whole if item in sizes]


@pytest.mark.parametrize("progress", ["poll", "thread"])
def test_help_and_checks_are_those_that_the_job_asks_for_and_change_no_bit(
    make_spec: Any,
    make_run: Any,
    work: Any,
    launch: Any,
    progress: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The two ranks fail where messages, operators or checkpoints were not told."""
    one, two = make_run(make_spec(1)), make_run(make_spec(2, launch={"progress": progress}))
    monkeypatch.setenv("PIPECTL_CHECK_MESSAGES", "1")
    for done in (work(0, one), launch(2, HERE / "wired_worker.py", "--run", two.path)):
        assert done.returncode == 0, done.stderr
    weights = [checkpoint.load(run.checkpoints / "step-000005") for run in (one, two)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    beat = read_heartbeat(two)
    found = {key: beat["messages"][key] for key in ("route", "progress", "why")}
    assert found == {"route": "in place", "progress": progress, "why": "set in the job"}
    assert "training begins: 5 steps of 4 samples on 2 ranks\n" in done.stderr


def test_a_rank_that_fails_in_step_3_ends_all_and_is_named(
    make_spec: Any, make_run: Any, work: Any
) -> None:
    """From sample 8 on, targets are no classes: the loss, on the last rank, raises."""
    run = make_run(make_spec(2, data={"kwargs": {"wrong_from": 8}}))
    done = work(2, run, fresh=True)
    assert done.returncode not in (0, 3)
    (error,) = read_errors(run)
    assert all_end_before(error["time"] + 20, run)
    assert (error["rank"], error["stage"], error["step"]) == (1, 1, 3)
    assert error["action"] == "FORWARD micro-batch 0"
    assert error["type"] == "IndexError"
    assert "Target 99 is out of bounds" in error["message"]
    assert "Traceback" in error["traceback"]
    assert error["exit_code"] == 1
    assert "pipectl: rank 1, stage 1, step 3, FORWARD micro-batch 0: IndexError" in done.stderr


def all_end_before(deadline: float, run: RunDirectory) -> bool:
    beat = read_heartbeat(run)
    pids = [rank["pid"] for rank in beat["ranks"]]
    assert len(pids) == 2
    while any(map(is_alive, pids)) and time.time() < deadline:
        time.sleep(0.1)
    return time.time() < deadline


def is_alive(pid: int) -> bool:
    try:
        return "pipectl.runtime.worker" in psutil.Process(pid).cmdline()
    except psutil.Error:
        return False


def test_data_that_fail_in_the_middle_of_training(make_spec: Any, make_run: Any, work: Any) -> None:
    callbacks = {"closed": f"{HERE / 'job_parts.py'}:Closed"}
    run = make_run(make_spec(1, data={"kwargs": {"fails_from": 9}}, callbacks=callbacks))
    done = work(0, run)
    assert done.returncode != 0
    (error,) = read_errors(run)
    assert (error["rank"], error["step"]) == (0, 3)
    assert error["message"] == "sample 9 cannot be read"
    assert "job_parts.py" in error["traceback"]
    assert [line["step"] for line in read_metrics(run)] == [1, 2]
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
    assert read_errors(run)[0]["type"] == "MismatchError"


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
    assert error["exit_code"] == 3
    assert "launch.mpi" in error["cure"]


def test_a_plan_of_another_model(make_spec: Any, make_run: Any, work: Any) -> None:
    run = make_run(make_spec(1))
    deeper = {"factory": f"{HERE / 'job_parts.py'}:Model", "kwargs": {"depth": 3}}
    other = make_run(make_spec(1, model=deeper))
    for mine, others in ((run.plan, other.plan), (run.profile, other.profile)):
        mine.write_bytes(others.read_bytes())
    done = work(0, run)
    assert done.returncode == 3
    assert (
        "MismatchError: plan.json was made for another model: "
        "operator 4, 'linear_2', has other arguments here than there" in done.stderr
    )
    assert "Traceback" not in done.stderr


def test_a_run_directory_that_does_not_exist(launch: Any, tmp_path: Path) -> None:
    done = launch(0, "-m", "pipectl.runtime.worker", "--run", tmp_path / "absent")
    assert done.returncode == 3
    assert f"{tmp_path / 'absent' / 'job.yaml'}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "absent").exists()


def test_a_rank_without_a_stage_takes_part(make_spec: Any, make_run: Any, work: Any) -> None:
    """The planner may find one stage on two ranks the fastest."""
    held_out = {"data": {"factory": f"{HERE / 'job_parts.py'}:Samples", "kwargs": {"count": 5}}}
    run = make_run(make_spec(2, pipeline={"micro_batches": 2, "stages": 1}, evaluation=held_out))
    done = work(2, run)
    assert done.returncode == 0, done.stderr
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 5]
    assert all(line["gradient_norm"] for line in lines[:5])
    assert lines[5]["evaluation"]["loss"] > 0
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
    make_spec: Any, make_run: Any, work: Any
) -> None:
    """One parameter's gradient does, in step 2; the learning rate waits with the step."""
    parts = HERE / "job_parts.py"
    half = {"precision": "float16", "steps": 3, "batch_size": 4}
    schedule = {"factory": "torch.optim.lr_scheduler:StepLR", "kwargs": {"step_size": 1}}
    model, data = {"factory": f"{parts}:Overflowing"}, {"factory": f"{parts}:Marked"}
    run = make_run(make_spec(2, data, model=model, training=half, lr_scheduler=schedule))
    done = work(2, run)
    assert done.returncode == 0, done.stderr
    lines = read_metrics(run)
    assert [line["skipped"] for line in lines] == [False, True, False]
    assert [line["loss_scale"] for line in lines] == [65536.0, 65536.0, 32768.0]
    assert [line["learning_rate"] for line in lines] == pytest.approx([0.1, 0.01, 0.01])
