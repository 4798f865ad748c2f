"""A small GPT: predicts the next character from those before it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SelfAttention(nn.Module):
    """Causal attention with several heads."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        projected = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.dropout(self.output(mixed.transpose(1, 2).reshape(batch, length, width)))


class Block(nn.Module):
    """Attention, then a two-layer network, each behind a norm and beside a skip connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, dropout)
        self.network_norm = nn.LayerNorm(width)
        self.network = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.network(self.network_norm(x))


class GPT(nn.Module):
    """Characters ``[batch, length]`` to scores ``[batch, length, vocabulary]``."""

    def __init__(
        self, vocabulary: int, length: int, layers: int, width: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(
    vocabulary: int = 98,
    length: int = 128,
    layers: int = 6,
    width: int = 128,
    heads: int = 4,
    dropout: float = 0.1,
) -> GPT:
    """The model; the arguments are the ``kwargs`` of the job file."""
    return GPT(vocabulary, length, layers, width, heads, dropout)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy per character, in nats."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


class Perplexity:
    """exp(mean cross-entropy) over all characters: how many characters seem equally likely."""

    def __init__(self) -> None:
        self.total = 0.0
        self.characters = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.total += loss(outputs, targets).item() * targets.numel()
        self.characters += targets.numel()

    def compute(self) -> float:
        return math.exp(self.total / self.characters)
