"""``profile``: from a job spec to ``profile.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import torch

from pipectl.capture import CapturedJob
from pipectl.capture.job import SMALLEST_EXPORT
from pipectl.capture.model_with_loss import own_name
from pipectl.capture.operators import runs_own_code
from pipectl.capture.slices import coupled_operators
from pipectl.capture.tensors import is_deferred
from pipectl.errors import CaptureError
from pipectl.faults import is_ours
from pipectl.planner.costs.footprint import Footprints
from pipectl.profile import Profile
from pipectl.profile_parts import MeasuredOn, Operator, SmallestMicroBatch
from pipectl.profiler.bench import MeasuredTimes, Subject, time_operators, time_stages
from pipectl.profiler.effort import Effort, Work, measured_sizes, sizes_from
from pipectl.profiler.fit import CACHE_SHARES, DISTURBED, Fit, fit_stages
from pipectl.profiler.halved_loss import compare_halves
from pipectl.profiler.halved_metrics import find_uneven_metrics
from pipectl.profiler.journal import Journal
from pipectl.profiler.machine import last_level_bytes
from pipectl.profiler.neighbours import Neighbours
from pipectl.profiler.operators import Walk
from pipectl.profiler.optimizer import optimizer_cost
from pipectl.profiler.readings import (
    NOTES,
    find_redrawn,
    find_redrawn_samples,
    find_shared_samples,
    other_reader,
)
from pipectl.profiler.script_steps import compare_script, uncompared_of, values_of_script
from pipectl.profiler.trial import try_job, try_metrics
from pipectl.runs.code import Code, loaded_here
from pipectl.runtime.device import (
    CpuDevice,
    Device,
    choose_device,
    move,
    reset_resident_peak,
    resident_peak_bytes,
    set_arithmetic,
    settle_process,
)
from pipectl.spec import JobSpec, evaluation_key, profile_key
from pipectl.torch_api import pytree
from pipectl.units import Report, plural

_MPI_BYTES = 14 << 20
"""What MPI takes of a rank's process (measured with MPICH)."""
_RANK_BYTES = _MPI_BYTES + (10 << 20)
"""What a rank's process needs beyond the profiler's when it trains: also the libraries that load
with the first operator (8 MiB), and the evaluation graph."""
_WATCHER_BYTES = 12 << 20
"""The process that watches the ranks of a node (measured), counted with each of them."""
_IN_PIECES = (
    "operators were measured one at a time, equal ones once, and their times were not scaled to "
    "the time of the whole model, which fits no process (materialize: per_rank)"
)
_DISTURBED = (
    "stages took {:.0%} more or less than their operators on average, so other processes probably "
    "disturbed the measurement (profile --again measures again)"
)
_KEPT, _STAGES = "what operators keep", "random stages"
_MEMORY_SHARE = 0.5
"""Of the free memory, for measuring a micro-batch."""


