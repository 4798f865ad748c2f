"""What ranks do once before the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pipectl.capture.python_state import undisturbed
from pipectl.capture.slices import Rows
from pipectl.runtime.loss_shares import LossShares
from pipectl.runtime.optimizer import SharedGradients
from pipectl.runtime.setup import Setup
from pipectl.runtime.step import Batch, Step, narrowed
from pipectl.schedule import is_unflushed, plan_of_trial
from pipectl.schedule.one_f_one_b import ONE_F_ONE_B


def learn_layouts(
    setup: Setup, loss_shares: LossShares, shared: SharedGradients, evaluation: Callable[[], None]
) -> None:
    """Send micro-batches of every size over every channel, so that all ends know all layouts.

    It leaves no trace: buffers and what modules keep in Python objects are put back, gradients are
    dropped.

    Args:
        evaluation: does the same for evaluations.
    """
    with undisturbed(setup.job.step, setup.written.values()):
        for size in setup.division.sizes:
            _try(size, setup, loss_shares, shared)
        evaluation()


def _try(size: int, setup: Setup, loss_shares: LossShares, shared: SharedGradients) -> None:
    """A short step without an update."""
    plan = setup.plan
    if is_unflushed(plan):  # a trial is flushed; its messages are the same
        plan = replace(plan, schedule=ONE_F_ONE_B.name)
    rank, loader = setup.communicator.rank, setup.job.loader
    trial = Step.of(plan_of_trial(plan, size), rank, setup.reading, load_whole=loader.takes_whole)
    assert trial.pieces is not None
    whole: Any = loader.example(size) if setup.reading else None
    batches: list[Batch] = [narrowed(whole, rows, Rows.of(size)) for rows in trial.pieces.values()]
    seed = setup.job.spec.training.seed, "layouts"
    given = loss_shares.step_input(trial, iter(batches), seed)
    setup.training.run(trial, given)
    shared.learn()
    setup.reducer.learn()
    for stage in setup.stages.values():
        stage.forget()
