"""An encoder-decoder transformer, from padded sequences to padded sequences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PADDING = 0


class Seq2Seq(nn.Module):
    """Scores ``[batch, target length, vocabulary]`` of each next character of the target."""

    def __init__(
        self, vocabulary: int, length: int, layers: int, width: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=PADDING)
        self.positions = nn.Embedding(length, width)
        options = {"dropout": dropout, "norm_first": True, "batch_first": True}
        encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, heads, 4 * width, **options),
            layers,
            nn.LayerNorm(width),
            enable_nested_tensor=False,  # of no use with norm_first; torch would warn
        )
        self.transformer = nn.Transformer(
            width, heads, layers, layers, 4 * width, custom_encoder=encoder, **options
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Codes ``source [batch, length]`` and ``target [batch, target length]``."""
        length = target.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        padded = source == PADDING
        decoded = self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=later,
            src_key_padding_mask=padded,
            memory_key_padding_mask=padded,
        )
        return self.head(decoded)

    def embed(self, codes: Tensor) -> Tensor:
        return self.tokens(codes) + self.positions(
            torch.arange(codes.shape[1], device=codes.device)
        )


def build(
    vocabulary: int = 99,
    length: int = 128,
    layers: int = 3,
    width: int = 128,
    heads: int = 4,
    dropout: float = 0.1,
) -> Seq2Seq:
    return Seq2Seq(vocabulary, length, layers, width, heads, dropout)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy per character, without the padding."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=PADDING)


def characters(targets: Tensor) -> Tensor:
    """Number of characters that the loss of a micro-batch is a mean of: its weight in the step."""
    return (targets != PADDING).sum()
