"""Timing operators and stages in place: in stages, repeatedly, as ranks run them.

A first pass runs the stages in the order of the pipeline and stores what each one receives:
activations for its forward, gradients for its backward. Any stage can then be run alone, one
forward and one backward at a time, as in the steady state of 1F1B.

For the times of operators the whole graph runs as one stage. If its data does not fit in the cache,
it also runs in windows that do, one at a time: a stage of a long pipeline is like them. Random
stages are timed as a whole too, for what stages take in addition to their operators.

An operator measured alone has other caches, another allocator and other neighbours than in a stage,
and does not include what autograd does between operators. Marks are therefore set into the stage's
own code:

    mark  conv2d  mark  batch_norm  mark  relu  mark

A mark records the time and the number of autograd nodes so far; so every node of the backward
belongs to the operator that created it, and a hook before each node records when it starts. The
time between two records belongs to the operator, including gradient accumulation.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, pairwise, repeat
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from pipectl.capture import CapturedGraph, CapturedJob, Cut, Slot
from pipectl.capture.batch import by_name, copy_written_inputs
from pipectl.capture.randomness import SEEDERS
from pipectl.capture.slices import Span
from pipectl.capture.stage import Pass, StageCode
from pipectl.lanes import TransferKind
from pipectl.planner.costs.footprint import Footprints
from pipectl.profiler.effort import Rounds
from pipectl.profiler.fit import CACHE_SHARES, Sample, StageTimes
from pipectl.profiler.machine import Clock, clock_for, clock_of, loading_clock
from pipectl.runtime.casts import SharedCast
from pipectl.runtime.device import Device
from pipectl.runtime.layout import Tensors
from pipectl.runtime.segment import MicroBatch
from pipectl.runtime.stage import Stage
from pipectl.torch_api import count_nodes, number_of

Pairs = dict[str, tuple[float, float]]
"""(forward_s, backward_s) by operator."""
Advance = Callable[[float], None]
"""Called with the share of a measurement that is done."""
_SEED = 1
_MIN_STAGES, _MAX_STAGES = 2, 6
_COPIES = 20
_MIN_CUTS, _MAX_CUTS = 3, 12
_SPLIT_CUTS = 2
"""Cuts whose stages are also timed with split backwards."""
_OUTSIDE = -1
_TRIALS = 15
_CHAIN = 200


class Cost(NamedTuple):
    """The cost of measuring, in seconds: of a mark, and of a hook of the backward."""

    mark_s: float
    hook_s: float


class MarkedCode:
    """A stage's code with marks, which record when every operator begins.

    Args:
        operators: names of the captured operators; other calls belong to one of them.
        clock: in seconds, after all queued work.
        cost: of measuring, subtracted from every figure.
    """

    def __init__(
        self, code: StageCode, operators: Container[str], clock: Clock, cost: Cost
    ) -> None:
        self._clock, self._cost = clock, cost
        self._begins, self._nodes = begins, nodes = list[float](), list[int]()
        self._turns: list[tuple[int, float]] = []
        self._roots: list[Any] = []
        module = code.module_for(Pass.MARK)
        # That of a seed or a cast is the next operator, that of a fork the one before.
        owner_of: dict[fx.Node, str] = {}
        waiting: list[fx.Node] = []
        for node in module.graph.nodes:
            if node.op != "call_function":
                continue
            waiting.append(node)
            leads = node.target in SEEDERS or isinstance(node.target, SharedCast)
            if node.name in operators or (owner_of and not leads):
                owner = node.name if node.name in operators else next(reversed(owner_of.values()))
                owner_of.update(dict.fromkeys(waiting, owner))
                waiting = []

        def mark() -> None:
            nodes.append(count_nodes())
            begins.append(clock())

        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        self._owners: list[str] = []  # of what lies between two marks
        for node in module.graph.nodes:
            owner = owner_of.get(node, "")
            if node.op == "output" or (owner and [owner] != self._owners[-1:]):
                graph.call_function(mark)
                self._owners += [owner] if owner else []
            copies[node] = graph.node_copy(node, copies.__getitem__)
        self._module = fx.GraphModule(module, graph)

    def __call__(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Run the stage's code."""
        self._begins.clear()
        self._nodes.clear()
        results: tuple[Tensor, ...] = self._module(*arguments)
        self._roots = [tensor.grad_fn for tensor in results if tensor.grad_fn is not None]
        return results

    def watch_backward(self) -> None:
        """Set the hooks for the backward of the last call."""
        self._turns.clear()
        visited = set(self._roots)
        waiting = list(visited)
        while waiting:
            node = waiting.pop()
            if "AccumulateGrad" not in type(node).__name__:
                node.register_prehook(self._hook(node))
            for later, _ in node.next_functions:
                if later is not None and later not in visited:
                    visited.add(later)
                    waiting.append(later)
        self._roots = []

    def _hook(self, node: Any) -> Callable[[Any], None]:
        number = number_of(node)
        within = self._nodes[0] <= number < self._nodes[-1]
        index = bisect_right(self._nodes, number) - 1 if within else _OUTSIDE
        turns, clock = self._turns, self._clock

        def turn(_: Any) -> None:
            turns.append((index, clock()))

        return turn

    def spent(self, end: float) -> Pairs:
        """Return the times of the call and of its backward, which ended at ``end``."""
        backward_s = dict.fromkeys(self._owners, 0.0)
        for (index, begin), (_, over) in pairwise([*self._turns, (_OUTSIDE, end)]):
            if index != _OUTSIDE:
                backward_s[self._owners[index]] += max(0.0, over - begin - self._cost.hook_s)
        return {
            owner: (max(0.0, over - begin - self._cost.mark_s), backward_s[owner])
            for owner, (begin, over) in zip(self._owners, pairwise(self._begins), strict=True)
        }


