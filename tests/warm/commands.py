"""Loads what commands need besides torch, the planner's kernels too, for all that is forked."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import pkgutil
import tempfile
from pathlib import Path

import pipectl

PARTS = ("batch", "cli", "jobs", "planner", "profiler", "report", "simulate")
"""Those that start no MPI."""

PROFILE = {
    "version": 1,
    "name": "warm",
    "source": "test",
    "micro_batch_size": 2,
    "optimizer": {"state_bytes_per_parameter": 2.0, "step_s_per_byte": 1e-10},
    "nodes": [
        {"id": f"op{index}", "forward_s": 0.01, "backward_s": 0.02, "parameter_bytes": 2**20,
         "output_bytes": 1000, "saved": [[f"op{index}", 1000]]}
        for index in range(6)
    ],
    "edges": [[f"op{index}", f"op{index + 1}"] for index in range(5)],
}  # fmt: skip


def load_kernels() -> None:
    """Plan something: that loads what is compiled of planner and simulator, or compiles it."""
    from pipectl.cli import main

    with tempfile.TemporaryDirectory() as place:
        profile = Path(place) / "profile.json"
        profile.write_text(json.dumps(PROFILE))
        sizes = ["--set", "training.batch_size=16", "--set", "pipeline.memory_limit=1GiB"]
        words = ["--devices", "3", *sizes, "--explain"]
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main(["plan", "--profile", str(profile), *words])
        assert code == 0, said.getvalue()


for part in PARTS:
    folder = Path(str(pipectl.__file__)).with_name(part)
    for module in pkgutil.walk_packages([str(folder)], f"pipectl.{part}."):
        importlib.import_module(module.name)
load_kernels()
