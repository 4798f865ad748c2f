"""Workers over a real MPI: how they end when one fails, and what they refuse."""

from __future__ import annotations

import gc
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from pipectl.capture import CapturedJob
from pipectl.capture.batch import Reader
from pipectl.errors import DataFileError, MismatchError, PipectlError
from pipectl.plan import Replication
from pipectl.runs import RunDirectory, read_errors, read_metrics
from pipectl.runtime import checkpoint
from pipectl.runtime.engine import Engine
from pipectl.runtime.nodes import check_supported
from pipectl.runtime.setup import Setup
from pipectl.runtime.step import StepRun
from pipectl.runtime.worker import run as work_here
from pipectl.watch.board import Board

PARTS = Path(__file__).with_name("job_parts.py")
COUPLED = {"factory": f"{PARTS}:Coupled", "kwargs": {"kind": "all"}}
SCALED = {
    "data": {"factory": f"{PARTS}:Scaled"},
    "loss": f"{PARTS}:scaled_loss",
    "pipeline": {"micro_batches": 1, "stages": 1, "replicas": 2},
}
LENGTHS = r"the ranks find different numbers of samples: \[23, 24\]"


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "sections", "code", "where", "message"),
    [
        (1, {"data": {"kwargs": {"fails_from": 9}}, "callbacks": {"told": f"{PARTS}:Told"}},
         1, ("OSError", 0, 3, "LOAD, step 3"), rf"sample 9 cannot be read \(at {PARTS}:\d+\)$"),
        (2, {"data": {"kwargs": {"wrong_from": 8}}},
         1, ("IndexError", 1, 3, "stage 1, FORWARD micro-batch 0, step 3"), "Target 99 is out of "),
        (2, {"evaluation": {"data": f"{PARTS}:Samples", "metrics": {"wrong": f"{PARTS}:valid"}}},
         1, ("WorkerError", 1, 0, ""), r"evaluation\.metrics\.wrong: raised TypeError: valid\(\) "),
        (2, {"data": {"factory": f"{PARTS}:RankDependent"}},
         3, ("MismatchError", None, 0, ""), rf"data: {LENGTHS}"),
        pytest.param(2, {"evaluation": {"data": {"factory": f"{PARTS}:RankDependent"}}},
         3, ("MismatchError", None, 0, ""), rf"evaluation\.data: {LENGTHS}",
         marks=pytest.mark.product),
        (2, {"optimizer": COUPLED}, 3, ("CaptureError", None, 0, ""),
         r"optimizer: .*job_parts\.py:Coupled updates a parameter differently"),
    ],
    ids=["data that fail", "a loss that fails on the last rank", "a metric that fails",
         "data by rank", "held-out data by rank", "an optimizer that looks at all parameters"],
)  # fmt: skip
def test_what_cannot_go_on_ends_all_ranks_and_is_named(
    make_run, work, ranks: int, sections: dict[str, Any], code: int, where: Any, message: str
) -> None:
    """Steps before it are told, unless rank 0 is behind; and a callback, which failure it was.

    Without a rank, all fail.
    """
    run = make_run(ranks, **sections)
    done = work(ranks if ranks > 1 else 0, run)
    assert done.returncode != 0
    kind, rank, step, place = where
    error, *others = read_errors(run.start)
    assert (error.type, error.step or 0, error.exit_code) == (kind, step, code)
    assert error.where.endswith(place)
    assert re.match(message, error.message, re.DOTALL)
    assert rank or [line.step for line in read_metrics(run)] == [*range(1, step)]
    if code == 3:
        assert "Traceback" not in done.stderr
        return
    assert (error.rank, others) == (rank, [])
    assert "Traceback" in error.traceback
    assert f"pipectl: {error.where}: {kind}" in done.stderr
    if "callbacks" in sections:
        assert "job_parts.py" in error.traceback
        assert (run.path / "closed").read_text() == "OSError"