def cost_of_measuring(clock: Clock) -> Cost:
    """Measure a mark and a hook on this machine, by the same clock; medians of some trials."""

    def backward_s(hook: Callable[[Any], None] | None) -> float:
        """Time the backward of a chain of small operators, with or without a hook at each."""
        value = torch.ones(1, requires_grad=True)
        for _ in range(_CHAIN):
            value = -value
            if hook is not None:
                assert value.grad_fn is not None
                value.grad_fn.register_prehook(hook)
        start = clock()
        value.backward()  # type: ignore[no-untyped-call]
        return clock() - start

    marks, hooks = [], []
    numbers: list[int] = []
    looks: list[float] = []
    for _ in range(_TRIALS):
        start = clock()
        for _ in range(_CHAIN):
            numbers.append(count_nodes())
            looks.append(clock())
        marks.append((clock() - start) / _CHAIN)
        plain_s = backward_s(None)
        hooks.append((backward_s(lambda _: looks.append(clock())) - plain_s) / _CHAIN)
    return Cost(median(marks), max(0.0, median(hooks)))


@dataclass(frozen=True)
class Subject:
    """A graph and the micro-batch on which it is measured.

    Args:
        states: parameters and buffers by full name.
        batch: the tensors of the micro-batch by name, on the device.
        size: number of samples.
        precision: as in the spec.
        length: of its sequences; 0 without buckets.
    """

    graph: CapturedGraph
    states: Mapping[str, Tensor]
    batch: Mapping[str, Tensor]
    size: int
    device: Device
    precision: str
    length: int = 0

    @classmethod
    def of(cls, job: CapturedJob, size: int, device: Device) -> Subject:
        """Return a job's training graph and the first samples of its data, padded to the largest
        length.
        """
        graph = job.training_graph(size)
        named = by_name(graph, job.loader.example(size))
        target = device.torch_device
        batch = {name: leaf.to(target) for name, leaf in named.items() if isinstance(leaf, Tensor)}
        precision, length = job.spec.training.precision, job.loader.lengths[-1]
        return cls(graph, job.states, batch, size, device, precision, length)


