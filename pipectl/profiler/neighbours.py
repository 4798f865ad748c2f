"""Processes that compute during the measurement, as the other ranks of a node will.

Cores share caches and the memory bus, and ranks that take turns on a core replace each other's
values in its caches, so an operator alone on a node is faster than in training. Each neighbour
captures the same job and trains it repeatedly until it is stopped.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event

import psutil

from pipectl.batch import LOCAL, system_of_this_node
from pipectl.capture import CapturedJob
from pipectl.older_python import Self
from pipectl.profiler.bench import Bench, Subject, single_stage
from pipectl.profiler.processes import begin_apart, start_processes
from pipectl.runtime.device import CpuDevice, set_arithmetic, settle_process
from pipectl.spec import JobSpec
from pipectl.spec.code import Snapshot, active, using

_MAX_RANKS_PER_CORE = 2
"""While measuring; further ranks on a core would take longer and change little."""
_PATIENCE_S = 60.0
_STEP_S = 0.05
_END_S = 10.0
"""For all of them to end by themselves."""


class Neighbours:
    """As many processes as the node will have other ranks; see :func:`neighbour_count`.

    Args:
        size: samples of the micro-batches that they compute.
    """

    def __init__(self, spec: JobSpec, size: int) -> None:
        self._spec = spec
        self._size = size
        self.count = neighbour_count(spec, len(os.sched_getaffinity(0)), system_of_this_node())
        context = multiprocessing.get_context("spawn")
        self._stop = context.Event()
        self._ready = [context.Event() for _ in range(self.count)]
        # Not daemons: a DataLoader of a script may start processes.
        self._processes: list[BaseProcess] = [
            context.Process(target=_compute, args=(spec, size, place, ready, self._stop, active()))
            for place, ready in enumerate(self._ready)
        ]

    def __enter__(self) -> Self:
        try:
            start_processes(self._processes)
        except BaseException:
            self.__exit__()  # Python waits at its end for those that have started
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        started = [process for process in self._processes if process.pid is not None]
        for process in started:
            process.terminate()
        deadline = time.monotonic() + _END_S
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()

    @property
    def assumptions(self) -> tuple[str, ...]:
        """A note for the profile if some neighbours did not start."""
        missing = self.count - self.computing
        if not missing:
            return ()
        return (
            f"{missing} of {self.count} neighbour processes failed to start while measuring, or "
            "found too little memory",
        )

    @property
    def computing(self) -> int:
        """Number of neighbours that compute."""
        return sum(
            ready.is_set() and process.is_alive()
            for ready, process in zip(self._ready, self._processes, strict=True)
        )

    def wait(self) -> None:
        """Wait until all neighbours compute or have failed, or take too long."""
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            pairs = zip(self._ready, self._processes, strict=True)
            if all(ready.is_set() or not process.is_alive() for ready, process in pairs):
                return
            time.sleep(_STEP_S)


def neighbour_count(spec: JobSpec, cores: int, scheduler: str) -> int:
    """Return the number of neighbours for a job on a machine with this number of cores.

    It is 0 for a model that fits in no process, and for accelerators, because each rank has its
    own. Ranks with one thread each may share cores, unless a batch system gives them cores.

    Args:
        scheduler: batch system of this machine, or ``local``.
    """
    alone = spec.model.materialize == "per_rank" or spec.resources.gpus_per_node > 0
    shares_cores = scheduler == LOCAL and spec.resources.cpus_per_task == 1
    ranks_per_core = _MAX_RANKS_PER_CORE if shares_cores else 1
    places = ranks_per_core * cores // spec.resources.cpus_per_task
    at_once = min(spec.resources.tasks_per_node, places)
    return 0 if alone else max(0, at_once - 1)


def has_room(job: CapturedJob, place: int) -> bool:
    """Return whether memory is left for the gradients of the measuring process and neighbours up to
    this.
    """
    gradients = sum(tensor.nbytes for tensor in job.states.values() if tensor.requires_grad)
    return (place + 2) * gradients <= int(psutil.virtual_memory().available)


def _compute(
    spec: JobSpec, size: int, place: int, ready: Event, stop: Event, code: Snapshot | None
) -> None:
    """Train until told to stop, or until the measuring process has ended.

    Args:
        place: among the neighbours; if memory is short, the first ones compute.
        code: that the measuring process uses.
    """
    begin_apart()
    settle_process(spec.threads)
    set_arithmetic(spec.training)
    measuring = multiprocessing.parent_process()
    assert measuring is not None
    with using(code):
        job = CapturedJob(spec)
        if not has_room(job, place):
            return
        subject = Subject.of(job, max(size, job.smallest(size)[0]), CpuDevice())
        bench = Bench(subject, single_stage(subject.graph))
        ready.set()
        while not stop.is_set() and measuring.is_alive():
            bench.run(0)
