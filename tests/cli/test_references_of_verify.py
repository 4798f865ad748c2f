"""With what a job is compared, and how exactly both must agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from pipectl.capture.job import Traits
from pipectl.cli.lab import verify
from pipectl.cli.lab.verify import expect
from pipectl.plan import Plan


def spec(precision: str = "float32", gpus: int = 0, materialize: str = "eager") -> Any:
    return SimpleNamespace(
        training=SimpleNamespace(precision=precision, compile=False),
        resources=SimpleNamespace(gpus_per_node=gpus),
        model=SimpleNamespace(materialize=materialize),
    )


def traits(*, random: bool = False, shared: bool = False, half: bool = False) -> Traits:
    return Traits(("dropout",) * random, ("tied.weight",) * shared, half)


@pytest.mark.parametrize(
    ("precision", "half", "tolerance"),
    [("float32", False, 1e-4), ("float32", True, 2e-2), ("bf16", False, 2e-2),
     ("float16", False, 2e-2)],
)  # fmt: skip
def test_rounding_is_that_of_the_coarsest_arithmetic(
    pipeline: Callable[..., Plan], precision: str, half: bool, tolerance: float
) -> None:
    notes, found = expect(spec(precision), traits(shared=True, half=half), pipeline(2, 2), None)
    assert found == tolerance
    assert notes[0].startswith("tied.weight: used several times")


def test_without_a_reason_the_same_bits_are_asked_for(pipeline: Callable[..., Plan]) -> None:
    plan = pipeline(2, 2)
    assert expect(spec(), traits(half=True), plan, None)[1] == 0.0
    assert expect(spec(), traits(random=True, shared=True), plan, None)[1] == 0.0


def test_plans_differ_in_no_bit_on_cpus_whatever_the_model(
    pipeline: Callable[..., Plan],
) -> None:
    everything = traits(random=True, shared=True, half=True)
    plan = pipeline(2, 2)
    assert expect(spec(), everything, plan, "why")[1] == 0.0
    assert expect(spec(gpus=1), everything, plan, "why")[1] == 2e-2
    assert expect(spec(), everything, plan, "why")[0][0].startswith("why: ")


@pytest.mark.parametrize(
    ("needed", "reason"), [(2 << 30, None), (4 << 30, "one process would need 4.00 GiB, and 3.")]
)
def test_two_plans_are_compared_if_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, needed: int, reason: str | None
) -> None:
    other = SimpleNamespace(
        prediction=SimpleNamespace(peak_memory_bytes=(needed,)), ranks=3, stages="abc"
    )
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=3 << 30))
    monkeypatch.setattr(verify, "_like", lambda *_, **__: None)
    monkeypatch.setattr(verify, "_plan_here", lambda _: ("job", other))
    plan: Any = SimpleNamespace(ranks=2)
    why, job, words = verify.choose_reference(spec(), plan, traits(), two_plans=False)
    assert (why and why[:39]) == reason
    assert (job, words) == (
        (None, "one plain PyTorch process")
        if reason is None
        else ("job", "another plan: 3 ranks, 3 stages")
    )


def test_replicas_are_compared_within_rounding(
    pipeline: Callable[..., Plan],
) -> None:
    plan = pipeline(1, 2, node_of_rank=[0, 0])
    several = replace(plan, stages=(replace(plan.stages[0], ranks=(0, 1)),))
    notes, tolerance = expect(spec(), traits(), several, None)
    assert tolerance == 1e-4
    assert notes[0].startswith("replicas add up gradients in another order")
