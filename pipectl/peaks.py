"""Peak FLOP/s of common accelerators, for the share of it that a job reaches (MFU).

From the data sheets of the manufacturers: dense products of matrices, without sparsity, at the
boost clock. Where a sheet gives only the rate with sparsity, half of that. Torch shows each half of
an MI250X as a device of its own.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_TERA = 1e12


class _Peaks(NamedTuple):
    """TFLOP/s by the type of the factors; None where the hardware has no products of this type."""

    bf16: float | None
    float16: float
    tf32: float | None
    float32: float


_PEAKS = {  # patterns of torch's names of devices; the first that matches counts
    r"V100-PCIE": _Peaks(None, 112, None, 14),
    r"V100-SXM[23]": _Peaks(None, 125, None, 15.7),
    r"Tesla T4": _Peaks(None, 65, None, 8.1),
    r"A10": _Peaks(125, 125, 62.5, 31.2),
    r"A30": _Peaks(165, 165, 82, 10.3),
    r"A40": _Peaks(149.7, 149.7, 74.8, 37.4),
    r"A100": _Peaks(312, 312, 156, 19.5),
    r"L4": _Peaks(121, 121, 60, 30.3),
    r"L40S": _Peaks(362, 362, 183, 91.6),
    r"H100 PCIe": _Peaks(756, 756, 378, 51),
    r"(H100|H200) NVL": _Peaks(835, 835, 417, 60),
    r"H100|H200|GH200": _Peaks(989, 989, 494, 67),
    r"B200": _Peaks(2250, 2250, 1125, 75),
    r"GB200": _Peaks(2500, 2500, 1250, 80),
    r"MI250X": _Peaks(191.5, 191.5, None, 47.9),
    r"MI300A": _Peaks(980.6, 980.6, 490.3, 122.6),
    r"MI300X|MI325X": _Peaks(1307.4, 1307.4, 653.7, 163.4),
}


def peak_flops_per_s(device: str, precision: str, float32_matmul_precision: str) -> float | None:
    """Return the peak FLOP/s of a whole accelerator for the products that a job computes.

    Args:
        device: its name in torch, such as ``NVIDIA H100 80GB HBM3``.
        precision, float32_matmul_precision: as in the spec.

    Returns:
        None if the device is not known, or is a part of one (MIG).
    """
    if "MIG" in device:
        return None
    known = (peaks for name, peaks in _PEAKS.items() if re.search(rf"\b({name})(\b|-)", device))
    peaks = next(known, None)
    if peaks is None:
        return None
    in_float32 = peaks.float32
    if float32_matmul_precision != "highest" and peaks.tf32 is not None:
        in_float32 = peaks.tf32
    rates = {"bf16": peaks.bf16, "bf16-weights": peaks.bf16, "float16": peaks.float16}
    rate = rates.get(precision, in_float32)
    return None if rate is None else rate * _TERA
