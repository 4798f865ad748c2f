"""Verifying that a job's pipeline trains what one process trains."""

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
from pipectl.errors import PipectlError, WorkerError
from pipectl.jobs.cancel import cancel
from pipectl.jobs.machines import cluster_of
from pipectl.jobs.places import LOCAL, profile_path
from pipectl.jobs.plan import find_plan
from pipectl.jobs.profile import Progress, fresh_profile, measure
from pipectl.jobs.status import RunStatus
from pipectl.jobs.submit import Inputs, submit
from pipectl.plan import Plan
from pipectl.profile import Profile
from pipectl.runs import RunDirectory
from pipectl.spec import dump, load

if TYPE_CHECKING:
    from pipectl.capture.traits import Traits
    from pipectl.runtime.compare import Comparison, Trained
    from pipectl.spec import JobSpec

PLAIN = "one plain PyTorch process"
ONE_RANK = "one rank"
ROUNDING = {"float32": 1e-4, "bf16": 2e-2}
"""Tolerance where the same bits cannot be expected, by precision; see ``compare``."""
_SGD = ("optimizer={factory: 'torch.optim:SGD', kwargs: {lr: 0.1}}", "lr_scheduler=null")

Follow = Callable[[RunDirectory], RunStatus]
"""Waits until a run is over."""


@dataclass(frozen=True)
class Verification:
    """What a pipeline was compared with, how, and what was found.

    Args:
        plan: of the pipeline.
        reference: what it was compared with.
        notes: why the reference or the tolerance is what it is.
        tolerance: see :func:`pipectl.runtime.compare.compare`; 0 asks for the same bits.
    """

    plan: Plan
    reference: str
    notes: tuple[str, ...]
    tolerance: float
    comparison: Comparison

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        first = self.comparison.first
        return {
            "equal": self.comparison.equal,
            "max_abs_difference": self.comparison.largest,
            "first_difference": None if first is None else first._asdict(),
            "tolerance": self.tolerance,
            "reference": self.reference,
            "notes": list(self.notes),
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
) -> Verification:
    """Train ``steps`` steps in a pipeline and in one process, and compare all losses and weights.

    Everything happens on this machine and in a temporary directory, where the weights after every
    step need room twice.

    Args:
        overrides: as for :func:`pipectl.spec.load`.
        ranks: processes of the pipeline, whatever ``resources`` asks for.

    Raises:
        PipectlError: the spec, the model or one of the trainings fails.
    """
    with TemporaryDirectory(prefix="pipectl-verify-") as directory:
        verifying = _Verifying(job, overrides, ranks, steps, Path(directory), follow)
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

    def __post_init__(self) -> None:
        asked = load(self.job, [*self.overrides, *_ranks(self.ranks)])
        self.here = _local(asked, self.steps, self.directory)

    def verify(self, progress: Progress | None) -> Verification:
        from pipectl.capture.traits import find_traits
        from pipectl.runtime.compare import PipelineRun, compare
        from pipectl.runtime.plain import first_weights

        spec = self._spec(self.ranks)
        profile = self._profile(spec, progress)
        plan = find_plan(spec, profile, cluster_of(spec, LOCAL))
        traits = find_traits(spec, plan.micro_batch_size)
        notes, tolerance = _expectation(spec, traits)
        if tolerance:
            self.here.extend(_SGD)
            spec = self._spec(self.ranks)
        found = PipelineRun(self._train(spec, profile, plan))
        reference = self._reference(profile, plan, traits)
        comparison = compare(found, reference, self.steps, tolerance, first_weights(spec))
        return Verification(
            plan, ONE_RANK if traits.random else PLAIN, notes, tolerance, comparison
        )

    def _spec(self, ranks: int, *more: str) -> JobSpec:
        return load(self.job, [*self.overrides, *self.here, *_ranks(ranks), *more])

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

    def _reference(self, profile: Profile, plan: Plan, traits: Traits) -> Trained:
        from pipectl.runtime.compare import PipelineRun, PlainRun

        if not traits.random:
            return PlainRun(self._train_plainly(plan))
        fixed = (f"pipeline.micro_batches={plan.micro_batches}", "pipeline.stages=1")
        spec = self._spec(1, *fixed, "pipeline.warm_up=auto")
        alone = find_plan(spec, profile, cluster_of(spec, LOCAL))
        assert alone.micro_batch_size == plan.micro_batch_size
        return PipelineRun(self._train(spec, profile, alone))

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


def _local(spec: JobSpec, steps: int, directory: Path) -> list[str]:
    """What differs from the job as the user wrote it: here, short, one thread a rank."""
    stages = spec.pipeline.stages or spec.resources.ranks  # fewer would leave ranks unverified
    launcher = ["launch={launcher: mpiexec}"] if spec.launch.launcher == "srun" else []
    return [
        *launcher,
        f"training.steps={steps}",
        f"output.directory='{directory}'",
        f"checkpoint={{every: 1, keep: {steps}}}",
        f"pipeline.stages={stages}",
        "resources.cpus_per_task=1",
        "resources.memory_per_node=null",
        "pipeline.memory_limit=null",
        "evaluation=null",
        "cluster=null",
    ]


def _ranks(ranks: int) -> tuple[str, str]:
    return "resources.nodes=1", f"resources.tasks_per_node={ranks}"


def _expectation(spec: JobSpec, traits: Traits) -> tuple[tuple[str, ...], float]:
    """Notes for the user, and the tolerance."""
    notes, inexact = [], []
    if traits.random:
        notes.append(
            f"{_some(traits.random)} draw random numbers, and a plain loop draws others: "
            "compared with one rank instead"
        )
    elif traits.shared:
        inexact.append(f"{_some(traits.shared)}: used several times, and added in another order")
    if spec.resources.gpus_per_node:
        inexact.append("accelerators do not always round alike")
    if inexact:
        inexact.append("trained with SGD here: other optimizers turn rounding into whole steps")
    return (*notes, *inexact), ROUNDING[spec.training.precision] if inexact else 0.0


def _some(names: Sequence[str]) -> str:
    """``a``, or ``a and 7 more``."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _require_success(found: RunStatus) -> None:
    if found.job.state is JobState.COMPLETED:
        return
    culprit = found.culprit
    if culprit is None:
        raise WorkerError(f"the pipeline ended without a result: {found.job.reason}")
    error = WorkerError(f"{culprit.where}: {culprit.message}", cure=culprit.cure)
    error.exit_code = culprit.exit_code
    raise error
