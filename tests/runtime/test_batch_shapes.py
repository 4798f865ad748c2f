"""Batches of another shape than the captured one: refused, and told what to do about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipectl.capture import CapturedJob
from pipectl.capture.batch import Reader
from pipectl.errors import CaptureError
from pipectl.runs import read_errors, read_metrics

PARTS = Path(__file__).with_name("job_parts.py")
RAGGED = f"{PARTS}:Ragged"


def test_only_the_number_of_samples_is_free(make_spec: Any) -> None:
    graph = CapturedJob(make_spec(1)).training_graph(2)

    def check(name: str, tensor: torch.Tensor, samples: int, *, training: bool = True) -> None:
        Reader(graph, training=training).check({name: tensor}, samples, {name}, is_whole=True)

    check("inputs", torch.zeros(5, 6), 5)
    check("targets", torch.zeros(1, 3, dtype=torch.int64), 1, training=False)
    for wrong in (torch.zeros(2, 7), torch.zeros(2), torch.zeros(2, 6, 1)):
        with pytest.raises(CaptureError, match=r"^data: 'inputs' of a batch is") as caught:
            check("inputs", wrong, 2)
        assert f"{list(wrong.shape)} of torch.float32" in caught.value.message
        assert "captured with [samples, 6] of torch.float32" in caught.value.message
    with pytest.raises(CaptureError, match=r"^evaluation\.data: 'targets' .* of torch\.int32, but"):
        check("targets", torch.zeros(2, 3, dtype=torch.int32), 2, training=False)
    with pytest.raises(CaptureError, match=r"^data: 'inputs' of a .* has 5 samples, not 6"):
        check("inputs", torch.zeros(5, 6), 6)


def test_what_only_a_kept_submodule_reads_may_have_any_shape(make_spec: Any) -> None:
    spec = make_spec(1, model={"factory": f"{PARTS}:Model", "opaque": ["layers"]})
    assert set(Reader(CapturedJob(spec).training_graph(2)).checked) == {"targets"}


@pytest.mark.parametrize(
    ("kwargs", "found"),
    [({"longer_from": 8}, "'inputs' of a batch is [2, 8]"),
     ({"fewer_from": 8}, "'targets' of a batch is [2, 2]"),
     ({"lost": 9}, "'inputs' of a micro-batch has 1 sample, not 2")],
)  # fmt: skip
def test_a_batch_of_another_shape_ends_the_training(
    make_spec: Any, make_run: Any, work: Any, kwargs: dict[str, int], found: str
) -> None:
    run = make_run(make_spec(1, data={"factory": RAGGED, "kwargs": kwargs}))
    done = work(0, run)
    assert done.returncode == 3
    (error,) = read_errors(run)
    assert error.message.startswith(f"data: {found}")
    assert (error.type, error.step) == ("CaptureError", 3)
    assert ("keep all samples" if "lost" in kwargs else "pad all samples") in error.cure
    assert [line.step for line in read_metrics(run)] == [1, 2]


def test_held_out_data_of_another_shape_are_refused_before_the_training(
    make_spec: Any, make_run: Any, work: Any
) -> None:
    held_out = {"factory": RAGGED, "kwargs": {"count": 4, "longer_from": 0}}
    run = make_run(make_spec(1, evaluation={"data": held_out, "every": 5}))
    assert work(0, run).returncode == 3
    (error,) = read_errors(run)
    assert error.message.startswith("evaluation.data: 'inputs' of a batch is [2, 8]")
    assert read_metrics(run) == []


def test_a_number_is_that_of_the_graph_for_its_size(
    make_spec: Any, make_run: Any, train: Any
) -> None:
    """Five samples a step, in micro-batches of two."""
    run = make_run(
        make_spec(
            1,
            data={"factory": f"{PARTS}:Counted"},
            loss={"factory": f"{PARTS}:counted_loss"},
            training={"steps": 2, "batch_size": 5},
            pipeline={"micro_batches": 3, "stages": 1},
        )
    )
    train(run)
    assert [line.step for line in read_metrics(run)] == [1, 2]
