"""Small models as people write them: each has a trait that a cut must survive."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Normal, kl_divergence
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

TOKENS, CLASSES, WIDTH, LENGTH = 23, 5, 12, 7


class Sequences(Dataset):
    """Token ids and a class."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(index)
        ids = torch.randint(1, TOKENS, (LENGTH,), generator=draw)
        return ids, torch.randint(0, CLASSES, (), generator=draw)


class Keywords(Sequences):
    """Two sequences with padding masks, by name."""

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        ids, label = super().__getitem__(index)
        other, _ = super().__getitem__(index + 100)
        padding = torch.arange(LENGTH) >= 3 + index % (LENGTH - 3)
        given = {"ids": ids, "other": other, "padding": padding, "scale": torch.tensor(1.5)}
        return given, label


class Images(Dataset):
    """Small images and a class."""

    def __init__(self, pixels: int = 16, classes: int = CLASSES) -> None:
        self.pixels, self.classes = pixels, classes

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(index)
        image = torch.randn(3, self.pixels, self.pixels, generator=draw)
        return image, torch.randint(0, self.classes, (), generator=draw)


class Rows(nn.Module):
    """What several models do: images become few numbers, which a layer widens; a head ends it."""

    def __init__(self, width: int = 20) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(48, width), nn.Linear(width, CLASSES)

    def widened(self, x: Tensor) -> Tensor:
        return self.stem(F.avg_pool2d(x, 4).flatten(1))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH, padding_idx=1)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        y, (hidden, _) = self.lstm(self.embed(ids))
        return self.head(torch.cat([y[:, -1], hidden[0]], 1))


class Encoder(nn.Module):
    """Several inputs by keyword, one of them a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 3, 24, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 3, 24, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, other: Tensor, *, padding: Tensor, scale: Tensor) -> Tensor:
        memory = self.encoder(self.embed(ids), src_key_padding_mask=padding)
        y = self.decoder(self.embed(other), memory, memory_key_padding_mask=padding)
        kept = y.masked_fill(padding[..., None], 0.0)
        return self.head(kept.sum(1) / (~padding).sum(1, keepdim=True)) * scale[:, None]


class Recommender(nn.Module):
    """Each token goes to two of four experts, which the loss balances; a bag of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.bag = nn.EmbeddingBag(TOKENS, WIDTH, mode="mean")
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)) for _ in range(4)]
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> dict[str, Any]:
        x = self.embed(ids)
        chances = self.router(x).softmax(-1)
        weights, chosen = chances.topk(2)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            share = (weights * (chosen == index)).sum(-1, keepdim=True)
            y += share * expert(x)
        logits = self.head(y.mean(1) + self.bag(ids))
        return {"logits": logits, "balance": chances.mean((0, 1)).square().sum()}


class Scored(NamedTuple):
    logits: Tensor
    again: Tensor


@dataclass
class Prediction:
    logits: Tensor
    auxiliary: Tensor
    nested: tuple[Any, ...]
    details: dict[str, Any]
    cache: object = None


class Structured(nn.Module):
    """Returns a dataclass with all that people nest in one, and one value twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.mix = nn.Linear(LENGTH * WIDTH, WIDTH)
        self.head, self.auxiliary = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Prediction:
        features = self.mix(self.embed(ids).flatten(1)).tanh()
        logits = self.head(features)
        details = {"features": features, "ids": ids, "kind": "trunk"}
        nested = [features, (Scored(logits, logits),)], None
        return Prediction(logits, self.auxiliary(features), nested, details, cache=object())


class Unet(nn.Module):
    """Skips over several levels, joined in the reverse order."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 6, 8, 10]
        self.down = nn.ModuleList([self._block(a, b) for a, b in itertools.pairwise(widths)])
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in itertools.pairwise(widths[1:])]
        )
        self.merge = nn.ModuleList([self._block(2 * a, a) for a in widths[1:-1]])
        self.head = nn.Conv2d(widths[1], CLASSES, 1)

    @staticmethod
    def _block(inside: int, outside: int) -> nn.Module:
        norm = nn.GroupNorm(2, outside)
        return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), norm, nn.SiLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        for level in reversed(range(len(self.up))):
            x = self.merge[level](torch.cat([self.up[level](x), skips[level]], 1))
        return self.head(x).mean((2, 3))


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 4) * 0.5


