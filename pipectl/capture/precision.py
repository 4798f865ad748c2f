"""Mixed precision: the context in which model and loss run, captured or not.

Exported under autocast, a graph holds no casts: autocast makes them when an operator runs. So the
graph can be cut anywhere, and every stage runs its part in the same context. What the model itself
asks of a dtype (``x.to(y.dtype)``) is settled while it is captured, which therefore happens in
this context too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from pipectl.errors import CaptureError

_DTYPES = {"bf16": torch.bfloat16, "float16": torch.float16}
_MISSING = re.compile("not implemented for|could not create a primitive|not supported|Half")


def arithmetic(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context for forwards; backwards follow what their forward did, and need none.

    Args:
        precision: as in the spec.
        device: where the operators run.
    """
    dtype = _DTYPES.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


@contextmanager
def missing_kernels(operator: str, precision: str, device: torch.device) -> Iterator[None]:
    """Say which operator it is that has no kernel for ``float16``; CPUs lack some.

    Raises:
        CaptureError: what ran inside failed as torch does where a kernel is missing.
    """
    try:
        yield
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        if precision != "float16" or not _MISSING.search(first):
            raise
        raise CaptureError(
            f"model: {operator} cannot run in float16 on {device.type}: {first}",
            cure="use training.precision: bf16, or run it under "
            f"torch.autocast({device.type!r}, enabled=False) on .float() values",
        ) from error
