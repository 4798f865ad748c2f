"""Classification of graphs; samples and batches are objects of a class."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

torch.manual_seed(0)


class Data:
    def __init__(self, x, adj, y):
        self.x, self.adj, self.y = x, adj, y

    def to(self, device):
        return Data(*(getattr(self, key).to(device) for key in ("x", "adj", "y")))


class GCN(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.conv1 = nn.Linear(6, hidden)
        self.conv2 = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, 2)

    def forward(self, data):
        x = F.relu(data.adj @ self.conv1(data.x))
        x = F.relu(data.adj @ self.conv2(x))
        return self.out(x.mean(1))


def collate(items):
    return Data(*(torch.stack([getattr(item, k) for item in items]) for k in ("x", "adj", "y")))


def make_graph(label):
    adj = (torch.rand(7, 7) > 0.5).float()
    adj = adj / adj.sum(1, keepdim=True).clamp(min=1)
    return Data(torch.randn(7, 6) + label, adj, torch.tensor(label))


dataset = [make_graph(i % 2) for i in range(80)]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = GCN().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
loader = DataLoader(dataset, batch_size=10, shuffle=True, collate_fn=collate)


def train():
    model.train()
    total_loss = 0
    for data in loader:
        data = data.to(device)
        optimizer.zero_grad()
        out = model(data)
        loss = F.cross_entropy(out, data.y)
        loss.backward()
        optimizer.step()
        total_loss += float(loss) * len(data.y)
    return total_loss / len(dataset)


for epoch in range(1, 4):
    print(f"epoch {epoch}: loss {train():.4f}")
