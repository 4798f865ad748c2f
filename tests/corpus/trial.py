"""One model of the corpus put to the test: captured, cut, trained, and compared to the bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import islice

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipectl.capture import CapturedJob
from pipectl.capture.operators import FunctionCall, is_random
from pipectl.capture.stage import uses_of_parameter
from tests.corpus.catalogue import MICRO_BATCH, MICRO_BATCHES, STEPS
from tests.corpus.stages import MOMENTUM, RATE, Batch, Stages
from tests.equality.cuts import random_cut
from tests.equality.outcome import different

Outcome = dict[str, Tensor]
MOST_STAGES = 6


class Trial:
    """A captured model and the outcome of training it in one stage.

    Attributes:
        reference: everything that training in one stage left behind, by name.
    """

    def __init__(self, job: CapturedJob) -> None:
        torch.set_num_threads(1)
        self.job, self.graph = job, job.training_graph(MICRO_BATCH)
        loader = self.job.loader.with_batch_size(MICRO_BATCH * MICRO_BATCHES, drop_last=False)
        self._batches = list(loader.micro_batches(islice(loader.batches(), STEPS), MICRO_BATCH))
        self.reference = self._train(random_cut(self.graph, 1, 0))

    def differences(self, stage_of: Mapping[str, int], *, recompute: bool = False) -> list[str]:
        """Names of what has other values or strides in the stages of a cut."""
        found = self._train(stage_of, recompute=recompute)
        other_strides = [
            name
            for name, tensor in self.reference.items()
            if name in found and tensor.stride() != found[name].stride()
        ]
        return different(self.reference, found) + other_strides

    def cut(self, seed: int) -> dict[str, int]:
        """A random cut into 2 to 6 stages."""
        return random_cut(self.graph, 2 + seed % (MOST_STAGES - 1), seed)

    @property
    def draws(self) -> bool:
        """Whether training draws random numbers, which a plain loop draws in another way."""
        others = (n for n in self.graph.operators if not isinstance(n.target, FunctionCall))
        return any(is_random(node, self.graph.root) for node in others)

    @property
    def shares(self) -> bool:
        """Whether several operators use one parameter."""
        return any(uses_of_parameter(self.graph, placeholder) for placeholder in self.graph.states)

    def plain_differences(self) -> dict[str, float]:
        """What differs from the user's own model in a plain loop, and how far, relatively."""
        plain = self._plain()
        found = {name: self.reference.get(name, tensor) for name, tensor in plain.items()}
        return _distances(plain, found)

    def _train(self, stage_of: Mapping[str, int], *, recompute: bool = False) -> Outcome:
        stages = Stages(self.job, MICRO_BATCH, stage_of, recompute=recompute)
        found: Outcome = {}
        for number, micro_batches in enumerate(self._steps()):
            found.update(stages.step(number, micro_batches))
        return {**found, **stages.states(), **stages.evaluate(copy.deepcopy(self._batches[0]))}

    def _steps(self) -> Iterator[list[Batch]]:
        for start in range(0, len(self._batches), MICRO_BATCHES):
            yield copy.deepcopy(self._batches[start : start + MICRO_BATCHES])  # some write them

    def _plain(self) -> Outcome:
        step = copy.deepcopy(self.job.wrapper).train()
        optimizer = torch.optim.SGD(
            [p for p in step.parameters() if p.requires_grad], lr=RATE, momentum=MOMENTUM
        )
        found: Outcome = {}
        step.with_outputs = False
        for number, micro_batches in enumerate(self._steps()):
            for index, batch in enumerate(micro_batches):
                loss = step(*batch)
                found[f"step {number} loss {index}"] = loss.detach()
                (loss / len(micro_batches)).backward()
            for name, parameter in step.named_parameters():
                if parameter.grad is not None:
                    found[f"step {number} gradient of {name}"] = parameter.grad.clone()
            optimizer.step()
            optimizer.zero_grad()
        found.update(dict(step.named_parameters()) | dict(step.named_buffers()))
        return {name: tensor.detach() for name, tensor in found.items()}

    def evaluation_differences(self) -> dict[str, float]:
        """What differs from the user's own trained model in evaluation, and how far, relatively."""
        step = copy.deepcopy(self.job.wrapper).eval()
        with torch.no_grad():
            for name, tensor in (*step.named_parameters(), *step.named_buffers()):
                tensor.copy_(self.reference.get(name, tensor))
            step.with_outputs = True
            loss, outputs = step(*copy.deepcopy(self._batches[0]))
        leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
        expected = {f"evaluation output {i}": leaf for i, leaf in enumerate(leaves)}
        return _distances({"evaluation loss": loss, **expected}, self.reference)


def _distances(expected: Outcome, found: Outcome) -> dict[str, float]:
    """How far apart what differs is, as a part of the largest figure of its kind."""
    largest: dict[str, float] = {}
    for name, tensor in expected.items():
        largest[_kind(name)] = max(largest.get(_kind(name), 0.0), _largest(tensor))
    return {
        name: _largest(expected[name] - found[name]) / largest[_kind(name)]
        for name in different(expected, {name: found[name] for name in expected})
    }


def _kind(name: str) -> str:
    return next((kind for kind in ("gradient", "loss", "output") if kind in name), "state")


def _largest(tensor: Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0
