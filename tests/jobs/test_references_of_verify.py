"""With what a job is compared, and how exactly both must agree."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from pipectl.capture.job import Traits
from pipectl.jobs import verify
from pipectl.jobs.verify import Reference, expect

RANDOM, SHARED = ("dropout",), ("tied.weight",)


def spec(precision: str = "float32", gpus: int = 0) -> Any:
    return SimpleNamespace(
        training=SimpleNamespace(precision=precision, compile=False),
        resources=SimpleNamespace(gpus_per_node=gpus),
        model=SimpleNamespace(materialize="eager"),
    )


@pytest.mark.parametrize(
    ("job", "traits", "reason", "replicas", "tolerance", "note"),
    [
        (spec(), ((), SHARED, False), "", 1, 1e-4, "tied.weight: used several times"),
        (spec(), ((), SHARED, True), "", 1, 2e-2, "tied.weight: used several times"),
        (spec("bf16"), ((), SHARED, False), "", 1, 2e-2, "tied.weight: used several times"),
        (spec("float16"), ((), SHARED, False), "", 1, 2e-2, "tied.weight: used several times"),
        (spec(), ((), (), True), "", 1, 0.0, ""),
        (spec(), (RANDOM, SHARED, False), "", 1, 0.0, "dropout: random numbers"),
        (spec(), (RANDOM, SHARED, True), "why", 1, 0.0, "why: "),
        (spec(gpus=1), (RANDOM, SHARED, True), "why", 1, 2e-2, "why: "),
        (spec(), ((), (), False), "", 2, 1e-4, "replicas add up gradients in another order"),
    ],
)
def test_plans_differ_in_no_bit_on_cpus_and_else_within_the_coarsest_rounding(
    pipeline, job, traits, reason, replicas, tolerance, note
):
    plan = pipeline(1, 2, node_of_rank=[0] * replicas)
    plan = replace(plan, stages=(replace(plan.stages[0], ranks=tuple(range(replicas))),))
    notes, found = expect(job, Traits(*traits), plan, reason)
    assert found == tolerance
    assert (notes or ("",))[0].startswith(note)


@pytest.mark.parametrize(("needed", "fits"), [(2 << 30, True), (4 << 30, False)])
def test_two_plans_are_compared_if_memory_is_short(monkeypatch, needed, fits):
    other = SimpleNamespace(
        prediction=SimpleNamespace(peak_memory_bytes=(needed,)), ranks=3, stages="abc"
    )
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=3 << 30))
    monkeypatch.setattr(verify, "_like", lambda *_, **__: None)
    monkeypatch.setattr(verify, "_prepare", lambda *_: ("job", other))
    plan: Any = SimpleNamespace(ranks=2)
    traits = Traits((), (), False)
    found = verify.choose_reference(spec(), plan, None, traits, two_plans=False)
    needs = "one process would need 4.00 GiB, and 3.00 GiB are free"
    two: Any = Reference("another plan: 3 ranks, 3 stages", "job", needs)  # type: ignore[arg-type]
    assert found == (Reference("one plain PyTorch process") if fits else two)
