"""T5 with LoRA of peft, in a loop of its own."""

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoModelForSeq2SeqLM, T5Config, get_linear_schedule_with_warmup

torch.manual_seed(0)
data = [
    {
        "input_ids": torch.randint(2, 60, (10,)),
        "attention_mask": torch.ones(10, dtype=torch.long),
        "labels": torch.randint(2, 60, (6,)),
    }
    for _ in range(40)
]
model = AutoModelForSeq2SeqLM.from_config(
    T5Config(
        vocab_size=60,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
)
peft_config = LoraConfig(
    task_type=TaskType.SEQ_2_SEQ_LM, inference_mode=False, r=4, lora_alpha=16, lora_dropout=0.0
)
model = get_peft_model(model, peft_config)
model.print_trainable_parameters()
device = "cuda" if torch.cuda.is_available() else "cpu"
num_epochs = 2
train_dataloader = DataLoader(
    data, shuffle=True, batch_size=4, pin_memory=torch.cuda.is_available()
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
lr_scheduler = get_linear_schedule_with_warmup(
    optimizer=optimizer, num_warmup_steps=0, num_training_steps=len(train_dataloader) * num_epochs
)
model = model.to(device)
for epoch in range(num_epochs):
    model.train()
    total_loss = 0
    for batch in tqdm(train_dataloader):
        batch = {k: v.to(device) for k, v in batch.items()}
        outputs = model(**batch)
        loss = outputs.loss
        total_loss += loss.detach().float()
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
    train_ppl = torch.exp(total_loss / len(train_dataloader))
    print(f"{epoch=}: {train_ppl=}")
