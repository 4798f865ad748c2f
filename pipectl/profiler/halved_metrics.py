"""Whether a metric of a batch is the mean of that metric of its halves.

The result of a metric that is a function is averaged over micro-batches. For the share of samples
that are right this is what the user means, and for a root of a mean, a maximum, a count or the area
under a curve it is not: then it depends on the number of samples in a micro-batch.

Early in training a metric may agree by chance: no sample is right, or all errors are equal. So it
is also tried on outputs that are right, and with one half whose values are smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipectl.capture import CapturedJob
from pipectl.errors import CaptureError
from pipectl.runtime.evaluation_metrics import is_stateful
from pipectl.torch_api import pytree

_MAX_SAMPLES = 16
_PLACES = 3
"""In the held-out data, from which samples are taken."""
_ROUNDING, _ROUNDING_OF_HALF = 1e-2, 5e-2
"""Relative differences that are no more than rounding, also to a few decimals."""
_SMALLER = 0.1
"""Factor of the values of one half."""
_Metric = Callable[[Any, Any], Any]
_Halves = list[tuple[Any, Any]]
"""Outputs and targets of two halves of a batch."""


def find_uneven_metrics(job: CapturedJob, size: int, device: torch.device) -> tuple[str, ...]:
    """Return the names of metrics that are functions and no means over samples.

    A metric that raises for some samples, or gives other numbers for the same values, is not named.

    Args:
        size: of a micro-batch in training.
        device: where the parameters are.
    """
    metrics = {name: each for name, each in job.metrics().items() if not is_stateful(each)}
    if not metrics or job.is_deferred:
        return ()
    assert job.spec.evaluation is not None
    size = job.spec.evaluation.batch_size or size
    uneven = dict[str, None]()
    for whole, halves in _batches(job, max(2, min(size, _MAX_SAMPLES) // 2 * 2), device):
        for name, metric in metrics.items():
            if any(_is_uneven(metric, *each) for each in _variants(whole, halves)):
                uneven[name] = None
    return tuple(name for name in metrics if name in uneven)


def _batches(
    job: CapturedJob, size: int, device: torch.device
) -> Iterator[tuple[tuple[Any, Any], _Halves]]:
    """Yield outputs and targets of some samples, and of their halves."""
    loader, half = job.evaluation_loader, size // 2
    if loader is None or (loader.samples or 0) < size:
        return
    for place in range(_PLACES):
        first = ((loader.samples or 0) - size) * place // (_PLACES - 1)
        inputs, targets = loader.example(size, first)
        parts = [_rows((inputs, targets), slice(at, at + half)) for at in (0, half)]
        try:
            outputs, *of_halves = (
                pytree.tree_map_only(Tensor, Tensor.cpu, job.evaluate(each, device)[1])
                for each in ((inputs, targets), *parts)
            )
        except CaptureError:  # it does not take half of the samples
            return
        leaves = pytree.tree_leaves(outputs)
        halves = []
        for at, own, (_, own_targets) in zip((0, half), of_halves, parts, strict=True):
            given, structure = pytree.tree_flatten(own)
            if len(given) != len(leaves):
                return
            rows = [_part(a, b, at, half) for a, b in zip(leaves, given, strict=True)]
            halves.append((pytree.tree_unflatten(rows, structure), own_targets))
        yield (outputs, targets), halves


def _rows(batch: Any, rows: slice) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor[rows], batch)


def _part(whole: Any, own: Any, start: int, half: int) -> Any:
    """Return the rows of an output for half of the samples; else what the model gives for it.

    Rounding may differ between both, and with it which class is the largest.
    """
    if not (isinstance(whole, Tensor) and isinstance(own, Tensor) and whole.dim() == own.dim()):
        return own
    differing = [dim for dim, size in enumerate(whole.shape) if size != own.shape[dim]]
    if [whole.shape[dim] for dim in differing] != [2 * half]:
        return own
    return whole.narrow(differing[0], start, half)


def _variants(whole: tuple[Any, Any], halves: _Halves) -> Iterator[tuple[tuple[Any, Any], _Halves]]:
    """Yield a batch and its halves, as they are and with other values."""
    yield whole, halves
    right = [_made_right(*each) for each in (whole, *halves)]
    yield right[0], right[1:]
    first, second = halves
    smaller = pytree.tree_map_only(Tensor, _smaller, second)
    joined = _joined(whole, first, smaller)
    if joined is not None:
        yield joined, [first, smaller]


def _made_right(outputs: Any, targets: Any) -> tuple[Any, Any]:
    """Replace scores of classes by some for which the classes of the targets are the largest."""
    classes = [each for each in pytree.tree_leaves(targets) if _counts(each)]

    def right(tensor: Tensor) -> Tensor:
        for target in classes:
            for dim in (-1, 1):
                if tensor.dim() != target.dim() + 1 or not tensor.is_floating_point():
                    continue
                count = tensor.shape[dim]
                if tensor.movedim(dim, -1).shape[:-1] == target.shape:
                    hot = nn.functional.one_hot(target.clamp(0, count - 1), count).movedim(-1, dim)
                    return hot.to(tensor.dtype)
        return tensor

    return pytree.tree_map_only(Tensor, right, outputs), targets


def _counts(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.int64


def _smaller(tensor: Tensor) -> Tensor:
    """Return smaller values, except for integers and masks."""
    is_mask = bool(((tensor == 0) | (tensor == 1)).all())
    return tensor * _SMALLER if tensor.is_floating_point() and not is_mask else tensor


def _joined(whole: Any, first: Any, second: Any) -> Any | None:
    """Return a batch of two halves; None if a value of it is no number per sample."""
    leaves, structure = pytree.tree_flatten(whole)
    pairs = [pytree.tree_leaves(each) for each in (first, second)]
    joined = list[Any]()
    for each, a, b in zip(leaves, *pairs, strict=True):
        if not isinstance(each, Tensor):
            joined.append(each)
            continue
        dims = [dim for dim, size in enumerate(each.shape) if size != a.shape[dim]]
        if len(dims) != 1 or each.shape[dims[0]] != 2 * a.shape[dims[0]]:
            return None
        joined.append(torch.cat([a, b], dims[0]))
    return pytree.tree_unflatten(joined, structure)


def _is_uneven(metric: _Metric, whole: tuple[Any, Any], halves: _Halves) -> bool:
    """Return whether the value of a batch is not the mean of the values of its halves."""
    try:
        value, again, *of_halves = (float(metric(*each)) for each in (whole, whole, *halves))
    except Exception:  # other values or fewer samples than it takes; the real ones were tried
        return False
    if not math.isfinite(value) or value != again:
        return False
    precise = all(
        tensor.element_size() >= 4 or not tensor.is_floating_point()
        for tensor in pytree.tree_leaves(whole)
        if isinstance(tensor, Tensor)
    )
    mean = sum(of_halves) / len(of_halves)
    limit = (_ROUNDING if precise else _ROUNDING_OF_HALF) * max(abs(value), abs(mean))
    return not abs(value - mean) <= limit
