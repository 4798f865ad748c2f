"""Scripts that are refused: what differs from a common loop, and words of the refusal."""

from dataclasses import dataclass
from textwrap import indent

import pytest

from pipectl.script import Command, Parts
from pipectl.script.findings import findings_of
from pipectl.script.later import compare_steps

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
for epoch in range({epochs}):
    for {names} in loader:
        {drops}
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
    epochs: int = 1
    names: str = "x, y"
    drops: str = "optimizer.zero_grad()"

    @property
    def script(self) -> str:
        own = {key: getattr(self, key) for key in ("before", "epochs", "names", "drops")}
        return COMMON.format(loop=indent(self.loop, "    "), **own)


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

LOGITS = "    logits = model(x)\n    loss = criterion(logits, y)\n"
CARRIED = (
    "    out, h = rnn(x[:, None], h)  # here\n    h = h.detach()\n"
    "    loss = criterion(model(out[:, 0]), y)\n    loss.backward()"
)
RNN = (
    "rnn = nn.GRU(4, 4, batch_first=True)\nh = {}\n"
    "optimizer.add_param_group({{'params': [*rnn.parameters()]}})"
)
REFUSED |= {
    "annealed weight": Refused(
        "mul reads 0.01 in step 2, and 0 in the first",
        f"{LOGITS}    loss = loss + beta * logits.pow(2).mean()  # here\n"
        "    beta = min(1.0, beta + 0.01)\n    loss.backward()",
        "beta = 0",
    ),
    "annealed by so little that the loss stays": Refused(
        "mul reads 1e-09 in step 2, and 0 in the first",
        f"{LOGITS}    loss = loss + beta * logits.pow(2).mean()  # here\n"
        "    beta = min(1.0, beta + 1e-9)\n    loss.backward()",
        "beta = 0.0",
    ),
    "annealed tensor": Refused(
        "the loss of step 1 is",
        f"{LOGITS}    loss = loss * beta\n    loss.backward()  # here\n    beta.add_(0.1)",
        "beta = torch.ones(())",
    ),
    "carried state": Refused(
        "GRU reads a tensor from outside the step, with other values",
        CARRIED,
        RNN.format("torch.zeros(1, 8, 4)"),
    ),
    "carried state, none at first": Refused("None in the first", CARRIED, RNN.format("None")),
    "carried loss": Refused(
        "add reads a tensor from outside the step, with other values",
        f"{LOGITS}    loss = loss + last  # here\n    last = loss.detach()\n    loss.backward()",
        "last = torch.zeros(())",
    ),
    "values as a list": Refused(
        "mul reads",
        f"{LOGITS}    loss = loss * max(x.mean(1).tolist())  # here\n    loss.backward()",
    ),
    "values through NumPy": Refused(
        "cross_entropy reads a tensor from outside the step, with other values",
        "    weight = torch.from_numpy(x.numpy().mean(0)[:3] ** 2)\n"
        "    loss = nn.functional.cross_entropy(model(x), y, weight)  # here\n    loss.backward()",
    ),
    "values decide": Refused(
        "only the first step computes mul",
        f"{LOGITS}    if x[0, 0] > 0:\n        loss = loss * 2  # here\n    loss.backward()",
    ),
    "annealed by epochs": Refused(
        "mul reads 0.5 in the first step of a second epoch, and 0 in the first",
        f"{LOGITS}    loss = loss + epoch / 2 * logits.pow(2).mean()  # here\n    loss.backward()",
        epochs=3,
    ),
    "rate set by hand": Refused(
        "lr of the optimizer is 0.05 in step 2, and 0.1 by the script's schedules",
        f"    optimizer.param_groups[0]['lr'] = 0.1 / step  # here\n    step += 1\n{BACKWARD}",
        "step = 1",
    ),
    "rate set by hand by epochs": Refused(
        "lr of the optimizer is 0.05 in the first step of a second epoch",
        f"    optimizer.param_groups[0]['lr'] = 0.1 / (1 + epoch)  # here\n{BACKWARD}",
        epochs=2,
    ),
    "weight decay set by hand": Refused(
        "weight_decay of the optimizer is 0.1 in step 2, and 0 by the script's schedules",
        "    for g in optimizer.param_groups: g['weight_decay'] = step / 10  # here\n"
        f"    step += 1\n{BACKWARD}",
        "step = 0",
    ),
    "weights written after the step": Refused(
        "writes 0.weight of the model",
        f"{BACKWARD}\n    optimizer.step()\n"
        "    for p in model.parameters(): p.data.clamp_(-1, 1)  # here\n    continue",
    ),
    "steps differ in a batch of accumulation": Refused(
        "mul reads 2 in batch 2 of step 1, and 1 in the first",
        f"{LOGITS}    loss = loss * weight  # here\n    loss.backward()\n    weight += 1\n"
        "    if weight == 2: continue",
        "weight = 1",
    ),
}
REFUSED |= {
    "steps of one batch and of two": Refused(
        "step 2 has 2 batches, and the first step 1",
        f"{LOGITS}    loss.backward()  # here\n    step += 1\n    if step % 2 == 0: continue",
        "step = 0",
    ),
    "a batch twice": Refused(
        "step 2 trains on the batch of step 1 again",
        f"    for _ in range(2):\n{indent(LOGITS, '    ')}        loss.backward()  # here\n"
        "        optimizer.step()\n        optimizer.zero_grad()\n    continue",
    ),
    "processes": Refused(
        "starts processes that train",
        before="import torch.multiprocessing as mp\nmp.spawn(print, nprocs=2)  # here",
    ),
    "tensors made in the loop": Refused(
        "that no DataLoader has given",
        "    x = torch.from_numpy(x.numpy() * 2)\n"
        "    loss = model(x).pow(2).mean()  # here\n    loss.backward()",
    ),
    "an attribute that forward leaves": Refused(
        "add reads a tensor with a gradient that pipectl has not seen computed",
        f"{LOGITS}    loss = loss + left[0].mean()  # here\n    loss.backward()",
        "left = []\nmodel[0].register_forward_hook(lambda m, x, y: left.insert(0, y))",
    ),
    "texts in the loop": Refused(
        "tensor reads",
        "    numbers = torch.tensor([len(str(v)) + v for v in y.tolist()])  # here\n"
        "    loss = criterion(model(x * numbers[:, None]), y)\n    loss.backward()",
    ),
    "LBFGS": Refused(
        "LBFGS.step() computes the loss again",
        "    def closure():\n        optimizer.zero_grad()\n        loss = criterion(model(x), y)\n"
        "        loss.backward()\n        return loss\n"
        "    optimizer.step(closure)  # here",
        "optimizer = torch.optim.LBFGS(model.parameters())",
    ),
}
LEAF = "scale = torch.ones(1, requires_grad=True)"
TRAINED = "\noptimizer.add_param_group({'params': [scale]})"
SCALED = "    loss = {} * {}\n    loss.backward()\n    optimizer.step()  # here\n    continue"
AROUND = """
class Around(torch.optim.Optimizer):
    def __init__(self, inner):
        {made}
        self.inner, self.param_groups = inner, inner.param_groups
    def zero_grad(self): self.inner.zero_grad()
    def step(self): self.inner.step()
optimizer = Around(optimizer)
"""
CLIPPED = "    nn.utils.clip_grad_norm_(model.parameters(), {})  # here"
REFUSED |= {
    "a trained tensor that is no parameter": Refused(
        "the optimizer trains a tensor of shape [1]",
        SCALED.format("criterion(model(x), y)", "scale"),
        LEAF + TRAINED,
    ),
    "a trained tensor that functions change first": Refused(
        "the optimizer trains a tensor of shape [1]",
        "    factor = torch.exp(-scale)\n" + SCALED.format("criterion(model(x), y)", "factor"),
        LEAF + TRAINED,
    ),
    "a trained tensor within a forward": Refused(
        "the optimizer trains a tensor of shape [1]",
        SCALED.format("criterion(net(x), y)", "1"),
        f"{LEAF}{TRAINED}\nclass Net(nn.Sequential):\n"
        "    def forward(self, x): return super().forward(x) * scale\nnet = Net(model)",
    ),
    "an optimizer around another, with groups of its own": Refused(
        "Around steps another optimizer, SGD",
        f"{BACKWARD}\n    optimizer.step()  # here",
        AROUND.format(made="super().__init__(inner.param_groups, {})"),
    ),
    "an optimizer around another, with nothing of its own": Refused(
        "Around steps another optimizer, SGD",
        f"{BACKWARD}\n    optimizer.step()  # here",
        AROUND.format(made=""),
    ),
    "clipped after each of several backwards": Refused(
        "clips gradients that a later backward() of the step adds to",
        f"{BACKWARD}\n{CLIPPED.format(0.1)}\n    step += 1\n    if step % 2: continue",
        "step = 0",
    ),
    "clipped in later steps only": Refused(
        "only step 2 clips gradients so (by norm, at 0.1)",
        f"{BACKWARD}\n    if step:\n    {CLIPPED.format(0.1)}\n    step += 1",
        "step = 0",
    ),
    "clipped in the first step only": Refused(
        "only the first step clips gradients so (by norm, at 0.1)",
        f"{BACKWARD}\n    if not step:\n    {CLIPPED.format(0.1)}\n    step += 1",
        "step = 0",
    ),
    "clipped at another limit in a second epoch": Refused(
        "only the first step of a second epoch clips gradients so (by norm, at 2)",
        f"{BACKWARD}\n{CLIPPED.format('1 + epoch')}",
        epochs=2,
    ),
    "clipped with what the optimizer does not have": Refused(
        "the norm is also of gradients of parameters that the optimizer does not have",
        f"{BACKWARD}\n{CLIPPED.format(0.1)}",
        "optimizer = torch.optim.SGD(model[2].parameters(), 0.1)",
    ),
}
STEPPED = "\n    optimizer.step()  # here\n    {}\n    continue"
REFUSED |= {
    f"gradients kept: {name}": Refused(
        f"{step} adds to the gradient of {weight} that the step before has left",
        f"{BACKWARD}{STEPPED.format(after)}",
        epochs=epochs,
        drops=drops,
        before="step = 0",
    )
    for name, step, weight, drops, after, epochs in (
        ("never dropped", "step 2", "0.weight", "step += 1", "pass", 1),
        ("dropped in a part", "step 2", "0.weight", "model[2].zero_grad()", "pass", 1),
        ("dropped but in a part", "step 2", "2.bias", "pass", "model[2].weight.grad = None; "
         "model[0].zero_grad(set_to_none=False)", 1),
        ("dropped by epochs", "step 2", "0.weight", "if y is loader: step = 0", "pass", 2),
        ("dropped now and then", "step 3", "0.weight", "step += 1",
         "if step % 3 == 1: optimizer.zero_grad()", 1),
        ("but in a second epoch", "the first step of a second epoch", "0.weight",
         "if not epoch: optimizer.zero_grad()", "pass", 2),
    )
}  # fmt: skip
REFUSED |= {
    "gradients dropped before each of several backwards": Refused(
        "the gradient of 0.weight by an earlier backward() of this step is dropped",
        "    loss = criterion(model(x), y)\n    loss.backward()  # here\n    step += 1\n"
        "    if step % 2: continue",
        "step = 0",
    ),
    "gradients dropped before the step": Refused(
        "the gradients are changed",
        f"{BACKWARD}\n    model[2].bias.grad = None{STEPPED.format('pass')}",
    ),
    "gradients set to zero before a later step": Refused(
        "the gradient of 2.bias by an earlier backward() of this step is dropped",
        f"{BACKWARD}\n    step += 1\n    if step == 2: model[2].bias.grad.zero_()"
        f"{STEPPED.format('pass')}",
        "step = 0",
    ),
}
CLOSURES = """
    def closure():
        loss = criterion(model(x), y)
        loss.backward()
        return loss

    step += 1
    if step % 2:
        closure()
    else:
        assert optimizer.step(closure) > 0
    continue
"""
"""Two batches in a step, the second of them in a closure of the optimizer."""
ALIKE = "    loss.backward()"
FOLLOWED = {
    "a tensor with a gradient that no optimizer has": Refused(
        "", f"    loss = criterion(model(x), y) * scale\n{ALIKE}", LEAF
    ),
    "clipped, all that the optimizer has": Refused(
        "",
        f"    nn.utils.clip_grad_norm_(model.parameters(), 9)\n{BACKWARD}\n"
        "    nn.utils.clip_grad_norm_(model[2].parameters(), 0.1)",
        "optimizer = torch.optim.SGD(model[2].parameters(), 0.1)",
    ),
    "evaluation in the loop, before the step": Refused(
        "",
        "    x = x.float()\n    if step % 2 == 0:\n        model.eval()\n"
        "        with torch.no_grad():\n"
        "            for a, b in DataLoader(data, batch_size=16): criterion(model(a), b)\n"
        f"        model.train()\n    step += 1\n{BACKWARD}",
        "step = 0\nmodel.append(nn.BatchNorm1d(3))",
    ),
    "an optimizer that is replaced": Refused(
        "",
        before="optimizer = torch.optim.SGD(model.parameters(), lr=0.2)\n"
        "warm_up = torch.optim.lr_scheduler.LinearLR(optimizer)\n"
        "model = nn.Sequential(nn.Linear(4, 3))\n"
        "optimizer, warm_up = torch.optim.SGD(model.parameters(), lr=0.1), None",
    ),
    "dropout": Refused(
        "", f"    loss = criterion(drop(model(x)), y)\n{ALIKE}", "drop = nn.Dropout()"
    ),
    "evaluation before the first step": Refused(
        "",
        before="model = nn.Sequential(model, nn.Dropout()).eval()\nwith torch.no_grad():\n"
        "    for x, y in loader: model(x)\nmodel.train()",
    ),
    "teacher without dropout": Refused(
        "",
        f"    with torch.no_grad(): wanted = teacher(x)\n"
        f"    loss = (model(x) - wanted).pow(2).mean()\n{ALIKE}",
        "teacher = nn.Sequential(nn.Linear(4, 3), nn.Dropout()).eval()",
    ),
    "noise": Refused("", f"    loss = criterion(model(x + torch.randn_like(x)), y)\n{ALIKE}"),
    "running statistics": Refused(
        "", f"    loss = criterion(norm(model(x)), y)\n{ALIKE}", "norm = nn.BatchNorm1d(3)"
    ),
    "a checkpoint in every step": Refused(
        "",
        f"{BACKWARD}\n    if step: torch.save(model.state_dict(), 'model.pt')\n    step += 1",
        "step = 0",
    ),
    "closures": Refused(
        "the script ends after 2", CLOSURES, "step = 0", drops="if step % 2 == 0: model.zero_grad()"
    ),
    "batches of a class": Refused(
        "",
        "    loss = criterion(net(batch.moved()), batch.y)\n    loss.backward()",
        """
class Batch:
    def __init__(self, x, y): self.x, self.y = x, y
    def moved(self): return Batch(self.x.to("cpu"), self.y)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model
    def forward(self, batch): return self.inner(batch.x)
net = Net()
loader = DataLoader(data, 8, collate_fn=lambda samples: Batch(*map(torch.stack, zip(*samples))))
""",
        names="batch",
    ),
    "outputs of a class": Refused(
        "",
        "    q = net(x)\n    p = torch.distributions.Normal(torch.zeros_like(q.loc), 1.0)\n"
        "    loss = torch.distributions.kl_divergence(q, p).mean()\n"
        "    loss = loss - q.log_prob(y[:, None]).mean()\n    loss.backward()",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model
    def forward(self, x): return torch.distributions.Normal(self.inner(x), 1.0)
net = Net()
""",
    ),
    "items taken out of the batch": Refused(
        "",
        "    y = batch.pop('y')\n    batch['x'] = batch['x'] / 2\n"
        "    loss = criterion(model(batch['x']), y)\n    loss.backward()",
        "def named(samples): return dict(zip('xy', map(torch.stack, zip(*samples))))\n"
        "loader = DataLoader(data, 8, collate_fn=named)",
        names="batch",
    ),
    "a model that is moved": Refused("", f"{BACKWARD}\n    model.to('cpu')"),
    **{
        f"gradients dropped: {name}": Refused("", f"{BACKWARD}{STEPPED.format(after)}", drops=drops)
        for name, drops, after in (
            ("set to zero", "optimizer.zero_grad(set_to_none=False)", "pass"),
            (
                "together",
                "optimizer.zero_grad(set_to_none=False)",
                "optimizer.defaults['foreach'] = True",
            ),
            ("of the model, after the step", "pass", "model.zero_grad(set_to_none=False)"),
            ("by hand", "pass", "for p in model.parameters(): p.grad = None"),
            (
                "to zero by hand",
                "for p in model.parameters(): p.grad is None or p.grad.data.zero_()",
                "pass",
            ),
            ("to zeros", "pass", "for p in model.parameters(): p.grad = torch.zeros_like(p)"),
        )
    },
    "other random numbers": Refused(
        "draws random numbers in another order than pipectl does",
        f"    torch.rand(2)\n    loss = criterion(model(x + torch.randn_like(x)), y)\n{ALIKE}",
    ),
    "a file written": Refused(
        "the script opens a file for writing after its first step",
        f"{BACKWARD}\n    if step: open('log', 'w')\n    step += 1",
        "step = 0",
    ),
    "one step": Refused(
        "the script ends after 1", f"    if step: break\n    step += 1\n{BACKWARD}", "step = 0"
    ),
}
"""Scripts that are followed, with the reason why their steps are not compared, if they are not."""

EPOCHS = """
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
data = TensorDataset(torch.randn(44, 4), torch.randint(0, 3, (44,)))
loader, held_out = DataLoader(data, 4, shuffle=True), DataLoader(data, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
by_step = lr_scheduler.SequentialLR(
    optimizer, [warm_up, lr_scheduler.CosineAnnealingLR(optimizer, 20)], [2]
)
by_epoch = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
criterion = nn.CrossEntropyLoss(reduction="sum")
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y){over}
        loss.backward()
        optimizer.step()
        by_step.step()
    by_epoch.step()
    model.eval()
    with torch.no_grad():
        found = [criterion(model(x), y) for x, y in held_out]
    assert len(found) == 2, "an evaluation is cut short"
    model.train()
"""
"""Several epochs with an evaluation after each, and schedules of two kinds."""


PLATEAU = """
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(3)
data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
train, val = random_split(data, [16, 8])
loaders = {"train": DataLoader(train, 16, shuffle=True), "val": DataLoader(val, 3)}
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.9)
scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
for epoch in range(9):
    model.train()
    for x, y in loaders["train"]:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    total = 0.0
    for x, y in loaders["val"]:
        with torch.no_grad():
            total += nn.functional.mse_loss(model(x), y).item() * len(x)
    scheduler.step(total / len(val))
"""
"""A schedule that follows the loss of held-out data."""


@pytest.fixture
def beginning():
    """What precedes the loop."""
    return Refused("", loop="").script.partition("for epoch")[0]


@pytest.fixture
def plateau():
    return PLATEAU


@pytest.fixture
def epochs():
    return EPOCHS


@pytest.fixture
def refusals():
    return REFUSED


@pytest.fixture
def annealed():
    return REFUSED["annealed weight"]


@pytest.fixture
def closures():
    return FOLLOWED["closures"]


@pytest.fixture(params=list(FOLLOWED))
def followed(request):
    return FOLLOWED[request.param]


@pytest.fixture(params=list(REFUSED))
def refused(request):
    return REFUSED[request.param]


@pytest.fixture
def found_in():
    """``found_in(command)``: what ``init`` finds in a script."""

    def take(command: Command):
        return findings_of(Parts.of(command), compare_steps(command))

    return take