class Autoencoder(nn.Module):
    """Tied weights, one BatchNorm used twice, and an autograd function that rounds the code."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.middle = nn.Linear(48, 20), nn.Linear(20, 20)
        self.norm = nn.BatchNorm1d(20)
        self.bias = nn.Parameter(torch.zeros(48))
        self.head = nn.Linear(48, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = F.avg_pool2d(x, 4).flatten(1)
        code = self.norm(self.encode(rows)).relu()
        code = _Rounded.apply(self.norm(self.middle(code)) * 4)
        return self.head(F.linear(code, self.encode.weight.t(), self.bias))


class Views(nn.Module):
    """Writes through views, chunks that are joined again, expanded and strided values."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.left, self.right = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(1, 8, 1, 1))
        self.head = nn.Linear(32, CLASSES)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.stem(x), inplace=True)
        if self.training:
            self.seen.lerp_(y.detach().mean((0, 2, 3)), 0.1)
        a, b = y.chunk(2, dim=1)
        z = torch.cat([b + self.left(a), self.right(b)], 1)
        z[:, ::2].mul_(0.5)
        z[:, 1, 0] += 1.0
        z = z + self.scale.expand_as(z) + self.seen[:, None, None]
        z = z.unfold(2, 4, 4).unfold(3, 4, 4).mean((-1, -2)).permute(0, 2, 3, 1)
        return self.head(z.flatten(1))


