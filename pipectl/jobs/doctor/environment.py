"""Python, torch, and the accelerators that torch sees."""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from pipectl import __version__
from pipectl.errors import PipectlError
from pipectl.jobs.doctor.finding import Finding, Findings, Level, said
from pipectl.versions import tested_torch, untested_torch

_SELF_TEST = "pipectl.runtime.transport.self_test"
_TORCH = (
    "import json, torch; found = torch.accelerator.current_accelerator(); "
    "print(json.dumps([torch.__version__, found and found.type, torch.accelerator.device_count()]))"
)


def python() -> Findings:
    """The interpreter."""
    text = f"{platform.python_version()} ({sys.executable}), pipectl {__version__}"
    yield Finding("python", Level.OK, text)


def torch() -> Findings:
    """Whether torch can be imported, and how messages leave accelerators."""
    cure = "pip install torch"
    try:
        installed = version("torch")
    except PackageNotFoundError:
        yield Finding("torch", Level.FAIL, "not installed", cure)
        return
    try:
        name, kind, count = json.loads(said([sys.executable, "-c", _TORCH], cure))
    except (PipectlError, ValueError) as error:
        text = error.message if isinstance(error, PipectlError) else "says nothing of its devices"
        yield Finding("torch", Level.FAIL, f"{installed} cannot be imported: {text}", cure)
        return
    if untested := untested_torch():
        cure = f"if something fails that should not, install {tested_torch()}"
        yield Finding("torch", Level.WARN, untested, cure)
    else:
        yield Finding("torch", Level.OK, name)
    if not kind:
        yield Finding("accelerators", Level.OK, "none: ranks compute on cores")
        return
    way = "MPI reads their memory" if _reads(kind) else "messages pass through host memory"
    yield Finding("accelerators", Level.OK, f"{count} of kind {kind}; {way}")


def _reads(kind: str) -> bool:
    """Whether a test message from an accelerator's memory arrives; else the process may crash."""
    try:
        said([sys.executable, "-m", "mpi4py", "-m", _SELF_TEST, kind], "")
    except PipectlError:
        return False
    return True
