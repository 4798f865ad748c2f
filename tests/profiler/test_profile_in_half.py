"""Operators that have no kernel for float16 are named before a node-hour is spent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from pipectl.errors import CaptureError
from pipectl.profiler import profile_job
from pipectl.spec import load

MODELS = Path(__file__).parents[1] / "corpus" / "own.py"


def test_an_operator_without_a_kernel_is_named(tmp_path: Path) -> None:
    job = {
        "version": 1,
        "name": "half",
        "site_defaults": False,
        "model": f"{MODELS}:Lstm",
        "loss": "torch.nn:CrossEntropyLoss",
        "data": f"{MODELS}:Sequences",
        "training": {"steps": 1, "batch_size": 2, "precision": "float16"},
        "pipeline": {"micro_batches": 1},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    threads = torch.get_num_threads()
    with pytest.raises(CaptureError, match="model: lstm cannot run in float16 on cpu") as caught:
        profile_job(load(tmp_path / "job.yaml"))
    torch.set_num_threads(threads)
    assert "bf16" in (caught.value.cure or "")
