"""The form of a tensor in a message: what comes out has the values and strides that went in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipectl.runtime.layout import Layout

BASE = torch.arange(24.0)
COMPLEX = torch.tensor([1 + 2j, 3 - 1j])
TENSORS = {
    "contiguous": BASE.view(4, 6),
    "permuted": BASE.view(2, 3, 4).permute(2, 0, 1),
    "expanded": torch.arange(4.0).view(4, 1).expand(4, 5),
    "sliced with gaps": BASE.view(4, 6)[:, 1:4],
    "odd stride in a size-1 dimension": BASE.as_strided((1, 3), (17, 1)),
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "scalar": torch.tensor(3.0),
    "empty within": torch.empty(2, 0, 3),
    "permuted and expanded": torch.arange(6.0).view(2, 1, 3).expand(2, 4, 3).permute(2, 0, 1),
    "booleans": torch.arange(6).view(2, 3).t() > 2,
    "half": torch.arange(6.0, dtype=torch.bfloat16).view(2, 3).t(),
    "conjugate": COMPLEX.conj(),  # its memory, and that of the next, holds the values before
    "negative": COMPLEX.conj().imag,
    "overlapping windows": torch.arange(6.0).unfold(0, 3, 1),
}
WITHOUT_A_COPY = ("contiguous", "permuted", "channels last", "expanded")


def message(layout: Layout, tensor: Tensor) -> Tensor:
    """Flatten, copy byte by byte, unflatten."""
    vector = layout.flatten(tensor)
    assert (vector.dim(), vector.is_contiguous(), vector.numel()) == (1, True, layout.count)
    received = torch.empty(layout.count, dtype=layout.dtype)
    received.view(torch.uint8).copy_(vector.view(torch.uint8))
    return layout.unflatten(received)


@pytest.mark.parametrize("name", TENSORS)
def test_values_and_strides_survive_also_of_a_tensor_that_lies_otherwise(name: str) -> None:
    tensor = TENSORS[name]
    layout = Layout.of(tensor)
    elsewhere = [] if "expanded" in name else [tensor.contiguous().clone()]
    strides = (3, 1) if name == "overlapping windows" else tensor.stride()
    for each in (tensor, *elsewhere):
        found = message(layout, each)
        assert (found.dtype, found.stride()) == (tensor.dtype, strides)
        assert torch.equal(found, tensor)
    without_a_copy = layout.flatten(tensor).data_ptr() == tensor.data_ptr()
    assert without_a_copy or name not in WITHOUT_A_COPY


def test_rows_that_differ_are_not_taken_for_an_expanded_one() -> None:
    layout = Layout.of(torch.ones(1, 3).expand(4, 3))
    with pytest.raises(ValueError, match="expanded"):
        layout.flatten(torch.arange(12.0).view(4, 3))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=4))
def test_any_strides_survive(dims: list[tuple[int, int]]) -> None:
    sizes, strides = [size for size, _ in dims], [stride for _, stride in dims]
    tensor = torch.arange(64.0).as_strided(sizes, strides)
    layout = Layout.of(tensor)
    assert torch.equal(message(layout, tensor), tensor)
    assert layout.count <= tensor.numel()
