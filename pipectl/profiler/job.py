"""``profile``: from a job spec to ``profile.json``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from pipectl.capture import CapturedGraph, CapturedJob, Cut, build_stage
from pipectl.capture.deferred import is_deferred
from pipectl.capture.precision import arithmetic
from pipectl.profile import Operator, OptimizerCost, Profile
from pipectl.profiler.costs import Times
from pipectl.profiler.memory import measure_step
from pipectl.profiler.states import SampleStates
from pipectl.profiler.walk import Measured, Walk
from pipectl.runtime.device import choose_device
from pipectl.runtime.stepper import make_optimizer
from pipectl.spec import JobSpec, profile_key

Progress = Callable[[int, int, str], None]
_WHOLE_REPEATS = 5
_OPTIMIZER_SAMPLE_BYTES = 64 << 20
_RANK_BYTES = 24 << 20
"""What a rank's process needs beyond the profiler's: MPI (measured: 14 MiB with MPICH), the
libraries that load with the first operator (8 MiB), and the evaluation graph."""
_IN_PARTS = (
    "operators were measured one at a time, equal ones once, and their times were not scaled to "
    "the time of the whole model, which fits no process (materialize: per_rank)"
)


def profile_job(spec: JobSpec, progress: Progress | None = None) -> Profile:
    """Capture a job's model and measure every operator on this node.

    Operator times are scaled so that their sum is the time of the whole graph, which the planner
    wants to predict: operators measured alone run with colder caches and their own overhead.

    Args:
        progress: called with (operators done, all operators, name of the one just done).

    Raises:
        CaptureError: the model, its loss or its data cannot be captured.
    """
    torch.set_num_threads(spec.resources.cpus_per_task)
    job = CapturedJob(spec)
    profiling = _Profiling(job, progress or (lambda _done, _total, _name: None))
    return profiling.profile(_baseline_bytes(job, measured_sizes(spec)[0]))


def measured_sizes(spec: JobSpec) -> tuple[int, ...]:
    """Micro-batch sizes to measure: the asked one, or two for the planner to choose between."""
    batch = spec.training.batch_size
    if spec.pipeline.micro_batches is not None:
        return (-(-batch // spec.pipeline.micro_batches),)
    stages = spec.pipeline.stages or spec.resources.ranks
    base = max(1, -(-batch // (2 * stages)))
    return (base, max(1, base // 4)) if base > 1 else (base,)


def _baseline_bytes(job: CapturedJob, size: int) -> int:
    """What a rank holds besides its stages: libraries, captured graph and data.

    Taken right after the capture, which every rank does for itself and which leaves more behind
    than importing torch does.
    """
    job.training_graph(size)
    states_bytes = sum(t.nbytes for t in job.states.values() if not is_deferred(t))
    return max(0, int(psutil.Process().memory_info().rss) - states_bytes) + _RANK_BYTES


@dataclass(frozen=True)
class _Pass:
    """Everything measured at one micro-batch size."""

    graph: CapturedGraph
    operators: Mapping[str, Measured]
    whole: Times | None

    def times(self, name: str) -> tuple[float, float]:
        """(forward_s, backward_s) of an operator, scaled to the whole graph if that was timed."""
        measured = self.operators[name].times
        return measured.forward_s * self._scale(0), measured.backward_s * self._scale(1)

    def _scale(self, direction: int) -> float:
        if self.whole is None:
            return 1.0
        pairs = [(m.times.forward_s, m.times.backward_s) for m in self.operators.values()]
        alone = sum(pair[direction] for pair in pairs)
        whole = (self.whole.forward_s, self.whole.backward_s)[direction]
        return whole / alone if alone else 1.0


class _Profiling:
    def __init__(self, job: CapturedJob, progress: Progress) -> None:
        self._job = job
        self._progress = progress
        self._precision = job.spec.training.precision
        self._device = choose_device(job.spec.resources.gpus_per_node, 0)
        self._in_parts = any(is_deferred(tensor) for tensor in job.states.values())
        for tensor in job.states.values():
            if not is_deferred(tensor):
                tensor.data = tensor.data.to(self._device.torch_device)

    def profile(self, baseline_bytes: int) -> Profile:
        spec = self._job.spec
        sizes = measured_sizes(spec)
        passes = {size: self._pass(size, index, len(sizes)) for index, size in enumerate(sizes)}
        graph = passes[sizes[0]].graph
        return Profile(
            name=spec.name,
            source=f"pipectl profile, torch {torch.__version__}, {self._device.torch_device}",
            micro_batch_size=sizes[0],
            operators=tuple(self._operator(node, passes) for node in graph.operators),
            edges=graph.edges,
            fingerprint=graph.fingerprint,
            optimizer=self._optimizer(),
            process_baseline_bytes=baseline_bytes,
            key=profile_key(spec),
            assumptions=(_IN_PARTS,) if self._in_parts else (),
        )

    def _pass(self, size: int, index: int, passes: int) -> _Pass:
        graph = self._job.training_graph(size)
        inputs = self._inputs(graph, size)
        total = len(graph.operators) * passes
        done = len(graph.operators) * index

        def advance(name: str) -> None:
            nonlocal done
            done += 1
            self._progress(done, total, name)

        states = SampleStates(self._job, self._device.torch_device)
        walk = Walk(graph, states, inputs, size, self._device, self._precision, once=self._in_parts)
        operators = walk.measure(advance)
        return _Pass(graph, operators, None if self._in_parts else self._whole(graph, inputs, size))

    def _inputs(self, graph: CapturedGraph, size: int) -> dict[str, Any]:
        leaves = pytree.tree_leaves(self._job.loader.example(size))
        target = self._device.torch_device
        moved = [leaf.to(target) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return dict(zip(graph.inputs, moved, strict=True))

    def _whole(self, graph: CapturedGraph, inputs: Mapping[str, Any], size: int) -> Times:
        """Times of the whole graph as one stage."""
        cut = Cut(graph, {node.name: 0 for node in graph.operators}, training=True)
        code = build_stage(cut, 0, size)
        states = [self._state(graph, slot.value) for slot in code.states]
        batch = [inputs[name] for name in code.inputs]
        loss_at = [slot.value for slot in code.results].index(graph.loss)
        times = []
        for _ in range(_WHOLE_REPEATS + 1):
            start = self._now()
            with arithmetic(self._precision, self._device.torch_device):
                loss = code.module(0, *states, *batch)[loss_at]
            middle = self._now()
            loss.backward()
            times.append((middle - start, self._now() - middle))
        for tensor in self._job.states.values():
            tensor.grad = None
        forward, backward = zip(*times[1:], strict=True)
        return Times(statistics.median(forward), statistics.median(backward))

    def _state(self, graph: CapturedGraph, placeholder: str) -> Tensor:
        state = graph.states[placeholder]
        if state.kind == "constant":
            return torch.as_tensor(graph.constants[state.name], device=self._device.torch_device)
        return self._job.states[state.name]

    def _operator(self, node: fx.Node, passes: Mapping[int, _Pass]) -> Operator:
        base, *others = passes
        first = passes[base]
        graph, measured = first.graph, first.operators[node.name]
        forward_s, backward_s = first.times(node.name)
        parameters = self._parameters(graph, node)
        return Operator(
            id=node.name,
            name=_readable(node),
            forward_s=forward_s,
            backward_s=backward_s,
            parameter_bytes=sum(size for _, size in parameters),
            output_bytes=measured.output_bytes,
            gradient_bytes=measured.output_bytes if graph.requires_grad[node.name] else 0,
            parameters=parameters,
            saved=measured.saved,
            timings={size: passes[size].times(node.name) for size in others},
            group=graph.groups.get(node.name),
            signature=graph.signatures[node.name],
            memory=measured.memory,
        )

    def _parameters(self, graph: CapturedGraph, node: fx.Node) -> tuple[tuple[str, int], ...]:
        states = [graph.states[s.name] for s in graph.tensor_inputs(node) if s.name in graph.states]
        names = [state.name for state in states if state.kind == "parameter"]
        return tuple((name, self._job.states[name].nbytes) for name in dict.fromkeys(names))

    def _optimizer(self) -> OptimizerCost:
        """State and time of an optimizer step, on a sample of the parameters."""
        sample = self._sample_parameters()
        size_bytes = sum(parameter.nbytes for parameter in sample.values()) or 1
        for parameter in sample.values():
            parameter.grad = torch.zeros_like(parameter)
        optimizer = make_optimizer(self._job, sample)
        times = []
        for _ in range(_WHOLE_REPEATS + 1):
            start = self._now()
            optimizer.step()
            times.append(self._now() - start)
        leaves = pytree.tree_leaves([dict(state) for state in optimizer.state.values()])
        state_bytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        step_s = statistics.median(times[1:])
        return OptimizerCost(
            state_bytes / size_bytes,
            step_s / size_bytes,
            measure_step(self._job, self._device.torch_device),
        )

    def _sample_parameters(self) -> dict[str, torch.nn.Parameter]:
        sample: dict[str, torch.nn.Parameter] = {}
        total = 0
        for name, tensor in self._job.states.items():
            if tensor.requires_grad and total < _OPTIMIZER_SAMPLE_BYTES:
                sample[name] = torch.nn.Parameter(self._sample(tensor))
                total += sample[name].nbytes
        return sample

    def _sample(self, tensor: Tensor) -> Tensor:
        """A copy of a parameter; a random vector, perhaps shorter, if it has no memory."""
        if not is_deferred(tensor):
            return tensor.detach().clone()
        count = min(tensor.numel(), _OPTIMIZER_SAMPLE_BYTES // tensor.element_size())
        return torch.randn(count, dtype=tensor.dtype, device=self._device.torch_device)

    def _now(self) -> float:
        self._device.synchronize()
        return time.perf_counter()


def _readable(node: fx.Node) -> str:
    """Path of the module an operator belongs to, then the operator."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0].removeprefix("model").removeprefix(".") if stack else ""
    return f"{path}.{node.name}" if path else node.name