class Bench:
    """Runs and times the stages of one cut.

    Args:
        stage_of: stage of every operator of the training graph.
        splits: whether to split backwards.

    Attributes:
        clock: for all times; see :func:`fit_clocks`.
    """

    def __init__(
        self, subject: Subject, stage_of: Mapping[str, int], *, splits: bool = False
    ) -> None:
        self.cut = Cut(subject.graph, stage_of, training=True)
        self.clock = clock_of(subject.device)
        span = Span.of(subject.size, subject.length)
        self._micro_batch, self._key = MicroBatch(0, span, _SEED), (True, span)
        states, device, precision = subject.states, subject.device, subject.precision
        self._stages = [
            Stage(index, {self._key: self.cut}, states, device, precision=precision)
            for index in range(1 + max(stage_of.values()))
        ]
        for stage in self._stages if splits else ():
            stage.split_backwards()
        self._marked: dict[int, MarkedCode] = {}
        self._batches = [
            {name: subject.batch[name] for name in stage.inputs(*self._key)}
            for stage in self._stages
        ]
        self._received: dict[tuple[TransferKind, int], dict[Slot, Tensor | None]] = {
            (kind, stage): {} for kind in TransferKind for stage in range(len(self))
        }
        for index in range(len(self)):
            sent = self._forward(index, self._batch(index))
            self._deliver(TransferKind.ACTIVATION, index, sent)
        for index in reversed(range(len(self))):
            self._deliver(TransferKind.GRADIENT, index, self._backward(index))
            self._finish_backward(index)

    def __len__(self) -> int:
        return len(self._stages)

    def run(self, index: int) -> StageTimes:
        """Run one forward and one backward of a stage, and time each."""
        batch = self._batch(index)
        start = self.clock()
        self._forward(index, batch)
        forward = self.clock()
        self._backward(index)
        backward = self.clock()
        self._finish_backward(index)
        return StageTimes(forward - start, backward - forward, self.clock() - backward)

    def run_marked(self, index: int, cost: Cost) -> Pairs:
        """Run a stage with marks; return the seconds of each operator.

        Args:
            cost: of measuring.
        """
        bound = self._stages[index].segments[0].codes[self._micro_batch.span]
        plain = bound.code
        if index not in self._marked:
            operators = self.cut.graph.position
            self._marked[index] = MarkedCode(plain, operators, self.clock, cost)
        marked = self._marked[index]
        bound.code = plain.after(Pass.MARK, marked)
        self._forward(index, self._batch(index))
        bound.code = plain
        marked.watch_backward()
        self._backward(index)
        return marked.spent(self.clock())

    def run_all(self) -> list[StageTimes]:
        """Return the times of every stage; a run before fills the caches."""
        times = []
        for index in range(len(self)):
            self.run(index)
            times.append(self.run(index))
        self.forget()
        return times

    def forget(self) -> None:
        """Drop the gradients of parameters."""
        for stage in self._stages:
            stage.forget()

    def _batch(self, index: int) -> dict[str, Tensor]:
        """Return the batch tensors of a stage for one forward; every run finds the same values."""
        return copy_written_inputs(self.cut.graph, self._batches[index])

    def _forward(self, index: int, batch: Mapping[str, Tensor]) -> Tensors:
        received = self._received[TransferKind.ACTIVATION, index]
        return self._stages[index].forward(self._micro_batch, batch, received)

    def _backward(self, index: int) -> Tensors:
        received = dict(self._received[TransferKind.GRADIENT, index])
        return self._stages[index].backward(self._micro_batch, received, 1.0)

    def _finish_backward(self, index: int) -> None:
        self._stages[index].finish_backward(self._micro_batch.number)

    def _deliver(self, kind: TransferKind, source: int, sent: Tensors) -> None:
        for lane, slots in self.cut.lanes.items():
            if lane.kind is kind and lane.source == source:
                for slot in slots:
                    tensor = sent.get(slot)
                    copy = None if tensor is None else tensor.detach().clone()
                    self._received[kind, lane.target][slot] = copy


