"""``profile``: from a job spec to ``profile.json``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch import fx
from torch.utils import _pytree as pytree

from pipectl.capture import CapturedGraph, CapturedJob
from pipectl.capture.data import Batches
from pipectl.capture.step import is_deferred, own_path
from pipectl.capture.traits import coupled_operators
from pipectl.errors import CaptureError
from pipectl.faults import is_ours
from pipectl.planner.costs.footprint import Footprints
from pipectl.planner.costs.operator_times import operator_times
from pipectl.profile import MeasuredOn, Operator, Profile
from pipectl.profiler.effort import Effort
from pipectl.profiler.fit import fit_stages
from pipectl.profiler.inplace import InPlace
from pipectl.profiler.journal import Journal
from pipectl.profiler.neighbours import Neighbours
from pipectl.profiler.optimizer import optimizer_cost
from pipectl.profiler.progress import Progress, Work
from pipectl.profiler.records import Records, Timed
from pipectl.profiler.sizes import measured_sizes
from pipectl.profiler.states import SampleStates
from pipectl.profiler.subject import Subject
from pipectl.profiler.timing import Timing
from pipectl.profiler.walk import Measured, Walk
from pipectl.runtime.device import CpuDevice, Device, choose_device, move
from pipectl.runtime.process import settle_process
from pipectl.spec import JobSpec, profile_key

_RANK_BYTES = 24 << 20
"""What a rank's process needs beyond the profiler's: MPI (measured: 14 MiB with MPICH), the
libraries that load with the first operator (8 MiB), and the evaluation graph."""
_IN_PIECES = (
    "operators were measured one at a time, equal ones once, and their times were not scaled to "
    "the time of the whole model, which fits no process (materialize: per_rank)"
)
_WATCHER_BYTES = 12 << 20
"""The process that watches the ranks of a node (measured), counted with each of them."""
_KEPT, _STAGES = "what operators keep", "random stages"
_MEMORY_SHARE = 0.5
"""Of the free memory, for measuring a micro-batch."""


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
        effort: how long to measure.
        journal: where finished measurements are kept, and those of an interrupted run are found.

    Raises:
        CaptureError: the model, its loss or its data cannot be captured.
    """

    def tell(phase: str) -> None:
        if progress is not None:
            progress(0, 0, phase)

    settle_process(spec.threads)
    sizes = measured_sizes(spec, effort)
    tell("capturing the model")
    with Neighbours(spec, sizes[0]) as neighbours:
        job = CapturedJob(spec, tell)
        device = choose_device(spec.resources.gpus_per_node, 0)
        baseline_bytes = _baseline_bytes(job, sizes[0], device)
        job.check_shapes(sizes[0])
        profiling = _Profiling(job, effort, sizes, progress, Records(journal), device)
        tell("waiting for the processes that compute beside")
        neighbours.wait()
        tell("measuring")
        try:
            profile = profiling.profile()
        except Exception as error:
            refusal = job.misfit(sizes[0]) if is_ours(error) else None
            if refusal is None:
                raise
            raise refusal from error
        return replace(
            profile,
            process_baseline_bytes=baseline_bytes,
            device=profiling.device(neighbours.computing),
            assumptions=(*profile.assumptions, *neighbours.assumptions),
        )


def _baseline_bytes(job: CapturedJob, size: int, device: Device) -> int:
    """What a rank holds besides its stages: libraries, captured graph and data.

    An accelerator holds none of it. Taken right after the capture, which every rank does for itself
    and which leaves more behind than importing torch does.
    """
    job.training_graph(size)
    if not isinstance(device, CpuDevice):
        return 0
    states_bytes = sum(t.nbytes for t in job.states.values() if not is_deferred(t))
    own_bytes = max(0, int(psutil.Process().memory_info().rss) - states_bytes)
    return own_bytes + _RANK_BYTES + _WATCHER_BYTES


