"""The exact balance on published profiles: values, proofs and seconds, as a markdown section.

    PIPECTL_WORKLOADS=DIRECTORY python tests/benchmarks/planner_optimality.py [NAME PART]

Prints every proven optimum of the directory's files beside the planner's value, and what is found
and proven within ten seconds for the graphs with too many downsets.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from pipectl.planner.balance.balance import balance
from pipectl.planner.balance.load_model import Balance, BalanceRequest
from pipectl.planner.graph.imported import prepared
from pipectl.profile import Operator, Profile

BUDGET_S = 10.0
OPEN = {
    "pipedream-inception_v3": (None, 12.5e9, 1e9),
    "pipedream-nasnetamobile": (None, 12.5e9, 1e9),
}
PROVEN_TEXT = """\
## Optimality: largest stage load

    PIPECTL_WORKLOADS=DIRECTORY python tests/benchmarks/planner_optimality.py

Seconds are of one core, without reading the file and without compiling (once for each
installation). Every value is proven anew.

| profile | devices | link | proven ms | ours ms | difference | downsets | s |
|---|---|---|---|---|---|---|---|"""
OPEN_TEXT = f"""
### Graphs with too many downsets, within {BUDGET_S:g} s

| profile | devices | link | ours ms | bound ms | gap | s |
|---|---|---|---|---|---|---|"""


def main() -> None:
    directory = os.environ.get("PIPECTL_WORKLOADS")
    if directory is None:
        print("Optimality: skipped, PIPECTL_WORKLOADS names no directory of published profiles.")
        return
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    files = [file for file in sorted(Path(directory).glob("*.json")) if part in file.stem]
    _warm_up()
    print(PROVEN_TEXT)
    for file in files:
        for row in _proven_rows(file):
            print(row, flush=True)
    print(OPEN_TEXT)
    for file in files:
        for row in _open_rows(file):
            print(row, flush=True)


def _warm_up() -> None:
    """Compile the kernels."""
    operators = tuple(Operator(f"n{i}", f"n{i}", 1.0 + i % 3, 1.0, 0, 8, 0) for i in range(9))
    edges = tuple((f"n{i}", f"n{j}") for i in range(9) for j in (i + 2, i + 3) if j < 9)
    profile = Profile("warm-up", "made up", 1, operators, edges)
    balance(profile, BalanceRequest(3, bandwidth_bytes_per_s=9.0))


def _proven_rows(file: Path) -> Iterator[str]:
    profile, seen = prepared(Profile.load(file)), set()
    for entry in json.loads(file.read_text())["best_known"]:
        request = _request(entry)
        proven = entry.get("proven_optimal") and entry["objective"].startswith("max stage load")
        if not proven or entry.get("cpus") or request in seen:
            continue
        seen.add(request)
        found, seconds = _timed(profile, request)
        difference = found.value_s / entry["value"] - 1
        name = file.stem.removeprefix("dnnpart-throughput-")
        cells = [name, str(request.devices), _link(profile, request)]
        cells += [f"{1e3 * entry['value']:.6g}"]
        cells += [f"{1e3 * found.value_s:.6g}", f"{difference:.0e}" if found.exact else "NO PROOF"]
        cells += [f"{found.downsets}", f"{seconds:.3f}"]
        yield f"| {' | '.join(cells)} |"


def _open_rows(file: Path) -> Iterator[str]:
    for bandwidth in OPEN.get(file.stem, ()):
        for devices in (2, 4, 8):
            profile = prepared(Profile.load(file))
            request = BalanceRequest(devices, bandwidth_bytes_per_s=bandwidth)
            found, seconds = _timed(profile, request, BUDGET_S)
            cells = [file.stem, str(devices), _link(profile, request), f"{1e3 * found.value_s:.6g}"]
            cells += [f"{1e3 * found.lower_bound_s:.6g}", f"{found.gap:.2%}", f"{seconds:.2f}"]
            yield f"| {' | '.join(cells)} |"


def _timed(
    profile: Profile, request: BalanceRequest, budget_s: float = float("inf")
) -> tuple[Balance, float]:
    start = perf_counter()
    expired: Callable[[], bool] = lambda: perf_counter() - start > budget_s  # noqa: E731
    found = balance(profile, request, expired)
    assert found is not None
    return found, perf_counter() - start


def _request(entry: dict[str, Any]) -> BalanceRequest:
    bandwidth = entry.get("bandwidth_bytes_per_s")
    return BalanceRequest(
        devices=entry["devices"],
        memory_limit_bytes=entry.get("memory_limit_bytes"),
        bandwidth_bytes_per_s=bandwidth if isinstance(bandwidth, float | int) else None,
        communication_scale=entry.get("comm_scale", 1.0),
    )


def _link(profile: Profile, request: BalanceRequest) -> str:
    if request.bandwidth_bytes_per_s:
        return f"{request.bandwidth_bytes_per_s / 1e9:g} GB/s"
    if all(operator.transfer_s is None for operator in profile.operators):
        return "free"
    scale = request.communication_scale
    return "as given" if scale == 1 else f"costs x {scale:g}"


if __name__ == "__main__":
    main()
