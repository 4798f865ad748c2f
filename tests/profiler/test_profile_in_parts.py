"""A model that no process holds, measured operator by operator, equal operators once."""

from __future__ import annotations

from typing import Any

import pytest

from pipectl.capture import CapturedJob
from pipectl.profile import Operator
from pipectl.profiler import operators, profile_job
from pipectl.profiler.bench import Subject
from pipectl.profiler.effort import Effort
from pipectl.profiler.journal import Journal
from pipectl.runtime.device import CpuDevice


@pytest.fixture
def profiled(spec_of: Any) -> Any:
    return lambda model, how: profile_job(spec_of(model, materialize=how), effort=Effort.FAST)


def all_but_times(operator: Operator) -> tuple[Any, ...]:
    """Values kept under names of their own count by size: how many there are is not fixed."""
    saved = [(n.split(":")[0], size) for n, size in operator.saved]
    sizes = operator.output_bytes, operator.gradient_bytes, operator.parameter_bytes
    return operator.id, operator.name, sizes, operator.parameters, saved, operator.signature


@pytest.mark.parametrize("model", ["gpt", "cnn", "dense"])
def test_an_operator_equal_to_another_keeps_what_it_would_by_itself(
    spec_of: Any, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    job = CapturedJob(spec_of(model))
    subject, observed = Subject.of(job, 4, CpuDevice()), list[object]()
    observe = operators.observe

    def noting(*given: Any) -> Any:
        observed.append(given)
        return observe(*given)

    monkeypatch.setattr(operators, "observe", noting)
    once = operators.Walk(job, subject, Journal(), None).measure(lambda _: None)
    assert len(observed) < len(once)
    monkeypatch.setattr(operators.Walk, "_key", lambda *_: object())
    each = operators.Walk(job, subject, Journal(), None).measure(lambda _: None)
    assert len(observed) > len(each)
    for name, mine in each.items():
        other = once[name]
        assert (mine.output_bytes, mine.memory, mine.flops) == (
            other.output_bytes, other.memory, other.flops,
        )  # fmt: skip
        assert sum(size for _, size in mine.saved) == sum(size for _, size in other.saved)


@pytest.mark.parametrize("model", ["tied", "cnn", "dense"])
def test_everything_but_times_is_that_of_the_whole_model(profiled: Any, model: str) -> None:
    whole, parts = (profiled(model, how) for how in ("eager", "per_rank"))
    assert list(map(all_but_times, parts.operators)) == list(map(all_but_times, whole.operators))
    assert (parts.edges, parts.fingerprint) == (whole.edges, whole.fingerprint)
    assert all(operator.forward_s > 0 for operator in parts.operators)
    assert any("not scaled" in assumption for assumption in parts.assumptions)
    assert parts.optimizer is not None
    assert whole.optimizer is not None
    assert parts.optimizer.state_bytes_per_parameter_byte == pytest.approx(
        whole.optimizer.state_bytes_per_parameter_byte, rel=0.02
    )


def test_equal_operators_are_measured_once(profiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []
    measure = operators.time_alone

    def counting(call: Any, device: Any, budget_s: float) -> Any:
        measured.append(call.target)
        return measure(call, device, budget_s)

    monkeypatch.setattr(operators, "time_alone", counting)
    profile = profiled("gpt", "per_rank")
    blocks = [
        {
            o.name.split(".", 2)[2]: (o.forward_s, o.backward_s)
            for o in profile.operators
            if o.name.startswith(f"blocks.{i}.")
        }
        for i in range(2)
    ]
    assert len(measured) < len(profile.operators) - len(blocks[1]) / 2
    linear = [times for name, times in blocks[0].items() if "qkv" in name]
    assert linear
    assert linear == [times for name, times in blocks[1].items() if "qkv" in name]
