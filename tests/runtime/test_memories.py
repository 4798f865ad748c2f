"""Gradients of parameters in memory of their own."""

import pytest
import torch
from torch import nn

from pipectl.runtime.saved_tensors import run_backward


@pytest.mark.parametrize("count", [1, 2, 3])
def test_parameters_behind_views_of_one_value_add_up_by_themselves(count):
    places = [nn.Parameter(torch.zeros(3)) for _ in range(count)]
    weight = torch.tensor([[1.0, 2.0, 3.0]])
    for _ in range(2):
        value = torch.ones(1, 3)
        for place in places:
            value = value + place.unsqueeze(0)
        run_backward([(value * weight).sum()], [torch.ones(())], places)
    assert [place.grad.tolist() for place in places] == [[2.0, 4.0, 6.0]] * count