class Conditional(Rows):
    """Control flow on a value, with a random operator in one branch."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(20, 20)

    def forward(self, x: Tensor) -> Tensor:
        y = self.widened(x).tanh()
        drop = self.training

        def noisy(y: Tensor) -> Tensor:
            return F.dropout(y, 0.5, drop) * 2

        def plain(y: Tensor) -> Tensor:
            return y.sin()

        y = torch.cond(y.sum() > 0, noisy, plain, (y,))
        return self.head(F.dropout(self.other(y), 0.3, drop))


class Parametrized(nn.Module):
    """Weights computed from others, in the ways of today and in an old one, which takes views
    without gradients; some of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = spectral_norm(nn.Linear(48, 20)), weight_norm(nn.Linear(20, 20))
        self.c = nn.utils.spectral_norm(nn.Linear(20, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.c(self.b(self.a(F.avg_pool2d(x, 4).flatten(1)).tanh()).tanh())
        with torch.no_grad():
            gate, turned = hidden[:, :1], hidden.t()
        return self.head(hidden.relu()) * gate.sigmoid() + turned.mean()


class Checkpointed(nn.Module):
    """Recomputes its blocks in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(48, 48), nn.GELU(), nn.Dropout(0.2)) for _ in range(3)]
        )
        self.head = nn.Linear(48, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = F.avg_pool2d(x, 4).flatten(1)
        for block in self.blocks:
            y = y + checkpoint(block, y, use_reentrant=False)
        return self.head(y)


class Codebook(Rows):
    """Nearest neighbours in a buffer that follows the data, around which the gradient goes.

    Other buffers are written before autograd keeps them, or by assignment after it kept them.
    """

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.register_buffer("deviation", torch.ones(WIDTH))
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("codes", torch.randn(9, WIDTH))
        self.register_buffer("count", torch.zeros(9))

    def forward(self, x: Tensor) -> Tensor:
        y = self.widened(x)
        if self.training:
            self.deviation.lerp_(y.detach().std(0), 0.3)
        y = y / self.deviation * self.scale
        nearest = torch.cdist(y, self.codes).argmin(1)
        found = self.codes[nearest]
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * y.detach().std(0)
            with torch.no_grad():
                chosen = F.one_hot(nearest, 9).to(y)
                self.count.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.codes.lerp_(chosen.t() @ y / (chosen.sum(0)[:, None] + 1), 0.1)
        return self.head(y + (found - y).detach())


class Teacher(nn.Module):
    """Values without gradients beside those with them, of a frozen norm in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.head = nn.Linear(48, 20), nn.Linear(20, CLASSES)
        self.teacher = nn.Sequential(nn.Linear(48, 20), nn.BatchNorm1d(20, affine=False))
        self.teacher.requires_grad_(False)

    def train(self, mode: bool = True) -> Teacher:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        rows = F.avg_pool2d(x, 4).flatten(1)
        y = self.student(rows)
        with torch.no_grad():
            y[:, 0].mul_(0.5)
            target = self.teacher(rows)
            with torch.enable_grad():
                apart = (y - target).square().mean()
            sharp = (target * 2).softmax(-1)
        with torch.inference_mode():
            usual = target.mean(0)
        return self.head(y.tanh() * sharp + usual) + apart


class Variational(nn.Module):
    """Distributions, which check their arguments, and assertions of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(768, 2 * WIDTH), nn.Linear(WIDTH, 768)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        mean, deviation = self.encode(images.flatten(1)).chunk(2, 1)
        code = Normal(mean, deviation.exp())
        sample = code.rsample() if self.training else code.mean
        assert not sample.isnan().any()
        prior = Normal(torch.zeros_like(mean), torch.ones_like(deviation))
        return self.decode(sample), kl_divergence(code, prior).sum(1).mean()


class Energy(nn.Module):
    """Gradients inside the forward, of a submodule and of functions of torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.squeeze, self.potential = nn.Linear(768, WIDTH), Potential()
        self.members = nn.ParameterList(torch.randn(3, CLASSES, WIDTH) for _ in range(2))
        self.average = Average(self.members)

    def forward(self, images: Tensor) -> Tensor:
        energy, forces = self.potential(self.squeeze(images.flatten(1)).tanh())
        return self.average(forces) + energy


class Potential(nn.Module):
    """The forces are what training looks at, so that their gradients are gradients of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, places: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            places = places if places.requires_grad else places.requires_grad_()
            energy = self.layers(places)
            (forces,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
        return energy, -forces


class Average(nn.Module):
    """An ensemble whose members are computed together."""

    def __init__(self, members: nn.ParameterList) -> None:
        super().__init__()
        self.members = members

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(F.linear, (None, 0))(x, self.members[0] * self.members[1]).mean(0)


def evidence(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    logits, divergence = outputs
    if divergence < -1:
        raise ValueError("a divergence is not negative")
    classes = Categorical(logits=logits[:, :CLASSES])
    return divergence - classes.log_prob(targets).mean()


def several_losses(outputs: Any, targets: Tensor) -> Tensor:
    """Cross entropies of what the models above return beside their logits, and other terms."""
    known = outputs if isinstance(outputs, dict) else vars(outputs)
    loss = F.cross_entropy(known["logits"], targets)
    if "auxiliary" in known:
        loss = loss + 0.4 * F.cross_entropy(known["auxiliary"], targets)
    return loss + 0.1 * known.get("balance", 0.0)


def magnitude(outputs: Any, targets: Any) -> float:
    """A metric that reads everything a model returned."""
    leaves = torch.utils._pytree.tree_leaves(outputs)
    return float(sum(leaf.double().abs().sum() for leaf in leaves if isinstance(leaf, Tensor)))


class Gate(nn.Module):
    """Branches on a value; one branch hands its input through."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.register_buffer("opened", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            self.opened += 1
            return self.norm(self.up(x)) + x
        return x


class Noisy(nn.Module):
    """Draws from python and numpy, loops as often as a value says, keeps a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.mean().item())
        scale = 1.0 + 0.1 * float(np.tanh(x.detach().numpy()).mean())
        if self.training:
            scale += 0.1 * random.random() + 0.1 * float(np.random.rand())
        for _ in range(1 + int(x.abs().sum().item()) % 3):
            x = self.drop(x) * scale
        return x


class Halves(nn.Module):
    """A pair, whose sizes and order follow from values."""

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        chosen = x.detach().mean(0) > 0
        y = x.clone()
        y[:, chosen.nonzero().flatten()] *= 0.5
        return y, {"flat": x * 2, "mask": chosen.expand_as(x)}


class Joined(nn.Module):
    def forward(self, pair: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
        y, other = pair
        return torch.where(other["mask"], y, other["flat"])


def unsteady() -> list[nn.Module]:
    """A list of layers, some nested: some follow values, one is there twice, pairs in between."""
    gate = Gate(20)
    return [
        nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(48, 20), nn.BatchNorm1d(20)),
        gate,
        nn.Sequential(nn.ReLU(inplace=True), Noisy(), nn.Linear(20, 20)),
        Halves(),
        Joined(),
        gate,
        nn.Linear(20, CLASSES),
    ]


class Router(nn.Module):
    """Sends every token to one expert; each expert sees as many rows as chose it."""

    def __init__(self, experts: nn.ModuleList) -> None:
        super().__init__()
        self.choose = nn.Linear(WIDTH, len(experts))
        self.experts = experts

    def forward(self, x: Tensor, *, scale: float) -> dict[str, Tensor]:
        rows = x.flatten(0, 1)
        chances = self.choose(rows).softmax(-1)
        chosen = chances.argmax(-1)
        y = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            mine = (chosen == index).nonzero().flatten()
            if mine.numel():
                y = y.index_add(0, mine, expert(rows[mine]) * chances[mine, index, None] * scale)
        return {"y": y.view_as(x), "balance": chances.mean(0).square().sum()}


class Routed(nn.Module):
    """Two routers, named in the spec, that share their experts, and tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.blocks = nn.ModuleList(
            [nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "router": Router(experts)}) for _ in "ab"]
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x, balance = self.embed(ids), torch.zeros(())
        for block in self.blocks:
            routed = block["router"](block["norm"](x), scale=0.5)
            x, balance = x + routed["y"], balance + routed["balance"]
        return {"logits": self.head(x.mean(1)), "balance": balance}
