"""Whether a loss depends on the number of micro-batches, found from the halves of a batch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pipectl.capture import CapturedJob
from pipectl.profile_parts import HalvedLoss
from pipectl.profiler.effort import Effort, measured_sizes
from pipectl.profiler.halved_loss import compare_halves
from pipectl.runtime.device import choose_device

LOSSES = Path(__file__).with_name("losses.py")
MSE = "torch.nn:MSELoss"


@pytest.fixture
def halved(spec_maker: Any) -> Any:
    make = spec_maker(LOSSES)

    def compare(model: str, loss: str, data: str, **more: Any) -> HalvedLoss | str:
        counts = more.pop("weight", None)
        if counts:
            loss = {"factory": f"{LOSSES}:{loss}", "weight": f"{LOSSES}:{counts}"}
        training = {"steps": 1, "batch_size": 16, **more.pop("training", {})}
        spec = make(model, loss=loss, data=data, training=training, **more)
        job, sizes = CapturedJob(spec), measured_sizes(spec, Effort.FAST)
        job.training_graph(sizes[0])
        return compare_halves(job, sizes, choose_device(0, 0))

    return compare


@pytest.mark.parametrize(
    ("model", "loss", "data", "more"),
    [
        ("plain", MSE, "Vectors", {}),
        ("plain", MSE, "Stream", {}),
        ("plain", MSE, "Vectors", {"training": {"batch_size": 7}}),
        ("plain", MSE, "Vectors", {"training": {"precision": "bf16"}}),
        ("plain", MSE, "Vectors", {"materialize": "per_rank"}),
        ("plain", "torch.nn:CrossEntropyLoss", "Classes", {}),
        ("plain", "Margin", "Classes", {}),
        ("plain", "FromCentre", "Vectors", {}),
        ("plain", "by_samples", "Vectors", {}),
        ("plain", "in_place", "Vectors", {}),
        ("Denoiser", "model", "Vectors", {}),
        ("Kept", "model", "Named", {}),
        ("Language", "of_words", "Texts", {"weight": "valid"}),
        ("Language", "masked", "Texts", {"weight": "valid"}),
        ("Language", "of_words_by_time", "Texts", {"weight": "valid"}),
        ("Language", "of_words", "Texts", {"weight": "valid", "kwargs": {"flat": True}}),
        ("Language", "of_texts", "Texts", {}),
        ("plain", "Random", "Vectors", {"loss_kwargs": {"kind": "noise"}}),
        ("plain", "Random", "Vectors", {"loss_kwargs": {"kind": "negatives"}}),
        ("Kept", "model", "Named", {"kwargs": {"p": 0.3}}),
        ("Language", "of_words", "Texts", {"weight": "valid", "kwargs": {"flat": True, "p": 0.3}}),
    ],
)
def test_a_mean_over_samples_or_over_what_is_counted_does_not_depend(
    halved: Any, model: str, loss: str, data: str, more: dict[str, Any]
) -> None:
    found = halved(model, loss, data, **more)
    assert not found.depends
    rounds = more.get("kwargs", {}).get("p") is None  # else these are means of several draws
    assert found.halves == pytest.approx(found.whole, rel=1e-2 if rounds else 0.2)


SUM = {"loss_kwargs": {"reduction": "sum"}}


@pytest.mark.parametrize(
    ("model", "loss", "data", "more", "ratio"),
    [
        ("plain", MSE, "Vectors", SUM, 2),
        ("plain", MSE, "Stream", SUM, 2),
        ("plain", MSE, "Vectors", {**SUM, "training": {"batch_size": 3}}, 2),
        ("linear", MSE, "Vectors", {**SUM, "pipeline": {"micro_batches": 16}}, 2),
        ("plain", MSE, "Vectors", {**SUM, "materialize": "per_rank"}, 2),
        ("plain", "by_batch_size_of_the_job", "Vectors", {}, 2),
        ("Denoiser", "model", "Vectors", {"kwargs": {"reduction": "sum"}}, 2),
        ("Kept", "model", "Named", {"kwargs": {"reduction": "sum"}}, 2),
        ("plain", "contrast", "Vectors", {}, None),
        ("Language", "of_words", "Texts", {}, 1),
        ("Language", "masked", "Texts", {}, 1),
        ("Language", "of_words_by_time", "Texts", {"training": {"precision": "bf16"}}, 1),
        ("Language", "of_words", "Texts", {"kwargs": {"flat": True}}, 1),
        ("plain", "Random", "Vectors", {"loss_kwargs": {"kind": "noise", "reduction": "sum"}}, 2),
        ("plain", "Random", "Vectors", {"loss_kwargs": {"kind": "contrast"}}, None),
        ("plain", "Random", "Vectors", {"loss_kwargs": {"kind": "pairs"}}, None),
        ("Kept", "model", "Named", {"kwargs": {"reduction": "sum", "p": 0.3}}, None),
    ],
)
def test_sums_means_over_tokens_and_comparisons_of_samples_depend(
    halved: Any, model: str, loss: str, data: str, more: dict[str, Any], ratio: float | None
) -> None:
    """The words of a model that knows nothing have equal losses, but gradients are not shared."""
    found = halved(model, loss, data, **more)
    assert found.depends
    if ratio is not None:
        assert found.whole == pytest.approx(ratio * found.halves, rel=1e-2)


@pytest.mark.parametrize(
    ("loss", "sums", "why"),
    [
        ("undefined", None, "the loss of some samples, or its gradient, is not finite"),
        ("by_samples", "abc", "this is a fault of pipectl, .*: 'str' .*, please report"),
        ("by_samples", iter, r"TypeError: .* \(at .*test_halved_loss.py:\d+\)"),
    ],
)
def test_what_is_not_compared_says_why(
    halved: Any, monkeypatch: Any, loss: str, sums: Any, why: str
) -> None:
    """Exceptions of the user's code, and of pipectl's own."""
    if sums is not None:
        function = sums if isinstance(sums, str) else lambda *_: sums(None)
        monkeypatch.setattr("pipectl.profiler.halved_loss.weighted_loss", function)
    assert re.match(why, halved("linear", loss, "Vectors"))


def test_batches_of_one_sample_have_no_halves(halved: Any) -> None:
    assert halved("linear", "by_samples", "Vectors", training={"batch_size": 1}) == ""
