"""Mixed precision with a GradScaler, and gradient accumulation, as in PyTorch's AMP recipe."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
use_amp = True
accum_steps = 4

inputs = torch.randn(256, 20)
targets = inputs @ torch.randn(20, 1) + 0.1 * torch.randn(256, 1)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True, drop_last=True)

net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
net = net.to(device)
opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
loss_fn = nn.MSELoss().to(device)
scaler = torch.amp.GradScaler("cuda", enabled=use_amp)

epochs = 3
for epoch in range(epochs):
    running = 0.0
    for i, (input, target) in enumerate(loader):
        input = input.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        with torch.autocast(device_type=device, dtype=torch.bfloat16, enabled=use_amp):
            output = net(input)
            loss = loss_fn(output, target) / accum_steps
        scaler.scale(loss).backward()
        if (i + 1) % accum_steps == 0:
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad(set_to_none=True)
        running += loss.item()
    print(f"epoch {epoch}: {running / len(loader):.4f}")
torch.save(net.state_dict(), "net.pt")
