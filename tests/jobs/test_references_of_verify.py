"""With what a job is compared, and how exactly both must agree."""

from types import SimpleNamespace

import psutil
import pytest

from pipectl.capture.job import Traits
from pipectl.jobs import verify
from pipectl.jobs.verify import Reference, expect

DROPS, TIED = Traits(("dropout",), (), False), Traits((), ("tied.weight",), False)
PLAIN, HALF = Traits((), (), False), Traits((), ("tied.weight",), True)
SHARED = "tied.weight: used several times"


def spec(precision="float32", gpus=0):
    return SimpleNamespace(
        training=SimpleNamespace(precision=precision, compile=False),
        resources=SimpleNamespace(gpus_per_node=gpus),
        model=SimpleNamespace(materialize="eager"),
    )


@pytest.mark.parametrize(
    ("job", "traits", "reason", "replicas", "tolerance", "note"),
    [
        (spec(), PLAIN, "", 1, 0.0, ""),
        (spec(), Traits((), (), True), "", 1, 0.0, ""),
        (spec(), DROPS, "", 1, 0.0, "dropout: random numbers"),
        (spec(), HALF, "why", 1, 0.0, "why: "),
        (spec(), TIED, "", 1, 1e-4, SHARED),
        (spec(), HALF, "", 1, 2e-2, SHARED),
        (spec("bf16"), TIED, "", 1, 2e-2, SHARED),
        (spec("float16"), TIED, "", 1, 2e-2, SHARED),
        (spec(gpus=1), HALF, "why", 1, 2e-2, "why: "),
        (spec(), PLAIN, "", 2, 1e-4, "replicas add up gradients in another order"),
    ],
)
def test_plans_differ_in_no_bit_on_cpus_and_else_within_the_coarsest_rounding(
    job, traits, reason, replicas, tolerance, note
):
    plan = SimpleNamespace(stages=[SimpleNamespace(replicas=replicas)])
    notes, found = expect(job, traits, plan, reason)
    assert found == tolerance
    assert (notes or ("",))[0].startswith(note)


def test_two_plans_are_compared_if_memory_is_short(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=3 << 30))
    monkeypatch.setattr(verify, "_like", lambda *_, **__: None)
    needs = "one process would need 4.00 GiB, and 3.00 GiB are free"
    for needed, reference in (
        (2 << 30, Reference("one plain PyTorch process")),
        (4 << 30, Reference("another plan: 3 ranks, 3 stages", "job", needs)),
    ):
        prediction = SimpleNamespace(peak_memory_bytes=(needed,))
        other = SimpleNamespace(prediction=prediction, ranks=3, stages="abc")
        monkeypatch.setattr(verify, "_prepare", lambda *_, other=other: ("job", other))
        plan = SimpleNamespace(ranks=2)
        found = verify.choose_reference(spec(), plan, None, PLAIN, two_plans=False)
        assert found == reference
