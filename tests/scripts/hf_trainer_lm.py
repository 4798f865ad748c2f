"""A causal language model with the Trainer of transformers."""

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)


class Blocks(Dataset):
    def __init__(self, n=120, length=16):
        g = torch.Generator().manual_seed(0)
        self.rows = torch.randint(0, 50, (n, length), generator=g).sort(dim=1).values

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i].clone()}


config = GPT2Config(
    vocab_size=64,
    n_positions=32,
    n_embd=32,
    n_layer=2,
    n_head=2,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=0,
    eos_token_id=0,
)
model = GPT2LMHeadModel(config)
args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=5e-4,
    num_train_epochs=2,
    warmup_steps=3,
    weight_decay=0.01,
    lr_scheduler_type="cosine",
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    seed=7,
)
trainer = Trainer(model=model, args=args, train_dataset=Blocks())
trainer.train()
