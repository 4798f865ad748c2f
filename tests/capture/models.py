"""Models, losses and data as users write them, each with one trait that capture must survive."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, default_collate


class Vectors(Dataset):
    """Pairs of a vector of 6 and a class out of 3."""

    def __init__(self, count: int = 20) -> None:
        generator = torch.Generator().manual_seed(1)
        self.vectors = torch.randn(count, 6, generator=generator)
        self.classes = torch.randint(0, 3, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: int) -> Any:
        return self.vectors[index], self.classes[index]


class Described(Vectors):
    """Targets with a name for every sample, one that the loss ignores, and how many there are."""

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Any]]:
        vector, found = super().__getitem__(index)
        return vector, {"name": f"{index}.png", "y": found, "id": torch.tensor([index, 0])}

    @staticmethod
    def collate_fn(samples: list[Any]) -> tuple[Tensor, dict[str, Any]]:
        inputs, targets = default_collate(samples)
        return inputs, {**targets, "count": len(samples)}


def by_keyword() -> list[dict[str, Tensor]]:
    pairs = Vectors()
    return [{"x": pairs.vectors[i], "y": pairs.classes[i]} for i in range(len(pairs))]


def mean_by_y(outputs: Tensor, targets: dict[str, Any]) -> Tensor:
    return cross_entropy(outputs, targets["y"])


def mean_by_size(outputs: Tensor, targets: dict[str, Any]) -> Tensor:
    """Of a size that is a number in the graph."""
    return cross_entropy(outputs, targets["y"], reduction="sum") / int(outputs.shape[0])


def loss_of_y(outputs: dict[str, Any], targets: Tensor) -> Tensor:
    return cross_entropy(outputs["y"], targets)


def mlp(width: int = 8, slope: float = 0.0, deep: int = 0) -> nn.Module:
    middle = nn.LeakyReLU(slope) if slope else nn.ReLU()
    more = [nn.Linear(width, width) for _ in range(deep)]
    return nn.Sequential(nn.Linear(6, width), middle, *more, nn.Linear(width, 3))


class Layers(nn.Module):
    """What the models below are made of; each of them uses some of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in "abc")
        self.head, self.norm, self.table = nn.Linear(6, 3), nn.BatchNorm1d(6), nn.Embedding(6, 6)
        self.register_buffer("newer", torch.linspace(0.5, 1.5, 6))
        self.register_buffer("older", torch.full((6,), 2.0))


class FixedBatch(Layers):
    """Holds for batches of 4 alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.reshape(4, 2, 3).flatten(1))


class Listing(Layers):
    """Lists the samples of one input and takes their number from another; has its own loss."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mean = sum(self.a(x)) / len(x)
        return cross_entropy(self.head(mean + torch.zeros(y.shape[0], 6)), y)


class Sizes(Layers):
    """Shapes computed from the batch size."""

    def forward(self, x: Tensor) -> Tensor:
        b = x.shape[0]
        rows = self.a(x).reshape(b * 2, 3) / (2 * b)
        return rows.view(b, 2, 3).mean(1) + torch.zeros(b, 3)


class Inplace(Layers):
    """Every kind of write: relu_, add_, copy_, index_put_, and a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).relu_()
        z = self.b(y)
        z.add_(y)
        w = torch.empty_like(z).copy_(z)
        w[:, torch.tensor([0, 2])] = torch.tensor([0.5, 0.5])
        if self.training:
            self.newer.add_(w.detach().mean(0))
        return self.head(w + z)


class Filled(Layers):
    """A value without gradient until it is filled through a view of itself."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[:, :3] = self.a(x)[:, :3]
        return self.head(y.tanh())


class WritesASlice(Layers):
    """Indices that are written through a view, from a buffer and twice, and no indices before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("indices", torch.arange(4) - 7)

    def forward(self, x: Tensor) -> Tensor:
        indices = torch.full((len(x), 4), -100)
        view = indices[:, :]
        view.copy_(self.indices)
        view.add_(3).add_(4)
        return self.head(x + self.table(indices).sum(1))


class OutArgument(Layers):
    """Writes a value by an argument ``out`` and reads it by its first name."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        with torch.no_grad():
            scale = torch.ones_like(hidden)
            torch.add(hidden, 1.0, out=scale)
        return self.head(hidden * scale)


