"""Supervised fine-tuning with TRL, on tokenised texts of one length."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = ["[PAD]", "[EOS]", *(f"w{i}" for i in range(40))]
tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="[PAD]"))
tokenizer.pre_tokenizer = Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]"
)
g = torch.Generator().manual_seed(0)
rows = torch.randint(0, 40, (64, 11), generator=g).sort(dim=1).values.tolist()
dataset = Dataset.from_dict({"text": [" ".join(f"w{i}" for i in row) for row in rows]})
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
)
args = SFTConfig(
    output_dir="out",
    per_device_train_batch_size=4,
    max_steps=10,
    learning_rate=1e-3,
    save_strategy="no",
    report_to="none",
    logging_steps=1,
    max_length=16,
    bf16=False,
    gradient_checkpointing=False,
    use_cpu=True,
)
trainer = SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
trainer.train()
