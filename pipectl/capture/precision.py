"""Mixed precision: the context in which model and loss run, captured or not.

Exported under autocast, a graph holds no casts: autocast makes them when an operator runs. So the
graph can be cut anywhere, and every stage runs its part in the same context. What the model itself
asks of a dtype (``x.to(y.dtype)``) is settled while it is captured, which therefore happens in
this context too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def arithmetic(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context for forwards; backwards follow what their forward did, and need none.

    Args:
        precision: as in the spec.
        device: where the operators run.
    """
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()
