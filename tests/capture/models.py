"""Models, losses and data as users write them, each with one trait that capture must survive."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

Output = namedtuple("Output", ["loss", "logits"])


class Vectors(Dataset):
    """Pairs of a vector of 6 and a class out of 3."""

    def __init__(self, count: int = 20) -> None:
        generator = torch.Generator().manual_seed(1)
        self.vectors = torch.randn(count, 6, generator=generator)
        self.classes = torch.randint(0, 3, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.vectors[index], self.classes[index]


class Mappings(Vectors):
    """The same as mappings: the model gets them as keywords."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.vectors[index], "y": self.classes[index]}


class Named(Vectors):
    """The same with inputs and targets by name."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.vectors[index], "targets": self.classes[index]}


class Integers(Vectors):
    """Whole numbers from 0 to 5."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.vectors[index].abs().clamp(max=5).long(), self.classes[index]


class Transposed(Vectors):
    """A collate_fn that puts the batch second."""

    @staticmethod
    def collate_fn(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        vectors, classes = zip(*samples, strict=True)
        return torch.stack(vectors, 1), torch.stack(classes)


def mlp(width: int = 8, slope: float = 0.0, deep: int = 0) -> nn.Module:
    middle = nn.LeakyReLU(slope) if slope else nn.ReLU()
    more = [nn.Linear(width, width) for _ in range(deep)]
    return nn.Sequential(nn.Linear(6, width), middle, *more, nn.Linear(width, 3))


class Inner(nn.Module):
    """What most models wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Layers(nn.Module):
    """Linear layers by name, with their sizes."""

    layers = (("a", 6, 6), ("head", 6, 3))

    def __init__(self) -> None:
        super().__init__()
        for name, entering, leaving in self.layers:
            setattr(self, name, nn.Linear(entering, leaving))


@dataclass
class ModelOutput:
    """As model libraries return it."""

    loss: Tensor
    logits: Tensor
    past: object = None
    cache: object = None


class WithLoss(Inner):
    """Returns its own loss, in one of the usual ways."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor, y: Tensor) -> object:
        logits = self.inner(x)
        loss = nn.functional.cross_entropy(logits, y)
        forms = {
            "tensor": loss,
            "tuple": (loss, logits),
            "dict": {"logits": logits, "loss": loss},
            "namedtuple": Output(loss, logits),
            "dataclass": ModelOutput(loss, logits, cache=object()),
            "texts": {"loss": loss, "kind": "linear", "note": "nothing"},
        }
        return forms[self.form]


class FixedBatch(Inner):
    """Holds for batches of 4 alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.reshape(4, 2, 3).flatten(1))


class Inplace(Layers):
    """Every kind of write: relu_, add_, copy_, index_put_, and a buffer."""

    layers = (("a", 6, 6), ("b", 6, 6), ("head", 6, 3))

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).relu_()
        z = self.b(y)
        z.add_(y)
        w = torch.empty_like(z).copy_(z)
        w[:, torch.tensor([0, 2])] = torch.tensor([0.5, 0.5])
        if self.training:
            self.calls.add_(w.detach().mean(0))
        return self.head(w + z)


class SharedNorm(Layers):
    """One BatchNorm used twice: its statistics are written and read in order."""

    layers = (("a", 6, 6), ("b", 6, 6), ("head", 6, 3))

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.b(self.norm(self.a(x)))))


class Dropping(Layers):
    layers = (("a", 6, 16), ("head", 16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.dropout(self.a(x), 0.5, self.training))


class Sizes(Layers):
    """Shapes computed from the batch size."""

    layers = (("inner", 3, 3),)

    def forward(self, x: Tensor) -> Tensor:
        b = x.shape[0]
        rows = self.inner(x.reshape(b * 2, 3)) / (2 * b)
        return rows.view(b, 2, 3).mean(1) + torch.zeros(b, 3)


class Filled(Layers):
    """A value without gradient until it is filled through a view of itself."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[:, :3] = self.a(x)[:, :3]
        return self.head(y.tanh())


class Skip(Layers):
    """A value used right away and once more at the end."""

    layers = (("a", 6, 6), ("b", 6, 6), ("c", 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).tanh()
        return (self.c(self.b(y)) + y)[:, :3]


class TwoHeads(Layers):
    """Two ways from one value, either of which may come first in the pipeline."""

    layers = (("a", 6, 6), ("b", 6, 3), ("c", 6, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).tanh()
        left = self.b(y)
        return self.c(y).sigmoid() + left


class Reordered(Layers):
    """Another order of layers in evaluation."""

    layers = (("a", 6, 6), ("b", 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x)) if self.training else self.a(self.b(x))
        return y[:, :3]


class Frozen(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


def vector_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def count_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).sum()


def float_loss(outputs: Tensor, targets: Tensor) -> float:
    return 1.0


def scaled_loss(outputs: Tensor, targets: Tensor, scale: float) -> Tensor:
    return scale * nn.functional.cross_entropy(outputs, targets)


def not_a_module() -> str:
    return "a model"


class OwnBackward(Layers):
    """An autograd function of two tensors and a number, inside another class."""

    layers = (("a", 6, 3), ("b", 6, 3))

    class Doubling(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor]:
            ctx.scale = scale
            return x * scale, y.round()

        @staticmethod
        def backward(ctx, for_x: Tensor, for_y: Tensor) -> tuple[Tensor, Tensor, None]:
            return for_x * 7.0 * ctx.scale, for_y, None

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.Doubling.apply(self.a(x), self.b(x), 2.0)
        return left + right


class BackwardHook(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.inner[0].register_full_backward_hook(lambda module, given, gradient: None)


class RunningScale(Layers):
    """Divides by a buffer it has just written, which autograd keeps for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        self.scale.lerp_(y.detach().std(0), 0.5)
        return self.head(y / self.scale)


class Assigning(Layers):
    """Assigns buffers that autograd keeps for the backward, and exchanges two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))
        self.register_buffer("newer", torch.ones(6))
        self.register_buffer("older", torch.full((6,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) * self.scale
        self.scale = 0.9 * self.scale + 0.1 * y.detach().std(0)
        self.newer, self.older = self.older.mul_(0.9), self.newer
        return self.head(y * self.scale / self.newer)


class WritingInput(Inner):
    """Changes its input where it is."""

    def forward(self, x: Tensor) -> Tensor:
        x += 1.5
        return self.inner(x)


class Described(Vectors):
    """Targets with a name for every sample, one that the loss ignores, and how many there are."""

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Any]]:
        vector, found = super().__getitem__(index)
        return vector, {"name": f"{index}.png", "y": found, "id": torch.tensor([index, 0])}

    @staticmethod
    def collate_fn(samples: list[Any]) -> tuple[Tensor, dict[str, Any]]:
        inputs, targets = default_collate(samples)
        return inputs, {**targets, "count": len(samples)}


Marks = namedtuple("Marks", ["y", "boxes"])


class Marked(Vectors):
    """Targets in a named tuple, some of them in a list."""

    def __getitem__(self, index: int) -> tuple[Tensor, Marks]:
        vector, found = super().__getitem__(index)
        return vector, Marks(found, [torch.ones(2), {"weight": torch.ones(1)}])


def mean_by_mark(outputs: Tensor, targets: Marks) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets.y) * targets.boxes[1]["weight"].mean()


def mean_by_count(outputs: Tensor, targets: dict[str, Any]) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets["y"], reduction="sum") / targets["count"]


