"""What is assumed where a profile or a cluster does not say, and the words for it."""

from __future__ import annotations

from pipectl.cluster import Cluster
from pipectl.planner.request import PlanRequest
from pipectl.profile import Profile

DEFAULT_BASELINE_BYTES = 240 * 2**20
"""A process with Python, torch and MPI, where the profile does not say."""


def baseline_bytes(profile: Profile) -> int:
    """Memory of a process without a stage."""
    measured = profile.process_baseline_bytes
    return DEFAULT_BASELINE_BYTES if measured is None else measured


def assumptions_of(profile: Profile, cluster: Cluster) -> tuple[str, ...]:
    """What neither a profile nor a cluster says."""
    assumptions = list(profile.assumptions)
    if profile.process_baseline_bytes is None:
        assumptions.append(f"a process without a stage takes {DEFAULT_BASELINE_BYTES >> 20} MiB")
    sizes = profile.edge_bytes.items()
    if any(size != profile.by_id[source].output_bytes for (source, _), size in sizes):
        assumptions.append(
            "a message has the output_bytes of its operator: edge_bytes are not used"
        )
    return (*assumptions, *cluster.assumptions)


def size_assumptions(profile: Profile, size: int) -> tuple[str, ...]:
    """What a profile does not say of micro-batches of ``size`` samples."""
    measured = profile.micro_batch_size
    if size == measured or profile.has_several_sizes:
        return ()
    return (f"times of {size} samples are taken as proportional to those of {measured}",)


def count_assumptions(request: PlanRequest, count: int, size: int) -> tuple[str, ...]:
    """Why there are not as many micro-batches as were asked for."""
    if request.micro_batches in (None, count):
        return ()
    copies = request.replicas or 1
    equally = f" and be shared evenly by {copies} replicas" if copies > 1 else ""
    return (
        f"{request.micro_batches} micro-batches of {request.batch_size} samples cannot be of one "
        f"size with a smaller last one{equally}: {count} of {size} samples instead",
    )
