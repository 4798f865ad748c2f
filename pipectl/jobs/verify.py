"""Verify that a pipeline trains the same as one process: both train a few steps.

The reference is a plain PyTorch loop in one process. It is one rank if operators draw random
numbers, because a plain loop draws others, and another plan if no process can hold the model.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import psutil

from pipectl.batch import LOCAL, JobState, process
from pipectl.batch.launchers import belongs_to_mpi
from pipectl.errors import InfeasibleError, PipectlError, UsageError, WorkerError
from pipectl.hash_seed import seed_variables
from pipectl.jobs.cancel import cancel
from pipectl.jobs.job import Job, change
from pipectl.jobs.output import profile_path, read_profile
from pipectl.jobs.owners import refuse_code_of_others
from pipectl.jobs.prepare import prepare
from pipectl.jobs.state import poll
from pipectl.jobs.submit import submit
from pipectl.jobs.variables import variables_set
from pipectl.plan import Plan
from pipectl.profile_parts import SEEDED_HINT, Readings
from pipectl.runs import RunDirectory
from pipectl.spec import dump, load
from pipectl.spec.code_sections import Optimizer
from pipectl.units import Report, format_bytes

if TYPE_CHECKING:
    from pipectl.capture.traits import Traits
    from pipectl.profile import Profile
    from pipectl.runtime.compare import Comparison
    from pipectl.spec import JobSpec

_ROUNDING = {"float32": 1e-4, "bf16": 2e-2, "bf16-weights": 2e-2, "float16": 2e-2}
"""Tolerance by precision if results cannot be equal to the bit; see ``compare``."""
_BY_PROCESS = (
    "samples differ from process to process, so both trainings may have had others (are classes "
    "numbered in the order of a set?)"
)
_NOT_FINITE = (
    "the loss of step {step} is not finite in both trainings, so that they are equal shows little: "
    "lower the learning rate, or look for the cause with one process"
)
_SAME_MICRO_BATCHES = (
    "{loss}: both trainings have {count} micro-batches, and a loop over whole batches would train "
    "something else"
)
_EVALUATIONS = (
    "evaluation.every=1",
    "evaluation.metrics={}",
    "evaluation.early_stopping=null",  # both trainings take as many steps
)
_CLEANUP_S = 20.0
_MAX_NAMED = 3
_PLAIN = "one plain PyTorch process"
_ITSELF = "the script by itself"
_COMPARED = {_ITSELF: "a plan and the script"}
_SCRIPT = 1e-5
"""By how much losses may differ from those of a script, whose batches are not divided."""


def verify(
    job: Path,
    overrides: Sequence[str],
    ranks: int,
    steps: int,
    progress: Report,
    *,
    two_plans: bool,
    trust_owner: bool,
) -> VerificationJson:
    """Train ``steps`` steps in a pipeline and in one process, and compare all losses and weights.

    A model that is too large for one process is trained with another plan instead. Everything runs
    on this machine, in a temporary directory that needs room for the weights of all steps, twice.

    Args:
        ranks: number of ranks of the pipeline, instead of those of ``resources``.
        two_plans: whether to compare with another plan in any case.
        trust_owner: run code that another user could have written.

    Raises:
        PipectlError: the spec, the model or one of the trainings fails.
    """
    from pipectl.schedule import SCHEDULES

    here = ("resources.nodes=1", f"resources.tasks_per_node={ranks}")
    spec = load(job, [*overrides, *here], check_names=True)
    if not trust_owner:
        refuse_code_of_others(spec, job)
    schedule = SCHEDULES.get(spec.pipeline.schedule or "")
    if schedule is not None and not schedule.flushes:
        raise UsageError(
            f"verify: schedule {spec.pipeline.schedule} is asynchronous, so its results are "
            "not those of one process",
            hint="verify the model and the job with --set pipeline.schedule=auto",
        )
    with (
        _temporary_directory() as directory,
        variables_set(spec.environment.variables),
        redirect_stdout(sys.stderr),  # what the user's code prints
    ):
        chunks = 1 if schedule is None else schedule.stages_per_rank[0]
        spec = load(job, [*overrides, *_changes(spec, steps, directory, chunks), *here])
        profile = None
        with suppress(PipectlError):  # use the job's profile: its times do not change results
            own = load(job, overrides)
            profile = read_profile(own, profile_path(own))
        if profile is not None and profile.fingerprint is None:
            profile = None
        pipeline, plan = _prepare(spec, profile, progress)
        # Not earlier: the memory of this process while it measures counts as memory of a rank.
        from pipectl.capture.traits import find_traits
        from pipectl.runtime.compare import Trained, compare, compare_losses
        from pipectl.runtime.plain import FirstWeights

        refuse_unrepeatable(pipeline.profile)
        traits = find_traits(spec, plan.micro_batch_size)
        reference = choose_reference(spec, plan, pipeline.profile, traits, two_plans=two_plans)
        notes, tolerance = expect(spec, traits, plan, reference.reason)
        shared = {} if traits.random else traits.shared
        unlike = unlike_script(spec, traits)
        if reference.job is None and traits.script_samples and not unlike:
            ours = Trained.of_run(_train(pipeline, {}, progress))
            progress(0, 0, "running the script by itself")
            losses = _own_losses(spec, steps, directory / "script")
            comparison = compare_losses(ours, losses, steps, tolerance or _SCRIPT)
            found = differing(plan, pipeline.profile, comparison)
            itself = Reference(_ITSELF)
            return describe(plan, comparison, itself, (*notes, *found), tolerance or _SCRIPT)
        if unlike:
            notes = (*notes, f"not compared with the script by itself: {unlike}")
        plain_steps = None
        if reference.job is None and shared and not tolerance:  # before the optimizer is chosen
            progress(0, 0, "training in one process")
            plain_steps = directory / "plain"
            joint = _train_plainly(spec, plan.micro_batch_size, plain_steps, shared)
            notes, tolerance = expect(spec, traits, plan, reference.reason, joint)
        notes = (*notes, *_notes_of(pipeline.profile, plan))
        changes: dict[str, object] = {}
        if tolerance:  # small differences must not become large ones
            sgd = Optimizer(factory="torch.optim:SGD", kwargs={"lr": 0.1})
            changes = {"optimizer": sgd, "lr_scheduler": None}
            spec = spec.model_copy(update=changes)
            plain_steps = None
        ours = Trained.of_run(_train(pipeline, changes, progress))
        if reference.job is None:
            if plain_steps is None:
                progress(0, 0, "training in one process")
                plain_steps = directory / "plain-sgd"
                _train_plainly(spec, plan.micro_batch_size, plain_steps, shared)
            theirs = Trained.of_process(plain_steps)
        else:
            theirs = Trained.of_run(_train(reference.job, changes, progress))
        weights = FirstWeights(spec)
        # a single process averages no buffers, and one rank only if results must not differ
        averages = reference.job is None if plan.reproducible else _has_replicas(plan)
        comparison = compare(
            ours,
            theirs,
            steps,
            tolerance,
            weights if tolerance else {},
            left_out=frozenset(weights.buffers) if averages else frozenset(),
        )
        kept = [] if reference.job or plain_steps is None else _changed_state(plain_steps)
        notes = (*notes, *differing(plan, pipeline.profile, comparison, kept))
        return describe(plan, comparison, reference, notes, tolerance)


def unlike_script(spec: JobSpec, traits: Traits) -> str:
    """Why a job has other losses than its script by itself; empty if it has the same, or none."""
    samples, batch = traits.script_samples, spec.training.batch_size
    if samples is None:
        return ""
    if others := spec.beside_script:
        return f"the job has its own {' and '.join(others)}"
    if samples != batch:
        return f"training.batch_size is {batch}, and a step of the script has {samples} samples"
    return f"the script draws other random numbers ({traits.random[0]})" if traits.random else ""


def refuse_unrepeatable(profile: Profile | None) -> None:
    """Raise if no two trainings of a job are alike.

    Raises:
        UsageError: saying why, and what to do.
    """
    if profile is not None and profile.readings is Readings.EACH:
        raise UsageError(
            "verify: the data give other samples each time they are read (drawn by a generator "
            "of their own?), so no two trainings have the same",
            hint="let samples depend only on their index and on the generators of random, "
            "numpy and torch, which are seeded before each; the job itself runs: one rank "
            "reads its data (data.read)",
        )
    if profile is not None and profile.redrawn is not None:
        raise UsageError(
            f"verify: {profile.redrawn!r} has another initial value each time the model is built, "
            "so no two trainings begin alike",
            hint=SEEDED_HINT,
        )


def _notes_of(profile: Profile | None, plan: Plan) -> list[str]:
    """What the profile says of both trainings."""
    notes = []
    if profile is not None and profile.readings is Readings.BY_PROCESS:
        notes.append(_BY_PROCESS)
    loss = None if profile is None else profile.halved_loss
    if loss is not None and loss.depends and plan.micro_batches > 1:
        notes.append(_SAME_MICRO_BATCHES.format(loss=loss, count=plan.micro_batches))
    return notes


class VerificationJson(TypedDict):
    """The comparison of two trainings.

    Args:
        equal: whether they are equal within the tolerance.
        max_abs_difference: largest difference of a loss or weight.
        first_difference: ``step``, ``tensor`` (or ``loss``) and ``largest`` difference in it of the
            first step that differs; null if none does.
        tolerance: relative tolerance; 0 means equal to the bit.
        compared: ``a plan and one process``, ``two plans``, or ``a plan and the script``, of which
            only losses are compared.
        reference: what the pipeline was compared with.
        notes: reasons for the reference and the tolerance.
        ranks, stages, schedule, micro_batches, micro_batch_size: of the plan.
        losses: pairs of losses of each step.
    """

    equal: bool
    max_abs_difference: float
    first_difference: dict[str, Any] | None
    tolerance: float
    compared: str
    reference: str
    notes: list[str]
    ranks: int
    stages: int
    schedule: str
    micro_batches: int
    micro_batch_size: int
    losses: list[list[float]]


def describe(
    plan: Plan, comparison: Comparison, reference: Reference, notes: Sequence[str], tolerance: float
) -> VerificationJson:
    """The result.

    Args:
        plan: plan of the pipeline.
        notes: reasons for the reference and the tolerance.
        tolerance: see :func:`pipectl.runtime.compare.compare`; 0 means equal to the bit.
    """
    first = comparison.first
    return {
        "equal": comparison.equal,
        "max_abs_difference": comparison.largest,
        "first_difference": None if first is None else first._asdict(),
        "tolerance": tolerance,
        "compared": _COMPARED.get(reference.words, "a plan and one process")
        if not reference.reason
        else "two plans",
        "reference": reference.words,
        "notes": list(notes),
        "ranks": plan.ranks,
        "stages": len(plan.stages),
        "schedule": plan.schedule,
        "micro_batches": plan.micro_batches,
        "micro_batch_size": plan.micro_batch_size,
        "losses": [list(pair) for pair in comparison.losses],
    }


def _changed_state(directory: Path) -> list[str]:
    """What a plain training has changed in Python objects."""
    from pipectl.runtime.plain import CHANGED, LOSSES

    names: list[str] = json.loads((directory / LOSSES).read_text("utf-8")).get(CHANGED, [])
    return names


def differing(
    plan: Plan, profile: Profile | None, comparison: Comparison, kept: Sequence[str] = ()
) -> list[str]:
    """Why a plan may have trained something else than one process: state in Python objects, and
    buffers of stages with replicas. Of equal trainings: whether that shows little.

    Args:
        kept: such state that the process has changed.
    """
    if comparison.equal:
        steps = enumerate(comparison.losses, 1)
        lost = next((step for step, pair in steps if not all(map(isfinite, pair))), None)
        return [] if lost is None else [_NOT_FINITE.format(step=lost)]
    names = ", ".join(kept[:_MAX_NAMED]) + (", ..." if len(kept) > _MAX_NAMED else "")
    notes = [
        f"the plain training changed {names}, outside of parameters and buffers: if the model "
        "computes with it, make it a buffer with register_buffer(), because a graph has its value "
        "at capture"
    ] * bool(kept)
    return notes + _replicated(plan, profile)


def _replicated(plan: Plan, profile: Profile | None) -> list[str]:
    if profile is None or plan.reproducible:
        return []
    stage_of = {node: index for index, stage in enumerate(plan.stages) for node in stage.nodes}
    return [
        f"in training, forwards write and read {name!r}, and the {plan.stages[stage].replicas} "
        f"replicas of stage {stage} each have values of their own"
        for name, node in profile.carried
        if plan.stages[stage := stage_of[node]].replicas > 1
    ]


@contextmanager
def _temporary_directory() -> Iterator[Path]:
    """A directory that is removed even if the watcher of a failed run still writes to it."""
    directory = Path(tempfile.mkdtemp(prefix="pipectl-verify-"))
    try:
        yield directory
    finally:
        deadline = time.monotonic() + _CLEANUP_S
        shutil.rmtree(directory, ignore_errors=True)
        while directory.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
            shutil.rmtree(directory, ignore_errors=True)


def _own_losses(spec: JobSpec, steps: int, directory: Path) -> list[float]:
    """The losses of a job's script, which runs by itself in a process of its own."""
    from pipectl.script.plain import LOSSES

    directory.mkdir()
    job, file = directory / "job.yaml", directory / "losses.json"
    job.write_text(dump(spec), encoding="utf-8")
    _run_here(spec, ["-m", "pipectl.script.plain", str(job), str(steps), str(file)])
    losses: list[float] = json.loads(file.read_text("utf-8"))[LOSSES]
    if len(losses) < steps:
        raise UsageError(
            f"verify: the script ends after {len(losses)} steps",
            hint=f"verify fewer: --steps {len(losses)}",
        )
    return losses