def single_stage(graph: CapturedGraph) -> dict[str, int]:
    """Return the cut with everything in one stage."""
    return {node.name: 0 for node in graph.operators}


def windows(graph: CapturedGraph, sizes: Mapping[str, float], limit: float) -> dict[str, int]:
    """Return a cut into runs of operators of at most ``limit`` in total, if groups allow it.

    Args:
        sizes: of every operator, in any unit.
    """
    total = 0.0
    borders: set[int] = set()
    allowed = set(_borders(graph))
    for index, node in enumerate(graph.operators):
        size = sizes[node.name]
        if index in allowed and total and total + size > limit:
            borders.add(index)
            total = 0.0
        total += size
    return _stages(graph, borders)


def random_stages(graph: CapturedGraph, seed: int) -> dict[str, int]:
    """Return a cut into 2 to 6 runs of operators, anywhere that groups allow."""
    draw = random.Random(seed)
    allowed = _borders(graph)
    count = min(draw.randint(_MIN_STAGES, _MAX_STAGES) - 1, len(allowed))
    return _stages(graph, draw.sample(allowed, count))


def _borders(graph: CapturedGraph) -> list[int]:
    """Return the places between neighbouring operators that divide no group."""
    groups = [graph.groups.get(node.name) for node in graph.operators]
    last = {group: index for index, group in enumerate(groups)}
    borders, closed = [], -1
    for index, group in enumerate(groups):
        if index and index > closed:
            borders.append(index)
        if group is not None:
            closed = max(closed, last[group])
    return borders


def _stages(graph: CapturedGraph, borders: Container[int]) -> dict[str, int]:
    stage, stage_of = 0, dict[str, int]()
    for index, node in enumerate(graph.operators):
        stage += index in borders
        stage_of[node.name] = stage
    return stage_of


def fit_clocks(device: Device, benches: Iterable[Bench]) -> None:
    """Give all the clock that fits the first one, see :func:`clock_for`.

    Args:
        benches: of one subject.
    """
    first, *others = benches
    clock = clock_for(device, first.run_all)
    for bench in (first, *others):
        bench.clock = clock


@dataclass(frozen=True)
class MeasuredTimes:
    """Times of every operator at one micro-batch size.

    Args:
        uncached: in the whole graph.
        cached: in stages whose data stays in the cache; empty if that of the whole graph does.
        loading_s: to load a micro-batch; 0 if other processes do that.
    """

    uncached: Mapping[str, tuple[float, float]]
    cached: Mapping[str, tuple[float, float]]
    loading_s: float = 0.0


def time_operators(
    subject: Subject,
    working_set: Mapping[str, float],
    cache_bytes: int | None,
    rounds: Rounds,
    batches: Iterator[Any],
    advance: Advance,
) -> MeasuredTimes:
    """Time the operators, and the loading of the micro-batches that ``batches`` yields.

    Args:
        working_set: approximate number of bytes that every operator uses.
        cache_bytes: as in :func:`fit_stages`.
    """
    graph = subject.graph
    cuts = [single_stage(graph)]
    if cache_bytes is not None:
        cuts.append(windows(graph, working_set, CACHE_SHARES[0] * cache_bytes))
    benches = [Bench(subject, cut) for cut in cuts]
    spent: list[list[Pairs]] = [[] for _ in benches]
    loading_s: list[float] = []
    fit_clocks(subject.device, benches)
    cost = cost_of_measuring(benches[0].clock)

    def load() -> bool:
        """Return whether there was a micro-batch; the training reports samples that fail."""
        with suppress(Exception):
            return next(batches, None) is not None
        return False

    load()  # the first one starts the iterator
    for _ in _repeat(rounds, advance):
        start = loading_clock()
        if load():  # between runs of the model, whose data fills the caches
            # Below 0 if the thread waited for a core while the clock was read.
            loading_s.append(max(0.0, loading_clock() - start))
        for bench, runs in zip(benches, spent, strict=True):
            for index in range(len(bench)):
                bench.run(index)  # fills the caches
                runs.append(bench.run_marked(index, cost))
            bench.forget()  # cuts of one model take turns
    rewriting_s = _rewriting_s(subject)
    uncached, *cached = [_medians(runs, rewriting_s) for runs in spent]
    return MeasuredTimes(
        uncached, cached[0] if cached else {}, median(loading_s) if loading_s else 0.0
    )


