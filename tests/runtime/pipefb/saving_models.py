"""Models that save all kinds of tensors for their backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

WIDTH = 24


class Samples(Dataset):
    def __init__(self) -> None:
        self.values = torch.randn(8, 6, WIDTH, generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.values[index], self.values[index].mean()


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.mean((1, 2)) - targets).square().mean()


class Attention(nn.Module):
    """Three views of one projection, a reshaped input, random masks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 3, c // 3).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.dropout(self.out(y.transpose(1, 2).reshape(b, t, c)))


class Normed(nn.Module):
    """Buffers that every forward writes, and operators in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(6)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("usual", torch.zeros(WIDTH))
        self.register_buffer("fixed", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.first(x)), inplace=True)
        if self.training:
            with torch.no_grad():
                self.usual.lerp_(y.mean((0, 1)), 0.1)
        y = (y * self.fixed - self.usual).tanh_()
        z = self.last(y).add_(x).sigmoid_()
        return z + y[..., :1].expand(-1, -1, WIDTH) * 3.0


class Patched(nn.Module):
    """Writes a part of a value, which rebuilds the graph behind it from the memory's layout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y[:, ::2].mul_(2.0)
        y[:, 1] = y[:, 0].sigmoid()
        return self.last(y.tanh())


class Tied(nn.Module):
    """One weight with two uses, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.frozen(self.shared(x).cos()))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        ctx.save_for_backward(value)
        return value * value

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient * (ctx.saved_tensors[0] > -1)


class Hidden(torch.autograd.Function):
    """Keeps a tensor where no hook sees it."""

    @staticmethod
    def forward(ctx, value):
        ctx.value = value
        return value * value

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.value * gradient


class Own(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(self.linear(x)).sin()


class Numpy(nn.Module):
    """Code that no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y * float(y.detach().numpy().std())


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.inside = nn.Linear(WIDTH, WIDTH), Numpy()

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(self.before(x)).tanh()


def attention() -> nn.Module:
    return nn.Sequential(Attention(), Attention())


def normed() -> nn.Module:
    return nn.Sequential(Normed(), Normed())


def normed_after_linear() -> nn.Module:
    norms = nn.LayerNorm(WIDTH), nn.GroupNorm(2, 6), nn.BatchNorm1d(6)
    return nn.Sequential(*(m for norm in norms for m in (nn.Linear(WIDTH, WIDTH), norm)))


def patched() -> nn.Module:
    return Patched()


def tied() -> nn.Module:
    return Tied()


def own_function() -> nn.Module:
    return Own(Square)


def hidden_function() -> nn.Module:
    return Own(Hidden)


def around_numpy() -> nn.Module:
    return Around()


class Placed(nn.Module):
    """Adds parameters through views; a sum's gradient is that of all it adds, in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.ParameterList([nn.Parameter(torch.randn(12, WIDTH)) for _ in range(6)])
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for place in self.places:
            x = x + place.view(2, 6, WIDTH)
        return self.linear(x)


def placed() -> nn.Module:
    return Placed()