class _Profiling:
    def __init__(
        self,
        job: CapturedJob,
        effort: Effort,
        sizes: tuple[int, ...],
        progress: Progress | None,
        records: Records,
        device: Device,
    ) -> None:
        self._job = job
        self._effort = effort
        self._sizes = sizes
        self._records = records
        self._left_out: list[str] = []
        self._device = device
        self._in_pieces = any(is_deferred(tensor) for tensor in job.states.values())
        for tensor in job.states.values():
            if not is_deferred(tensor):
                move(tensor, self._device.torch_device)
        self._graph = job.training_graph(sizes[0])
        records.match(self._graph.fingerprint)
        parts = {_size(size): float(size) for size in sizes}
        more = {} if self._in_pieces else {_KEPT: sizes[0] / 2, _STAGES: 2.0 * sizes[0]}
        self._work = Work(progress, {**more, **parts})

    def profile(self) -> Profile:
        """The profile, but for what is known of the process."""
        cost = optimizer_cost(self._job, self._device)
        profile = self._measured_in_pieces() if self._in_pieces else self._measured_in_place()
        kept = [f"{path} stays one operator: {why}" for path, why in self._job.kept.items()]
        found = (*profile.assumptions, *kept, *self._left_out)
        return replace(profile, optimizer=cost, assumptions=found)

    def device(self, neighbours: int) -> MeasuredOn:
        """What was measured on, as far as the process itself knows."""
        kind = self._device.torch_device.type
        cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
        return MeasuredOn(kind, "unknown", cores, threads, torch.__version__, neighbours)

    def _measured_in_pieces(self) -> Profile:
        """Operator by operator, equal ones once."""
        timing = Timing(self._effort.operators.budget_s / 100, self._records.journal)
        times: dict[int, Timed] = {}
        kept: dict[str, Measured] = {}
        for size in self._sizes:
            if not self._is_captured(size):
                continue
            found = self._walk(size, _size(size), timing)
            pairs = {name: (m.times.forward_s, m.times.backward_s) for name, m in found.items()}
            times[size] = Timed(pairs, {})
            kept = kept or found
        return replace(self._assembled(kept, times), assumptions=(_IN_PIECES,))

    def _measured_in_place(self) -> Profile:
        """In the forward and backward of the whole graph and of random stages."""
        kept = self._walk(self._sizes[0], _KEPT, None)
        working_set = self._working_sets(kept)
        times: dict[int, Timed] = {}
        for size in self._sizes:
            if size > self._sizes[0] and not self._fits(kept, size):
                break
            if not self._is_captured(size):
                continue
            times[size] = self._timed(size, working_set)
        fitted = self._fitted(self._assembled(kept, times), working_set)
        return _with_loading(fitted, self._graph, {s: t.loading_s for s, t in times.items()})

    def _is_captured(self, size: int) -> bool:
        """Whether the model takes micro-batches of a size; one it must take is measured first."""
        try:
            self._job.training_graph(size)
        except CaptureError as error:
            if size == self._sizes[0]:
                raise
            self._left_out.append(f"micro-batches of {size} were not measured: {error.message}")
            self._work.end(_size(size))
            return False
        return True

    def _timed(self, size: int, working_set: Mapping[str, float]) -> Timed:
        known = self._records.times(size)
        if known is None:
            inplace = self._in_place(size, working_set)
            known = inplace.operators(
                self._micro_batches(size), lambda share: self._work.advance(_size(size), share)
            )
            self._records.note_times(size, known)
        self._work.end(_size(size))
        return known

    def _micro_batches(self, size: int) -> Iterator[Any]:
        """What a rank that reads data loads itself, between its computations."""
        loader = self._job.loader
        if self._job.spec.data.workers:
            return iter(())
        samples = loader.samples
        batches = Batches(samples, size, drop_last=samples is not None and samples >= size)
        return loader.micro_batches(batches, size)

    def _fitted(self, profile: Profile, working_set: Mapping[str, float]) -> Profile:
        """The profile with what stages take besides operators, and operators scaled to it."""
        size, footprints = profile.micro_batch_size, Footprints(profile)
        fit = self._records.fit()
        if fit is None:
            inplace = self._in_place(size, working_set)
            samples = inplace.samples(footprints, lambda done: self._work.advance(_STAGES, done))
            fit = fit_stages(samples, operator_times(profile, size), inplace.cache_bytes)
            self._records.note_fit(fit)
        self._work.end(_STAGES)
        operators = tuple(operator.scaled(*fit.factors) for operator in profile.operators)
        return replace(profile, operators=operators, stage=fit.stage)

    def _in_place(self, size: int, working_set: Mapping[str, float]) -> InPlace:
        scale = max(1.0, size / self._sizes[0])
        scaled = {name: amount * scale for name, amount in working_set.items()}
        return InPlace(self._subject(size), self._job.states, scaled, self._effort)

    def _walk(self, size: int, part: str, timing: Timing | None) -> dict[str, Measured]:
        """Every operator by itself, for what it keeps, and for its times if asked."""
        subject = self._subject(size)
        states = SampleStates(self._job, self._device.torch_device)
        walk = Walk(subject, states, timing, once=self._in_pieces)
        total = len(subject.graph.operators)
        done = iter(range(1, 1 + total))
        found = walk.measure(lambda name: self._work.advance(part, next(done) / total, name))
        self._work.end(part)
        return found

    def _working_sets(self, kept: Mapping[str, Measured]) -> dict[str, float]:
        """Bytes that every operator touches, about: parameters, gradients and what it keeps."""
        return {
            node.name: 2.0 * sum(size for _, size in self._parameters(node))
            + sum(size for _, size in kept[node.name].saved)
            for node in self._graph.operators
        }

    def _fits(self, kept: Mapping[str, Measured], size: int) -> bool:
        """Whether a micro-batch of so many samples leaves the device enough memory."""
        saved = dict(pair for measured in kept.values() for pair in measured.saved)
        needed = sum(saved.values()) * size / self._sizes[0]
        return needed < _MEMORY_SHARE * self._device.free_bytes()

    def _subject(self, size: int) -> Subject:
        return Subject.of(self._job, size, self._device)

    def _assembled(self, kept: Mapping[str, Measured], times: Mapping[int, Timed]) -> Profile:
        spec, graph = self._job.spec, self._graph
        return Profile(
            name=spec.name,
            source=f"pipectl profile, torch {torch.__version__}, {self._device.torch_device}",
            micro_batch_size=self._sizes[0],
            operators=tuple(self._operator(n, kept[n.name], times) for n in graph.operators),
            edges=graph.edges,
            fingerprint=graph.fingerprint,
            key=profile_key(spec),
            coupled=tuple(_readable(graph.operators[i]) for i in coupled_operators(graph)),
        )

    def _operator(self, node: fx.Node, measured: Measured, times: Mapping[int, Timed]) -> Operator:
        graph, name, base = self._graph, node.name, self._sizes[0]
        forward_s, backward_s = times[base].uncached[name]
        parameters = self._parameters(node)
        some_cached = any(timed.cached for timed in times.values())
        return Operator(
            id=name,
            name=_readable(node),
            forward_s=forward_s,
            backward_s=backward_s,
            parameter_bytes=sum(size for _, size in parameters),
            output_bytes=measured.output_bytes,
            gradient_bytes=measured.output_bytes if graph.requires_grad[name] else 0,
            parameters=parameters,
            saved=measured.saved,
            timings={size: t.uncached[name] for size, t in times.items() if size != base},
            cached={s: (t.cached or t.uncached)[name] for s, t in times.items() if some_cached},
            group=graph.groups.get(name),
            signature=graph.signatures[name],
            memory=measured.memory,
        )

    def _parameters(self, node: fx.Node) -> tuple[tuple[str, int], ...]:
        graph = self._graph
        states = [graph.states[s.name] for s in graph.tensor_inputs(node) if s.name in graph.states]
        names = [state.name for state in states if state.kind == "parameter"]
        return tuple((name, self._job.states[name].nbytes) for name in dict.fromkeys(names))


