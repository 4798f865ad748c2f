"""Addition by a GRU, with a Trainer of its own, callbacks and an endless sampler, as in minGPT."""

from collections import defaultdict

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler

torch.manual_seed(3407)


class Config:
    def __init__(self, **values):
        self.__dict__.update(values)


class AdditionDataset(Dataset):
    def __init__(self, ndigit):
        self.ndigit = ndigit

    def __len__(self):
        return 10 ** (2 * self.ndigit)

    def __getitem__(self, idx):
        a, b = divmod(idx, 10**self.ndigit)
        text = f"{a:0{self.ndigit}d}{b:0{self.ndigit}d}" + f"{a + b:0{self.ndigit + 1}d}"[::-1]
        digits = [int(s) for s in text]
        x = torch.tensor(digits[:-1], dtype=torch.long)
        y = torch.tensor(digits[1:], dtype=torch.long)
        y[: self.ndigit * 2 - 1] = 0
        return x, y


class Model(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.embed = nn.Embedding(10, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.ln = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10, bias=False)

    def forward(self, idx, targets=None):
        x, _ = self.gru(self.embed(idx))
        logits = self.head(self.ln(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


class Trainer:
    def __init__(self, config, model, train_dataset):
        self.config = config
        self.model = model
        self.optimizer = None
        self.train_dataset = train_dataset
        self.callbacks = defaultdict(list)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = self.model.to(self.device)
        self.iter_num = 0

    def add_callback(self, onevent, callback):
        self.callbacks[onevent].append(callback)

    def trigger_callbacks(self, onevent):
        for callback in self.callbacks.get(onevent, []):
            callback(self)

    def run(self):
        model, config = self.model, self.config
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
        train_loader = DataLoader(
            self.train_dataset,
            sampler=RandomSampler(self.train_dataset, replacement=True, num_samples=int(1e10)),
            shuffle=False,
            batch_size=config.batch_size,
        )
        model.train()
        data_iter = iter(train_loader)
        while True:
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(train_loader)
                batch = next(data_iter)
            x, y = [t.to(self.device) for t in batch]
            _, self.loss = model(x, y)
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_norm_clip)
            self.optimizer.step()
            self.trigger_callbacks("on_batch_end")
            self.iter_num += 1
            if config.max_iters is not None and self.iter_num >= config.max_iters:
                break


def report(trainer):
    if trainer.iter_num % 10 == 0:
        print(f"iter {trainer.iter_num}: train loss {trainer.loss.item():.5f}")


config = Config(batch_size=16, learning_rate=5e-4, grad_norm_clip=1.0, max_iters=20)
trainer = Trainer(config, Model(), AdditionDataset(2))
trainer.add_callback("on_batch_end", report)
trainer.run()