def _medians(runs: Iterable[Pairs], rewriting_s: Mapping[str, float]) -> Pairs:
    """Return medians of every operator, over the runs that contain it."""
    times: dict[str, list[tuple[float, float]]] = {}
    for name, pair in chain.from_iterable(run.items() for run in runs):
        times.setdefault(name, []).append(pair)
    medians = {}
    for name, pairs in times.items():
        forward_s, backward_s = map(median, zip(*pairs, strict=True))
        medians[name] = forward_s + rewriting_s[name], backward_s
    return medians


def _rewriting_s(subject: Subject) -> dict[str, float]:
    """Return, by operator, the time of the copies that a stage makes of buffers it rewrites."""
    graph, clock = subject.graph, clock_of(subject.device)

    def copying_s(placeholder: str) -> float:
        buffer = subject.states[graph.states[placeholder].name]
        start = clock()
        for _ in range(_COPIES):
            copy = buffer.clone()
            copy.data = copy.detach()
        return (clock() - start) / _COPIES

    return {
        node.name: sum(copying_s(s.name) for s in node.all_input_nodes if s.name in graph.rewritten)
        for node in graph.operators
    }


def time_stages(
    subject: Subject, footprints: Footprints, rounds: Rounds, advance: Advance
) -> list[Sample]:
    """Time random stages and the whole graph; more of them the faster they are."""
    graph = subject.graph
    cuts = [single_stage(graph)]
    benches = [Bench(subject, cuts[0])]
    start = time.perf_counter()
    benches[0].run_all()
    affordable = rounds.budget_s / (rounds.min_rounds * (time.perf_counter() - start))
    count = min(_MAX_CUTS, max(_MIN_CUTS, int(affordable)))
    cuts += [random_stages(graph, seed) for seed in range(count)]
    benches += [Bench(subject, cut) for cut in cuts[1:]]
    halved = [Bench(subject, cut, splits=True) for cut in cuts[:_SPLIT_CUTS]]
    fit_clocks(subject.device, (*benches, *halved))
    runs = [[bench.run_all() for bench in (*benches, *halved)] for _ in _repeat(rounds, advance)]
    medians = []
    for of_bench in zip(*runs, strict=True):
        stages = zip(*of_bench, strict=True)
        medians.append([StageTimes(*map(median, zip(*times, strict=True))) for times in stages])
    samples = []
    split = chain(medians[len(benches) :], repeat(()))
    for bench, times, in_halves in zip(benches, medians, split, strict=False):
        inside = [bench.cut.operators(index) for index in range(len(bench))]
        parts = footprints.of([[graph.position[name] for name in names] for names in inside])
        samples.append(Sample(parts, times, in_halves))
    return samples


def _repeat(rounds: Rounds, advance: Advance) -> Iterator[int]:
    """Yield numbers of rounds; each runs everything, so that drift of the machine affects all
    alike.
    """
    start = time.perf_counter()
    for done in range(rounds.max_rounds):
        used = (time.perf_counter() - start) / rounds.budget_s
        if done >= rounds.min_rounds and used > 1:
            break
        yield done
        advance(
            min(1.0, max((done + 1) / rounds.max_rounds, min(used, (done + 1) / rounds.min_rounds)))
        )
    advance(1.0)
