"""The profiler: costs of every operator of a model on this node."""

from pipectl.profiler.job import profile_job

__all__ = ["profile_job"]
