"""Importing torchvision beside a torch that its compiled operators were not built for.

The wheel of torchvision on PyPI is built with CUDA. Beside a torch for the CPU its operators do
not load and its import stops where it describes them; with their names declared, everything that
is written in Python works, and no model of the corpus needs more.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import warnings
from functools import cache
from pathlib import Path

import torch

_DECLARED = torch.library.Library("torchvision", "FRAGMENT")


def installed(package: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


def version(package: str) -> str:
    """Of an installed package."""
    return importlib.metadata.version(package)


@cache
def declare_torchvision() -> None:
    """Declare the operators that torchvision describes, unless they load."""
    if not installed("torchvision") or _operators_load():
        return
    for name in _described():
        if not hasattr(torch.ops.torchvision, name):
            _DECLARED.define(f"{name}(Tensor boxes) -> Tensor")


def _operators_load() -> bool:
    library = next(_folder().glob("_C*.so"), None)
    if library is None:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.ops.load_library(str(library))
    except OSError:
        return False
    return True


def _described() -> list[str]:
    text = "".join(
        (_folder() / f"{name}_registrations.py").read_text() for name in ("_meta", "_autograd")
    )
    return sorted(set(re.findall(r'"torchvision::(\w+)"', text)))


def _folder() -> Path:
    found = importlib.util.find_spec("torchvision")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent
