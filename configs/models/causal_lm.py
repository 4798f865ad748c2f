"""A causal language model of transformers, fine-tuned with LoRA; `python causal_lm.py` merges it.

    python causal_lm.py BASE model.safetensors OUTPUT

writes a directory that `AutoModelForCausalLM.from_pretrained` loads.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel


def build(base: str, rank: int = 8, targets: tuple[str, ...] = ("q_proj", "v_proj")) -> PeftModel:
    """The pretrained model of a directory, frozen, with trainable low-rank updates."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.config.use_cache = False
    config = LoraConfig(
        task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules=list(targets)
    )
    return get_peft_model(model, config)


class Text(Dataset[dict[str, Tensor]]):
    """The bytes of a text file in windows; use the tokens of your tokenizer instead."""

    def __init__(self, file: str, length: int = 128) -> None:
        codes = torch.frombuffer(bytearray(Path(file).read_bytes()), dtype=torch.uint8)
        self.windows = codes.unfold(0, length, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.windows[index].long()
        return {"input_ids": tokens, "labels": tokens}


def merge(base: str, weights: str, output: str, **options: object) -> PreTrainedModel:
    """Merge the low-rank updates into the weights of the base model, and save it.

    Args:
        weights: the exported file with the names of the LoRA model.
        options: those that `build` got.
    """
    model = build(base, **options)  # type: ignore[arg-type]
    model.load_state_dict(load_file(weights))
    merged: PreTrainedModel = model.merge_and_unload()
    merged.save_pretrained(output)
    return merged


if __name__ == "__main__":
    merge(*sys.argv[1:])
