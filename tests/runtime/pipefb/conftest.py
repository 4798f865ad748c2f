"""Both halves of every stage in one process, and whole stages to compare them with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from pipectl.capture import CapturedJob, Cut, Lane, Slot
from pipectl.capture.slices import Rows
from pipectl.graph import TransferKind
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.pipefb import BackwardHalf, ForwardHalf, places_of
from pipectl.runtime.stage import MicroBatch, Stage
from pipectl.spec import load

HERE = Path(__file__).parent
MODELS = HERE / "saving_models.py"


@dataclass
class Told:
    """A wire within one process."""

    objects: dict[int, list[Any]] = field(default_factory=dict)

    def send_object(self, value: Any, _rank: int, tag: int) -> None:
        self.objects.setdefault(tag, []).append(deepcopy(value))

    def receive_object(self, _rank: int, tag: int) -> Any:
        return self.objects[tag].pop(0)


@pytest.fixture(scope="session")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., CapturedJob]:
    """The job of a model; every step has copies of its states."""

    @cache
    def make(model: str, precision: str = "float32") -> CapturedJob:
        document = {
            "version": 1,
            "name": "job",
            "site_defaults": False,
            "model": {"factory": f"{MODELS}:{model}"},
            "loss": {"factory": f"{MODELS}:loss"},
            "data": {"factory": f"{MODELS}:Samples"},
            "training": {"steps": 1, "batch_size": 4, "precision": precision},
        }
        path = tmp_path_factory.mktemp("pipefb") / "job.yaml"
        path.write_text(yaml.safe_dump(document))
        return CapturedJob(load(path))

    return make


def copies(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """States of a process of its own."""
    return {
        name: nn.Parameter(t.detach().clone(), t.requires_grad)
        if isinstance(t, nn.Parameter)
        else t.detach().clone()
        for name, t in states.items()
    }


class Step:
    """Forwards and backwards of some micro-batches through all stages of a cut.

    Args:
        apart: whether the halves of every stage are processes of their own.
        versions: whether weights have versions, as where steps overlap.

    Attributes:
        returned: gradients that left a stage, and copies made at once.
    """

    def __init__(
        self,
        job: CapturedJob,
        cut: Cut,
        *,
        apart: bool,
        recompute: bool = False,
        versions: bool = False,
        size: int = 2,
    ) -> None:
        self.cut, self.size = cut, size
        cuts, told = {(True, Rows.of(size)): cut}, Told()
        stages = range(1 + max(cut.stage_of.values()))
        shared = (CpuDevice(), job.spec.training.precision)
        self.forwards: list[Stage] = []
        self.backwards: list[Stage] = []
        for index in stages:
            if not apart:
                states = copies(job.states)
                whole = Stage(index, cuts, states, *shared, recompute=recompute)
                self.forwards.append(whole)
                self.backwards.append(whole)
                continue
            for halves, kind in ((self.forwards, ForwardHalf), (self.backwards, BackwardHalf)):
                given = told, 0, index, cuts, copies(job.states), *shared
                halves.append(kind(*given, recompute=recompute))  # type: ignore[arg-type]
        for stage in self.backwards if versions else ():
            stage.keep_versions(1)
        self.recompute = recompute
        self.messages: list[dict[Slot, Tensor | None]] = []
        self.returned: list[tuple[Tensor, Tensor]] = []

    def run(self, batches: list[tuple[Any, Any]]) -> None:
        """All forwards, then all backwards; the first half forgets what it sent."""
        for number, batch in enumerate(batches):
            self._forward(number, dict(zip(self.cut.graph.inputs, batch, strict=True)))
        for number in range(len(batches)):
            self._backward(number)

    def _forward(self, number: int, batch: dict[str, Tensor]) -> None:
        values: dict[Slot, Tensor | None] = {}
        for index, (front, back) in enumerate(zip(self.forwards, self.backwards, strict=True)):
            code = front.segments[0].codes[Rows.of(self.size)].stage
            micro_batch = MicroBatch(number, Rows.of(self.size), 7 + number)
            inputs = {name: batch[name].clone() for name in code.inputs}
            arrived = {Slot(s.value): copied(values[Slot(s.value)]) for s in code.received}
            made = front.forward(micro_batch, inputs, arrived)
            values.update({Slot(slot.value): tensor for slot, tensor in made.items()})
            if isinstance(front, ForwardHalf) and isinstance(back, BackwardHalf):
                message = {slot: copied(t) for slot, t in front.leaving(number).items()}
                self.messages.append(message)
                places = places_of(self.cut, index)
                everything = {Slot(str(p)): message.get(Slot(str(p))) for p in range(places)}
                back.arriving(micro_batch, everything)

    def _backward(self, number: int) -> None:
        gradients: dict[tuple[int, Slot], Tensor | None] = {}
        micro_batch = MicroBatch(number, Rows.of(self.size))
        for index in reversed(range(len(self.backwards))):
            if self.recompute:
                self.backwards[index].recompute(micro_batch)
            mine = {slot: t for (stage, slot), t in gradients.items() if stage == index}
            made = self.backwards[index].backward(micro_batch, mine, 0.5)
            self.returned += [(t, t.clone()) for t in made.values() if t is not None]
            for lane, slots in self.cut.lanes.items():
                if lane.kind is TransferKind.GRADIENT and lane.source == index:
                    gradients.update({(lane.target, slot): made.get(slot) for slot in slots})

    def gradients(self) -> dict[tuple[int, str], Tensor]:
        """Of all parameters and their uses, by stage."""
        found = {}
        for index, stage in enumerate(self.backwards):
            leaves = {**stage.parameters, **{"/".join(s): t for s, t in stage.uses.items()}}
            found.update({(index, n): t.grad for n, t in leaves.items() if t.grad is not None})
        return found

    def buffers(self) -> dict[str, Tensor]:
        """As the forwards left them."""
        return {n: t for stage in self.forwards for n, t in stage.buffers.items()}


def copied(tensor: Tensor | None) -> Tensor | None:
    """What arrives at another process: the same layout in memory of its own."""
    return None if tensor is None else tensor.detach().clone()


@pytest.fixture
def steps(capture: Callable[..., CapturedJob]) -> Callable[..., tuple[Step, Step]]:
    """``steps(model, stages)``: two micro-batches through whole stages, and through halves."""

    def make(model: str, stages: int = 1, precision: str = "float32", **how: bool):
        job = capture(model, precision)
        graph = job.training_graph(2)
        count = len(graph.operators)
        merged: dict[str, int] = {}
        for index, node in enumerate(graph.operators):
            stage = index * stages // count
            group = graph.groups.get(node.name, node.name)
            merged[node.name] = merged.setdefault(group, stage)
        cut = Cut(graph, merged, training=True)
        generator = torch.Generator().manual_seed(1)
        batches = [job.loader.example(2) for _ in range(2)]
        batches = [(x + torch.rand(x.shape, generator=generator), y) for x, y in batches]
        found = []
        for apart in (False, True):
            step = Step(job, cut, apart=apart, **how)
            step.run(batches)
            found.append(step)
        return found

    return make


__all__ = ["Lane", "Step"]
