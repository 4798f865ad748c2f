"""Parameter groups without decay for biases and norms; warm-up, then a cosine."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(42)


class Patterns(Dataset):
    """Sequences that repeat with a period; the class is the period."""

    def __init__(self, n=200, length=24):
        g = torch.Generator().manual_seed(7)
        self.labels = torch.randint(2, 6, (n,), generator=g)
        self.rows = []
        for label in self.labels.tolist():
            base = torch.randint(0, 16, (label,), generator=g)
            self.rows.append(base.repeat(length // label + 1)[:length])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"tokens": self.rows[i], "label": self.labels[i] - 2}


class Classifier(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(16, dim)
        self.pos = nn.Parameter(torch.zeros(1, 24, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 4)

    def forward(self, tokens):
        x = self.embed(tokens) + self.pos
        return self.head(self.norm(self.encoder(x).mean(dim=1)))


model = Classifier()
decay, no_decay = [], []
for name, p in model.named_parameters():
    (no_decay if p.ndim < 2 or name.endswith("bias") else decay).append(p)
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0, "lr": 2e-3}],
    lr=1e-3,
)
loader = DataLoader(Patterns(), batch_size=20, shuffle=True)
num_epochs = 3
total = num_epochs * len(loader)
warmup = 4


def lr_lambda(step):
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda)
for epoch in range(num_epochs):
    for batch in loader:
        logits = model(batch["tokens"])
        loss = F.cross_entropy(logits, batch["label"], label_smoothing=0.1)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
