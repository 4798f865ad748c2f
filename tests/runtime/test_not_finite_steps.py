"""Steps whose loss or gradients are not finite: found, named, left out or stopped at."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import nn

from pipectl.capture import CapturedJob, Cut, Slot
from pipectl.capture.batch import by_name
from pipectl.capture.slices import Span
from pipectl.errors import StepError
from pipectl.jobs.state import get_status
from pipectl.runs import NotFinite, read_errors
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.diagnosis import find_not_finite
from pipectl.runtime.finite import BufferCheck
from pipectl.runtime.gradients import gradient_norms
from pipectl.runtime.segment import MicroBatch
from pipectl.runtime.stage import Stage
from pipectl.runtime.trainer import Trainer
from pipectl.runtime.vote import (
    Origin,
    Origins,
    Result,
    Vote,
    fault_of_buffers,
    fault_of_gradients,
    fault_of_losses,
)
from pipectl.schedule import Kind
from pipectl.watch.board import Activity, Board

HERE = Path(__file__).parent
PARTS = HERE / "job_parts.py"
SPOILT = {"factory": f"{PARTS}:Spoilt"}
STEEP = {"factory": f"{PARTS}:Overflowing"}
MASKED = {"factory": f"{PARTS}:Blocks"}
MARKED = {"factory": f"{PARTS}:Marked"}


def layers() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


def vote_of_one() -> Vote:
    return Vote(MPI.COMM_SELF, [name for name, _ in layers().named_parameters()])


def fault_of(model: nn.Module) -> int:
    """Of two stages."""
    named = dict(model.named_parameters())
    stages = {s: {n: p for n, p in named.items() if n.startswith(str(s))} for s in (0, 1)}
    return fault_of_gradients(stages, gradient_norms(named), list(named))


def result_of(vote: Vote) -> Result:
    result = vote.count()
    assert result is not None
    return result


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_fault_of_a_step_is_named(value: float) -> None:
    """Losses come first; backwards begin at the last stage, and in one the model's order holds."""
    model, vote = layers(), vote_of_one()
    model[0].weight.grad.fill_(3e38)  # finite, unlike its norm
    model[1].bias.grad = None
    assert fault_of(model) == 0
    model[0].weight.grad[1, 1] = value
    vote.cast(3, fault_of(model))
    assert result_of(vote).fault == NotFinite(gradient_of="0.weight", stage=0)
    model[1].bias.grad = torch.full((2,), value)
    model[1].weight.grad[0, 0] = value
    vote.cast(4, fault_of(model))
    result = result_of(vote)
    assert result.fault == NotFinite(gradient_of="1.weight", stage=1)
    with pytest.raises(StepError, match=r"^the gradient of '1\.weight' in stage 1 is not"):
        vote.stop(result, together=True)
    losses = [torch.tensor(x) for x in (value, 1.0, math.inf, math.nan)]
    fault = fault_of_losses([0, 2, 4, 6], losses, [0.0, 9.0, 0.5, 9.0, 0.3, 9.0, 0.2])
    assert fault > fault_of(model)
    vote.cast(5, fault)
    vote.cast(6)
    result = result_of(vote)
    assert (result.step, result.fault) == (5, NotFinite(loss_of_micro_batch=4))
    # Where steps overlap, a rank without the fault must not wait for one that may wait for it.
    with pytest.raises(StepError, match=r"^the loss of micro-batch 4 is not") as failed:
        vote.stop(replace(result, is_mine=False), together=False)
    assert failed.value.step == 5
    assert result_of(vote).fault is None
    assert vote.count() is None


def test_a_buffer_counts_that_was_finite_before() -> None:
    """It comes before gradients, which are computed later; whole numbers have no such values."""
    lowest, spread, count = (torch.full((2,), x) for x in (math.inf, 3e38, 7))
    check = BufferCheck({"model.low": lowest, "model.spread": spread, "model.count": count})
    assert check.faults() == []
    spread[1] = math.nan
    assert check.faults() == ["model.spread"]
    spread[1] = 1.0  # the step is left out
    lowest.fill_(2.0)
    assert check.faults() == []
    lowest[0] = -math.inf
    spread[0] = math.inf
    faults, model = check.faults(), layers()
    vote = Vote(MPI.COMM_SELF, [], ["model.count", "model.spread", "model.low"])
    assert faults == ["model.low", "model.spread"]
    model[1].weight.grad.fill_(math.nan)
    fault = fault_of_buffers(faults, ["model.count", "model.spread", "model.low"])
    of_loss = fault_of_losses([0], [torch.tensor(math.nan)], [1.0])
    assert of_loss > fault > fault_of(model) > fault_of_buffers([], []) == 0
    vote.cast(2, fault)
    result = result_of(vote)
    assert result.fault == NotFinite(buffer="spread")
    with pytest.raises(StepError, match=r"^the buffer 'spread' is not finite"):
        vote.stop(result, together=True)


def test_the_first_stage_is_named_that_handed_on_what_was_not_finite() -> None:
    slot, mask = Slot("block"), Slot("mask")
    origins = Origins({slot.value})
    fine, spoilt = torch.ones(3), torch.tensor([1.0, math.inf, 1.0])
    for micro_batch, stage, tensor in ((0, 1, fine), (2, 3, spoilt), (2, 1, spoilt), (1, 0, fine)):
        origins.note(micro_batch, stage, {slot: tensor, mask: spoilt})
    origins.note(0, 2, {slot: torch.full((9,), 60000.0, dtype=torch.float16), mask: None})
    assert origins.take_first(2) is None
    assert origins.take_first(3) == Origin(2, 1)
    assert origins.take_first(3) is None
    vote = vote_of_one()
    of_loss = fault_of_losses([2], [torch.tensor(math.nan)], [0.0, 0.0, 1.0])
    for origin, stage in ((Origin(2, 1), 1), (Origin(0, 0), -1), (None, -1)):
        vote.cast(1, of_loss, origin)
        result = result_of(vote)
        assert (result.fault, result.origin) == (NotFinite(loss_of_micro_batch=2), stage)
        words = "; the first output that is not finite is that of stage 1"
        with pytest.raises(StepError, match=r"^the loss of micro-batch 2 is not") as error:
            vote.stop(result, together=True)
        assert (words in error.value.message) is (stage == 1)


