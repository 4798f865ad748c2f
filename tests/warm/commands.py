"""Loads what commands need besides torch, the planner's kernels too, for all that is forked."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import kernels

import pipectl

PARTS = ("batch", "cli", "jobs", "planner", "profiler", "report", "simulate")
"""Those that start no MPI."""

for part in PARTS:
    folder = Path(str(pipectl.__file__)).with_name(part)
    for module in pkgutil.walk_packages([str(folder)], f"pipectl.{part}."):
        importlib.import_module(module.name)
kernels.load()
