"""Models and data of the jobs that the tests start over MPI."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, IterableDataset, default_collate

PADDING = -100


class Samples(Dataset):
    """Vectors with three targets each, some of which are padding."""

    def __init__(
        self,
        count: int = 24,
        wrong_from: int | None = None,
        fails_from: int = 1000,
        width: int = 6,
    ) -> None:
        generator = torch.Generator().manual_seed(2)
        self.vectors = torch.randn(count, width, generator=generator)
        self.targets = torch.randint(0, 4, (count, 3), generator=generator)
        self.targets[torch.rand(count, 3, generator=generator) < 0.5] = PADDING
        if wrong_from is not None:
            self.targets[wrong_from:] = 99
        self.fails_from = fails_from

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= self.fails_from:
            raise OSError(f"sample {index} cannot be read")
        return self.vectors[index], self.targets[index]


class Head(nn.Sequential):
    """Logits of all words, and little else."""

    def __init__(self, words: int) -> None:
        super().__init__(nn.Embedding(words, 32), nn.Linear(32, words))


class Marked(Samples):
    """Four samples, 4 to 7, are marked by a large number."""

    def __init__(self, first: int = 4) -> None:
        super().__init__()
        self.vectors[first : first + 4, 0] = 100.0


class Ragged(Samples):
    """From one sample to the tenth, vectors are longer, or targets fewer; or a sample is lost."""

    def __init__(
        self,
        count: int = 30,
        longer_from: int = 1000,
        fewer_from: int = 1000,
        lost: int | None = None,
        double: bool = False,
    ) -> None:
        super().__init__(count)
        self.longer_from, self.fewer_from, self.lost = longer_from, fewer_from, lost
        self.vectors = self.vectors.double() if double else self.vectors

    @staticmethod
    def collate_fn(samples: list[tuple[Tensor, Tensor] | None]) -> Any:
        return default_collate([sample for sample in samples if sample is not None])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor] | None:
        if index == self.lost:
            return None
        vector, targets = super().__getitem__(index)
        longer = nn.functional.pad(vector, (0, 2)) if self.longer_from <= index < 10 else vector
        return longer, targets[: 2 if self.fewer_from <= index < 10 else 3]


class Counted(Samples):
    """With the number of samples of each micro-batch."""

    @staticmethod
    def collate_fn(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, dict[str, Any]]:
        inputs, targets = default_collate(samples)
        return inputs, {"y": targets, "count": len(samples)}


class Scaled(Samples):
    """With a number that is another one for the samples 4 to 7."""

    @staticmethod
    def collate_fn(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, dict[str, Any]]:
        inputs, targets = default_collate(samples)
        others = Samples().vectors[4:8]
        is_other = any(torch.equal(inputs[0], each) for each in others)
        return inputs, {"y": targets, "scale": 2.0 if is_other else 1.0}


def scaled_loss(outputs: Tensor, targets: dict[str, Any]) -> Tensor:
    return loss(outputs, targets["y"]) * targets["scale"]


def counted_loss(outputs: Tensor, targets: dict[str, Any]) -> Tensor:
    """Each size has a graph of its own, with its own numbers and constants."""
    total = nn.functional.cross_entropy(
        outputs.transpose(1, 2), targets["y"], ignore_index=PADDING, reduction="sum"
    )
    return total / targets["count"] / torch.tensor(float(int(outputs.shape[0])))


class Emptied(Samples):
    """Samples of nothing but padding are zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors[(self.targets == PADDING).all(1)] = 0.0


class HalfPadded(Samples):
    """Five samples, of which the first two have nothing but padding."""

    def __init__(self) -> None:
        super().__init__(5)
        self.targets[:2] = PADDING


class Spoilt(Samples):
    """Two vectors cannot be computed with."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors[5] = float("nan")
        self.vectors[17] = float("inf")


class RankDependent(Samples):
    """As many samples as this rank's copy of the file system shows."""

    def __init__(self) -> None:
        super().__init__(24 - MPI.COMM_WORLD.rank)


class Paced(Samples):
    """Each sample takes some time, in seconds."""

    def __init__(self, pause_s: float = 0.1) -> None:
        super().__init__()
        self.pause_s = pause_s

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.pause_s)
        return super().__getitem__(index)


