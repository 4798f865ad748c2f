"""Whether the loss of a batch is the mean of the losses of its micro-batches.

The loss of a step is the mean over its micro-batches, weighted by ``loss.weight``, or their sum.
If it is a mean over samples, or a sum, this is the loss of the batch, whatever the number of
micro-batches. It is another one for a sum of which means are taken, for a mean over tokens of which
some samples have more, and for a loss that compares samples. Then the gradients depend on the
number of micro-batches, and so does, in effect, the learning rate.

To find this out, the training graph is cut in two. Its first part, the model, computes some samples
once, as in training. So dropout, batch norm and all that the model computes over samples cannot
make a difference. Its second part, the loss, gets the results for all of these samples, and then
those for each half of them. The gradients of the model's results are compared: losses may agree by
chance (if the model gives all tokens the same scores at first, for example), and these do not.

A loss that draws random numbers (masks, noise, sampled negatives) draws them for all samples each
time, and a half takes its rows, as replicas of a micro-batch do. Some draws have no rows: a
permutation of the samples, or what a submodule that stays one operator draws. Then the means of the
gradients over many draws are compared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from pipectl.capture import CapturedGraph, CapturedJob, Cut, Slot
from pipectl.capture.batch import by_name, copy_written_inputs
from pipectl.capture.data import Loader
from pipectl.capture.opaque import Opaque
from pipectl.capture.operators import calling_module
from pipectl.capture.shares import sample_shares, target_shares, weighted_loss
from pipectl.capture.slices import Span, is_batch_norm
from pipectl.capture.tensors import fill_sample, is_deferred, tensors_in
from pipectl.errors import CaptureError, PipectlError
from pipectl.faults import fault_of, is_ours, user_line
from pipectl.profile_parts import HalvedLoss
from pipectl.runtime.device import Device
from pipectl.runtime.segment import MicroBatch
from pipectl.runtime.stage import Stage
from pipectl.torch_api import BatchNorm, Dropout, pytree

_MODEL, _LOSS = 0, 1
"""Stages of the cut."""
_ROUNDING, _ROUNDING_OF_HALF = 1e-3, 2e-2
"""Relative differences that are no more than rounding, also of other kernels for other sizes."""
_DRAWS = 16, 32, 64, 128
"""Numbers of draws after which means are compared."""
_CERTAIN = 6.0
"""Standard errors."""
_MIN_DIFFERENCE, _MAX_DIFFERENCE = 0.05, 0.2
"""Relative differences of means: what may count as one, and what certainly does."""
_MAX_ENTRIES = 1 << 15
"""Of the gradients, whose means are compared."""
_PATIENCE_S = 20.0
"""For the draws."""
_PLACES = 3
"""In the first epoch, from which batches are compared: later samples may be padded, for example."""
_FEW, _MANY = 4, 16
"""Samples that are compared. Some losses need several of a class."""
_MEMORY_SHARE = 0.5
"""Of the free memory, for more samples than a micro-batch."""


class _UnknownError(Exception):
    """Losses cannot be compared; says why."""


def compare_halves(job: CapturedJob, sizes: Sequence[int], device: Device) -> HalvedLoss | str:
    """Compare the loss of some samples with that of their halves.

    Args:
        sizes: of micro-batches, that of the profile first.
        device: where parameters and buffers are.

    Returns:
        The first comparison that differs, else the last one. If there is none, why; empty if a
        batch is one sample.
    """
    found: HalvedLoss | str = ""
    try:
        if half := _half_size(job, sizes, device):
            loss = _LossOfModel(job, half, device)
            with _sample_by_sample(loss.operators):
                for batch in _batches(job.loader, 2 * half):
                    try:
                        found = loss.compare(batch)
                    except _UnknownError as unknown:
                        found = found or str(unknown)
                    if isinstance(found, HalvedLoss) and found.depends:
                        break
    except Exception as error:  # training reports what fails there, too
        found = found if isinstance(found, HalvedLoss) else _reason(error)
    return found


def _reason(error: Exception) -> str:
    """Why an exception ended the comparison, in words for the user."""
    if isinstance(error, _UnknownError):
        return str(error)
    if isinstance(error, PipectlError):
        return error.message
    if is_ours(error):
        return f"{fault_of(error).message}, please report it"
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}{user_line(error.__traceback__)}"


def _half_size(job: CapturedJob, sizes: Sequence[int], device: Device) -> int:
    """Return how many samples a half has; 0 if a batch has no halves.

    A micro-batch of the profile's size fits into memory. More samples are compared if all values
    that the graph computes of them fit, too.
    """
    batch_size, size = job.spec.training.batch_size, sizes[0]
    more = min(batch_size, max(_FEW, min(_MANY, max(sizes))))
    if more > size:
        graph, length = job.training_graph(size), job.loader.lengths[-1]
        values = (value for node in graph.operators for value in tensors_in([node.meta.get("val")]))
        needed_bytes = sum(
            prod(graph.shape_of(value, size, length)) * value.element_size() for value in values
        )
        if needed_bytes * more / size > _MEMORY_SHARE * device.free_bytes():
            more = min(batch_size, max(size, 2))
    return more // 2


def _batches(loader: Loader, size: int) -> Iterator[tuple[Any, Any]]:
    """Yield batches of the largest length from all over the first epoch."""
    planned = loader.with_batch_size(size, drop_last=True).epoch(0)
    fitting = [b for b in planned if (b.size, b.length) == (size, loader.lengths[-1])]
    if not fitting:
        yield loader.example(size)
    last = len(fitting) - 1
    for place in sorted({last * i // (_PLACES - 1) for i in range(_PLACES)}) if fitting else ():
        yield loader.read(fitting[place])


@contextmanager
def _sample_by_sample(operators: Iterable[fx.Node]) -> Iterator[None]:
    """Let submodules that stay one operator run without dropout, and batch norm as in evaluation.

    Otherwise these would differ between all samples and half of them.
    """
    kept = {id(node.target): node.target for node in operators if isinstance(node.target, Opaque)}
    before = [(opaque, opaque.modes) for opaque in kept.values()]
    for opaque, modes in before:
        opaque.modes = [(m, on and not isinstance(m, BatchNorm | Dropout)) for m, on in modes]
    try:
        yield
    finally:
        for opaque, modes in before:
            opaque.modes = modes


class _Run(NamedTuple):
    """A forward and a backward of the loss.

    Args:
        gradients: of the model's results and of the loss's own parameters.
    """

    loss: Tensor
    gradients: dict[Slot, Tensor]

    @classmethod
    def like(cls, run: _Run) -> _Run:
        """Return zeros in the place of a run's values."""
        zeros = {slot: torch.zeros_like(each) for slot, each in run.gradients.items()}
        return cls(torch.zeros_like(run.loss), zeros)

    def entries(self) -> Tensor:
        """Return some entries of the gradients, spread over all."""
        flat = [gradient.reshape(-1) for gradient in self.gradients.values()]
        stride = 1 + sum(map(len, flat)) // _MAX_ENTRIES
        return torch.cat([each[::stride].double().cpu() for each in flat])


