"""Builds the pretended accelerator, in a folder that makes it known to every Python that has it on
its path."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import torch
from torch.utils import cpp_extension

HERE = Path(__file__).resolve().parents[1] / "accelerator"
COMPILER = shutil.which(os.environ.get("CXX", "g++"))


def build(folder: Path) -> None:
    """Compile it into a folder, with the entry point by which torch finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    torch_folder = Path(torch.__file__).parent
    options = ["-O0", "-DAT_PER_OPERATOR_HEADERS", "-shared", "-fPIC", "-std=c++20"]
    includes = [option for path in cpp_extension.include_paths() for option in ("-isystem", path)]
    libraries = [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    target = ["-o", str(folder / "libpretended.so")]
    assert COMPILER is not None
    subprocess.run(
        [COMPILER, *options, *includes, str(HERE / "pretended.cpp"), *target, *libraries],
        check=True,
    )
    shutil.copy(HERE / "pretended.py", folder)
    info = folder / "pretended-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pretended\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\npretended = pretended:load\n")
