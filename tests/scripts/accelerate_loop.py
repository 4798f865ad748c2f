"""A loop with accelerate, gradient accumulation and a linear schedule."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def main():
    set_seed(42)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    x = torch.randn(192, 10)
    y = (x.sum(dim=1) > 0).long()
    train_dataloader = DataLoader(TensorDataset(x, y), shuffle=True, batch_size=8)
    model = torch.nn.Sequential(
        torch.nn.Linear(10, 32),
        torch.nn.Tanh(),
        torch.nn.Linear(32, 32),
        torch.nn.Tanh(),
        torch.nn.Linear(32, 2),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=24)
    model, optimizer, train_dataloader, scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, scheduler
    )
    model.train()
    for epoch in range(2):
        for step, batch in enumerate(train_dataloader):
            with accelerator.accumulate(model):
                inputs, targets = batch
                outputs = model(inputs)
                loss = F.cross_entropy(outputs, targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: {loss.item():.4f}")


if __name__ == "__main__":
    main()
