"""Micro-steps that read the next batch ahead, from an iterator made before the model, as nanoGPT."""

from contextlib import nullcontext

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

batch_size, block_size, vocab_size, n_embd = 4, 16, 40, 24
gradient_accumulation_steps, max_iters, learning_rate, grad_clip = 2, 10, 1e-3, 1.0
device = "cuda" if torch.cuda.is_available() else "cpu"
ctx = nullcontext() if device == "cpu" else torch.amp.autocast(device_type=device)
torch.manual_seed(1337)
data = torch.randint(0, vocab_size, (1000,))


class Windows(Dataset):
    def __len__(self):
        return len(data) - block_size

    def __getitem__(self, i):
        return data[i : i + block_size], data[i + 1 : i + 1 + block_size]


loader = DataLoader(Windows(), batch_size=batch_size, shuffle=True)
stream = iter(loader)


def get_batch():
    global stream
    try:
        x, y = next(stream)
    except StopIteration:
        stream = iter(loader)
        x, y = next(stream)
    return x.to(device), y.to(device)


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        layer = nn.TransformerEncoderLayer(n_embd, 2, 48, dropout=0.0, batch_first=True)
        self.h = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        b, t = idx.size()
        x = self.wte(idx) + self.wpe(torch.arange(0, t, device=idx.device))
        mask = nn.Transformer.generate_square_subsequent_mask(t, device=idx.device)
        logits = self.lm_head(self.h(x, mask=mask))
        return logits, F.cross_entropy(logits.view(-1, vocab_size), targets.view(-1))


model = LM().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler(device, enabled=False)
X, Y = get_batch()
iter_num = 0
while True:
    for micro_step in range(gradient_accumulation_steps):
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % 5 == 0:
        print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}")
    iter_num += 1
    if iter_num > max_iters:
        break