class WritingInput(Layers):
    """Changes its input where it is."""

    def forward(self, x: Tensor) -> Tensor:
        x += 1.5
        return self.head(self.a(x))


class Assigning(Layers):
    """Assigns buffers that autograd keeps for the backward, and exchanges two of them."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) * self.newer
        self.newer = 0.9 * self.newer + 0.1 * y.detach().std(0)
        y = y * self.newer
        self.newer, self.older = self.older.mul_(0.9), self.newer
        return self.head(y / self.newer)


class Shifting(Layers):
    """Buffers that move along a line, and two that change places and are written there."""

    def __init__(self) -> None:
        super().__init__()
        for index in range(3):
            self.register_buffer(f"line_{index}", torch.full((6,), 1.0 + index))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z = y * self.line_0 + self.line_1 - 0.5 * self.line_2
        if self.training:
            self.line_2, self.line_1 = self.line_1, self.line_0
            self.line_0 = y.detach().mean(0)
            self.newer, self.older = self.older, self.newer
            self.older.mul_(0.9)
        return self.head(z * self.newer + self.older)


class Dropping(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.dropout(self.a(x), 0.5, self.training))


class Skip(Layers):
    """A value used right away and once more at the end."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).tanh()
        return (self.c(self.b(y)) + y)[:, :3]


class TwoHeads(Layers):
    """Two ways from one value, either of which may come first in the pipeline."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).tanh()
        left = self.b(y)
        return self.head(self.c(y).sigmoid() + left)


def scaling(factor: float) -> Any:
    """An autograd function of two tensors and a number; all of them have one name."""

    class Scaling(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor]:
            ctx.scale = scale
            return x * scale * factor, y.round()

        @staticmethod
        def backward(ctx, for_x: Tensor, for_y: Tensor) -> tuple[Tensor, Tensor, None]:
            return for_x * 7.0 * ctx.scale * factor, for_y, None

    return Scaling


class OwnBackward(Layers):
    first, second = scaling(2.0), scaling(5.0)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.first.apply(self.a(x), self.b(x), 2.0)
        left, right = self.second.apply(right, left, 3.0)
        return self.head(left + right)


class Positions(Layers):
    """Makes tensors on the device that it was captured on, some of them in a branch."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cond(x.sum() > 0, self.shift, lambda x: x * 2, (x,))
        return self.head(x + self.table(torch.arange(6, device=x.device)).sum(1))

    def shift(self, x: Tensor) -> Tensor:
        return x + torch.arange(6, device=x.device)


class Nested(Layers):
    """Half precision with a float32 softmax inside, and a weight used with and without grad."""

    def __init__(self, half: bool = True) -> None:
        super().__init__()
        self.half = half

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            y = self.a(x)
            with torch.autocast("cpu", enabled=False):
                weights = (y.float() * 3).softmax(-1)
                with torch.no_grad():
                    shift = self.b(weights) * 0.5
            y = self.b(y * weights) + shift
        return self.head(y.float())


class Branches(Layers):
    """An autocast within a branch, which is one operator."""

    def forward(self, x: Tensor) -> Tensor:
        def half(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.a(x).float()

        y = torch.cond(x.sum() > -1e9, half, lambda x: self.a(x).sin(), (x,))
        return self.head(self.b(y))


class Written(Layers):
    """A value of several uses that is written where no gradients are recorded."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        with torch.no_grad():
            y[:, 0].mul_(0.5)
        return self.head(self.b(y) + y) + y.mean()


class Asking(Layers):
    """Asks for dtypes, switches autocast off in between, and uses a weight with a norm."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        wide = x.float()
        scaled = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        with torch.autocast("cpu", enabled=False):
            angle = torch.sin(scaled.float())
        x = self.b(nn.functional.layer_norm(scaled + angle.to(x.dtype), (6,), self.older))
        return self.head(x * 1.5 if x.dtype == torch.bfloat16 else x)


class Reading(Layers):
    """Reads the types of values, which the autocast of a device decides."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.layer_norm(self.a(x), (6,))
        bias = torch.zeros(6, dtype=x.dtype)
        shares = self.b(x).softmax(-1)
        assert torch.finfo(shares.dtype).bits >= 16
        return self.head(shares + bias.to(shares.dtype))


# Layers that no export takes, within models that go on


class Branch(nn.Module):
    """Ways of its own, one of which hands the input through, and a list that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.kept: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x))
        self.kept.append(x.sum().item())
        if x.sum() > 1e6:
            return torch.ones_like(y)
        return y if x.sum() > 0 else x


