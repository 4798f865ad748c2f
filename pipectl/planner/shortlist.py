"""Plans that fit, of many that are proposed; the fastest are the first that are made to fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

from pipectl.plan import Plan
from pipectl.planner.activations.modes import ModeSearch
from pipectl.planner.bounds import least_step_s
from pipectl.planner.evaluate import TIE, Evaluator, preference
from pipectl.planner.problem import Problem


class Shortlist:
    """Plans that fit, with predictions.

    Args:
        expired: asked now and then; once it is true, no more is tried.
        offload: whether stages may offload, all that is allowed.
        accepts: whether a plan is as it was asked for.
        max_actions: to simulate, forwards and backwards of all replicas in all.

    Attributes:
        plans: in the order in which they were accepted.
        finished: whether nothing was left out for want of time.
    """

    def __init__(
        self,
        problem: Problem,
        expired: Callable[[], bool],
        offload: tuple[bool, ...] = (False,),
        accepts: Callable[[Plan], bool] = lambda _: True,
        **limits: int,
    ) -> None:
        self.evaluator = Evaluator(problem, expired, **limits)
        self.plans: list[Plan] = []
        self.finished = True
        self._modes = ModeSearch(self.evaluator, offload)
        self._cluster = problem.cluster
        self._accepts = accepts

    @property
    def fastest_s(self) -> float:
        """The shortest step so far."""
        return min((plan.predicted_step_s for plan in self.plans), default=inf)

    def consider(self, proposed: Iterable[Plan], gain: float = TIE) -> None:
        """Accept what fits; of what does not, what could be the fastest if it saves memory.

        Args:
            proposed: without predictions.
            gain: share of the shortest step by which others must be faster; if it is more than a
                tie, no slower ones are accepted.
        """
        simulated: list[Plan] = []
        for plan in proposed:
            if self.evaluator.is_exhausted and (self.plans or simulated):
                self.finished = False
                break
            if least_step_s(plan, self._cluster) < self.fastest_s * (1 - gain):
                simulated.append(self._modes.simplest(plan))
        for plan in sorted(simulated, key=preference):
            limit_s = self.fastest_s * (1 - gain)
            held: Plan | None = plan if self.evaluator.fits(plan) else None
            if plan.predicted_step_s < limit_s and not (self.plans and self.evaluator.is_exhausted):
                held = self._modes.within_memory(plan)
            if held is None or not self._accepts(held):
                continue
            if gain == TIE or held.predicted_step_s < limit_s:
                self.plans.append(held)
