"""The profiler: costs of every operator of a model on this node."""

from pipectl.profiler.effort import measured_sizes
from pipectl.profiler.job import profile_job

__all__ = ["measured_sizes", "profile_job"]