class Counting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + sum(v > 0 for v in x.flatten().tolist()))


class NamedVectors(Vectors):
    """Inputs with a name for every sample."""

    def __getitem__(self, index: int) -> tuple[dict[str, Any], Tensor]:
        vector, found = super().__getitem__(index)
        return {"x": vector, "name": f"{index}.png"}, found


class Named(nn.Linear):
    """Gets names, and computes with them in some way, or in none."""

    def __init__(self, way: str) -> None:
        super().__init__(6, 3)
        self.way, self.table = way, {f"{index}.png": index for index in range(20)}

    def forward(self, x: Tensor, name: list[str]) -> Tensor:
        if self.way == "length":
            x = x * torch.tensor([len(each) for each in name])[:, None]
        if self.way == "table":
            x = x * torch.tensor([self.table[each] for each in name])[:, None]
        if self.way == "branch":
            x = 2 * x if name[0].startswith("0") else x
        return super().forward(x)


class Passing(nn.Module):
    """Passes names on."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Named("none")

    def forward(self, x: Tensor, name: list[str]) -> Tensor:
        return self.inside(x, name=name)


class Select(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = Select()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(x).sum()


def between(names: list[str]) -> nn.Module:
    """Layers of these classes between two others."""
    return nn.Sequential(nn.Linear(6, 6), *(globals()[name]() for name in names), nn.Linear(6, 3))


def selecting() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3), Select())


def scripted() -> nn.Module:
    return nn.Sequential(torch.jit.script(nn.Linear(6, 6)), nn.Linear(6, 3))


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(4, 6, sparse=True), nn.Linear(6, 3))


class Unrolled(nn.Linear):
    """A long loop; false, as it says that it is empty."""

    def __init__(self) -> None:
        super().__init__(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(12):
            x = super().forward(x).tanh()
        return x

    def __len__(self) -> int:
        return 0


class Skipping(nn.Module):
    """Leaves layers out at random; a part of its result has a structure that follows from that."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(9))

    def forward(self, x: Tensor) -> dict[str, Any]:
        every = []
        for layer in self.layers:
            every.append(x)
            if torch.rand([]) > 0.5:
                x = layer(x)
            else:
                every.append(x)
        return {"last": x, "every": tuple(every)}


class Speech(nn.Module):
    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.encoder, self.head, self.reads = Skipping(), nn.Linear(6, 3), reads

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.encoder(x)
        assert isinstance(outputs["every"], tuple)
        more = sum(outputs["every"]) if self.reads else 0
        return self.head(outputs["last"] + more)


class Pair(Layers):
    """Returns its input, too, so that a loss may ask for the slope."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        return self.a(x).tanh(), x


def slope_of(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return torch.autograd.grad(outputs[0].sum(), outputs[1], create_graph=True)[0].sum()


class Slope(nn.Module):
    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


class Equation(nn.Module):
    """A submodule differentiates what was computed before it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.slope, self.head = nn.Linear(6, 6), Slope(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_()
        return self.head(self.slope(self.a(x).tanh(), x))


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2 if x.sum() > 0 else 3)


class Outer(Layers):
    """Writes the result of a gate, which is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = self.gate(x)
        y.add_(1)
        return self.head(y) + self.b(x)[:, :3]


class Scaling(nn.Module):
    """Assigns two buffers, one of which it may write in place before."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("newer", torch.full((6,), 0.5))
        self.register_buffer("older", torch.full((6,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.newer * self.older
        if x.sum() > 1e9:
            return y
        if self.in_place:
            self.newer.mul_(0.9)
        self.newer, self.older = 0.9 * self.newer, self.newer
        return y


class Twice(Layers):
    """Reads the buffer that a submodule assigns before, between and after its two uses."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.scaling = Scaling(in_place)

    def forward(self, x: Tensor) -> Tensor:
        newer = self.scaling.newer
        x = self.a(x) * newer
        x = self.scaling(x) * self.scaling.newer
        return self.head(self.scaling(x) * newer)


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


def branching_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.mean() > 1e6:
        return outputs.mean()
    return cross_entropy(outputs, targets)
