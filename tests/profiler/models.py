"""Models whose costs can be counted by hand: vectors of 6 in, classes out of 3."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset


class Vectors(Dataset):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((6,), float(index)), index % 3


class Counted(nn.Module):
    """Linear, relu_ in place, layer norm, dropout, a view, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.drop = nn.Dropout(0.5)
        self.b = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.norm(self.a(x).relu_()))
        return self.b(y.view(-1, 2, 5)[:, 0])


class Unpooled(Counted):
    def forward(self, x: Tensor) -> Tensor:
        pooled, places = nn.functional.max_pool2d(x.view(-1, 1, 2, 3), (2, 1), return_indices=True)
        back = nn.functional.max_unpool2d(pooled, places, (2, 1), output_size=(2, 3))
        return super().forward(back.view(-1, 6))


class Squares(torch.autograd.Function):
    """Keeps its input where it is asked to: saved for the backward, or in an attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, power: float, is_saved: bool) -> Tensor:
        ctx.power = power
        if is_saved:
            ctx.save_for_backward(x)
        else:
            ctx.x = [x]
        return x**power

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors or ctx.x
        return ctx.power * x * gradient, None, None


@torch.library.custom_op("pipectl_tests::square", mutates_args=())
def square(x: Tensor) -> Tensor:
    return x * x


square.register_fake(torch.empty_like)


def keep_input(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    (ctx.x,) = inputs


square.register_autograd(lambda ctx, gradient: 2 * ctx.x * gradient, setup_context=keep_input)


class Hiding(Counted):
    def forward(self, x: Tensor) -> Tensor:
        x = Squares.apply(super().forward(x).tanh(), 2.0, True)
        return square(Squares.apply(x.tanh(), 2.0, False).tanh())


class Again(nn.Module):
    """A layer that is checkpointed three times, each time by a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = checkpoint(lambda y: self.layer(y).tanh(), x, use_reentrant=True)
        return x


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.again, self.b = nn.Linear(6, 10), Again(), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.again(self.a(x)))


class Drawn(nn.Module):
    """Initial values that no seed gives, but for those of the first layer."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        print("built")
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        values = np.random.default_rng(seed).standard_normal((3, 6))
        self.register_buffer(
            "last", torch.randn(6, generator=torch.Generator().manual_seed(id(self)))
        )
        self.second.weight.data = torch.tensor(values, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        self.last.copy_(x.detach()[0])
        return self.second(self.first(x) + self.last)


class Scaled(Counted):
    """By numbers in plain attributes that no seed gives; those that no operator reads are none of
    a graph's."""

    def __init__(self, read: str) -> None:
        super().__init__()
        numbers = np.random.default_rng()
        self.read = read
        self.tensor, self.parts = torch.from_numpy(numbers.random(6)).float(), {}
        self.parts["array"] = numbers.random(6)
        self.unread = torch.from_numpy(numbers.random(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.read == "tensor":
            x = x * self.tensor
        elif self.read == "array":
            x = x * torch.from_numpy(self.parts["array"]).float()
        return super().forward(x)


class Large(Counted):
    """With a buffer of 64 MiB, and takes no more than so many samples."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.register_buffer("table", torch.ones(2**24))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > self.most:
            raise ValueError("too many")
        return super().forward(x) * self.table[0]


class Normed(Counted):
    """With a norm of what all samples have in common."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(super().forward(x), None, None, training=True)


class NeedsGradients(torch.optim.SGD):
    """Fails where there is nothing to do."""

    def step(self, closure=None):
        if any(p.grad is None for group in self.param_groups for p in group["params"]):
            raise ValueError("no gradient")
        return super().step(closure)


class KeepsSets(torch.optim.SGD):
    """Has state that no checkpoint holds."""

    def step(self, closure=None):
        super().step(closure)
        self.state[self.param_groups[0]["params"][0]]["seen"] = {1}


class FromOne(Vectors):
    """Classes that are counted from 1."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        vector, found = super().__getitem__(index)
        return vector, found + 1


def counted_from_one(outputs: Tensor, targets: Tensor) -> Tensor:
    """Changes the targets where they are."""
    targets -= 1
    return nn.functional.cross_entropy(outputs, targets)


class SlowVectors(Vectors):
    """Takes its time to load each sample."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(0.02)
        return super().__getitem__(index)


WAITS_S = 0.004


@torch.library.custom_op("tests_profiler::wait", mutates_args=())
def wait(x: Tensor) -> Tensor:
    """A copy; the calling thread waits meanwhile, as for the threads of a library."""
    time.sleep(WAITS_S)
    return x.clone()


@wait.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


wait.register_autograd(lambda ctx, gradient: wait(gradient))


class Waits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(wait(self.first(x)))
