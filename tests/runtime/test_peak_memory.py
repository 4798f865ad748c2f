"""The peak memory that a rank reports."""

import subprocess
import sys

SCRIPT = """
import torch
from pipectl.runtime.device import CpuDevice

device = CpuDevice()
first = device.peak_bytes()
device.begin_copy()
copy = torch.ones(2**26)
during = device.peak_bytes()
del copy
device.end_copy()
after = device.peak_bytes()
large = torch.ones(2**25)
print(during - first, after - first, device.peak_bytes() - first)
"""


def test_a_copy_for_a_checkpoint_does_not_count():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    during, after, with_large = map(int, done.stdout.split())
    assert during == 0
    assert after < 2**23
    assert with_large > 2**26  # 128 MiB, less than the copy of 256 MiB
