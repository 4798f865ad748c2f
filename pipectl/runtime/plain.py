"""The same training without a pipeline: what a user would write, as a reference for ``verify``.

Started as ``python -m pipectl.runtime.plain JOB.yaml MICRO_BATCH_SIZE DIRECTORY [USES]``. The model
is the user's, not the captured graph, and MPI is not used; only the order of the data, the
micro-batches and the seeds are those of the pipeline.

Autograd adds up the gradients of a parameter with several uses micro-batch by micro-batch, a
pipeline use by use. Optimizers such as Adam turn this difference in rounding into whole steps, so
the gradients of the uses are added in the pipeline's order here too. USES is the JSON of the
parameters with several uses, with the number of uses of each.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import Node

from pipectl.capture import CapturedJob
from pipectl.capture.data import split_batch
from pipectl.capture.half_weights import half_weights
from pipectl.capture.model_with_loss import in_model, name_in_loss, own_name
from pipectl.capture.modes import set_mode
from pipectl.capture.opaque import write_buffers_once
from pipectl.capture.python_state import changed_state, state_values
from pipectl.capture.regions import arithmetic
from pipectl.capture.shares import (
    first_undefined,
    sample_shares,
    target_shares,
    target_weight,
    weighted_loss,
)
from pipectl.capture.tensors import is_deferred
from pipectl.errors import PipectlError
from pipectl.files import write_json
from pipectl.runtime.device import choose_device, set_arithmetic, settle_process
from pipectl.runtime.finite import BufferCheck, norms_of, not_finite
from pipectl.runtime.gradients import gradients_of
from pipectl.runtime.optimizer import Updater, make_updater, refuse_half_parameters
from pipectl.runtime.saved_tensors import nodes_behind, run_backward, zeros_behind
from pipectl.spec import JobSpec, load
from pipectl.torch_api import edge_of, number_of, persistent_names, pytree
from pipectl.units import printable

LOSSES = "losses.json"
CHANGED = "changed"
"""Key in this file: what the user's code keeps in Python objects and has changed in training."""
_CAST = "ToCopyBackward0"
"""Autograd's node of a cast, of which autocast makes one for all uses of a parameter."""
Batch = tuple[Any, Any]


def train(
    spec: JobSpec, micro_batch_size: int, directory: Path, uses: Mapping[str, int] | None = None
) -> None:
    """Train all steps; writes ``losses.json`` and the weights after every step.

    Args:
        uses: of the parameters that several operators use, by their names in the user's model.

    Raises:
        CaptureError: user code fails.
    """
    settle_process(spec.threads)
    set_arithmetic(spec.training)
    job = CapturedJob(spec)
    device = choose_device(spec.resources.gpus_per_node, 0).torch_device
    set_mode(job.wrapper.to(device), training=True)
    write_buffers_once(job.wrapper)
    parameters = dict(job.wrapper.named_parameters())
    updater = make_updater(job, parameters)
    scale, is_scaled = spec.training.loss_scale, spec.training.precision == "float16"
    if is_scaled:
        refuse_half_parameters(parameters)
    # Torch's loss scaler does nothing except in float16.
    interval = scale.growth_interval
    scaler = GradScaler(device.type, scale.initial, growth_interval=interval, enabled=is_scaled)
    own = {own_name(name): parameter for name, parameter in parameters.items()}
    separate = SeparateUses({own[name]: count for name, count in (uses or {}).items()})
    losses, state = [], state_values(job.wrapper)
    skips = spec.training.on_nonfinite == "skip"
    check = BufferCheck(dict(job.wrapper.named_buffers()) if skips else {})
    weigh = job.weight()
    for step, (sizes, batches) in enumerate(_batches(job, micro_batch_size), 1):
        if weigh is not None:
            shares = target_shares(weigh, spec.loss.weight, [targets for _, targets in batches])
        else:
            shares = sample_shares(sizes, adds_up=spec.loss.adds_up)
        before = {name: buffer.clone() for name, buffer in job.wrapper.named_buffers() if skips}
        step_losses = _accumulate(job, batches, shares, scaler, device, separate)
        losses.append(weighted_loss(step_losses, shares))
        gradients = {} if scaler.is_enabled() else gradients_of(parameters)
        faulty = skips and (
            first_undefined(step_losses, shares) is not None
            or bool(check.faults())
            or bool(not_finite(gradients, norms_of(gradients)))
        )
        _update(updater, scaler, spec.training.clip_grad_norm, parameters, faulty=faulty)
        for name, buffer in job.wrapper.named_buffers() if faulty else ():
            buffer.data.copy_(before[name])  # undo writes by forwards of a skipped step
        if updater.watches:
            updater.watch(_evaluate(job, micro_batch_size, device))
        save_file(_weights(job), weights_file(directory, step))
    joint = [name for name, each in own.items() if each in separate.joint]
    changed = changed_state(state, state_values(job.wrapper))
    write_json(directory / LOSSES, {"losses": losses, "joint": joint, CHANGED: changed})


