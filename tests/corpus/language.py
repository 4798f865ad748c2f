"""Models of transformers, built from config objects with tiny sizes and random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.corpus.vision import declare_torchvision

VOCABULARY, LENGTH = 61, 10

LAYERS = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
THREE_HEADS = {**LAYERS, "num_attention_heads": 3}
GROUPED = {**LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES: dict[str, dict[str, Any]] = {
    "GPT2": {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 16},
    "Llama": GROUPED,
    "Bert": {**THREE_HEADS, "max_position_embeddings": 16},
    "T5": {
        "d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 3,
        "decoder_start_token_id": 0,
    },
    "ViT": {**THREE_HEADS, "image_size": 16, "patch_size": 4},
    "Mixtral": {**GROUPED, "num_local_experts": 4, "output_router_logits": True},
}  # fmt: skip


def build(config: str, model: str, **kwargs: Any) -> nn.Module:
    """A model from a config object.

    Args:
        config: name of the config without its ending, e.g. ``GPT2``.
        model: name of the model class.
    """
    declare_torchvision()  # transformers imports torchvision where it is installed
    import transformers

    vocabulary = {} if config == "ViT" else {"vocab_size": VOCABULARY}
    sizes = {**vocabulary, **SIZES[config], **kwargs}
    return getattr(transformers, model)(getattr(transformers, f"{config}Config")(**sizes))


class Tokens(Dataset):
    """Token ids with their attention mask and labels; padding counts for nothing."""

    def __init__(self, samples: int = 16) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(index)
        ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=draw)
        mask = (torch.arange(LENGTH) < 6 + index % 5).long()
        labels = torch.where(mask.bool(), ids, -100)
        return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


class Pixels(Dataset):
    """Images and their class, by the names transformers gives them."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(index)
        pixels = torch.randn(3, 16, 16, generator=draw)
        return {"pixel_values": pixels, "labels": torch.randint(0, 2, (), generator=draw)}
