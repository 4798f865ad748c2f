"""A class that fits, with short epochs, a validation after each, OneCycle, and early stopping."""

import logging
import os
import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset, Subset, SubsetRandomSampler


@dataclass
class Config:
    lr: float = 1e-2
    epochs: int = 4
    batch_size: int = 8
    clip: float = 0.5
    seed: int = 11


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True


class Signs(Dataset):
    def __init__(self, n):
        self.x = np.random.randn(n, 5).astype("float32")
        self.y = (self.x.sum(1) > 0).astype("int64")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": torch.from_numpy(self.x[index]), "y": int(self.y[index])}


class EarlyStopping:
    def __init__(self, patience=2):
        self.best, self.bad, self.patience = None, 0, patience

    def __call__(self, value):
        if self.best is None or value < self.best:
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        return self.bad >= self.patience


class Fitter:
    def __init__(self, config):
        self.config = config
        data = Signs(36)
        self.train_loader = DataLoader(
            Subset(data, range(24)), config.batch_size, sampler=SubsetRandomSampler(range(24))
        )
        self.val_loader = DataLoader(data, 4, sampler=SubsetRandomSampler(range(24, 36)))
        self.model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2))
        self.optimizer = optim.AdamW(self.model.parameters(), config.lr)
        self.scheduler = optim.lr_scheduler.OneCycleLR(
            self.optimizer,
            config.lr,
            epochs=config.epochs,
            steps_per_epoch=len(self.train_loader),
        )
        self.criterion = nn.CrossEntropyLoss()

    def train_step(self, batch):
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(batch["x"]), batch["y"])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        losses = [self.criterion(self.model(b["x"]), b["y"]).item() for b in self.val_loader]
        self.model.train()
        return sum(losses) / len(losses)

    def fit(self):
        stopping = EarlyStopping()
        for epoch in range(self.config.epochs):
            total = torch.zeros(())
            for batch in self.train_loader:
                total += self.train_step(batch)
            value = self.validate()
            logging.info("epoch %d: %.4f, %.4f", epoch, total / len(self.train_loader), value)
            if stopping(value):
                break


def main():
    config = Config()
    seed_everything(config.seed)
    logging.basicConfig(level=os.environ.get("LOGLEVEL", "WARNING"))
    Fitter(config).fit()


if __name__ == "__main__":
    main()
