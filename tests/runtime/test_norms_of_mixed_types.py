"""The norm of gradients of several types, which torch adds one type after another."""

import pytest
import torch
from torch import nn

from pipectl.runtime.gradients import gradient_norms, total_norm


@pytest.mark.parametrize("other", [torch.bfloat16, torch.float64])
def test_norms_are_added_in_the_order_of_torch(other: torch.dtype) -> None:
    torch.manual_seed(1)
    parameters = {
        str(index): nn.Parameter(torch.zeros(9, dtype=(torch.float32, other)[index % 2]))
        for index in range(300)
    }
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    norms = [*gradient_norms(parameters).values()]
    found = total_norm(norms, [parameter.dtype for parameter in parameters.values()])
    assert torch.equal(found, torch.nn.utils.get_total_norm([p.grad for p in parameters.values()]))
    in_model_order = torch.linalg.vector_norm(torch.tensor(norms, dtype=found.dtype))
    assert not torch.equal(found, in_model_order), "so that the order shows"