class Shifted(Samples):
    """All samples of a micro-batch are moved by a number that is drawn for it."""

    @staticmethod
    def collate_fn(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        vectors, targets = default_collate(samples)
        return vectors + torch.randn(1), targets


class Filling(Samples):
    """Where the environment names a directory, its file system is full from here on."""

    def __init__(self) -> None:
        super().__init__()
        if FILLED in os.environ:
            fill(Path(os.environ[FILLED]))


FILLED = "TEST_FILLED_DIRECTORY"


def fill(directory: Path) -> None:
    """As another job on the node may do."""
    with (directory / f"filler-{os.getpid()}").open("wb", buffering=0) as stream:
        for size in (1 << 16, 1):
            with suppress(OSError):
                while True:
                    stream.write(bytes(size))


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        samples = Samples()
        while True:
            yield from (samples[index] for index in range(len(samples)))


class Model(nn.Module):
    def __init__(self, depth: int = 2, dropout: float = 0.0, width: int = 6) -> None:
        super().__init__()
        random = [nn.Dropout(dropout)] if dropout else []
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(width, width), nn.GELU(), *random) for _ in range(depth)]
        )
        self.head = nn.Linear(width, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)).view(-1, 3, 4)


class OverPresent(Model):
    """Divides by how many samples are not zeros; without one, all is NaN from there on."""

    def forward(self, x: Tensor) -> Tensor:
        present = (x != 0).any(1, keepdim=True)
        first, *later = self.layers
        hidden = first(x) * (present / present.sum())
        for each in later:
            hidden = each(hidden)
        return self.head(hidden).view(-1, 3, 4)


class Called(Model):
    """Scales by how often it was called, also in evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x * (1 + 0.1 * self.calls))


class Turned(Model):
    """Weights that are views of transposed ones."""

    def __init__(self) -> None:
        super().__init__(3)
        for layer in (*(part[0] for part in self.layers), self.head):
            layer.weight.data = layer.weight.data.mT.contiguous().mT


class Unseeded(Model):
    """By numbers in a plain attribute that no seed gives."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor([float.fromhex("0x" + os.urandom(4).hex()) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (self.scale / self.scale.sum()))


class Hungry(Model):
    """Marked samples ask for more memory than there is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].insert(1, Asks())


class Asks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().abs().max()) > 20:
            return x + x.new_empty(1 << 50).sum()
        return 1 * x


class Tied(Model):
    """With one weight in two layers."""

    def __init__(self) -> None:
        super().__init__(depth=6)
        self.layers[5][0].weight = self.layers[0][0].weight


class Overflowing(Model):
    """Marked samples leave its value alone and make the gradient of one parameter infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        huge = (x[:, :1] > 50) * 1e38
        return super().forward(x.clamp(-3, 3) + self.gate * huge * 1e6)


class Block(nn.Module):
    """With a mask that is infinite on purpose, and the logarithm of a factor."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mask", torch.tensor([0.0] + 5 * [-math.inf]))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        shares = (self.linear(x) + self.mask).softmax(-1)
        return x + torch.log(shares.sum(-1, keepdim=True) * self.factor)


class Blocks(nn.Module):
    """Three blocks, of which the second has a factor."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(factor), Block())
        self.head = nn.Linear(6, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)).view(-1, 3, 4)


class Late(Model):
    """Subtracts a running mean that no forward changes before the fifth."""

    def __init__(self, after: int = 3) -> None:
        super().__init__()
        self.after = after
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        moved = 0.9 * self.mean + 0.1 * x.mean(0)
        self.mean.copy_(torch.where(self.count > self.after, moved, self.mean))
        self.count += 1
        return super().forward(x - self.mean)


class Described(Model):
    """With a state dict that holds more than tensors."""

    def get_extra_state(self) -> Any:
        return {"version": 3, "scales": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        assert state["version"] == 3


class Part(nn.Module):
    """Runs again in the backward, which ends before its last operator or goes through."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.BatchNorm1d(6))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant)


class Checkpointed(Model):
    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.part = Part(reentrant)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.part(x))


class Again(torch.autograd.Function):
    """Keeps nothing of a module: its backward runs it once more, and a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        torch.autograd.backward(y, gradient)
        return x.grad, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return Again.apply(Again.apply(x, self.inner), self.inner)


class Reversed(Model):
    """Calls one such part twice."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Reversible()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(self.part(self.layers(x)))).view(-1, 3, 4)


class Hidden(torch.autograd.Function):
    """The square, whose backward reads a tensor that is no saved one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.x * gradient


class Hiding(Model):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Hidden.apply(super().forward(x).flatten(1)[:, :6]))


