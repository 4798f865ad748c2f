"""Checks across fields, each made as soon as the sections it needs are right themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipectl.spec import references
from pipectl.spec.models import JobSpec
from pipectl.spec.names import fault_of_name
from pipectl.spec.running import Launch, Resources
from pipectl.spec.training import Loss, Pipeline, Training
from pipectl.spec.types import APART, BUILT_IN, ONE_STAGE, ROUND, UNFLUSHED, V_SHAPED

Finding = tuple[tuple[str, ...], str]

_WEIGHTS = ("model", "weights")
"""May be a directory, too."""


def cross_check(sections: Mapping[str, Any]) -> Iterator[Finding]:
    """What does not fit together in the sections given (those that are right themselves)."""
    for names, check in _CHECKS:
        if all(name in sections for name in names):
            yield from check(*(sections[name] for name in names))


def missing_files(spec: JobSpec) -> Iterator[Finding]:
    """References of the spec to files that do not exist."""
    for path, text in spec.factories():
        file = references.parse(text, spec.base).file
        if file is not None and not _is_file(file):
            yield path, f"no such file: {file}"
    for path, file in spec.files():
        if path == _WEIGHTS:
            if not _exists(file):
                yield path, f"no such file or directory: {file}"
        elif not _is_file(file):
            yield path, f"no such file: {file}"


def missing_names(spec: JobSpec) -> Iterator[Finding]:
    """References of the spec to functions and classes that are not where it says.

    What is installed is not looked at where the job runs with another Python's packages.
    """
    environment = spec.environment
    elsewhere = (
        environment.container or environment.modules or environment.setup
        or "PYTHONPATH" in environment.variables
    )  # fmt: skip
    for path, text in spec.factories():
        reference = references.parse(text, spec.base)
        installed = reference.file is None and reference.root is None
        fault = None if installed and elsewhere else fault_of_name(reference)
        if fault is not None:
            yield path, fault


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _stages_fit_ranks(pipeline: Pipeline, resources: Resources) -> Iterator[Finding]:
    if pipeline.stages is None or pipeline.schedule not in (None, *BUILT_IN):
        return
    if pipeline.schedule in ROUND:
        if pipeline.stages % min(pipeline.stages, resources.ranks):
            yield (
                ("pipeline", "stages"),
                f"{pipeline.stages} stages cannot go round over {resources.ranks} ranks; schedule "
                f"{pipeline.schedule} takes a multiple of them",
            )
    elif pipeline.schedule in V_SHAPED:
        if pipeline.stages % 2 or pipeline.stages > 2 * resources.ranks:
            yield (
                ("pipeline", "stages"),
                f"{pipeline.stages} stages cannot lie in a V over {resources.ranks} ranks; "
                f"schedule {pipeline.schedule} takes two a rank",
            )
    elif pipeline.stages > resources.ranks:
        kinds = [f"{kind.nodes} x {kind.tasks_per_node}" for kind in resources.kinds]
        asked = f"nodes x tasks_per_node = {' + '.join(kinds)}"
        yield (
            ("pipeline", "stages"),
            f"{pipeline.stages} stages need as many ranks; resources give {asked}",
        )


def _micro_batches_fit_batch(pipeline: Pipeline, training: Training) -> Iterator[Finding]:
    if pipeline.micro_batches is not None and pipeline.micro_batches > training.batch_size:
        yield (
            ("pipeline", "micro_batches"),
            f"a batch of {training.batch_size} cannot be cut into {pipeline.micro_batches}; "
            "lower it or raise training.batch_size",
        )


def _warm_up_fits(pipeline: Pipeline) -> Iterator[Finding]:
    if pipeline.warm_up is None:
        return
    path = ("pipeline", "warm_up")
    given = len(pipeline.warm_up)
    if pipeline.stages is None:
        yield path, f"needs pipeline.stages: {given} as well"
    elif given != pipeline.stages:
        yield path, f"has length {given}, but pipeline.stages is {pipeline.stages}"
    if pipeline.schedule == "gpipe":
        yield path, "has no meaning with schedule gpipe, which runs all forwards first"
    if pipeline.schedule not in (None, *ONE_STAGE):
        yield path, f"has no meaning with schedule {pipeline.schedule}, which has one of its own"
    if any(early < late for early, late in pairwise(pipeline.warm_up)):
        yield path, f"{list(pipeline.warm_up)} rises from a stage to the next; it may only fall"
    most = max(pipeline.warm_up, default=0)
    if pipeline.micro_batches is not None and most > pipeline.micro_batches:
        yield (
            path,
            f"{most} forwards, but there are {pipeline.micro_batches} micro-batches",
        )


def _offload_frees_memory(pipeline: Pipeline, resources: Resources) -> Iterator[Finding]:
    if pipeline.offload == "host" and not resources.gpus_per_node:
        yield (
            ("pipeline", "offload"),
            "frees nothing on ranks that compute on the CPU, in the host's memory; write disk",
        )


def _backward_can_be_apart(
    pipeline: Pipeline, resources: Resources, training: Training
) -> Iterator[Finding]:
    """Two ranks a stage, between which nothing else comes."""
    if pipeline.backward != "apart":
        return
    path, stages = ("pipeline", "backward"), pipeline.stages or 1
    if 2 * stages > resources.ranks:
        yield path, f"apart takes 2 ranks a stage: {2 * stages}; resources give {resources.ranks}"
    if pipeline.schedule not in (None, *APART):
        known = ", ".join(APART)
        yield path, f"cannot be apart with schedule {pipeline.schedule}, but with one of {known}"
    if pipeline.replicas not in (None, 1, "any"):
        yield path, f"cannot be apart with {pipeline.replicas} replicas a stage; leave these out"
    if pipeline.offload in ("host", "disk"):
        yield path, "cannot be apart with offload: what is offloaded would leave the rank at once"
    if pipeline.recompute == "blocks":
        yield path, "cannot be apart with recompute: blocks; write all, which sends only inputs"
    elif training.compile and pipeline.recompute != "all":
        yield path, "with training.compile can be apart only where recompute is all"


def _steps_can_overlap(pipeline: Pipeline, training: Training) -> Iterator[Finding]:
    """Schedules without flushes have no moment at which all stages have their gradients."""
    if pipeline.schedule not in UNFLUSHED:
        return
    cure = f"leave it out, or use another schedule than {pipeline.schedule}"
    if training.clip_grad_norm is not None:
        yield (
            ("training", "clip_grad_norm"),
            f"needs the gradients of all stages, which update at different times; {cure}",
        )
    if training.precision == "float16":
        yield (
            ("training", "precision"),
            "float16 skips a step if any stage overflows, but stages update at different times; "
            f"use bf16, or another schedule than {pipeline.schedule}",
        )
    if training.on_nonfinite == "skip":
        yield (
            ("training", "on_nonfinite"),
            "skip leaves a step out on all ranks, but stages update at different times, and later "
            f"steps have begun by then; use stop, or another schedule than {pipeline.schedule}",
        )
    if pipeline.schedule == "pipedream" and (pipeline.micro_batches or 1) > 1:
        yield (
            ("pipeline", "micro_batches"),
            f"{pipeline.micro_batches} have no meaning with schedule pipedream, which updates "
            "behind each; leave it out, or use pipedream-2bw",
        )


def _a_core_is_left(launch: Launch, resources: Resources) -> Iterator[Finding]:
    if launch.progress_core and resources.cpus_per_task < 2:
        yield (
            ("launch", "progress_core"),
            "leaves no core to compute with: resources.cpus_per_task is 1; set it to 2 or more",
        )


def _loss_has_use_of_kwargs(loss: Loss) -> Iterator[Finding]:
    if loss.factory == "model" and loss.kwargs:
        yield ("loss", "kwargs"), "has no meaning where the model returns its loss"


_CHECKS: tuple[tuple[tuple[str, ...], Callable[..., Iterator[Finding]]], ...] = (
    (("pipeline", "resources"), _stages_fit_ranks),
    (("pipeline", "training"), _micro_batches_fit_batch),
    (("pipeline",), _warm_up_fits),
    (("pipeline", "resources"), _offload_frees_memory),
    (("pipeline", "training"), _steps_can_overlap),
    (("pipeline", "resources", "training"), _backward_can_be_apart),
    (("launch", "resources"), _a_core_is_left),
    (("loss",), _loss_has_use_of_kwargs),
)