class SeparateUses:
    """The gradients of parameters with several uses, added use by use.

    Args:
        counts: the number of uses of each.

    Attributes:
        joint: those whose uses autograd's graph does not tell apart; their gradients stay as
            autograd has added them.
    """

    def __init__(self, counts: Mapping[Tensor, int]) -> None:
        self._counts = counts
        self._types = {parameter: parameter.dtype for parameter in counts}
        self._sums: dict[Tensor, dict[int, Tensor]] = {}
        self.joint: set[Tensor] = set()

    def watch(self, loss: Tensor) -> None:
        """Before the backward of a micro-batch: note the gradient of each use."""
        if not self._counts:
            return
        assert loss.grad_fn is not None
        nodes = nodes_behind([edge_of(loss)])
        readers: dict[Node, dict[Node, list[int]]] = {}
        for node in nodes:
            for index, (after, _) in enumerate(node.next_functions):
                if after is not None:
                    readers.setdefault(after, {}).setdefault(node, []).append(index)
        for leaf in [node for node in nodes if hasattr(node, "variable")]:
            parameter, uses = leaf.variable, readers.get(leaf, {})
            if parameter not in self._counts:
                continue
            if [node.name() for node in uses] == [_CAST]:
                uses = readers.get(next(iter(uses)), {})
            if len(uses) != self._counts[parameter]:
                self.joint.add(parameter)
                continue
            in_order = sorted(uses, key=lambda node: number_of(node))
            for number, node in enumerate(in_order):
                node.register_hook(partial(self._add, parameter, number, uses[node]))

    def replace_gradients(self) -> None:
        """After the last backward of a step: give the parameters the sums of their uses."""
        for parameter, sums in self._sums.items():
            if parameter not in self.joint:
                total: Tensor | None = None
                for _, gradient in sorted(sums.items()):
                    total = gradient if total is None else total + gradient
                parameter.grad = total
        self._sums.clear()

    def _add(
        self,
        parameter: Tensor,
        number: int,
        indices: Sequence[int],
        gradients: Sequence[Tensor | None],
        _: Any,
    ) -> None:
        """Hook: the gradients that a node has computed for its inputs."""
        sums = self._sums.setdefault(parameter, {})
        parts = [gradients[index] for index in indices]
        found = [part.detach().to(self._types[parameter]) for part in parts if part is not None]
        if found:
            gradient = sum(found[1:], found[0])
            sums[number] = sums[number] + gradient if number in sums else gradient.clone()


def _update(
    updater: Updater,
    scaler: GradScaler,
    largest: float | None,
    parameters: Mapping[str, nn.Parameter],
    *,
    faulty: bool,
) -> None:
    """The end of a step; if it is skipped, the learning rate does not change."""
    assert updater.optimizer is not None
    scaler.unscale_(updater.optimizer)
    if largest is not None:
        torch.nn.utils.clip_grad_norm_(parameters.values(), largest)
    before = scaler.get_scale()
    if not faulty:
        scaler.step(updater.optimizer)
    scaler.update()
    updater.drop_gradients()
    if not faulty and scaler.get_scale() >= before:
        updater.step_schedule()


