"""What jobs of tests train, also what cannot be trained: ``real_job`` copies it to model.py."""

import os

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset


def build():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def build_by_variable():
    """Only in a process that has the variables of the job."""
    width = int(os.environ["WIDTH"])
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


def weigh_in_deterministic_processes(targets):
    assert torch.are_deterministic_algorithms_enabled()
    return len(targets)


def data():
    return TensorDataset(torch.randn(20, 4), torch.randn(20, 2))


def raises():
    raise RuntimeError("no weights here")


def normalized():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 2))


def dropping():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2))


class Tied(nn.Module):
    """One matrix is used three times, twice by the same module."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight, self.head = self.first.weight, nn.Linear(4, 2)

    def forward(self, x):
        x = torch.tanh(self.first(torch.tanh(self.first(x))))
        return self.head(torch.tanh(self.second(x)))


class Moving(torch.optim.AdamW):
    """Gives parameters and gradients other memory in every step."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data.clone()
                parameter.grad = parameter.grad.clone()
        super().step(closure)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x):
        return self.inner(x) if x.sum() > 0 else self.inner(-x)


class Deceiving(nn.Module):
    """Another model for whoever captures it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        x = self.first(x)
        return self.second(x if type(x) is torch.Tensor else x * 1.5)


class Ragged(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.zeros(4 if index < 12 else 6), torch.zeros(2)

    def collate_fn(self, samples):
        inputs, targets = zip(*samples, strict=True)
        return nn.utils.rnn.pad_sequence(inputs, batch_first=True), torch.stack(targets)


def tagger():
    return nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 9))


def sequences():
    return [(torch.arange(n) % 9, torch.arange(n) % 7) for n in range(1, 9)] * 3


def tags(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-100)
