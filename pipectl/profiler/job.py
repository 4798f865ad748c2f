"""``profile``: from a job spec to ``profile.json``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from pipectl.capture import CapturedGraph, CapturedJob
from pipectl.capture.deferred import is_deferred
from pipectl.planner.costs import Footprints, operator_times
from pipectl.profile import Operator, Profile, StageOverhead
from pipectl.profiler.effort import Effort
from pipectl.profiler.fit import Fit, fit_stages
from pipectl.profiler.inplace import InPlace, Pairs, Timed
from pipectl.profiler.journal import Journal
from pipectl.profiler.neighbours import Neighbours
from pipectl.profiler.optimizer import optimizer_cost
from pipectl.profiler.progress import Progress, Work
from pipectl.profiler.sizes import measured_sizes
from pipectl.profiler.states import SampleStates
from pipectl.profiler.walk import Measured, Walk
from pipectl.runtime.device import choose_device
from pipectl.spec import JobSpec, profile_key

_IN_PARTS = (
    "operators were measured one at a time, equal ones once, and their times were not scaled to "
    "the time of the whole model, which fits no process (materialize: per_rank)"
)
_STRUCTURE, _STAGES = "what operators keep", "random stages"


def profile_job(
    spec: JobSpec,
    progress: Progress | None = None,
    *,
    effort: Effort = Effort.NORMAL,
    journal: Journal | None = None,
) -> Profile:
    """Capture a job's model and measure every operator on this node.

    Operators are timed where they run, in the forward and backward of the whole graph, while as
    many processes compute on the node as it will have ranks. A model that fits no process
    (``materialize: per_rank``) is measured operator by operator instead.

    Args:
        progress: called with (work done, all work, what was just done).
        effort: how much time to take.
        journal: what an interrupted profile of the same has measured; it is continued.

    Raises:
        CaptureError: the model, its loss or its data cannot be captured.
    """
    torch.set_num_threads(spec.resources.cpus_per_task)
    sizes = measured_sizes(spec, effort)
    with Neighbours(spec, sizes[0]) as neighbours:
        job = CapturedJob(spec)
        baseline_bytes = _baseline_bytes(job, sizes[0])
        profiling = _Profiling(job, effort, sizes, progress, journal)
        neighbours.wait()
        profile = profiling.profile()
    return replace(
        profile,
        process_baseline_bytes=baseline_bytes,
        assumptions=(*profile.assumptions, *neighbours.assumptions),
    )


def _baseline_bytes(job: CapturedJob, size: int) -> int:
    """What a rank holds besides its stages: libraries, captured graph and data.

    Taken right after the capture, which every rank does for itself and which leaves more behind
    than importing torch does.
    """
    job.training_graph(size)
    states_bytes = sum(t.nbytes for t in job.states.values() if not is_deferred(t))
    return max(0, int(psutil.Process().memory_info().rss) - states_bytes)


class _Profiling:
    def __init__(
        self,
        job: CapturedJob,
        effort: Effort,
        sizes: tuple[int, ...],
        progress: Progress | None,
        journal: Journal | None,
    ) -> None:
        self._job = job
        self._effort = effort
        self._sizes = sizes
        self._journal = journal
        self._precision = job.spec.training.precision
        self._device = choose_device(job.spec.resources.gpus_per_node, 0)
        self._in_parts = any(is_deferred(tensor) for tensor in job.states.values())
        for tensor in job.states.values():
            if not is_deferred(tensor):
                tensor.data = tensor.data.to(self._device.torch_device)
        self._work = Work(progress)

    def profile(self) -> Profile:
        """The profile, but for what is known of the process."""
        profile = self._in_one_piece() if not self._in_parts else self._in_pieces()
        return replace(profile, optimizer=optimizer_cost(self._job, self._torch_device, self._now))

    @property
    def _torch_device(self) -> torch.device:
        return self._device.torch_device