def _evaluate(job: CapturedJob, micro_batch_size: int, device: torch.device) -> float:
    loader, spec, weigh = job.evaluation_loader, job.spec.evaluation, job.weight()
    assert loader is not None
    assert spec is not None
    total, weights = 0.0, 0.0
    size, planned = spec.batch_size or micro_batch_size, loader.epoch(0)
    counts = [count for each in planned for count in split_batch(each.size, size)]
    set_mode(job.wrapper, training=False)
    for count, batch in zip(counts, loader.micro_batches(planned, size), strict=True):
        inputs, targets = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)
        with torch.no_grad(), job.arithmetic(device):
            loss = job.wrapper(inputs, targets)
        weight: float = 1 if job.spec.loss.adds_up else count
        if weigh is not None:
            weight = target_weight(weigh, job.spec.loss.weight, batch[1])
        if weight:
            total, weights = total + float(loss) * weight, weights + weight
    set_mode(job.wrapper, training=True)
    if not weights:
        return math.nan
    return total if job.spec.loss.adds_up else total / weights


def weights_file(directory: Path, step: int) -> Path:
    """The file of the weights after ``step``."""
    return directory / f"step-{step:06d}.safetensors"


class FirstWeights(Mapping[str, Tensor]):
    """The initial weights of a job, by their names in a comparison.

    Weights without memory are made when they are accessed, and not kept.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._job = CapturedJob(spec)
        self._full = _names(self._job)

    @property
    def buffers(self) -> list[str]:
        """Names of the weights that are not parameters."""
        states = self._job.states
        return [n for n, full in self._full.items() if not isinstance(states[full], nn.Parameter)]

    def __getitem__(self, name: str) -> Tensor:
        full = self._full[name]
        tensor = self._job.states[full]
        return (self._job.initial_values(full) if is_deferred(tensor) else tensor).detach()

    def __iter__(self) -> Iterator[str]:
        return iter(self._full)

    def __len__(self) -> int:
        return len(self._full)


def _states(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers that belong in a state dict, as a checkpoint has them."""
    states: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    states |= module.named_buffers(remove_duplicate=False)
    kept = persistent_names(module)
    return {name: states[name] for name in states if name in kept}


def name_of_loss(name: str) -> str:
    """The name of a state of the loss in a comparison, which no state of a model has."""
    return f"{name} (of the loss)"


def _names(job: CapturedJob) -> dict[str, str]:
    """The full names of all weights by their names in a comparison: those in the user's model, and
    those of the loss, without what it shares."""
    full = {}
    for name in _states(job.wrapper):
        in_loss = name_in_loss(name)
        if in_model(name):
            full[own_name(name)] = job.tied.get(name, name)
        elif in_loss is not None and name not in job.tied:
            full[name_of_loss(in_loss)] = name
    return full


def _weights(job: CapturedJob) -> dict[str, Tensor]:
    """Copies of the weights: tied ones share memory, which a file of tensors does not allow."""
    states = _states(job.wrapper)
    tensors = {name: states[full] for name, full in _names(job).items()}
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}


def _batches(job: CapturedJob, micro_batch_size: int) -> Iterator[tuple[list[int], list[Batch]]]:
    planned = list(islice(job.loader.batches(), job.spec.training.steps))
    loaded = job.loader.micro_batches(planned, micro_batch_size)
    for batch in planned:
        sizes = split_batch(batch.size, micro_batch_size)
        yield sizes, list(islice(loaded, len(sizes)))


def _accumulate(
    job: CapturedJob,
    batches: Sequence[Batch],
    shares: Sequence[float],
    scaler: GradScaler,
    device: torch.device,
    separate: SeparateUses,
) -> list[Tensor]:
    losses, precision = [], job.spec.training.precision
    parameters = list(job.wrapper.parameters())
    for batch, share in zip(batches, shares, strict=True):
        inputs, targets = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)
        with half_weights(job.wrapper, precision):
            with arithmetic(precision, device):
                loss = job.wrapper(inputs, targets)
            scaled = scaler.scale(loss * share)
            if share:
                separate.watch(scaled)
            with nullcontext() if share else zeros_behind([edge_of(scaled)]):
                run_backward([scaled], [torch.ones_like(scaled)], parameters)
        losses.append(loss.detach())
    separate.replace_gradients()
    return losses


def main(arguments: Sequence[str]) -> int:
    """Entry point; returns the exit code of a command."""
    job, micro_batch_size, directory, *uses = arguments
    known = json.loads(uses[0]) if uses else {}
    try:
        train(load(Path(job)), int(micro_batch_size), Path(directory), known)
    except PipectlError as error:
        sys.stderr.write(printable(f"{error}\n"))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
