"""What the examples train: a small GPT and ResNet-18, and data that needs no download.

Workers need nothing of it: the cut goes through its classes down to torch's layers. A class that has to be kept whole
would be asked for by name; workers then import it from here if they were started with ``--trust models``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    from collections.abc import Callable


# --------------------------------------------------------------------------------------------------------------- GPT
class Attention(nn.Module):
    """Causal self-attention: (B, T, D) to (B, T, D)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Look at earlier positions."""
        size, length, width = hidden.shape
        split = self.query_key_value(hidden).view(size, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(size, length, width))
        return out


class Block(nn.Module):
    """Attention and a perceptron, each with a skip connection: (B, T, D) to (B, T, D)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Run the block."""
        hidden = hidden + self.attention(self.norm1(hidden))
        out: Tensor = hidden + self.perceptron(self.norm2(hidden))
        return out


class SmallGPT(nn.Module):
    """Tokens (B, T) to scores (B, V, T), as `CrossEntropyLoss` takes them; V tokens, D wide."""

    def __init__(self, vocabulary: int, context: int, width: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of the token that follows each position."""
        hidden = self.blocks(self.token(tokens) + self.position)
        scores: Tensor = self.head(self.norm(hidden))
        return scores.transpose(1, 2)


def build_gpt(
    *, vocabulary: int = 64, context: int = 32, width: int = 64, num_layers: int = 4, num_heads: int = 4
) -> nn.Module:
    """Return a GPT of the given size, with random weights."""
    return SmallGPT(vocabulary, context, width, num_layers, num_heads)


# ---------------------------------------------------------------------------------------------------------- ResNet-18
class BasicBlock(nn.Module):
    """Two convolutions with a skip connection around them: (B, C, H, W) to (B, C', H', W')."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.short: nn.Module = nn.Identity()
        if stride > 1 or channels_in != channels:
            shrink = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.short = nn.Sequential(shrink, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        hidden = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(hidden)) + self.short(x))


def build_resnet18(*, num_classes: int = 10) -> nn.Module:
    """Return a ResNet-18 with the stem for small images (B, 3, H, W): torchvision's, or the same here without it."""
    try:
        from torchvision.models import resnet18  # noqa: PLC0415 - optional
    except (ImportError, RuntimeError):  # not there, or made for another PyTorch
        return _own_resnet18(num_classes)
    model: nn.Module = resnet18(num_classes=num_classes)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def _own_resnet18(num_classes: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    sizes = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
    for channels_in, channels, stride in sizes:
        layers += [BasicBlock(channels_in, channels, stride), BasicBlock(channels, channels, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, num_classes))


# --------------------------------------------------------------------------------------------------------------- data
def token_loader(num_batches: int, batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return sequences in which each token follows from the one before, but for one in ten."""
    vocabulary, context = 64, 32
    random = torch.Generator().manual_seed(0)
    sequences = torch.randint(vocabulary, (num_batches * batch_size, context + 1), generator=random)
    keep = torch.rand(sequences.shape, generator=random) < 0.9
    for position in range(context):
        following = (5 * sequences[:, position] + 1) % vocabulary
        sequences[:, position + 1] = torch.where(keep[:, position], following, sequences[:, position + 1])
    return DataLoader(TensorDataset(sequences[:, :-1], sequences[:, 1:]), batch_size)


def image_loader(num_batches: int, batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return noisy images (B, 3, 16, 16) of ten patterns, with the number of the pattern."""
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (num_batches * batch_size,), generator=random)
    patterns = torch.randn(10, 3, 16, 16, generator=random)
    images = patterns[labels] + 0.5 * torch.randn(len(labels), 3, 16, 16, generator=random)
    return DataLoader(TensorDataset(images, labels), batch_size)


@dataclass(frozen=True)
class Task:
    """A model and its data."""

    build: Callable[[], nn.Module]
    load: Callable[[int, int], DataLoader[tuple[Tensor, ...]]]
    guessing: float
    """The loss of a model that knows nothing."""


TASKS = {
    "gpt": Task(build_gpt, token_loader, math.log(64)),
    "resnet18": Task(build_resnet18, image_loader, math.log(10)),
}
"""By the name that ``--model`` takes."""