def profile_job(
    spec: JobSpec,
    measured_on: MeasuredOn,
    progress: Report | None = None,
    *,
    effort: Effort = Effort.NORMAL,
    journal: Journal | None = None,
    uncompared: Sequence[str] | None = None,
) -> Profile:
    """Capture a job's model and measure every operator on this node.

    Operators are timed in place, in the forward and backward of the whole graph, while as many
    processes compute on the node as it will have ranks. A model that fits in no process
    (``materialize: per_rank``) is measured operator by operator instead.

    Args:
        measured_on: the device of a rank, without what the measurement shows of it.
        progress: called with (work done, total work, what was just done).
        effort: how long to measure.
        journal: keeps finished measurements, and has those of an interrupted run.
        uncompared: what could not be compared of the job's script, if that is known already.

    Raises:
        CaptureError: the model, its loss or its data cannot be captured.
    """

    def notify(phase: str) -> None:
        if progress is not None:
            progress(0, 0, phase)

    settle_process(spec.threads)
    set_arithmetic(spec.training)
    sizes = measured_sizes(spec, effort)
    if spec.script is not None and uncompared is None:
        notify("comparing the first steps of the script")
    compared = compare_script(spec) if uncompared is None else None
    uncompared = uncompared_of(compared) if uncompared is None else uncompared
    notify("capturing the model")
    with other_reader(spec) as other, Neighbours(spec, sizes[0]) as neighbours:
        reset_resident_peak()
        job = CapturedJob(spec, notify)
        device = choose_device(spec.resources.gpus_per_node, 0)
        baseline_bytes, capture_bytes = _process_bytes(job, sizes[0], device)
        smallest, reason = job.smallest(sizes[0])
        is_open = spec.pipeline.micro_batches is None
        job.check_epoch(None if is_open else sizes[0], smallest)
        sizes = sizes_from(sizes, smallest)
        job.check_shapes(sizes[0])
        readings = other.compare(job)
        redrawn = find_redrawn(job, sizes[0])
        script_values = values_of_script(job, compared)
        journal = Journal() if journal is None else journal  # an empty one counts as false
        notify("trying what else the job needs")
        try_job(job, sizes[0], device.torch_device)
        # That captures graphs, for which parameters are on the host; the rest needs them here.
        for tensor in job.states.values():
            if not is_deferred(tensor):
                move(tensor, device.torch_device)
        try_metrics(job, sizes[0], device.torch_device)
        uneven = find_uneven_metrics(job, sizes[0], device.torch_device)
        loss = compare_halves(job, sizes, device)
        notify("waiting for the processes on the other cores")
        neighbours.wait()
        notify("measuring")
        try:
            profile = _Profiling(job, effort, sizes, progress, journal, device).profile()
        except Exception as error:
            refusal = job.misfit(sizes[0]) if is_ours(error) else None
            if refusal is None:
                raise
            raise refusal from error
        differing = (NOTES[readings],) if readings in NOTES else ()
        return replace(
            profile,
            readings=readings,
            redrawn=redrawn,
            script_samples=None if job.script is None else job.script.samples_per_step,
            script_values=script_values,
            smallest=SmallestMicroBatch(smallest, reason) if reason else None,
            epoch=job.loader.counts,
            halved_loss=None if isinstance(loss, str) else loss,
            loss_unknown=loss if isinstance(loss, str) else "",
            evaluation_key=evaluation_key(spec),
            held_out=() if (held_out := job.evaluation_loader) is None else held_out.counts,
            shared_samples=(shared := find_shared_samples(job)),
            redrawn_samples=() if shared else find_redrawn_samples(job, other),
            uneven_metrics=uneven,
            code=tuple(Code.of(spec).with_loaded(loaded_here()).loaded.values()),
            process_baseline_bytes=baseline_bytes,
            capture_bytes=capture_bytes,
            device=replace(
                measured_on,
                neighbours=neighbours.computing,
                memory_bytes=device.usable_bytes(),
            ),
            assumptions=(*profile.assumptions, *neighbours.assumptions, *differing, *uncompared),
        )


def _process_bytes(job: CapturedJob, size: int, device: Device) -> tuple[int, int]:
    """Return what a rank needs besides its stages, and the peak while it captures the model.

    Besides its stages, it needs libraries, the captured graph and data. Both are measured directly
    after the capture, which every rank does for itself, with the whole model in memory unless it is
    ``per_rank``. An accelerator holds none of it.
    """
    job.training_graph(max(size, SMALLEST_EXPORT))  # perhaps it takes no single samples
    if not isinstance(device, CpuDevice):
        return 0, 0
    states_bytes = sum(t.nbytes for t in job.states.values() if not is_deferred(t))
    own_bytes = max(0, int(psutil.Process().memory_info().rss) - states_bytes)
    return own_bytes + _RANK_BYTES + _WATCHER_BYTES, resident_peak_bytes() + _MPI_BYTES


