"""The resident memory of a rank: which part of it the reported peak counts, and what it keeps."""

import subprocess
import sys

WITH_A_COPY = """
import torch
from pipectl.runtime.device import CpuDevice

device = CpuDevice()
first = device.peak_bytes()
copy = torch.ones(2**26)
device.begin_copy(copy.nbytes)
during = device.peak_bytes()
small = torch.ones(2**24)
beside = device.peak_bytes()
del copy
device.end_copy()
after = device.peak_bytes()
large = torch.ones(2**25)
print(during - first, beside - first, after - first, device.peak_bytes() - first)
"""


WITH_DROPPED_PARAMETERS = """
import psutil
import torch
from pipectl.runtime.device import keep_freed_memory, return_freed_memory

def resident():
    return psutil.Process().memory_info().rss

return_freed_memory()
own, dropped, names = [], [], []
first = resident()
for index in range(64):
    own.append(torch.ones(2**18))
    dropped.append(torch.ones(2**18))
    names.append(torch.ones(8))
keep_freed_memory()
del dropped
after_drop = resident()
gradients = [torch.ones(2**18) for _ in range(64)]
del gradients
print(after_drop - first, resident() - after_drop)
"""


def run(script: str) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return [int(word) for word in done.stdout.split()]


def test_a_copy_for_a_checkpoint_does_not_count():
    during, beside, after, with_large = run(WITH_A_COPY)
    assert during < 2**23
    assert abs(beside - 2**26) < 2**23  # 64 MiB
    assert after < 2**26 + 2**23
    assert abs(with_large - 2**26 - 2**27) < 2**24  # 128 MiB more; the copy has 256 MiB


def test_parameters_of_other_ranks_return_to_the_system_and_memory_of_steps_stays():
    kept, added = run(WITH_DROPPED_PARAMETERS)
    assert abs(kept - 2**26) < 2**24  # 64 MiB of its own
    assert added > 2**26 - 2**24
