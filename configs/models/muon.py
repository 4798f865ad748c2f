"""Muon for the matrices within a model, and AdamW for all else, in one optimizer.

torch.optim.Muon takes matrices only. Here, `optimizer.groups` says which matrices are left to
AdamW, usually embeddings and the layer that computes the outputs:

    optimizer:
      factory: "./models/muon.py:Muon"
      kwargs: {lr: 0.02, adam_lr: 3.0e-3}
      groups: [{match: "*embedding*", muon: false}, {match: "head*", muon: false}]

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal, for matrices of groups with ``muon``; AdamW for the others."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        momentum: float = 0.95,
        adam_lr: float = 3e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        muon: bool = True,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "adam_lr": adam_lr / lr, "betas": betas, "eps": eps,
            "weight_decay": weight_decay, "muon": muon,
        }  # fmt: skip
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if group["muon"] and parameter.dim() == 2:
                    rate, change = group["lr"], self._muon(parameter, group)
                else:  # a schedule of learning rates changes both
                    rate, change = group["lr"] * group["adam_lr"], self._adam(parameter, group)
                parameter.mul_(1 - rate * group["weight_decay"]).add_(change, alpha=-rate)

    def _muon(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        state, gradient, beta = self.state[parameter], parameter.grad, group["momentum"]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(gradient, 1 - beta)
        rows, columns = parameter.shape
        change = orthogonal(gradient.lerp(state["momentum"], beta))  # Nesterov's momentum
        return change * max(1.0, rows / columns) ** 0.5

    def _adam(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        state, gradient, (beta_1, beta_2) = self.state[parameter], parameter.grad, group["betas"]
        if not state:
            state["step"] = 0
            state["mean"], state["square"] = (torch.zeros_like(parameter) for _ in range(2))
        state["step"] += 1
        state["mean"].lerp_(gradient, 1 - beta_1)
        state["square"].mul_(beta_2).addcmul_(gradient, gradient, value=1 - beta_2)
        square = state["square"] / (1 - beta_2 ** state["step"])
        return state["mean"] / (1 - beta_1 ** state["step"]) / (square.sqrt() + group["eps"])


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """Near the closest matrix with orthogonal rows or columns, by an iteration of Newton-Schulz."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if is_tall else x
