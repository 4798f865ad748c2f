"""Profiler: what every operator of a model costs on this node."""

from pipectl.profiler.job import measured_sizes, profile_job

__all__ = ["measured_sizes", "profile_job"]
