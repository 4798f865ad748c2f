"""The versions of torch and typer that pipectl was tested with, and those that are installed."""

from __future__ import annotations

import platform
import re

from pipectl import __version__

OLDEST_TORCH, NEWEST_TORCH = "2.8", "2.15"
"""The first and the last release of torch that pipectl was tested with."""
OLDEST_TYPER, NEWEST_TYPER = "0.28", "0.29"
"""Those of typer, whose inside the commands use."""
_TESTED = {"torch": (OLDEST_TORCH, NEWEST_TORCH), "typer": (OLDEST_TYPER, NEWEST_TYPER)}
_DRIVER = re.compile(r"\blib(cuda|nvidia-ml|amdhip64|ze_loader|level_zero)\.so")
_ILLEGAL = 4
"""The signal SIGILL."""


def tested(package: str) -> str:
    """Return the tested range: ``torch 2.8 to 2.15``."""
    return "{} {} to {}".format(package, *_TESTED[package])


def untested(package: str) -> str:
    """Return a warning if the package is installed outside the tested range, else an empty text."""
    installed = installed_version(package)
    release, oldest, newest = (
        [int(number) for number in re.findall(r"\d+", text or "")[:2]]  # major and minor
        for text in (installed, *_TESTED[package])
    )
    if installed is None or oldest <= release <= newest:
        return ""
    return f"tested with {tested(package)}; this is {installed}"


def hint_of_torch(fault: str, signal: int = 0) -> str:
    """Return what to do if torch cannot be imported.

    Args:
        fault: the error, such as ``libcudart.so.12: cannot open shared object file``.
        signal: that ended the process, if one did.
    """
    again = "install torch again (pip install --force-reinstall torch)"
    if "No module named 'torch'" in fault:
        return f"pip install torch; tested are {tested('torch')}"
    if missing := re.search(r"No module named '([\w.]+)'", fault):
        return (
            f"torch is installed, but not all that it needs: pip install {missing[1]}, or {again}"
        )
    if _DRIVER.search(fault):
        return (
            "this library is of the GPU's driver, which login nodes and machines without a GPU "
            "lack: try on a node with GPUs (srun, qsub -I), or install a torch for CPUs"
        )
    if re.search(r"cannot open shared object file|not found in the system path", fault):
        return (
            "load the module that has this library, or add its directory to LD_LIBRARY_PATH; in "
            f"jobs, set environment.modules or environment.variables; else {again}"
        )
    if re.search(r"version `?GLIBC_", fault):
        return "this torch is built for a newer system: install one for it, or use a container"
    if re.search(r"undefined symbol|version `?[\w.]+' not found", fault):
        return (
            "another version of a library is found before the one that torch needs: look at "
            "LD_LIBRARY_PATH and the loaded modules (module list), or install torch again"
        )
    if signal == _ILLEGAL:
        return "torch is built for another processor: install one for the oldest kind of your nodes"
    return f"`python -c 'import torch'` shows the whole error; {again}"


def installed_versions() -> str:
    """Return for example ``pipectl 0.1.0, torch 2.13.0, mpi4py 4.1.1, Python 3.12.3``, for reports.

    Reads the metadata of packages without importing them.
    """
    others = {name: installed_version(name) or "not installed" for name in ("torch", "mpi4py")}
    versions = {"pipectl": __version__, **others, "Python": platform.python_version()}
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