class _Profiling:
    """The measurements of one job.

    Args:
        job: its parameters are on the device.
        sizes: of micro-batches, that of the profile first.
    """

    def __init__(
        self,
        job: CapturedJob,
        effort: Effort,
        sizes: tuple[int, ...],
        progress: Report | None,
        journal: Journal,
        device: Device,
    ) -> None:
        self._job, self._effort, self._sizes = job, effort, sizes
        self._journal, self._device = journal, device
        self._assumptions: list[str] = []
        self._hiding: set[str] = set()
        self._in_pieces = job.is_deferred
        self._graph = job.training_graph(sizes[0])
        journal.match(self._graph.fingerprint)
        # Graphs are made, and rounds have a least time, however small the micro-batches are.
        base = float(sizes[0])
        parts = {_part_of(size): base + size for size in sizes}
        more = {} if self._in_pieces else {_KEPT: 2.0 * base, _STAGES: 4.0 * base}
        self._work = Work(progress, {**more, **parts})

    def profile(self) -> Profile:
        """Return the profile, without what is known of the process."""
        optimizer = optimizer_cost(self._job, self._device)
        profile = self._measure_in_pieces() if self._in_pieces else self._measure_in_place()
        notes = [f"{path} stays one operator: {why}" for path, why in self._job.kept.items()]
        samples, batch = self._job.loader.samples, self._job.spec.training.batch_size
        if samples is not None and samples < batch:
            notes.append(
                f"the data have {plural(samples, 'sample')}, fewer than training.batch_size: the "
                f"prediction is for {batch}, but steps take {samples}"
            )
        lengths = self._job.loader.lengths
        if len(lengths) > 1:
            notes.append(f"all sequences have length {lengths[-1]}, the largest of data.buckets")
        assumptions = (*profile.assumptions, *notes, *self._assumptions)
        return replace(profile, optimizer=optimizer, assumptions=assumptions)

    def _measure_in_pieces(self) -> Profile:
        """Measure operator by operator, equal ones once."""
        budget_s = self._effort.operators.budget_s / 100
        operators: dict[str, Operator] = {}
        times: dict[int, MeasuredTimes] = {}
        for size in self._sizes:
            if self._is_captured(size):
                measured = self._measure_alone(size, _part_of(size), budget_s)
                pairs = {name: (o.forward_s, o.backward_s) for name, o in measured.items()}
                times[size] = MeasuredTimes(pairs, {})
                operators = operators or measured
        return replace(self._assemble(operators, times), assumptions=(_IN_PIECES,))

    def _measure_in_place(self) -> Profile:
        """Measure in the forward and backward of the whole graph and of random stages."""
        base = self._sizes[0]
        measured = self._measure_alone(base, _KEPT, None)
        saved_bytes = sum(dict(pair for one in measured.values() for pair in one.saved).values())
        # Bytes that every operator touches, about: parameters, gradients and what it keeps.
        working_set = {
            name: float(
                sum(size for _, size in (*one.parameters, *one.parameter_gradients, *one.saved))
            )
            for name, one in measured.items()
        }
        times: dict[int, MeasuredTimes] = {}
        for size in self._sizes:
            needed_bytes = saved_bytes * size / base
            if size > base and needed_bytes >= _MEMORY_SHARE * self._device.free_bytes():
                break
            if self._is_captured(size):
                scale = max(1.0, size / base)
                scaled = {name: amount * scale for name, amount in working_set.items()}
                measure = partial(self._time_operators, size, scaled)
                times[size] = self._journal.remember(str(size), MeasuredTimes, measure)
                self._work.end(_part_of(size))
        profile = self._assemble(measured, times)
        cache_bytes = self._cache_bytes(working_set)
        fit = self._journal.remember("stages", Fit, partial(self._fit, profile, cache_bytes))
        self._work.end(_STAGES)
        if fit.error > DISTURBED:
            self._assumptions.append(_DISTURBED.format(fit.error))
        operators = tuple(operator.scaled(*fit.factors) for operator in profile.operators)
        profile = replace(profile, operators=operators, stage=fit.stage, split=fit.split)
        return self._with_loading(profile, {size: each.loading_s for size, each in times.items()})

    def _is_captured(self, size: int) -> bool:
        """Return whether the model accepts a micro-batch size; raise for the profile's."""
        try:
            self._job.training_graph(size)
        except CaptureError as error:
            if size == self._sizes[0]:
                raise
            left_out = f"micro-batches of {size} were not measured: {error.message}"
            self._assumptions.append(left_out)
            self._work.end(_part_of(size))
            return False
        return True

    def _measure_alone(self, size: int, part: str, budget_s: float | None) -> dict[str, Operator]:
        """Measure every operator alone: what it keeps, and its times if there is a budget."""
        subject = Subject.of(self._job, size, self._device)
        walk = Walk(self._job, subject, self._journal, budget_s)
        total = len(subject.graph.operators)
        done = iter(range(1, 1 + total))
        measured = walk.measure(lambda name: self._work.advance(part, next(done) / total, name))
        self._hiding |= walk.hiding
        self._work.end(part)
        return measured

    def _cache_bytes(self, working_set: Mapping[str, float]) -> int | None:
        """Return the last level cache; None on an accelerator, or if it is large enough."""
        if not isinstance(self._device, CpuDevice):
            return None
        cache_bytes = last_level_bytes()
        return cache_bytes if sum(working_set.values()) > CACHE_SHARES[0] * cache_bytes else None

    def _time_operators(self, size: int, working_set: Mapping[str, float]) -> MeasuredTimes:
        loader = self._job.loader
        loaded: Iterator[Any] = iter(())
        if not self._job.spec.data.workers:  # a rank loads it itself, between its computations
            loader = loader.with_batch_size(size, drop_last=(loader.samples or 0) >= size)
            loaded = loader.micro_batches(loader.batches(), size)
        subject = Subject.of(self._job, size, self._device)
        cache_bytes = self._cache_bytes(working_set)
        rounds, advance = self._effort.operators, partial(self._work.advance, _part_of(size))
        return time_operators(subject, working_set, cache_bytes, rounds, loaded, advance)

    def _fit(self, profile: Profile, cache_bytes: int | None) -> Fit:
        """Return what stages take besides operators, and the factors of operators."""
        size = profile.micro_batch_size
        subject = Subject.of(self._job, size, self._device)
        rounds, advance = self._effort.stages, partial(self._work.advance, _STAGES)
        samples = time_stages(subject, Footprints(profile), rounds, advance)
        return fit_stages(samples, profile, cache_bytes)

    def _assemble(
        self, measured: Mapping[str, Operator], times: Mapping[int, MeasuredTimes]
    ) -> Profile:
        spec, graph, base = self._job.spec, self._graph, self._sizes[0]
        some_cached = any(timed.cached for timed in times.values())
        operators = {
            name: replace(
                operator,
                forward_s=times[base].uncached[name][0],
                backward_s=times[base].uncached[name][1],
                timings={size: t.uncached[name] for size, t in times.items() if size != base},
                cached={s: (t.cached or t.uncached)[name] for s, t in times.items() if some_cached},
            )
            for name, operator in measured.items()
        }
        coupled = [graph.operators[place].name for place in coupled_operators(graph)]
        return Profile(
            name=spec.name,
            source=f"pipectl profile, torch {torch.__version__}, {self._device.torch_device}",
            micro_batch_size=base,
            operators=tuple(operators.values()),
            edges=graph.edges,
            fingerprint=graph.fingerprint,
            key=profile_key(spec),
            coupled=tuple(operators[name].name for name in coupled),
            carried=tuple((own_name(name), node) for name, node in graph.carried.items()),
            own_code=tuple(
                node.name
                for node in graph.operators
                if runs_own_code(node) or node.name in self._hiding
            ),
        )

    def _with_loading(self, profile: Profile, loading_s: Mapping[int, float]) -> Profile:
        """Add the time to load a micro-batch to the first operators that read inputs and targets.

        The ranks of their stages load the data, each for itself.

        Args:
            loading_s: by micro-batch size.
        """
        graph, base_s = self._graph, loading_s[profile.micro_batch_size]
        readers = set()
        for part in (0, 1):
            names = [n for n, place in graph.places.items() if place[0] == pytree.SequenceKey(part)]
            users = [user for name in names for user in graph.users.get(name, ())]
            readers.add(min(users, key=graph.position.__getitem__, default=None))

        def longer(times: Mapping[int, tuple[float, float]]) -> dict[int, tuple[float, float]]:
            return {size: (f + loading_s[size], b) for size, (f, b) in times.items()}

        operators = [
            replace(
                operator,
                forward_s=operator.forward_s + base_s,
                timings=longer(operator.timings),
                cached=longer(operator.cached),
            )
            if operator.id in readers
            else operator
            for operator in profile.operators
        ]
        return replace(profile, operators=tuple(operators), loading_s=base_s)


def _part_of(size: int) -> str:
    """The name of the measurement of a micro-batch size, for the progress."""
    return f"micro-batch size {size}"
