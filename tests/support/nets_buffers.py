"""Models with buffers that their forward pass changes."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Average(nn.Module):
    """Subtracts a running mean, kept in place or by putting a new tensor there."""

    mean: Tensor

    def __init__(self, *, replaces: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.linear = nn.Linear(16, 16)
        self.replaces = replaces

    def forward(self, x: Tensor) -> Tensor:
        new = x.detach().mean(0) * 0.1
        if self.replaces:
            self.mean = self.mean * 0.9 + new
        else:
            self.mean.mul_(0.9).add_(new)
        return self.linear(x) - self.mean


def averaged(*, replaces: bool) -> nn.Module:
    """One such module between others."""
    return nn.Sequential(nn.Linear(16, 16), Average(replaces=replaces), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def averaged_twice(*, replaces: bool) -> nn.Module:
    """The same module in two places."""
    average = Average(replaces=replaces)
    return nn.Sequential(
        nn.Linear(16, 16), average, nn.Linear(16, 16), nn.Tanh(), average, nn.Linear(16, 16), nn.Tanh(),
        nn.Linear(16, 4),
    )  # fmt: skip
