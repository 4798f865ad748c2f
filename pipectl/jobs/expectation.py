"""With what a pipeline can be compared, and how exactly both can agree."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from pipectl.units import format_bytes

if TYPE_CHECKING:
    from pipectl.capture.traits import Traits
    from pipectl.plan import Plan
    from pipectl.spec import JobSpec

PLAIN = "one plain PyTorch process"
ONE_RANK = "one rank"
ROUNDING = {"float32": 1e-4, "bf16": 2e-2, "float16": 2e-2}
"""Tolerance where the same bits cannot be expected, by precision; see ``compare``."""


@dataclass(frozen=True)
class Expectation:
    """How two trainings of a job should agree.

    Args:
        notes: why the reference or the tolerance is what it is.
        tolerance: see :func:`pipectl.runtime.compare.compare`; 0 asks for the same bits.
    """

    notes: tuple[str, ...]
    tolerance: float


def against_one_process(spec: JobSpec, traits: Traits, plan: Plan) -> Expectation:
    """A pipeline against one process."""
    notes, inexact = [], [*_of_replicas(plan), *_inexact(spec)]
    if traits.random:
        notes.append(
            f"{_some(traits.random)} draw random numbers, and a plain loop draws others: "
            "compared with one rank instead"
        )
    elif traits.shared:
        what = f"{_some(traits.shared)}: used several times, and added in another order"
        inexact.insert(0, what)
    return _expectation(spec, traits, notes, inexact)


def between_plans(spec: JobSpec, traits: Traits, plan: Plan, reason: str) -> Expectation:
    """A pipeline against another one without replicas; such plans differ in no bit on CPUs.

    Args:
        reason: why not against one process.
    """
    note = f"{reason}: compared with another plan instead of one process"
    return _expectation(spec, traits, [note], [*_of_replicas(plan), *_inexact(spec)])


def averaged_buffers(buffers: Collection[str], plan: Plan) -> frozenset[str]:
    """What replicas make means of, which no single process has."""
    return frozenset(buffers) if _of_replicas(plan) else frozenset()


def reason_for_two_plans(spec: JobSpec, *, asked: bool) -> str | None:
    """Why no single process can be the reference, as far as the spec tells."""
    if asked:
        return "--between-plans"
    return "materialize: per_rank" if spec.model.materialize == "per_rank" else None


def too_large_for_a_process(alone: Plan | None) -> str | None:
    """Why a plan of one rank cannot run here, or None.

    Args:
        alone: the job on one rank; None if it was found to fit nowhere.
    """
    if alone is None:
        return "one process would need more memory than there is"
    assert alone.prediction is not None
    needed = alone.prediction.peak_memory_bytes[0]
    available = int(psutil.virtual_memory().available)
    if needed <= available:
        return None
    return f"one process would need {format_bytes(needed)}, and {format_bytes(available)} are free"


def _of_replicas(plan: Plan) -> list[str]:
    if all(stage.replicas == 1 for stage in plan.stages):
        return []
    return ["replicas add up gradients in another order (buffers they average are not compared)"]


def _inexact(spec: JobSpec) -> list[str]:
    """Why results are not the same to the bit, as far as the spec tells."""
    reasons = {
        "accelerators do not always round alike": spec.resources.gpus_per_node,
        "training.compile: fused operators round differently": spec.training.compile,
    }
    return [reason for reason, holds in reasons.items() if holds]


def _expectation(
    spec: JobSpec, traits: Traits, notes: list[str], inexact: list[str]
) -> Expectation:
    if not inexact:
        return Expectation(tuple(notes), 0.0)
    sgd = "trained with SGD here: other optimizers turn rounding into whole steps"
    tolerance = max(ROUNDING[spec.training.precision], ROUNDING["bf16"] if traits.half else 0.0)
    return Expectation((*notes, *inexact, sgd), tolerance)


def _some(names: Sequence[str]) -> str:
    """``a``, or ``a and 7 more``."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
