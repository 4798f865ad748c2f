"""Profiler: what every operator of a model costs on this node."""

from pipectl.profiler.job import profile_job
from pipectl.profiler.sizes import measured_sizes

__all__ = ["measured_sizes", "profile_job"]