@pytest.mark.mpi
def test_a_number_of_a_batch_is_compared_where_replicas_share_a_micro_batch(make_run, work) -> None:
    """It is no longer what the graph computes with from step 2 on."""
    run = make_run(2, **SCALED)
    assert work(2, run).returncode != 0
    error = read_errors(run.start)[0]
    assert (error.step, error.exit_code) == (2, 3)
    assert error.message.startswith("data: 'targets_scale' of a batch is the number 2.0, but the")


@pytest.mark.mpi
def test_more_processes_than_ranks_and_a_run_that_does_not_exist_are_refused(
    make_run, work, launch, tmp_path: Path
) -> None:
    more = work(2, make_run(1))
    assert "MPI started 2 process(es), but the plan has 1 ranks" in more.stderr
    assert "plan again for the ranks you start" in more.stderr
    absent = tmp_path / "absent"
    none = launch(0, "-m", "pipectl.runtime.worker", "--run", absent)
    assert str(absent / "job.yaml") in none.stderr
    assert not absent.exists()
    assert [done.returncode for done in (more, none)] == [3, 3]
    assert "Traceback" not in more.stderr + none.stderr


@pytest.mark.mpi
def test_a_rank_without_a_stage_takes_part(make_run, train) -> None:
    """The planner may find one stage on two ranks the fastest."""
    held_out = {"data": {"factory": f"{PARTS}:Samples", "kwargs": {"count": 5}}}
    run = make_run(2, pipeline={"micro_batches": 2, "stages": 1}, evaluation=held_out)
    train(run)
    lines = read_metrics(run)
    assert [line.step for line in lines] == [1, 2, 3, 4, 5, 5]
    assert all(line.gradient_norm for line in lines[:5])
    assert lines[5].evaluation["loss"] > 0
    assert "head.weight" in checkpoint.load(run.checkpoints / "step-000005")


