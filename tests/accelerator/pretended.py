"""An accelerator of another vendor, as torch finds it: by an entry point, when it is imported.

The functions are those that torch asks such a module for. Its operators draw from the CPU's
generator.
"""

import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import torch


def load() -> None:
    """Make the device known to torch, which calls this."""
    torch.ops.load_library(Path(__file__).with_name("libpretended.so"))
    torch.utils.rename_privateuse1_backend("pretended")  # type: ignore[attr-defined]
    torch._register_device_module("pretended", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend()  # type: ignore[attr-defined]


def is_available() -> bool:
    return True


is_initialized = is_available


def device_count() -> int:
    return 2


def current_device() -> int:
    return torch.accelerator.current_device_index()


def manual_seed(_: int) -> None:
    pass


manual_seed_all = manual_seed


def _is_in_bad_fork() -> bool:
    return False


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def _dump_snapshot(filename: str) -> None:
    Path(filename).write_bytes(pickle.dumps(torch.accelerator.memory_allocated()))


memory = SimpleNamespace(_dump_snapshot=_dump_snapshot)
