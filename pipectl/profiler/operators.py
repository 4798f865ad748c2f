"""One call of one operator: what it keeps and allocates, its arithmetic, and its times alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

from pipectl.profiler.allocated import record_allocated
from pipectl.profiler.marks import clock_of
from pipectl.runtime.device import Device

_MIN_REPEATS, _MAX_REPEATS = 3, 15
_LONG_S = 2.0
"""An operator that takes longer is steady, and not repeated more than it must be."""
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}
"""What torch's own counter leaves out."""


@dataclass(frozen=True)
class Call:
    """One operator with real arguments.

    Args:
        mutates: whether it writes into its arguments, which are then copied for every run.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    mutates: bool

    def prepared(self) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """Fresh arguments, and those among them whose gradient is wanted."""

        def fresh(tensor: Tensor) -> Tensor:
            alias = tensor.detach().requires_grad_(tensor.requires_grad)
            return alias.clone() if self.mutates else alias

        arguments = (self.args, dict(self.kwargs))
        args, kwargs = pytree.tree_map_only(Tensor, fresh, arguments)
        leaves = tensors_in((args, kwargs))
        return args, kwargs, [leaf for leaf in leaves if leaf.requires_grad]

    def run(self, mark: Callable[[], None] = lambda: None) -> Run:
        """Forward and backward.

        Args:
            mark: called before the forward, after it, and before the backward.
        """
        args, kwargs, wanted = self.prepared()
        mark()
        result = self.target(*args, **kwargs)
        mark()
        roots = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
        seeds = [torch.ones_like(root) for root in roots]
        mark()
        gradients: Sequence[Tensor | None] = ()
        if wanted and roots:
            gradients = torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
        return Run(result, pytree.tree_leaves((args, kwargs)), seeds, gradients)


@dataclass(frozen=True)
class Run:
    """What went into one call, and what it gave.

    Args:
        leaves: the arguments it was called with, flattened: aliases or copies of the call's own.
        seeds: gradients that its backward began with.
        gradients: of the arguments that want one, in order; none if there was no backward.
    """

    result: Any
    leaves: list[Any]
    seeds: list[Tensor]
    gradients: Sequence[Tensor | None]


@dataclass(frozen=True)
class Observed:
    """One call whose memory was followed.

    What its backward releases of its own (saved values of the operators it consists of) makes
    room for what it allocates later, as in a stage. Arguments and seeds are not counted.

    Args:
        kept: bytes of each storage that autograd keeps for the backward, by its identity.
        made_bytes: storages that the result brings.
        forward_bytes, backward_bytes: most that was live at once.
        gradients_bytes: memory that each wanted gradient brings; None if there is no gradient.
    """

    run: Run
    kept: dict[int, int]
    made_bytes: int
    forward_bytes: int
    backward_bytes: int
    gradients_bytes: list[int | None]


def observe(call: Call, device: torch.device) -> Observed:
    """Run an operator forward and backward once, and follow its memory."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept.setdefault(storage._cdata, storage.nbytes())
        return tensor

    with record_allocated(device) as recording, saved_tensors_hooks(pack, lambda tensor: tensor):
        run = call.run(recording.mark)
    arguments, forward, seeds, backward = recording.phases
    gradients_bytes: list[int | None] = []
    known: list[Any] = list(run.seeds)
    for gradient in run.gradients:
        brought = None if gradient is None else _new_bytes([gradient], known)
        gradients_bytes.append(brought)
        known.append(gradient)
    return Observed(
        run,
        kept,
        _new_bytes(pytree.tree_leaves(run.result), run.leaves),
        forward.peak_bytes - arguments.end_bytes,
        backward.peak_bytes - seeds.end_bytes,
        gradients_bytes,
    )


def count_flops(call: Call) -> int:
    """Floating-point operations of matrix products, convolutions and attention, both ways.

    0 for code that runs under no mode of torch's dispatcher.
    """
    counter = FlopCounterMode(display=False, custom_mapping=_ATTENTION)
    with suppress(Exception), counter:
        call.run()
        return int(counter.get_total_flops())
    return 0


def time_alone(call: Call, device: Device, budget_s: float) -> tuple[float, float]:
    """Seconds of forward and backward: medians of runs, which drop those that were disturbed.

    Runs are repeated until the figures are steady or the budget is used.
    """
    clock = clock_of(device)
    looks: list[float] = []
    times: list[tuple[float, float]] = []
    spent_s = 0.0
    while len(times) <= _MAX_REPEATS and spent_s < _LONG_S:
        if len(times) > _MIN_REPEATS and spent_s > budget_s:
            break
        looks.clear()
        run = call.run(lambda: looks.append(clock()))
        start, middle, begin = looks
        times.append((middle - start, clock() - begin if run.gradients else 0.0))
        if len(times) > 1:  # the first run warms up
            spent_s += sum(times[-1])
    forward, backward = zip(*times[1:], strict=True)
    return statistics.median(forward), statistics.median(backward)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a tree, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def storages_in(value: Any) -> list[int]:
    """Identity of the storage of every tensor in a tree, in order."""
    return [tensor.untyped_storage()._cdata for tensor in tensors_in(value)]


def _new_bytes(leaves: Sequence[Any], known: Sequence[Any]) -> int:
    """Bytes of the storages among ``leaves`` that no tensor in ``known`` lies in."""
    old = set(storages_in(list(known)))
    sizes = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors_in(list(leaves)))}
    return sum(size for storage, size in sizes.items() if storage not in old)
