"""Verifying that a job's pipeline trains what one process trains, or what another plan does."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pipectl.batch import JobState, process
from pipectl.errors import InfeasibleError, PipectlError, UsageError, WorkerError
from pipectl.jobs.cancel import cancel
from pipectl.jobs.expectation import (
    ONE_RANK,
    PLAIN,
    Expectation,
    against_one_process,
    averaged_buffers,
    between_plans,
    reason_for_two_plans,
    too_large_for_a_process,
)
from pipectl.jobs.machines import cluster_of
from pipectl.jobs.places import LOCAL, profile_path
from pipectl.jobs.plan import find_plan
from pipectl.jobs.profile import Progress, fresh_profile, measure
from pipectl.jobs.status import RunStatus
from pipectl.jobs.submit import Inputs, submit
from pipectl.jobs.trust import refuse_code_of_others
from pipectl.jobs.verify_overrides import SGD, local, on_ranks
from pipectl.plan import Plan
from pipectl.planner.request import PLACED
from pipectl.profile import Profile
from pipectl.runs import RunDirectory
from pipectl.schedule.unflushed import NAMES as UNFLUSHED
from pipectl.spec import dump, load

if TYPE_CHECKING:
    from pipectl.capture.traits import Traits
    from pipectl.runtime.compare import Comparison, Trained
    from pipectl.spec import JobSpec

Follow = Callable[[RunDirectory], RunStatus]
"""Waits until a run is over."""


@dataclass(frozen=True)
class Verification:
    """What a pipeline was compared with, how, and what was found.

    Args:
        plan: of the pipeline.
        other: the plan it was compared with; None if that was one process.
        reference: what it was compared with, in words.
    """

    plan: Plan
    other: Plan | None
    reference: str
    expected: Expectation
    comparison: Comparison

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        first = self.comparison.first
        return {
            "equal": self.comparison.equal,
            "max_abs_difference": self.comparison.largest,
            "first_difference": None if first is None else first._asdict(),
            "tolerance": self.expected.tolerance,
            "compared": "a plan and one process" if self.other is None else "two plans",
            "reference": self.reference,
            "notes": list(self.expected.notes),
            "ranks": self.plan.ranks,
            "stages": len(self.plan.stages),
            "schedule": self.plan.schedule,
            "micro_batches": self.plan.micro_batches,
            "micro_batch_size": self.plan.micro_batch_size,
            "losses": [list(pair) for pair in self.comparison.losses],
        }


def verify(
    job: Path,
    overrides: Sequence[str],
    ranks: int,
    steps: int,
    follow: Follow,
    progress: Progress | None = None,
    *,
    two_plans: bool = False,
    trust_owner: bool = False,
) -> Verification:
    """Train ``steps`` steps in a pipeline and in one process, and compare all losses and weights.

    A model that fits no single process is trained in a second pipeline, of another plan, instead.
    Everything happens on this machine and in a temporary directory, where the weights after every
    step need room twice.

    Args:
        overrides: as for :func:`pipectl.spec.load`.
        ranks: processes of the pipeline, whatever ``resources`` asks for.
        two_plans: whether to compare with another plan in any case.
        trust_owner: run code that another user could have written.

    Raises:
        PipectlError: the spec, the model or one of the trainings fails.
    """
    if not trust_owner:
        refuse_code_of_others(load(job, [*overrides, *on_ranks(ranks)]), job)
    with TemporaryDirectory(prefix="pipectl-verify-") as directory:
        verifying = _Verifying(job, overrides, ranks, steps, Path(directory), follow, two_plans)
        return verifying.verify(progress)


@dataclass
class _Verifying:
    """One verification; ``directory`` takes its files, ``here`` is what differs from the job."""

    job: Path
    overrides: Sequence[str]
    ranks: int
    steps: int
    directory: Path
    follow: Follow
    two_plans: bool

    def __post_init__(self) -> None:
        asked = load(self.job, [*self.overrides, *on_ranks(self.ranks)])
        if asked.pipeline.schedule in UNFLUSHED:
            raise UsageError(
                f"verify: schedule {asked.pipeline.schedule} is asynchronous, so its results are "
                "not those of one process",
                cure="verify the model and the job with --set pipeline.schedule=auto",
            )
        self.here = local(asked, self.steps, self.directory)

    def verify(self, progress: Progress | None) -> Verification:
        from pipectl.capture.traits import find_traits
        from pipectl.runtime.compare import PipelineRun, compare
        from pipectl.runtime.plain import FirstWeights

        spec = self._spec(self.ranks)
        profile = self._profile(spec, progress)
        plan = find_plan(spec, profile, cluster_of(spec, LOCAL))
        traits = find_traits(spec, plan.micro_batch_size)
        other, expected = self._other(spec, profile, plan, traits)
        if expected.tolerance:
            self.here.extend(SGD)
            spec = self._spec(self.ranks)
        found = PipelineRun(self._train(spec, profile, plan))
        reference = self._reference(profile, plan, other, traits)
        start = FirstWeights(spec) if expected.tolerance else {}
        averaged = averaged_buffers(FirstWeights(spec).buffers, plan)
        comparison = compare(
            found, reference, self.steps, expected.tolerance, start, left_out=averaged
        )
        words = ONE_RANK if traits.random else PLAIN
        if other is not None:
            words = f"another plan: {other.ranks} ranks, {len(other.stages)} stages"
        return Verification(plan, other, words, expected, comparison)

    def _other(
        self, spec: JobSpec, profile: Profile, plan: Plan, traits: Traits
    ) -> tuple[Plan | None, Expectation]:
        """The plan to compare with where no single process can be; and what to expect."""
        reason = reason_for_two_plans(spec, asked=self.two_plans)
        reason = reason or too_large_for_a_process(self._alone(profile, plan))
        if reason is None:
            return None, against_one_process(spec, traits, plan)
        return self._cut_otherwise(profile, plan), between_plans(spec, traits, plan, reason)

    def _alone(self, profile: Profile, plan: Plan) -> Plan | None:
        """The plan of one rank; None if one rank has too little memory."""
        with suppress(InfeasibleError):
            return self._plan(1, profile, plan)
        return None

    def _cut_otherwise(self, profile: Profile, plan: Plan) -> Plan:
        """A plan of one stage more, or else of one less: all of its cuts move.

        Raises:
            InfeasibleError: the model can be cut in one way only.
        """
        for ranks in (plan.ranks + 1, plan.ranks - 1):
            with suppress(PipectlError):
                return self._plan(ranks, profile, plan)
        raise InfeasibleError(
            f"no other plan to compare with: only {plan.ranks} stages are possible",
            cure="verify it with more ranks: --ranks",
        )

    def _plan(self, ranks: int, profile: Profile, like: Plan) -> Plan:
        """A plan with a stage a rank and the micro-batches of another."""
        spec = self._like(ranks, like)
        plan = find_plan(spec, profile, cluster_of(spec, LOCAL))
        assert plan.micro_batch_size == like.micro_batch_size
        return plan

    def _like(self, ranks: int, plan: Plan) -> JobSpec:
        fixed = (
            f"pipeline.micro_batches={plan.micro_batches}",
            f"pipeline.stages={ranks}",
            "pipeline.replicas=1",
            "pipeline.backward=together",
        )
        simple = ("pipeline.schedule=1f1b",) if plan.schedule in PLACED else ()
        return self._spec(ranks, *fixed, *simple, "pipeline.warm_up=auto")

    def _spec(self, ranks: int, *more: str) -> JobSpec:
        return load(self.job, [*self.overrides, *self.here, *on_ranks(ranks), *more])

    def _profile(self, spec: JobSpec, progress: Progress | None) -> Profile:
        """The job's own profile if it is fresh: its times change no result."""
        with suppress(PipectlError):
            usual = load(self.job, self.overrides)
            profile = fresh_profile(usual, profile_path(usual))
            if profile is not None and profile.fingerprint is not None:
                return replace(profile, key=None)
        return measure(spec, self.directory / "profile.json", progress).profile

    def _train(self, spec: JobSpec, profile: Profile, plan: Plan) -> RunDirectory:
        """Run a plan here, to its end."""
        inputs = Inputs(spec, LOCAL, cluster_of(spec, LOCAL), profile, plan)
        run = submit(inputs, time.time()).run
        try:
            _require_success(self.follow(run))
        except BaseException:
            with suppress(PipectlError):
                cancel(run, time.time())
            raise
        return run

    def _reference(
        self, profile: Profile, plan: Plan, other: Plan | None, traits: Traits
    ) -> Trained:
        from pipectl.runtime.compare import PipelineRun, PlainRun

        if other is None and not traits.random:
            return PlainRun(self._train_plainly(plan))
        other = other or self._plan(1, profile, plan)
        return PipelineRun(self._train(self._like(other.ranks, plan), profile, other))

    def _train_plainly(self, plan: Plan) -> Path:
        directory = self.directory / "plain"
        directory.mkdir()
        spec = self._spec(plan.ranks)
        job = directory / "job.yaml"
        job.write_text(dump(spec), encoding="utf-8")
        size = str(plan.micro_batch_size)
        command = [sys.executable, "-m", "pipectl.runtime.plain", str(job), size, str(directory)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment |= spec.environment.variables
        done = process.run(command, cure="", env=environment, timeout_s=None)
        if done.returncode:
            raise WorkerError(f"the plain process failed: {done.said}")
        return directory


def _require_success(found: RunStatus) -> None:
    if found.job.state is JobState.COMPLETED:
        return
    culprit = found.culprit
    if culprit is None:
        raise WorkerError(f"the pipeline ended without a result: {found.job.reason}")
    error = WorkerError(f"{culprit.where}: {culprit.message}", cure=culprit.cure)
    error.exit_code = culprit.exit_code
    raise error
