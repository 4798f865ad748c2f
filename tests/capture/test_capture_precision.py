"""A graph captured under autocast, run under autocast, gives what the model itself gives."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from pipectl.capture import CapturedJob, Cut, build_stage
from pipectl.capture.regions import arithmetic, region_of

CPU = torch.device("cpu")


class Asking(nn.Module):
    """Asks for dtypes, switches autocast off in between, and uses a weight with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        wide = x.float()
        scaled = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        with torch.autocast("cpu", enabled=False):
            angle = torch.sin(scaled.float())
        x = self.norm(scaled + angle.to(x.dtype))
        return self.second(x * 1.5 if x.dtype == torch.bfloat16 else x)


class Vectors(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.sin(torch.arange(4.0) + index), index % 3


def test_the_captured_graph_equals_the_model_to_the_bit(make_spec) -> None:
    here = Path(__file__)
    spec = make_spec(
        f"{here}:Asking",
        data=f"{here}:Vectors",
        training={"steps": 1, "batch_size": 8, "precision": "bf16"},
    )
    job = CapturedJob(spec)
    graph = job.training_graph(4)
    assert any(region_of(node).autocasts for node in graph.operators)
    code = build_stage(Cut(graph, {n.name: 0 for n in graph.operators}, training=True), 0, 4)
    inputs, targets = job.loader.example(4)
    with arithmetic("bf16", CPU):
        states = [job.states[graph.states[slot.value].name] for slot in code.states]
        (loss,) = code.module(0, *states, inputs, targets)
    loss.backward()
    found = [parameter.grad for parameter in job.model.parameters()]
    job.model.zero_grad()
    with arithmetic("bf16", CPU):
        outputs = job.model(inputs)
        expected = F.cross_entropy(outputs, targets)
    expected.backward()
    assert outputs.dtype == torch.bfloat16
    assert torch.equal(loss, expected)
    for gradient, parameter in zip(found, job.model.parameters(), strict=True):
        assert gradient is not None
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, parameter.grad)


def test_float32_changes_nothing() -> None:
    with arithmetic("float32", CPU):
        assert not torch.is_autocast_enabled("cpu")