class Scaling(Model):
    """By one constant in training, and by another one in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        first, last = (1.0, 2.0) if self.training else (-3.0, 4.0)
        return super().forward(x * torch.tensor([first, 1.0, 1.0, 1.0, 1.0, last]))


class Holding(Model):
    """Three constants: one of training, one of evaluation, and one of both."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.shared, self.first, self.last = (torch.full((count,), f) for f in (1.0, 2.0, 3.0))

    def forward(self, x: Tensor) -> Tensor:
        own = self.first if self.training else self.last
        return super().forward(x + self.shared.mean() + own.mean())


class Averaging(Model):
    """Computes with a running mean of its own, which each micro-batch moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(dim=0), 0.5)
        return super().forward(x - self.mean)


class Spreading(Model):
    """Has the spread of its inputs in a buffer, which a single sample makes NaN; loss and gradients
    are not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("spread", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        self.spread.lerp_(x.detach().var(dim=0), 0.5)
        return super().forward(x)


class Counter(nn.Module):
    """Scales by how often it was called, which it keeps in several ways; and takes its time.

    Kept as one operator by ``model.opaque``.
    """

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.pause_s = pause_s
        self.calls, self.seen, self.loose = 0, [0.0], torch.zeros(1)
        self.register_buffer("counted", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.pause_s)
        self.calls += 1
        self.seen.append(self.seen[-1] + 1)
        self.loose += 1
        self.counted += 1
        return x * (1 + 0.1 * (self.calls + len(self.seen) + self.loose + self.counted))


class Counting(Model):
    def __init__(self, pause_s: float = 0.0) -> None:
        super().__init__()
        self.counter = Counter(pause_s)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.counter(x))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(
        outputs.flatten(0, 1), targets.flatten(), ignore_index=PADDING
    )


def mean_of_valid(outputs: Tensor, targets: Tensor) -> Tensor:
    """The same; without a valid target, its gradients are NaN, too."""
    rows, valid = outputs.flatten(0, 1), (targets != PADDING).flatten()
    losses = nn.functional.cross_entropy(rows, targets.flatten() * valid, reduction="none")
    return (losses * valid).sum() / valid.sum()


class Tempered(nn.Module):
    """A loss that is trained, too."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        rows = (outputs * self.temperature).flatten(0, 1)
        total = nn.functional.cross_entropy(
            rows, targets.flatten(), ignore_index=PADDING, reduction="sum"
        )
        return total / targets.numel()


def valid(targets: Tensor) -> Tensor:
    return (targets != PADDING).sum()


def mean(outputs: Tensor, _: Tensor) -> Tensor:
    return outputs.mean()


class Seen:
    """A metric that counts micro-batches."""

    def __init__(self) -> None:
        self.count = 0

    def update(self, outputs: Tensor, _: Tensor) -> None:
        self.count += 1

    def compute(self) -> int:
        return self.count


FAILS = "TEST_EVALUATION_FAILS"
"""Environment variable: what fails in the first evaluation after steps, on one rank."""
evaluations = {"compute": count(), "data": count(), "update": count()}
"""Begun in this process, by what notices it. The first one is made before the first step, after
which a rank restores numbers."""


def fail_at(place: str) -> None:
    if next(evaluations[place]) and os.environ.get(FAILS) == place:
        raise ValueError("only one class is present")


class Fragile:
    """A metric without a result for few samples."""

    def __init__(self) -> None:
        self.count = 0

    def update(self, outputs: Any, targets: Any) -> None:
        self.count += 1
        if self.count == 7:
            fail_at("update")

    def compute(self) -> float:
        if self.count < 2:
            raise ValueError("no result for so few samples")
        fail_at("compute")
        return 1.0


class HeldOut(Samples):
    """The fifth sample may be unreadable on the first rank."""

    def __getitem__(self, index: int) -> Any:
        if index == 5 and MPI.COMM_WORLD.rank == 0:
            fail_at("data")
        return super().__getitem__(index)


class Faulty(torch.optim.SGD):
    """Flips one bit of one weight, in one step and on one rank."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, rank: int, step: int) -> None:
        super().__init__(parameters, lr)
        self.left = step if MPI.COMM_WORLD.rank == rank else -1

    def step(self, closure: None = None) -> None:
        super().step(closure)
        self.left -= 1
        if self.left == 0:
            self.param_groups[0]["params"][1].data.view(torch.int32)[3] ^= 1