COMPUTED = "the first value that is not finite is computed by module 'blocks.1' (at "


@pytest.mark.parametrize(
    ("factor", "change", "said"),
    [
        (1.0, "", ""),
        (-1.0, "", COMPUTED),
        (0.0, "", COMPUTED),
        (1.0, "model.blocks.2.linear.weight", "'blocks.2.linear.weight' is not finite before"),
        (1.0, "data", "the data have a value that is NaN"),
    ],
    ids=["finite", "NaN", "infinite", "weight", "data"],
)
def test_the_module_is_named_that_computes_the_first_value_that_is_not_finite(
    make_spec, factor: float, change: str, said: str
) -> None:
    """Masks are infinite on purpose."""
    job = CapturedJob(make_spec(1, model={**MASKED, "kwargs": {"factor": factor}}))
    graph, span = job.training_graph(2), Span.of(2)
    cuts = {(True, span): Cut(graph, {node.name: 0 for node in graph.operators}, training=True)}
    stage = Stage(0, cuts, job.states, CpuDevice())
    given = by_name(graph, job.loader.example(2))
    if change == "data":
        given = {n: t * math.nan if t.is_floating_point() else t for n, t in given.items()}
    elif change:
        job.states[change].detach()[0, 0] = math.inf
    inputs = {name: given[name] for name in stage.inputs(True, span)}
    found = find_not_finite(stage, MicroBatch(0, span), inputs, {})
    assert found.startswith(said)
    assert bool(found) is bool(said)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "clip", "written"),
    [
        pytest.param(1, 1.0, True, id="with all ranks"),
        pytest.param(1, None, True, id="before a checkpoint"),
        pytest.param(1, 1.0, False, id="no checkpoint can be written"),
        pytest.param(2, None, None, id="a step later, unless steps take a second"),
    ],
)
def test_a_job_stops_and_saves_nothing_of_the_step(
    make_run, work, ranks: int, clip: float | None, written: bool | None
) -> None:
    """Samples 4 to 7, from step 3 on, make the gradient of one parameter infinite, and no loss."""
    run = make_run(
        ranks,
        MARKED,
        model=STEEP,
        training={"steps": 5, "batch_size": 2, "clip_grad_norm": clip},
        pipeline={"micro_batches": 1, "stages": ranks},
        checkpoint={"every": None if written is None else 1, "keep": 1},
    )
    if written is False:
        run.checkpoints.rmdir()
        run.checkpoints.write_text("no folder")
    done = work(ranks if ranks > 1 else 0, run)
    assert done.returncode != 0
    (error,) = read_errors(run.start)
    stage = error.rank  # which one has the gate follows from what was measured
    assert (error.stage, error.step, error.action, error.exit_code) == (None, 3, "", 1)
    fault = f"the gradient of 'gate' in stage {stage}"
    assert error.message == f"{fault} is not finite (infinite or NaN)"
    assert ("the checkpoint of step 2 was not written" in done.stderr) is (written is False)
    saved = ["step-000002"] if written else []
    assert [path.name for path in run.checkpoints.glob("step-*")] == saved
    found = get_status(run, 0.0).measured
    assert (found.not_finite, found.fault) == ((3,), fault)


def test_a_checkpoint_that_takes_long_before_the_job_stops_is_no_row() -> None:
    """In a row, all ranks would be taken for waiting for each other."""
    board, seen = Board(), list[Activity]()
    board.row(Kind.UPDATE.name, 1, -1)
    saver = SimpleNamespace(finish=lambda: seen.append(board.read()))
    rank: Any = SimpleNamespace(_setup=SimpleNamespace(board=board), _saver=saver)
    Trainer._finish_saving(rank)
    assert [(activity.in_program, activity.action) for activity in seen] == [(False, "saving")]
    assert (board.read().action, board.read().stage) == ("UPDATE", 1)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "given"),
    [
        (2, {"schedule": "1f1b", "micro_batches": 2}),
        pytest.param(
            2, {"schedule": "pipedream-2bw", "micro_batches": 2}, marks=pytest.mark.product
        ),
        (3, {"schedule": "pipedream"}),
    ],
    ids=lambda item: f"{item}" if isinstance(item, int) else item["schedule"],
)
def test_steps_stop_at_a_loss_also_if_they_overlap(
    make_run, work, ranks: int, given: dict[str, Any]
) -> None:
    training = {"steps": 5, "batch_size": 4}
    pipeline = {"stages": ranks, **given}
    run = make_run(ranks, SPOILT, training=training, pipeline=pipeline)
    done = work(ranks, run)
    assert done.returncode != 0
    error = read_errors(run.start)[0]
    assert error.step == 2
    cause = "; the data have a value that is NaN" if given["schedule"] == "1f1b" else ""
    assert error.message.startswith(
        f"the loss of micro-batch 0 is not finite (infinite or NaN){cause}"
    )
    assert not list(run.checkpoints.glob("step-*"))
