"""Replicas of a stage whose weights are no longer the same are noticed, and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipectl.runs import read_errors, read_metrics
from pipectl.runtime import checkpoint
from pipectl.runtime.replicas import checksum

PARTS = Path(__file__).with_name("job_parts.py")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.complex64, torch.bool]
)
def test_every_bit_counts(dtype: torch.dtype) -> None:
    tensor = torch.arange(13).to(dtype)
    before = checksum(tensor)
    octets = tensor.view(torch.uint8)
    for index in range(octets.numel()):
        for bit in range(8) if dtype != torch.bool else [0]:
            octets[index] ^= 1 << bit
            assert checksum(tensor) != before
            octets[index] ^= 1 << bit
    assert checksum(tensor) == before


@pytest.mark.mpi
def test_replicas_agree_on_a_buffer_that_the_first_forward_leaves_as_it_was(
    make_spec: Any, make_run: Any, train: Any
) -> None:
    """Each takes one of two micro-batches; after a step both have the mean of theirs."""
    late = {"factory": f"{PARTS}:Late"}
    training = {"steps": 6, "batch_size": 4}
    pipeline = {"micro_batches": 2, "stages": 1, "replicas": 2}
    spec = make_spec(2, model=late, training=training, pipeline=pipeline)
    run = make_run(spec)
    train(run)
    generator = torch.Generator().manual_seed(2)
    samples = torch.randn(24, 6, generator=generator)  # those of job_parts, in order
    mean = torch.zeros(6)
    for step in range(6):
        parts = samples[4 * step : 4 * step + 4].split(2)
        if 2 * step > 3:
            mean = sum(0.9 * mean + 0.1 * part.mean(0) for part in parts) / 2
    weights = checkpoint.load(run.checkpoints / "step-000006")
    assert int(weights["count"]) == 12
    assert torch.allclose(weights["mean"], mean, atol=1e-6)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("step", "saving", "stop"),
    [(99, {}, False), (3, {"checkpoint": {"every": 4}}, False), (1, {}, True)],
    ids=["every hundred steps", "before a checkpoint", "before a stop"],
)
def test_a_flipped_bit_ends_the_job_where_replicas_are_compared_next(
    make_spec: Any,
    make_run: Any,
    work: Any,
    step: int,
    saving: dict[str, Any],
    stop: bool,
) -> None:
    """On the second of three replicas, a step before; no checkpoint has it."""
    optimizer = {"factory": f"{PARTS}:Faulty", "kwargs": {"lr": 0.1, "rank": 1, "step": step}}
    training = {"steps": step + 3, "batch_size": 6}
    pipeline = {"micro_batches": 3, "stages": 1, "replicas": 3}
    spec = make_spec(3, optimizer=optimizer, training=training, pipeline=pipeline, **saving)
    run = make_run(spec)
    if stop:  # all ranks do, behind step 2
        run.stop_request.write_text("")
    done = work(3, run)
    assert done.returncode != 0
    (error,) = read_errors(run)
    assert error.rank == 1
    assert error.message.startswith(
        f"step {step + 1}: the replicas of stage 0 no longer hold the same weights: "
        "'layers.0.0.bias'; rank 1 differs from the others of ranks 0, 1, 2"
    )
    assert {line.step for line in read_metrics(run)} <= {*range(1, step + 2)}
    assert list(run.checkpoints.glob("step-*")) == []