def _with_loading(
    profile: Profile, graph: CapturedGraph, loading_s: Mapping[int, float]
) -> Profile:
    """With the time to load a micro-batch in the operators that read inputs and targets first.

    The ranks of their stages load the data, each for itself.

    Args:
        loading_s: by micro-batch size.
    """

    def first_reader(part: int) -> str | None:
        names = [n for n, place in graph.places.items() if place[0] == pytree.SequenceKey(part)]
        users = [user for name in names for user in graph.users.get(name, ())]
        return min(users, key=graph.position.__getitem__, default=None)

    readers = {first_reader(0), first_reader(1)}
    operators = [
        _changed(each, profile.micro_batch_size, lambda size, f, b: (f + loading_s[size], b))
        if each.id in readers
        else each
        for each in profile.operators
    ]
    return replace(
        profile, operators=tuple(operators), loading_s=loading_s[profile.micro_batch_size]
    )


def _changed(
    operator: Operator, size: int, change: Callable[[int, float, float], tuple[float, float]]
) -> Operator:
    """An operator with other times.

    Args:
        size: of the profile's micro-batches.
        change: from a micro-batch size, forward and backward time to these two.
    """
    forward_s, backward_s = change(size, operator.forward_s, operator.backward_s)
    return replace(
        operator,
        forward_s=forward_s,
        backward_s=backward_s,
        timings={size: change(size, *pair) for size, pair in operator.timings.items()},
        cached={size: change(size, *pair) for size, pair in operator.cached.items()},
    )


def _size(size: int) -> str:
    return f"micro-batch size {size}"


def _readable(node: fx.Node) -> str:
    """Path of the module an operator belongs to, then the operator."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = own_path(stack[-1][0]) if stack else ""
    return f"{path}.{node.name}" if path else node.name
