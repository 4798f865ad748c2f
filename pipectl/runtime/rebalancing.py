"""Looks for a better plan while the job trains, if ranks are slower than their plan expects.

Rank 0 sees how long every rank computes in every step. As long as all take the same multiple of
what was predicted, the plan is right, whatever that multiple is. If some take longer than others
for `WINDOW` steps, another process plans again (:mod:`pipectl.jobs.replan`), while the training
goes on. If its plan pays, all ranks save their state after the same step, build their stages anew
in the same processes, and go on from there: results do not depend on the plan.

Two causes are told apart. What is uneven from the beginning is taken for a wrong profile of the
stages' operators, which stays with these wherever they go. What becomes uneven later is taken for
ranks that have become slower or faster, which keeps to the ranks.

The idea of a pipeline that adapts to slow nodes is that of PIPEMORPH (Wu et al., "Attack of the
Bubbles: Straggler-Resilient Pipeline Parallelism for Large Model Training", NSDI 2026), which
changes the order of work instead; a changed cut keeps the results.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import pipectl
from pipectl.batch import process
from pipectl.errors import PipectlError
from pipectl.files import make_private_directory
from pipectl.plan import Plan
from pipectl.runs import WARM_UP_STEPS, RankBeat, RunDirectory
from pipectl.runs.rebalance import Balance, Imbalance
from pipectl.runtime.rank_process import job_log, say, warn
from pipectl.schedule import is_unflushed
from pipectl.units import format_time, plural

WINDOW = 20
"""Steps for which ranks are uneven before something is done."""
_UNEVEN = 1.15
"""Ratio to the fastest ranks from which a rank counts as slow."""
_FASTEST = 0.25
"""Share of the ranks that are the fastest; more than one, so that noise of one does not count."""
_LOOK_S = 0.2
_BYTES_PER_S = 2e8
"""Assumed speed at which a checkpoint is written and read."""
Figures = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Move:
    """A plan under which the training is to go on.

    Args:
        why: a sentence for the log and for ``status``.
        balance: what it gains.
        shares: of the ranks, which it was made for.
    """

    plan: Plan
    why: str
    balance: Balance
    shares: tuple[float, ...]


def can_move(plan: Plan) -> bool:
    """Whether the stages of a plan can be cut anew without a change of results.

    They cannot if steps overlap, or if stages differ in their numbers of copies, since sums over
    copies are rounded in another order.
    """
    ranks = {rank for stage in plan.stages for rank in (*stage.ranks, *stage.updating_ranks)}
    copies = {stage.replicas for stage in plan.stages}
    has_times = plan.prediction is not None
    return len(ranks) > 1 and len(copies) == 1 and has_times and not is_unflushed(plan)


class Rebalancing:
    """What rank 0 knows about the speeds of all ranks; one for all plans of a start.

    Args:
        steps: of the whole run.
        accepts: whether the ranks can work under another plan.

    Attributes:
        found: the plan to move to; None as long as the present one stays.
    """

    def __init__(
        self,
        run: RunDirectory,
        plan: Plan,
        steps: int,
        accepts: Callable[[Plan], bool] = lambda _: True,
    ) -> None:
        self._run, self._steps, self._accepts = run, steps, accepts
        self._shares: Figures = np.ones(plan.ranks)
        self._pid: int | None = None
        shutil.rmtree(run.rebalance, ignore_errors=True)  # of an earlier start
        self.follow(plan)

    def follow(self, plan: Plan) -> None:
        """Follow a plan from now on, whose stages the ranks begin to build."""
        self.found: Move | None = None
        self._plan = plan
        self._expected_s = _expected_s(plan, self._shares)
        self._began_at, self._move_s = time.monotonic(), 0.0
        self._ratios: deque[Figures] = deque(maxlen=WINDOW)
        self._usual: Figures | None = None
        self._pause, self._next, self._skip = WINDOW, 0, WARM_UP_STEPS
        self._looked_at = 0.0
        self._why, self._asked = "", self._shares

    def begin(self) -> None:
        """Record that the stages are built: a move takes as long, and what it saves and loads."""
        state = sum(stage.cost.resident_bytes for stage in self._plan.stages)
        built_s = time.monotonic() - self._began_at
        self._move_s = built_s + 2 * state / _BYTES_PER_S

    def look(self, step: int, ranks: Sequence[RankBeat]) -> None:
        """Take in how long the ranks computed in a step; start planning, or look for its result."""
        if self._skip:
            self._skip -= 1
            return
        busy_s = np.array([beat.busy_s or np.nan for beat in ranks])
        self._ratios.append(busy_s / self._expected_s)
        if self._pid is not None:
            self._look_for_answer(step)
        elif self.found is None and len(self._ratios) == WINDOW and step >= self._next:
            self._compare(step, ranks)

    def drop(self) -> None:
        """Stay with the present plan, since no rank can move."""
        self.found = None
        self._next = self._steps

    def close(self) -> None:
        """End the process that plans."""
        if self._pid is not None:
            process.kill_child(self._pid)
            self._pid = None

    def _compare(self, step: int, ranks: Sequence[RankBeat]) -> None:
        ratios = np.array(self._ratios)
        is_first = self._usual is None
        usual = np.ones(len(ranks)) if self._usual is None else self._usual
        if is_first:
            self._usual = np.median(ratios, axis=0)
        halves = np.median((ratios / usual).reshape(2, WINDOW // 2, -1), axis=1)
        halves /= np.nanquantile(halves, _FASTEST, axis=1, method="lower", keepdims=True)
        if not np.nanmax(halves.min(axis=0)) > _UNEVEN:  # NaN for a rank that computes nothing
            return
        slow = halves[1]
        worst = int(np.nanargmax(slow))
        node = ranks[worst].node or ranks[worst].host
        than = "predicted" if is_first else "before"
        self._why = (
            f"rank {worst} on {node} computes {slow[worst]:.2g} times as long as {than}, compared "
            f"with other ranks, since step {step - WINDOW + 1}"
        )
        slow = np.where(np.isfinite(slow), slow, 1.0)
        self._ask(step, slow, is_first=is_first)

    def _ask(self, step: int, slow: Figures, *, is_first: bool) -> None:
        """Start planning."""
        shares, factors = self._shares, [1.0] * len(self._plan.stages)
        if is_first:
            factors = [float(max(slow[list(s.updating_ranks)])) for s in self._plan.stages]
        else:
            shares = shares / slow
            shares /= shares.max()
        self._asked = shares
        self._next = step + self._pause
        self._pause *= 2
        left = self._steps - step
        imbalance = Imbalance(left, self._move_s, tuple(map(float, shares)), tuple(factors))
        argv = [sys.executable, "-m", "pipectl.jobs.replan", str(self._run.path)]
        try:
            make_private_directory(self._run.rebalance)
            self._run.balance.unlink(missing_ok=True)
            imbalance.save(self._run.imbalance)
            output = job_log()
            package = Path(pipectl.__file__).parents[1]
            self._pid = process.start_detached(
                argv,
                directory=Path("/"),
                stdout=output,
                stderr=output,
                env={**os.environ, **process.search_path(package)},
            )
        except (OSError, PipectlError) as error:
            warn(f"{self._why}; another plan cannot be looked for: {error}")
            self._next = self._steps

    def _look_for_answer(self, step: int) -> None:
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        assert self._pid is not None
        if not process.has_ended(self._pid):
            return
        self._pid = None
        try:
            balance = Balance.load(self._run.balance)
            if not balance.pays:
                return
            plan = Plan.load(self._run.rebalance / "plan.json")
        except PipectlError as error:
            warn(f"{self._why}; no other plan was made: {error}")
            return
        if not self._accepts(plan) or self._steps - step < WINDOW:
            return
        why = (
            f"{self._why}: {plural(balance.operators, 'operator')} moved to other ranks, step "
            f"{format_time(balance.before_s)} to {format_time(balance.after_s)} as predicted"
        )
        self.found = Move(plan, why, balance, tuple(map(float, self._asked)))

    def adopt(self, step: int) -> Plan:
        """Write the plan that was found into the run, whose state is saved after a step."""
        move, run = self.found, self._run
        assert move is not None
        say(f"{move.why}; the training goes on after step {step}")
        run.put_aside(run.trace_until(step))
        move.plan.save(run.plan)
        folder = run.rebalance
        (folder / "predicted.json").replace(run.predicted)
        (folder / "profile.next.json").replace(folder / "profile.json")
        self._shares = np.array(move.shares)
        self.follow(move.plan)
        return move.plan


def _expected_s(plan: Plan, shares: Figures) -> Figures:
    """Predicted seconds of forwards and backwards of each rank in a step; NaN without any."""
    assert plan.prediction is not None
    busy_s = plan.prediction.step_time_s * np.array(plan.prediction.utilisation)
    for stage in plan.stages:
        for rank in stage.updating_ranks:
            busy_s[rank] -= stage.cost.update_s / shares[rank]
    return np.where(busy_s > 0, busy_s, np.nan)