def mean_by_y(outputs: Tensor, targets: dict[str, Any]) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets["y"])


def mean_by_size(outputs: Tensor, targets: dict[str, Any]) -> Tensor:
    """Of a size that is a number in the graph."""
    loss = nn.functional.cross_entropy(outputs, targets["y"], reduction="sum")
    return loss / int(outputs.shape[0])


def scaling(factor: float) -> type[torch.autograd.Function]:
    class Scaling(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x * factor

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:
            return gradient * factor

    return Scaling


class Positions(Inner):
    """Makes tensors on the device that it was captured on, some of them in a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cond(x.sum() > 0, self.shift, lambda x: x * 2, (x,))
        return self.inner(x + self.table(torch.arange(6, device=x.device)).sum(1))

    def shift(self, x: Tensor) -> Tensor:
        return x + torch.arange(6, device=x.device)


class DroppedLstm(nn.Module):
    """An operator that draws, and gives several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        values, _ = self.lstm(x.unflatten(1, (2, 3)))
        return self.head(values[:, -1])


class OneName(Inner):
    """Two autograd functions that cannot be told apart by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.functions = scaling(2.0), scaling(5.0)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.functions
        return second.apply(first.apply(self.inner(x)))


class ReadsIntegers(Inner):
    """Uses integers as token ids, as numbers, or one of them as a class."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 6)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        if self.use == "numbers":
            return self.inner(x.float())
        if self.use == "class":
            return self.inner(x[:, 1:].float().sum(1, keepdim=True) + self.table(x[:, 0]))
        return self.inner(self.table(x.view(-1, 6).clamp(min=0)).sum(1))


class WritesASlice(Inner):
    """Indices that are written through a view, from a buffer and twice, and no indices before."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 6)
        self.register_buffer("indices", torch.arange(4) - 7)

    def forward(self, x: Tensor) -> Tensor:
        indices = torch.full((len(x), 4), -100)
        view = indices[:, :]
        view.copy_(self.indices)
        view.add_(3).add_(4)
        return self.inner(x + self.table(indices).sum(1))


class ReturnsMore(Inner):
    """Its result with the number of samples, or with a parameter."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.ones(3))
        self.what = what

    def forward(self, x: Tensor) -> dict[str, Any]:
        found = self.inner(x)
        return (
            {"y": found, "n": x.shape[0]} if self.what == "size" else {"y": found, "w": self.extra}
        )


class WithEmbedding(Layers):
    """Its result, and a second one with parameters of its own, which the loss does not read."""

    layers = (("a", 6, 6), ("head", 6, 3), ("project", 6, 2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.a(x)
        return {"y": self.head(y), "e": self.project(y)}


def loss_of_y(outputs: dict[str, Any], targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs["y"], targets)


def count_of_outputs(outputs: dict[str, Any], targets: Tensor) -> Tensor:
    return torch.tensor(float(outputs["n"] == len(targets)))


class OutArgument(Layers):
    """Writes a value by an argument ``out`` and reads it by its first name."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        with torch.no_grad():
            scale = torch.ones_like(hidden)
            torch.add(hidden, 1.0, out=scale)
        return self.head(hidden * scale)


# Autocast and no_grad


class Halves(Layers):
    layers = (("first", 6, 8), ("second", 8, 8), ("head", 8, 3))


class Nested(Halves):
    """Half precision with a float32 softmax inside, and a weight used with and without grad."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.first(x)
            with torch.autocast("cpu", enabled=False):
                weights = (y.float() * 3).softmax(-1)
                with torch.no_grad():
                    shift = self.second(weights) * 0.5
            y = self.second(y * weights) + shift
        return self.head(y.float())


class Branches(Halves):
    """An autocast within a branch, which is one operator."""

    def forward(self, x: Tensor) -> Tensor:
        def half(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.first(x).float()

        y = torch.cond(x.sum() > -1e9, half, lambda x: self.first(x).sin(), (x,))
        return self.head(self.second(y))


class Written(Halves):
    """A value of several uses that is written where no gradients are recorded."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.no_grad():
            y[:, 0].mul_(0.5)
        z = self.second(y)
        return self.head(z + y) + y.mean()


class Asking(Halves):
    """Asks for dtypes, switches autocast off in between, and uses a weight with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        wide = x.float()
        scaled = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        with torch.autocast("cpu", enabled=False):
            angle = torch.sin(scaled.float())
        x = self.second(self.norm(scaled + angle.to(x.dtype)))
        return self.head(x * 1.5 if x.dtype == torch.bfloat16 else x)


class Switched(nn.Module):
    def __init__(self, enabled: bool) -> None:
        super().__init__()
        self.head, self.enabled = nn.Linear(6, 3), enabled

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            return self.head(x)
