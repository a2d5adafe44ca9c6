"""Models whose values at a cut are large, oddly laid out or of an odd type."""

from __future__ import annotations

import random
import time

import torch
from torch import Tensor, nn


class Transposed(nn.Module):
    """S35: cuts where values are transposed, strided and expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(4, 8), nn.Linear(4, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 16) to (B, 4)."""
        h = torch.tanh(self.a(x)).view(-1, 4, 4).transpose(1, 2)
        h = torch.tanh(self.b(h))[:, :, ::2]
        h = torch.tanh(self.c(h)).transpose(0, 1)
        out: Tensor = self.head(h.mean(0).unsqueeze(1).expand(-1, 3, -1)).sum(1)
        return out


class ChannelsLast(nn.Module):
    """S35: channels_last from the first layer on; the head tells the memory format by a flattening of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.c, self.head = nn.Conv2d(8, 8, 3, padding=1, stride=2), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 3, H, W) to (B, 4)."""
        x = torch.tanh(self.a(x.contiguous(memory_format=torch.channels_last)))
        x = torch.tanh(self.b(x))
        x = torch.tanh(self.c(x))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class Wide(nn.Module):
    """S33: a layer of 20 MB, and 8 MB of activations at the cuts for 512 samples."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 4096), nn.Linear(4096, 1280), nn.Linear(1280, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 16) to (B, 4)."""
        out: Tensor = self.c(torch.relu(self.b(torch.relu(self.a(x)))))
        return out


class Sleepy(nn.Module):
    """S28: a layer that takes 0 to 20 ms longer at random."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 16) to (B, 16)."""
        if bool(x.sum() < -1e9):  # no tracer can enter this module
            return x
        time.sleep(random.random() * 0.02)
        return torch.tanh(self.linear(x))


class Raising(nn.Module):
    """S32: raises at the third batch."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 16) to (B, 16)."""
        self.seen += 1
        if int(self.seen) >= 3:
            raise ValueError("boom")
        return torch.tanh(self.linear(x))


class MeanOfWords(nn.Module):
    """S25: any length of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, words: Tensor) -> Tensor:
        """Map (B, T) to (B, 4)."""
        out: Tensor = self.head(torch.tanh(self.mix(self.embed(words))).mean(1))
        return out


class Masked(nn.Module):
    """S26: takes input_ids and attention_mask by name, as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Map (B, T) to (B, 4)."""
        h = torch.tanh(self.mix(self.embed(input_ids)))
        weight = attention_mask.unsqueeze(-1).to(h.dtype)
        out: Tensor = self.head((h * weight).sum(1) / weight.sum(1))
        return out


def sleepy(dropout: float = 0.0) -> nn.Module:
    """Three sleepy layers and a head."""
    del dropout
    return nn.Sequential(Sleepy(), Sleepy(), Sleepy(), nn.Linear(16, 4))
