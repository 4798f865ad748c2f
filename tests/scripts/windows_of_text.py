"""A GPT-like model whose batches come from a Dataset of windows, as the refusal of get_batch() says."""

import torch
import torch.nn as nn
from torch.nn import functional as F

batch_size = 8
block_size = 16
max_iters = 20
learning_rate = 1e-3
torch.manual_seed(1337)
text = "to be, or not to be, that is the question: whether 'tis nobler in the mind to suffer " * 12
chars = sorted(set(text))
stoi = {ch: i for i, ch in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text], dtype=torch.long)
n = int(0.9 * len(data))
train_data, val_data = data[:n], data[n:]


class Windows(torch.utils.data.Dataset):
    def __len__(self):
        return len(train_data) - block_size

    def __getitem__(self, i):
        return train_data[i : i + block_size], train_data[i + 1 : i + 1 + block_size]


loader = torch.utils.data.DataLoader(Windows(), batch_size=batch_size, shuffle=True)


class Bigram(nn.Module):
    def __init__(self, vocab_size, n_embd=24):
        super().__init__()
        self.token = nn.Embedding(vocab_size, n_embd)
        self.position = nn.Embedding(block_size, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 64), nn.ReLU(), nn.Linear(64, n_embd))
        self.head = nn.Linear(n_embd, vocab_size)

    def forward(self, idx, targets=None):
        B, T = idx.shape
        x = self.token(idx) + self.position(torch.arange(T, device=idx.device))
        logits = self.head(x + self.mlp(x))
        if targets is None:
            return logits, None
        B, T, C = logits.shape
        loss = F.cross_entropy(logits.view(B * T, C), targets.view(B * T))
        return logits, loss


model = Bigram(len(chars))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
for xb, yb in loader:
    logits, loss = model(xb, yb)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
print(loss.item())
