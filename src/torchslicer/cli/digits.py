"""What the demo trains: a small residual network, scikit-learn's handwritten digits, and the loop to compare with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchslicer.errors import UserError

MOMENTUM, WEIGHT_DECAY, LEARNING_RATE = 0.9, 5e-4, 0.05
OPTIMIZER: dict[str, Any] = {
    "name": "SGD",
    "params": {"lr": LEARNING_RATE, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY},
}
_TEST_SHARE = 5  # one digit in five is held out


class ResidualBlock(nn.Module):
    """Two convolutions with a skip connection around them, added by a functional op: (B, C, H, W) to the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        hidden = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(x + self.norm2(self.conv2(hidden)))


class ResidualDigits(nn.Module):
    """Digits (B, 1, 8, 8) to scores (B, 10).

    One more skip connection leads from the stem to the end, so that a value crosses every cut in between.

    Example:
        >>> ResidualDigits()(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(self, channels: int = 24) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.block1 = ResidualBlock(channels)
        self.block2 = ResidualBlock(channels)
        self.down = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.block3 = ResidualBlock(2 * channels)
        self.short = nn.Conv2d(channels, 2 * channels, 1, stride=2)
        self.head = nn.Linear(2 * channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores."""
        stem = functional.relu(self.norm(self.stem(x)))
        hidden = self.block2(self.block1(stem))
        hidden = self.block3(functional.relu(self.down(hidden))) + self.short(stem)
        scores: Tensor = self.head(functional.relu(hidden).mean(dim=(2, 3)))
        return scores


@dataclass(frozen=True)
class Digits:
    """Images (N, 1, 8, 8) and labels (N,)."""

    images: Tensor
    labels: Tensor


class Loader:
    """Batches of digits, in a new order each epoch if there is a *seed*: the same orders whenever it is used anew.

    Args:
        digits: What to give out.
        batch_size: Samples of a batch; the last one may be smaller.
        seed: Of the order; None for the order as it is.
    """

    def __init__(self, digits: Digits, batch_size: int, seed: int | None = None) -> None:
        self.digits = digits
        self.batch_size = batch_size
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        """Return the number of batches."""
        return math.ceil(len(self.digits.labels) / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Begin an epoch."""
        count = len(self.digits.labels)
        order = torch.arange(count) if self.generator is None else torch.randperm(count, generator=self.generator)
        for indices in order.split(self.batch_size):
            yield self.digits.images[indices], self.digits.labels[indices]


def load_digits(seed: int) -> tuple[Digits, Digits]:
    """Return the digits to train on and those held out.

    Raises:
        UserError: scikit-learn is not there.
    """
    try:
        from sklearn import datasets  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UserError("the demo needs scikit-learn for its digits: pip install 'torchslicer[demo]'") from error
    data = datasets.load_digits()
    images = torch.as_tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.as_tensor(data.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    held_out, kept = order[: len(order) // _TEST_SHARE], order[len(order) // _TEST_SHARE :]
    return Digits(images[kept], labels[kept]), Digits(images[held_out], labels[held_out])


def train_unsliced(model: nn.Module, loader: Loader, *, epochs: int, num_microbatches: int) -> None:
    """Train *model* whole, as one would by hand: gradients of the micro-batches add up, then the optimizer steps.

    This is what the sliced training is compared with, so nothing of TorchSlicer takes part.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    criterion = nn.CrossEntropyLoss()
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            for x, y in zip(images.tensor_split(num_microbatches), labels.tensor_split(num_microbatches), strict=True):
                if len(y):
                    (criterion(model(x), y) * (len(y) / len(labels))).backward()
            optimizer.step()
        scheduler.step()


def largest_difference(model: nn.Module, other: nn.Module) -> float:
    """Return the largest absolute difference of any parameter or buffer of two models of the same kind."""
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return float(torch.stack([(a.double() - b.double()).abs().max() for a, b in pairs]).max())