def test_a_rank_says_what_it_does_from_its_start(make_run, monkeypatch) -> None:
    """Alone, it may have an optimizer that looks at all parameters."""
    run = make_run(1, training={"steps": 1, "batch_size": 4}, optimizer=COUPLED)
    board, phases, say = Board(), [], Board.phase

    def note(board: Board, text: str) -> None:
        phases.append(text)
        say(board, text)

    monkeypatch.setattr(Board, "phase", note)
    work_here(run, MPI.COMM_SELF, board)
    assert "; ".join(phases) == (
        "reading the plan; meeting the other ranks; looking for a checkpoint; choosing the device; "
        "building the model and the data; capturing the model; choosing how messages travel; "
        "building the stages; connecting to the other ranks; making the optimizer; warming up; "
        "training; saving; training; finishing"
    )
    assert board.read().step == 1


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_step_is_freed_at_its_end_without_the_garbage_collector(
    make_run, monkeypatch: pytest.MonkeyPatch, schedule: str
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
    job = make_run(1, pipeline=pipeline, training=training, checkpoint={"every": 1})
    gc.disable()
    try:
        work_here(job, MPI.COMM_SELF, Board())
        still_there.append(sum(ref() is not None for ref in steps))
    finally:
        gc.enable()
    assert len(steps) > 3
    assert not any(still_there)


def refusal(run: RunDirectory, after: int = 0) -> PipectlError:
    """What the worker refuses to do after so many steps, in this process."""
    with pytest.raises(PipectlError) as raised:
        work_here(run, MPI.COMM_SELF, Board())
    assert raised.value.exit_code == 3
    assert raised.value.hint
    assert [line.step for line in read_metrics(run)] == [*range(1, after + 1)]
    assert not list(run.checkpoints.glob("step-*"))
    return raised.value


def ragged(**kwargs: Any) -> dict[str, Any]:
    return {"data": {"factory": f"{PARTS}:Ragged", "kwargs": kwargs}}


SHORT_EPOCHS = {  # the sixth step has 2 of 22 samples, long after the first checkpoint
    "data": {"kwargs": {"count": 22}},
    "training": {"steps": 8, "batch_size": 4},
    "pipeline": {"stages": 1, "schedule": "pipedream-2bw", "micro_batches": 2},
    "checkpoint": {"every": 2},
}


@pytest.mark.parametrize(
    ("sections", "after", "message"),
    [
        ({"data": {"kwargs": {"count": 3}, "drop_last": True}}, 0, "data: 3 samples fill no batch"),
        ({"evaluation": {"data": f"{PARTS}:Endless"}}, 0, "evaluation.data: is iterable, so that "),
        ({"evaluation": ragged(count=4, longer_from=0)}, 0, r".*\[2, 8\] of torch.float32, but "),
        ({"evaluation": ragged(double=True)}, 0, r".*\[2, 6\] of torch.float64, but "),
        (SHORT_EPOCHS, 0, "data: the last batch of an epoch fills 1 of 2 micro-batches; schedule "),
        (ragged(longer_from=8), 2, r"data: 'inputs' .* \[2, 8\].*pad all samples"),
        (ragged(fewer_from=8), 2, r"data: 'targets' .* \[2, 2\].*pad all samples"),
        (ragged(lost=9), 2, "data: 'inputs' .* has 1 sample, not 2.*keep all samples"),
    ],
)
def test_data_that_do_not_suit_the_job_are_refused(
    make_run, monkeypatch, sections: dict[str, Any], after: int, message: str
) -> None:
    """What a rank has opened for its training is closed in any case."""
    closed: list[Setup] = []
    monkeypatch.setattr(Setup, "close", lambda setup: closed.append(setup))
    error = refusal(make_run(1, **sections), after)
    assert len(closed) == 1 or not after
    assert re.match(message, f"{error.message} {error.hint}", re.DOTALL)


def test_a_plan_for_others_or_none_at_all_is_refused(make_run) -> None:
    alone = refusal(make_run(2))  # as srun without the right --mpi starts them
    assert "MPI started 1 process(es), but the plan has 2 ranks" in alone.message
    assert "every process is alone" in alone.hint
    assert "launch.mpi" in alone.hint
    run = make_run(1)
    other = make_run(1, model={"factory": f"{PARTS}:Model", "kwargs": {"depth": 3}})
    for mine, others in ((run.plan, other.plan), (run.profile, other.profile)):
        mine.write_bytes(others.read_bytes())
    assert refusal(run).message == (
        "plan.json was made for a different model: "
        "operator 4, 'linear_2', has other arguments here than there"
    )
    text = run.plan.read_text()
    run.plan.unlink()
    for damaged in (None, text[:200], '{"version": 1}'):
        if damaged is not None:
            run.plan.write_text(damaged)
        error = refusal(run)
        assert isinstance(error, DataFileError)
        assert error.message.startswith(str(run.plan))
        assert error.hint == "write a new one with: pipectl plan JOB.yaml"


def test_what_only_a_kept_submodule_reads_may_have_any_shape(make_spec) -> None:
    spec = make_spec(1, model={"factory": f"{PARTS}:Model", "opaque": ["layers"]})
    assert set(Reader(CapturedJob(spec).training_graph(2)).checked) == {"targets"}


def test_plans_that_no_ranks_can_run_are_refused(pipeline) -> None:
    """Replicas get samples; backwards on other ranks are neither split nor shared."""
    plan = pipeline(2, 4, micro_batch_size=2, node_of_rank=[0] * 5)
    first, last = plan.stages
    several = replace(plan, stages=(first, replace(last, ranks=(1, 2, 3))))
    apart = replace(plan, stages=(first, replace(last, backward_ranks=(2,))))
    both = replace(plan, stages=(first, replace(last, ranks=(1, 2), backward_ranks=(3, 4))))
    for runs in (several, apart):
        check_supported(runs)
    split = replace(several, replication=Replication.SPLIT)
    for refused, message in (
        (split, r"stages\[1\] has 3 replicas for the 2 samples"),
        (replace(apart, schedule="zb-h1"), "backward: apart with schedule zb-h1, which splits"),
        (replace(apart, schedule="interleaved"), "apart with schedule interleaved, which places"),
        (both, "the plan has backward: apart with replicas; it can be simulated, but not run"),
    ):
        with pytest.raises(MismatchError, match=message):
            check_supported(refused)
