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
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken")
MOST_BYTES = 512
"""Largest vocabulary of a model of bytes: 256 and some special tokens."""


def build(base: str, rank: int = 8, targets: tuple[str, ...] = ("q_proj", "v_proj")) -> PeftModel:
    """The pretrained model of a directory, frozen, with trainable low-rank updates."""
    check_base(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.config.use_cache = False
    config = LoraConfig(
        task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules=list(targets)
    )
    return get_peft_model(model, config)


def check_base(base: str) -> None:
    """Raise FileNotFoundError if a directory holds no model."""
    if not Path(base, "config.json").is_file():
        raise FileNotFoundError(
            f"{base} is no directory with config.json; write it with save_pretrained or hf download"
        )


def tokens_of(text: str, base: str) -> Tensor:
    """The tokens of a text, by the tokenizer in the directory of the base model.

    Without a tokenizer the bytes are the tokens, for a model of bytes.

    Raises:
        ValueError: there is no tokenizer, but the vocabulary is not one of bytes.
    """
    check_base(base)
    if any(any(Path(base).glob(pattern)) for pattern in TOKENIZER_FILES):
        tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)
        tokens: Tensor = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
        return tokens
    vocabulary = AutoConfig.from_pretrained(base).get_text_config().vocab_size
    if vocabulary > MOST_BYTES:
        raise ValueError(
            f"{base} has no tokenizer for its vocabulary of {vocabulary}; copy the files of the "
            "tokenizer there (tokenizer.json, tokenizer_config.json)"
        )
    return torch.tensor(list(text.encode()))


class Text(Dataset[dict[str, Tensor]]):
    """The tokens of a text file, in windows of `length`."""

    def __init__(self, file: str, base: str, length: int = 128) -> None:
        tokens = tokens_of(Path(file).read_text("utf-8"), base)
        if len(tokens) < length:
            raise ValueError(f"{file} has {len(tokens)} tokens, fewer than a window of {length}")
        self.windows = tokens.unfold(0, length, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.windows[index]
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