@dataclass(frozen=True)
class _Sizes:
    """The graphs of a micro-batch and of its half, which may be the same, and their sizes."""

    whole: CapturedGraph
    half: CapturedGraph
    samples: int
    length: int

    def node(self, name: str) -> fx.Node:
        """Return an operator."""
        node: fx.Node = self.whole.operators[self.whole.position[name]]
        return node

    def shapes(self, name: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return the shapes of an operator's tensors for all samples, and for half of them."""
        of_graphs = []
        for graph, batch in ((self.whole, self.samples), (self.half, self.samples // 2)):
            values = tensors_in([graph.operators[self.whole.position[name]].meta.get("val")])
            of_graphs.append([graph.shape_of(value, batch, self.length) for value in values])
        return list(zip(*of_graphs, strict=True))

    def counts_samples(self, name: str) -> bool:
        """Return whether a value has a row per sample, or several."""
        return any(whole != half for whole, half in self.shapes(name))

    def dimensions(self, name: str) -> list[int] | None:
        """Return the dimensions of a value that are its samples.

        None if they are merged with another dimension, so that half of the samples may be anywhere,
        or if it is not one tensor.
        """
        if not isinstance(self.node(name).meta.get("val"), Tensor):
            return None
        ((whole, half),) = self.shapes(name)
        differing = [dim for dim, size in enumerate(whole) if size != half[dim]]
        sizes = {(whole[dim], half[dim]) for dim in differing}
        return differing if sizes <= {(self.samples, self.samples // 2)} else None


def cut_loss(sizes: _Sizes) -> dict[str, int]:
    """Return the stage of every operator: the model's or the loss's.

    To the loss belong the operators of its module. If the model computes its loss itself, they are
    those after the last operators with parameters. A part of the model that ends in one number for
    all samples (a penalty, for example) belongs to the loss, too.
    """
    graph = sizes.whole
    last = sizes.node(graph.loss)
    by_module, needed = not _is_of_model(last), {last}
    leads_to_rows, model = set[fx.Node](), set[fx.Node]()
    for node in reversed(graph.operators):
        if sizes.counts_samples(node.name) or leads_to_rows.intersection(node.users):
            leads_to_rows.add(node)
        if needed.intersection(node.users):
            needed.add(node)
        is_last = node in leads_to_rows and (
            _is_of_model(node) if by_module else _has_weights(graph, node)
        )
        if is_last or model.intersection(node.users):
            model.add(node)
    loss = needed - model
    return _complete(sizes, {node.name for node in loss})


def _complete(sizes: _Sizes, loss: set[str]) -> dict[str, int]:
    """Return the stages after the loss has got what cannot be cut from it: memory that is written,
    and values whose samples are not one dimension.
    """
    graph, waiting = sizes.whole, list(loss)
    members: dict[str, list[str]] = {}
    for name, group in graph.groups.items():
        members.setdefault(group, []).append(name)
    while waiting:
        name = waiting.pop()
        node = sizes.node(name)
        sources = (s.name for s in graph.tensor_inputs(node) if s.name in graph.position)
        merged = [s for s in sources if s not in loss and sizes.dimensions(s) is None]
        together = members.get(graph.groups.get(name, ""), ())
        joining = {*together, *graph.users.get(name, ()), *merged} - loss
        waiting += joining
        loss |= joining
    return {node.name: _LOSS if node.name in loss else _MODEL for node in graph.operators}


def _is_of_model(node: fx.Node) -> bool:
    return calling_module(node).partition(".")[0] == "model"


def _has_weights(graph: CapturedGraph, node: fx.Node) -> bool:
    """Return whether an operator reads a parameter or buffer that is more than one number."""
    names = (source for source in node.all_input_nodes if source.name in graph.states)
    return any(prod(source.meta["val"].shape) > 1 for source in names)


class _LossOfModel:
    """The loss as a stage of its own, after the model as another.

    Args:
        half: number of samples in each half.

    Attributes:
        operators: of the loss, in each graph.

    Raises:
        CaptureError: the model does not take these sizes.
        _UnknownError: the loss cannot be told from what the model computes over samples.
    """

    def __init__(self, job: CapturedJob, half: int, device: Device) -> None:
        self._job, self._device = job, device.torch_device
        length = job.loader.lengths[-1]
        whole = job.training_graph(2 * half, length)
        # The loss takes the half; the model (its batch norm, for example) need not.
        takes_half = whole.holds_for(half, length)
        graphs = whole, whole if takes_half else job.training_graph(half, length)
        self._sizes = sizes = _Sizes(*graphs, 2 * half, length)
        stage_of = cut_loss(sizes)
        self.operators = [n for g in graphs for n in g.operators if stage_of[n.name] == _LOSS]
        names = {state.name for node in self.operators for state in sizes.whole.states_of(node)}
        deferred = {name for name, state in job.states.items() if is_deferred(state)}
        if any(map(is_batch_norm, self.operators)) or names & deferred:
            raise _UnknownError(
                "it has statistics of its samples, or parameters without values (per_rank)"
            )
        cuts = [Cut(graph, stage_of, training=True) for graph in graphs]
        given = job.states, device, job.spec.training.precision
        whole_span = Span.of(2 * half, length)
        self._whole = MicroBatch(0, whole_span)
        for shares_draws in (True, False) if takes_half else (False,):
            halves = [Span.of(half, length)] * 2
            if shares_draws:
                halves = [Span(start, start + half, 2 * half, length) for start in (0, half)]
            forms = {(True, whole_span): cuts[0], **{(True, each): cuts[1] for each in halves}}
            try:
                self._loss = Stage(_LOSS, forms, *given)
            except CaptureError:
                if shares_draws:
                    continue  # half of the samples have no part of a draw
                raise
            self._halves = [MicroBatch(0, each) for each in halves]
            self._shares_draws = shares_draws
            break
        self._received = {Slot(slot.value) for slot in cuts[0].received(_LOSS)}
        self._model: Stage | None = None
        if self._received and not deferred:
            self._model = Stage(_MODEL, {(False, whole_span): cuts[0]}, *given)
        self._buffers = {name: buffer.clone() for name, buffer in self._loss.buffers.items()}

    def compare(self, batch: tuple[Any, Any]) -> HalvedLoss:
        """Compare the loss of a batch with that of its halves.

        Raises:
            _UnknownError: losses are not finite or have no gradient, or draws hide the difference.
        """
        results = self._results(batch)
        whole, halves = self._both(batch, results, 0)
        if not self._shares_draws and self._loss.draws(True, self._whole.span):
            again, _ = self._both(batch, results, 1)
            if _difference(whole, again) > _ROUNDING:
                return self._compare_means(batch, results)
        difference = _difference(whole, halves)
        losses = float(whole.loss), float(halves.loss)
        depends = difference > self._rounding(whole)
        return HalvedLoss(self._sizes.samples, *losses, difference, depends)

    def _compare_means(self, batch: Any, results: Mapping[Slot, Tensor]) -> HalvedLoss:
        """Compare means over many draws, until they certainly differ or certainly agree.

        Of two independent runs, the product of their differences is the square of the mean
        difference on average. All pairs of runs are taken.
        """
        until = time.monotonic() + _PATIENCE_S
        wholes, halves, losses = list[Tensor](), list[Tensor](), list[tuple[float, float]]()
        for count in _DRAWS:
            while len(losses) < count and time.monotonic() < until:
                whole, half = self._both(batch, results, len(losses))
                _difference(whole, half)  # they are finite
                losses.append((float(whole.loss), float(half.loss)))
                wholes.append(whole.entries())
                halves.append(half.entries())
            if len(losses) < count:
                break
            differences = [a - b for a, b in zip(wholes, halves, strict=True)]
            square, error = _square_of_mean(differences)
            largest = max(_square_of_mean(wholes)[0], _square_of_mean(halves)[0])
            depends = square > _CERTAIN * error and square > _MIN_DIFFERENCE**2 * largest
            if depends or square + _CERTAIN * error < _MAX_DIFFERENCE**2 * largest:
                of_whole, of_halves = (sum(each) / count for each in zip(*losses, strict=True))
                difference = math.sqrt(max(square, 0.0) / largest)
                samples = self._sizes.samples
                return HalvedLoss(samples, of_whole, of_halves, difference, depends)
        raise _UnknownError("it draws random numbers, which hide a difference")

    def _both(self, batch: Any, results: Mapping[Slot, Tensor], seed: int) -> tuple[_Run, _Run]:
        """Run the loss of all samples, and of their halves as two micro-batches."""
        half = self._sizes.samples // 2
        starts = (0, half)
        parts = [self._half_of(batch, start) for start in starts]
        whole = self._run(self._whole._replace(seed=3 * seed), batch, results, 1.0)
        total, losses, shares = _Run.like(whole), list[Tensor](), self._shares(parts)
        for place, (start, part, share) in enumerate(zip(starts, parts, shares, strict=True)):
            if share:  # else its loss may be undefined
                rows = {slot: self._rows(slot, t, start).clone() for slot, t in results.items()}
                own = 3 * seed if self._shares_draws else 3 * seed + 1 + place
                run = self._run(self._halves[place]._replace(seed=own), part, rows, share)
                losses.append(run.loss)
                for slot, gradient in run.gradients.items():
                    self._rows(slot, total.gradients[slot], start).add_(gradient)
        of_halves = weighted_loss(losses, [share for share in shares if share])
        return whole, total._replace(loss=torch.tensor(of_halves))

    def _half_of(self, batch: Any, start: int) -> Any:
        rows = slice(start, start + self._sizes.samples // 2)
        return pytree.tree_map_only(Tensor, lambda tensor: tensor[rows], batch)

    def _shares(self, parts: Sequence[tuple[Any, Any]]) -> list[float]:
        weigh = self._job.weight()
        if weigh is None:
            return sample_shares([1 for _ in parts], adds_up=self._job.spec.loss.adds_up)
        targets = [targets for _, targets in parts]
        return target_shares(weigh, self._job.spec.loss.weight, targets)

    def _results(self, batch: Any) -> dict[Slot, Tensor]:
        """Return what the model gives for a batch; of a model without memory, random values."""
        if self._model is not None:
            graph, inputs = self._sizes.whole, self._tensors(self._sizes.whole, batch)
            results = self._model.evaluate(self._whole, copy_written_inputs(graph, inputs), {})
            pairs = ((slot, results[slot]) for slot in self._received)
            return {slot: value for slot, value in pairs if value is not None}
        blanks = {}
        for slot in self._received:
            ((shape, _),) = self._sizes.shapes(slot.value)
            value = self._sizes.node(slot.value).meta["val"]
            blanks[slot] = fill_sample(torch.empty(shape, dtype=value.dtype, device=self._device))
        return blanks

    def _run(
        self, micro_batch: MicroBatch, batch: Any, results: Mapping[Slot, Tensor], share: float
    ) -> _Run:
        """Run the loss forward and backward, with buffers as they were."""
        for name, value in self._buffers.items():
            self._loss.buffers[name].data = value.clone()
        is_whole = micro_batch.span == self._whole.span
        graph = self._sizes.whole if is_whole else self._sizes.half
        inputs = copy_written_inputs(graph, self._tensors(graph, batch))
        loss = self._loss.forward(micro_batch, inputs, dict(results))[Slot(graph.loss)]
        assert loss is not None
        gradients = self._loss.backward(micro_batch, {}, share)
        own = {Slot(name): each for name, each in self._loss.parameters.items()}
        for leaves in (own, self._loss.uses):
            gradients.update((slot, leaf.grad) for slot, leaf in leaves.items())
        self._loss.forget()
        return _Run(loss, {slot: g for slot, g in gradients.items() if g is not None})

    def _rows(self, slot: Slot, tensor: Tensor, start: int) -> Tensor:
        """Return the part of a value for half of the samples; all of what counts no samples."""
        if slot.value in self._sizes.whole.position:
            for dim in self._sizes.dimensions(slot.value) or ():
                tensor = tensor.narrow(dim, start, self._sizes.samples // 2)
        return tensor

    def _tensors(self, graph: CapturedGraph, batch: Any) -> dict[str, Tensor]:
        named = by_name(graph, batch)
        return {n: leaf.to(self._device) for n, leaf in named.items() if isinstance(leaf, Tensor)}

    def _rounding(self, run: _Run) -> float:
        """Return the relative difference that is no more than rounding."""
        precise = self._device.type == "cpu" and self._job.spec.training.precision == "float32"
        sizes = [each.element_size() for each in (run.loss, *run.gradients.values())]
        return _ROUNDING if precise and min(sizes) >= 4 else _ROUNDING_OF_HALF


def _square_of_mean(values: Sequence[Tensor]) -> tuple[float, float]:
    """Return an unbiased estimate of the square of the mean of random vectors, and its standard
    error if the mean is zero.
    """
    count, stacked = len(values), torch.stack(list(values))
    products = stacked @ stacked.T
    pairs = products[tuple(torch.triu_indices(count, count, 1))]
    return float(pairs.mean()), math.sqrt(float(pairs.square().mean()) / len(pairs))


def _difference(one: _Run, other: _Run) -> float:
    """Return the difference of two runs' gradients, relative to the larger ones.

    Raises:
        _UnknownError: there are none, or something is not finite.
    """
    pairs = [(gradient, other.gradients[slot]) for slot, gradient in one.gradients.items()]

    def norm(tensors: Iterable[Tensor]) -> float:
        return math.hypot(*(float(torch.linalg.vector_norm(t.double())) for t in tensors))

    largest = max(norm(a for a, _ in pairs), norm(b for _, b in pairs))
    difference = norm(a - b for a, b in pairs)
    numbers = largest, difference, float(one.loss), float(other.loss)
    if not all(map(math.isfinite, numbers)):
        raise _UnknownError("the loss of some samples, or its gradient, is not finite")
    if not largest:
        raise _UnknownError("the gradient of the loss of some samples is zero")
    return difference / largest