class Told:
    """Writes down what a callback is told, and with which failure it is closed."""

    def __init__(self, run: Path, config: Any) -> None:
        self.run = run

    def __call__(self, line: Any) -> None:
        with (self.run / "told.jsonl").open("a") as stream:
            stream.write(json.dumps(line) + "\n")

    def close(self, failure: BaseException | None) -> None:
        (self.run / "closed").write_text(type(failure).__name__)


class Coupled(torch.optim.AdamW):
    """Clips by a norm of all its parameters, or of those of a group; or draws noise in turn."""

    def __init__(self, parameters: Any, kind: str, lr: float = 0.01) -> None:
        super().__init__(parameters, lr)
        self.kind, self.generator = kind, torch.Generator().manual_seed(1)

    def step(self, closure: None = None) -> None:
        groups = [group["params"] for group in self.param_groups]
        every = [parameter for group in groups for parameter in group]
        for parameters in groups if self.kind == "groups" else [every]:
            if self.kind != "noise":
                nn.utils.clip_grad_norm_(parameters, 1.0 if self.kind == "groups" else 1e-3)
        for parameter in every if self.kind == "noise" else []:
            parameter.grad += torch.randn(parameter.shape, generator=self.generator)
        super().step(closure)


def watching(run, config):
    """Writes down which checkpoints there are behind each step, and takes its time."""

    def tell(line):
        time.sleep(0.2)
        names = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
        with (run / "seen.jsonl").open("a") as stream:
            stream.write(json.dumps([line["step"], names]) + "\n")

    return tell


class Backwards(nn.Module):
    """Uses its layers in another order than it has them; their sizes tell them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle, self.first = nn.Linear(8, 12), nn.Linear(7, 8), nn.Linear(6, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x))).view(-1, 3, 4)


TAKEN = [[1, 0], [0, 0]], [[0, 1], [0, 0]], [[0, 0], [0, 0]], [[1, 1], [0, 1]], [[0, 0], [1, 0]]
"""By step and micro-batch: which of the two branches are taken. Ranks warm up with the first."""


class BranchingSamples(Samples):
    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        vector, targets = super().__getitem__(index)
        taken = torch.tensor(TAKEN).flatten(0, 1)[index // 2 % 10]
        return {"x": vector, "taken": taken}, targets


class Branch(nn.Module):
    """Uses its parameters where it is told to: one of its own, one that both branches have."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.own, self.shared = nn.Parameter(torch.ones(6)), shared

    def forward(self, x: Tensor, taken: Tensor) -> Tensor:
        return x * self.own + self.shared if taken.any() else x * 1.0


class Branching(Model):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Parameter(torch.ones(6))
        self.before, self.first, self.second = nn.Linear(6, 6), Branch(shared), Branch(shared)

    def forward(self, x: Tensor, taken: Tensor) -> Tensor:
        x = self.first(self.before(x), taken[:, 0])
        return super().forward(self.second(x.tanh(), taken[:, 1]))


class Wide(Model):
    """What it keeps is large enough to be offloaded."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(6 << 11)) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = torch.tanh(x.repeat(1, scale.numel() // x.shape[1]) * scale)
        return super().forward(x[:, :6])


def count_waits(run: Path, _: object) -> Callable[[dict[str, Any]], object]:
    """Write after every step how often the host has waited for the pretended accelerator."""

    def write(_: dict[str, Any]) -> None:
        waits, unpinned = torch.ops.pretended.counts()
        with (run / "waits.txt").open("a") as file:
            print(waits, unpinned, file=file)

    return write
