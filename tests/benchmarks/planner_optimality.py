"""Optimality: largest stage load

    PIPECTL_WORKLOADS=DIRECTORY python tests/benchmarks/planner_optimality.py [NAME PART]

Every published optimum is computed and proven again; a problem is a number of devices and a link.
*Difference* is the relative difference from the published value. Seconds are of one core, without
reading the file and without compiling. The rows of each problem go to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from tables import print_table

from pipectl.planner.balance.balance import balance
from pipectl.planner.balance.load_model import Balance, BalanceRequest
from pipectl.planner.graph.imported import prepared
from pipectl.profile import Operator, Profile

BUDGET_S = 10.0
OPEN = {
    "pipedream-inception_v3": (None, 12.5e9, 1e9),
    "pipedream-nasnetamobile": (None, 12.5e9, 1e9),
}
PROVEN = ("profile", "problems", "proven", "largest difference", "most downsets", "longest s")
SEARCHED = ("profile", "link", "2 devices", "4 devices", "8 devices", "longest s")


def main() -> None:
    directory = os.environ.get("PIPECTL_WORKLOADS")
    if directory is None:
        print("Optimality: skipped, PIPECTL_WORKLOADS names no directory of published profiles.")
        return
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    files = [file for file in sorted(Path(directory).glob("*.json")) if part in file.stem]
    _warm_up()
    print_table(PROVEN, filter(None, map(_proven, files)))
    print("\n### Graphs with too many downsets: largest load in ms (gap), within "
          f"{BUDGET_S:g} s\n")  # fmt: skip
    print_table(SEARCHED, (row for file in files for row in _searched(file)))


def _warm_up() -> None:
    """Compile the kernels."""
    operators = tuple(Operator(f"n{i}", f"n{i}", 1.0 + i % 3, 1.0, 0, 8, 0) for i in range(9))
    edges = tuple((f"n{i}", f"n{j}") for i in range(9) for j in (i + 2, i + 3) if j < 9)
    profile = Profile("warm-up", "made up", 1, operators, edges)
    balance(profile, BalanceRequest(3, bandwidth_bytes_per_s=9.0))


def _proven(file: Path) -> tuple[object, ...]:
    """One row for all problems of a profile whose optimum is published; nothing without one."""
    profile, requests = prepared(Profile.load(file)), set()
    name = file.stem.removeprefix("dnnpart-throughput-")
    results: list[tuple[Balance, float, float]] = []
    for entry in json.loads(file.read_text())["best_known"]:
        request = _request(entry)
        has_proof = entry.get("proven_optimal") and entry["objective"].startswith("max stage load")
        if not has_proof or entry.get("cpus") or request in requests:
            continue
        requests.add(request)
        solution, seconds = _timed(profile, request)
        results.append((solution, seconds, solution.value_s / entry["value"] - 1))
        values = f"{1e3 * solution.value_s:.6g} ms, published {1e3 * entry['value']:.6g} ms"
        problem = f"{name}, {request.devices} devices, {_link(profile, request)}"
        print(f"{problem}: {values}, {seconds:.3f} s", file=sys.stderr, flush=True)
    if not results:
        return ()
    return (
        *(name, len(results), sum(solution.exact for solution, _, _ in results)),
        f"{max((difference for _, _, difference in results), key=abs):.0e}",
        max(solution.downsets for solution, _, _ in results),
        f"{max(seconds for _, seconds, _ in results):.3f}",
    )


def _searched(file: Path) -> Iterator[tuple[str, ...]]:
    """A row for every link."""
    for bandwidth in OPEN.get(file.stem, ()):
        profile, cells, longest_s = prepared(Profile.load(file)), [], 0.0
        for devices in (2, 4, 8):
            request = BalanceRequest(devices, bandwidth_bytes_per_s=bandwidth)
            solution, seconds = _timed(profile, request, BUDGET_S)
            cells.append(f"{1e3 * solution.value_s:.6g} ({solution.gap:.2%})")
            longest_s = max(longest_s, seconds)
        yield file.stem, _link(profile, request), *cells, f"{longest_s:.2f}"


def _timed(
    profile: Profile, request: BalanceRequest, budget_s: float = float("inf")
) -> tuple[Balance, float]:
    start = perf_counter()
    expired: Callable[[], bool] = lambda: perf_counter() - start > budget_s  # noqa: E731
    solution = balance(profile, request, expired)
    assert solution is not None
    return solution, perf_counter() - start


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
