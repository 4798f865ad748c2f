"""Scripts that are refused: what differs from a common loop, and words of the refusal."""

from dataclasses import dataclass

import pytest

COMMON = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
data = TensorDataset(torch.randn(32, 4), torch.randint(0, 3, (32,)))
loader = DataLoader(data, batch_size=8, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
{before}
for x, y in loader:
    optimizer.zero_grad()
{loop}
    optimizer.step()
"""
BACKWARD = "    loss = criterion(model(x), y)\n    loss.backward()"


@dataclass
class Refused:
    """A script, whose faulty line ends in ``# here``, and words that the refusal contains."""

    words: str
    loop: str = BACKWARD
    before: str = ""

    @property
    def script(self) -> str:
        return COMMON.format(before=self.before, loop=self.loop)


REFUSED = {
    "number": Refused(
        "takes a number out of a tensor",
        "    logits = model(x)\n    scale = logits.mean().item()  # here\n"
        "    loss = criterion(logits, y) * scale\n    loss.backward()",
    ),
    "data without a loader": Refused(
        "that no DataLoader has given",
        "    x = torch.randn(5, 4)\n    loss = model(x).pow(2).mean()  # here\n    loss.backward()",
    ),
    "two optimizers": Refused(
        "a second optimizer",
        before="other = nn.Linear(2, 2)\nsecond = torch.optim.Adam(other.parameters())  # here",
    ),
    "gradients by hand": Refused(
        "gradients are changed",
        f"{BACKWARD}\n    for p in model.parameters(): p.grad = p.grad * 2\n"
        "    optimizer.step()  # here",
    ),
    "backward twice": Refused(
        "a second time",
        "    logits = model(x)\n    loss = criterion(logits, y)\n"
        "    loss.backward(retain_graph=True)\n    logits.sum().backward()  # here",
    ),
    "process group": Refused(
        "torch.distributed",
        before="torch.distributed.init_process_group('gloo')  # here",
    ),
    "clipped values": Refused(
        "clips single values",
        f"{BACKWARD}\n    nn.utils.clip_grad_value_(model.parameters(), 0.1)  # here",
    ),
    "batch written": Refused(
        "writes into a tensor of the batch",
        f"    x[:, 0] = 0.0  # here\n{BACKWARD}",
    ),
}


@pytest.fixture(params=list(REFUSED))
def refused(request):
    return REFUSED[request.param]
