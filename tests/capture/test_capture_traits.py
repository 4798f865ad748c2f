"""What decides how exactly a training can be repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipectl.capture import CapturedJob
from pipectl.capture.job import find_traits
from pipectl.capture.slices import coupled_operators

COUPLED = """
import torch
from torch import nn

def data():
    return torch.utils.data.TensorDataset(torch.randn(16, 6), torch.randint(3, (16,)))

class Plain(nn.Module):
    def __init__(self, frozen=False):
        super().__init__()
        self.layer, self.norm, self.frozen = nn.Linear(6, 3), nn.BatchNorm1d(3), frozen

    def forward(self, x):
        return self.layer(nn.functional.layer_norm(x, (6,)))

class Normed(Plain):
    def forward(self, x):
        return self.norm(self.layer(x))

class Frozen(Plain):
    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.norm(self.layer(x))

class Centred(Plain):
    def forward(self, x):
        y = self.layer(x)
        return y - 0.5 * y.mean(dim=0)

class Related(Plain):
    def forward(self, x):
        y = self.layer(x)
        return torch.softmax(y @ y.T, dim=1) @ y
"""


@pytest.mark.parametrize(
    ("model", "coupled"),
    [
        ("Plain", []),
        ("Frozen", []),
        ("Normed", ["batch_norm"]),
        ("Centred", ["sub"]),
        ("Related", ["matmul"]),
    ],
)
def test_operators_that_couple_samples_are_found(
    make_spec, tmp_path: Path, model: str, coupled: list[str]
) -> None:
    place = tmp_path / "coupled.py"
    place.write_text(COUPLED)
    graph = CapturedJob(make_spec(f"{place}:{model}", data=f"{place}:data")).training_graph(4)
    assert [graph.operators[i].name for i in coupled_operators(graph)] == coupled


def test_traits_of_a_model_without_any(make_spec) -> None:
    traits = find_traits(make_spec("mlp"), 4)
    assert (traits.random, traits.shared) == ((), ())


def test_random_operators_and_shared_parameters_are_named(make_spec) -> None:
    assert find_traits(make_spec("Dropping"), 4).random == ("dropout",)
    here = __file__.replace("capture/test_capture_traits.py", "equality/models.py")
    spec = make_spec(f"{here}:tied", loss=f"{here}:token_loss", data=f"{here}:Tokens")
    assert find_traits(spec, 4).shared == ("tokens.weight",)
