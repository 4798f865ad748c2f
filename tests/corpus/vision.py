"""Models of torchvision, unchanged, with few classes; beside any torch.

The wheel of torchvision on PyPI is built with CUDA. Beside a torch for the CPU its operators do
not load and its import stops where it describes them; with their names declared, everything that
is written in Python works, and no model of the corpus needs more.
"""

from __future__ import annotations

import re
import warnings
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10
_DECLARED = torch.library.Library("torchvision", "FRAGMENT")


@cache
def declare_torchvision() -> None:
    """Declare the operators that torchvision describes, unless they load."""
    found = find_spec("torchvision")
    if found is None or found.origin is None:
        return
    folder = Path(found.origin).parent
    with warnings.catch_warnings(), suppress(OSError):
        warnings.simplefilter("ignore")
        for library in folder.glob("_C*.so"):
            torch.ops.load_library(str(library))
    files = (folder / f"{name}_registrations.py" for name in ("_meta", "_autograd"))
    described = "".join(file.read_text() for file in files)
    for name in sorted(set(re.findall(r'"torchvision::(\w+)"', described))):
        if not hasattr(torch.ops.torchvision, name):
            _DECLARED.define(f"{name}(Tensor boxes) -> Tensor")


def build(name: str, **kwargs: Any) -> nn.Module:
    """A model by its name in torchvision."""
    declare_torchvision()
    from torchvision.models import get_model

    return get_model(name, weights=None, num_classes=CLASSES, **kwargs)


def with_auxiliary(outputs: Any, targets: Tensor) -> Tensor:
    """Inception's loss: its auxiliary classifier counts 0.4, and is absent in evaluation."""
    if isinstance(outputs, Tensor):
        return F.cross_entropy(outputs, targets)
    return F.cross_entropy(outputs.logits, targets) + 0.4 * F.cross_entropy(
        outputs.aux_logits, targets
    )