def _run_here(spec: JobSpec, arguments: Sequence[str]) -> None:
    """Run a program of this Python as the job would, with one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    variables = spec.environment.variables
    environment |= {**variables, **seed_variables(variables)}
    done = process.run([sys.executable, *arguments], hint="", env=environment, timeout_s=inf)
    if done.returncode:
        raise WorkerError(f"the plain process failed: {done.message}")


class Reference(NamedTuple):
    """The training that a pipeline is compared with.

    Args:
        words: description.
        job: job that trains it; None for a plain process.
        reason: why it is another plan; empty if it is one process.
    """

    words: str
    job: Job | None = None
    reason: str = ""


def choose_reference(
    spec: JobSpec, plan: Plan, profile: Profile | None, traits: Traits, *, two_plans: bool
) -> Reference:
    """Choose one process, or another plan if no process can hold the model."""
    reason, alone = "--between-plans" if two_plans else "", None
    if not reason and spec.model.materialize == "per_rank":
        reason = "materialize: per_rank"
    elif not reason:
        try:
            alone, alone_plan = _prepare(_like(spec, plan, ranks=1), profile)
        except InfeasibleError:
            reason = "one process would need more memory than there is"
        else:
            assert alone_plan.prediction is not None
            needed = alone_plan.prediction.peak_memory_bytes[0]
            if needed > (available := int(psutil.virtual_memory().available)):
                sizes = f"{format_bytes(needed)}, and {format_bytes(available)} are free"
                reason = f"one process would need {sizes}"
    if not reason:
        return Reference("one rank", alone) if traits.random else Reference(_PLAIN)
    for ranks in (plan.ranks + 1, plan.ranks - 1):  # one stage more or less moves all cuts
        with suppress(PipectlError):
            if ranks:
                other, other_plan = _prepare(_like(spec, plan, ranks), profile)
                stages = len(other_plan.stages)
                words = f"another plan: {other_plan.ranks} ranks, {stages} stages"
                return Reference(words, other, reason)
    raise InfeasibleError(
        f"no other plan to compare with: only {plan.ranks} stages are possible",
        hint="verify it with more ranks: --ranks",
    )


def _prepare(
    spec: JobSpec, profile: Profile | None, progress: Report | None = None
) -> tuple[Job, Plan]:
    """Plan a job for this machine, with a profile if there is one."""
    (job,) = prepare(spec, LOCAL, progress, profile=profile)
    assert job.plan is not None, "a job that runs here is planned here"
    return job, job.plan


def _like(spec: JobSpec, plan: Plan, ranks: int) -> JobSpec:
    """The job with one stage per rank on ``ranks`` ranks, and the micro-batches of a plan."""
    from pipectl.planner.request import (
        OTHER_SCHEDULES,  # not before the model is measured, see `prepare`
    )

    pipeline = {
        "micro_batches": plan.micro_batches,
        "stages": ranks,
        "replicas": 1,
        "backward": "together",
        "warm_up": None,
        **({"schedule": "1f1b"} if plan.schedule in OTHER_SCHEDULES else {}),
    }
    return change(spec, resources={"tasks_per_node": ranks}, pipeline=pipeline)


def _train(job: Job, changes: Mapping[str, object], progress: Report) -> RunDirectory:
    """Run a job with changed sections of its spec to its end."""
    job = replace(job, spec=job.spec.model_copy(update=changes))
    run = submit([job], time.time())[0].run
    try:
        for status in poll(run):
            progress(*status.progress)
        if status.job.state is JobState.COMPLETED:
            return run
        if (failure := status.failure) is None:
            raise WorkerError(f"the pipeline ended without a result: {status.job.reason}")
        error = WorkerError(f"{failure.where}: {failure.what}", hint=failure.hint)
        error.exit_code = failure.exit_code
        raise error
    except BaseException:
        with suppress(PipectlError):
            cancel(run, time.time())
        raise


def _train_plainly(
    spec: JobSpec, micro_batch_size: int, directory: Path, shared: Mapping[str, int]
) -> list[str]:
    """Train in one plain process, which writes the weights to a new directory.

    Args:
        shared: as in :class:`~pipectl.capture.traits.Traits`.

    Returns:
        Names of the shared parameters whose gradients are added in another order than a pipeline's.
    """
    from pipectl.runtime.plain import LOSSES

    directory.mkdir()
    job = directory / "job.yaml"
    job.write_text(dump(spec), encoding="utf-8")
    size = str(micro_batch_size)
    module = ["-m", "pipectl.runtime.plain"]
    _run_here(spec, [*module, str(job), size, str(directory), json.dumps(shared)])
    joint: list[str] = json.loads((directory / LOSSES).read_text("utf-8"))["joint"]
    return joint


def _changes(spec: JobSpec, steps: int, directory: Path, chunks: int) -> list[str]:
    """Changes of the user's job: it runs here, for a few steps, with one thread per rank.

    Args:
        chunks: stages per rank of the job's schedule.
    """
    pipeline = spec.pipeline
    stages: int | str | None = pipeline.stages
    if stages is None and (pipeline.replicas == "any" or pipeline.backward is None):
        stages = "auto"
    elif stages is None:  # fewer would leave ranks unverified
        ranks_of_stage = 2 if pipeline.backward == "apart" else int(pipeline.replicas or 1)
        stages = chunks * max(1, spec.resources.ranks // ranks_of_stage)
    # A learning rate schedule may follow the loss of evaluations.
    evaluates = spec.evaluation is not None and spec.lr_scheduler is not None
    return [
        *(["launch={launcher: mpiexec}"] if not belongs_to_mpi(spec.launch) else []),
        "environment.container=null",  # one of the trainings runs in this process
        # Values that are not finite on both sides count as equal.
        *(["training.on_nonfinite=ignore"] if spec.training.on_nonfinite == "stop" else []),
        *(_EVALUATIONS if evaluates else ["evaluation=null"]),
        f"training.steps={steps}",
        f"output.directory='{directory}'",
        f"checkpoint={{every: 1, keep: {steps}}}",
        f"pipeline.stages={stages}",
        "resources.cpus_per_task=1",
        *(["launch.progress=auto"] if spec.launch.progress == "core" else []),
        "resources.memory_per_node=null",
        "pipeline.memory_limit=null",
        "callbacks=null",
        "tracking=null",
        "cluster=null",
    ]


def expect(
    spec: JobSpec, traits: Traits, plan: Plan, reason: str, joint: Sequence[str] = ()
) -> tuple[tuple[str, ...], float]:
    """Notes and tolerance for the comparison with one process, or with another plan.

    On CPUs, plans without replicas are equal to the bit, and all plans of a reproducible training.

    Args:
        reason: why another plan is the reference; empty if one process is.
        joint: parameters with several uses whose gradients one process adds in another order.
    """

    def some(names: Sequence[str]) -> str:
        return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"

    notes, inexact = [], []
    if reason:
        notes.append(f"{reason}: compared with another plan instead of one process")
    elif traits.random:
        notes.append(
            f"{some(traits.random)}: random numbers, of which a plain loop draws others; "
            "compared with one rank instead"
        )
    elif joint:
        inexact.append(f"{some(joint)}: used several times, and added in another order")
    if plan.reproducible and not (reason or traits.random):
        inexact.append(
            "training.reproducible adds up gradients in another order than a plain loop (buffers, "
            "which it averages, are not compared)"
        )
    if _has_replicas(plan) and not plan.reproducible:
        inexact.append(
            "replicas add up gradients in another order (buffers they average are not compared)"
        )
    if spec.resources.gpus_per_node:
        inexact.append("accelerators do not always round alike")
    if spec.training.compile:
        inexact.append("training.compile: fused operators round differently")
    if not inexact:
        return tuple(notes), 0.0
    sgd = "trained with SGD here: other optimizers turn rounding into whole steps"
    tolerance = max(_ROUNDING[spec.training.precision], _ROUNDING["bf16"] if traits.half else 0.0)
    return (*notes, *inexact, sgd), tolerance


def _has_replicas(plan: Plan) -> bool:
    return any(stage.replicas > 1 for stage in plan.stages)
